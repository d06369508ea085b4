"""The model: embeddings, layers, head. The forward pass is written as in the paper.

    p = embed[token];  blocks = []
    for each layer:
        h = mix(blocks, p)                      before a block's first layer is banked
        if a block starts here: bank p
        a = attention(norm(h));                 p = a at a block start, else p + a
        p = p + mlp(norm(mix(blocks, p)))
    logits = head(norm(mix(blocks, p)))

A `Model` is immutable once loaded and has no timeline; a timeline's `State` is passed in. Weights may still be
loading when the model is built: a pass waits for each at its first use. Every row of every product depends on
that row alone, so tokens may be taken in one at a time or many at once, with the same bits. One forward pass runs
at a time.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from k3 import kernels
from k3.engine.definition.model_options import ModelOptions
from k3.engine.forward.layer import Layer
from k3.engine.forward.observer import PassObserver
from k3.engine.forward.residual import ResidualMix
from k3.engine.forward.state import State
from k3.engine.forward.weights import Weights, to_float32
from k3.model.architecture import ModelConfig
from k3.model.model_source import EncodedTensor, ModelSource, TensorReader
from k3.store.source import ExpertSource

Array = npt.NDArray[np.float32]


class Model:
    """The weights that stay in memory, and the pass over them. `observer` may be changed between passes."""

    def __init__(
        self,
        source: ModelSource,
        config: ModelConfig,
        experts: ExpertSource,
        options: ModelOptions,
        reading: TensorReader,
    ) -> None:
        """Build the layers of `config.layers`, and wait for nothing.

        `reading` gives out the dense tensors, and must stay open until each was used once or `load` has returned.
        A weight is taken from it at its first use, where an error of reading it is raised.
        """
        self.config = config
        self.options = options
        self.identity = source.identity
        self.observer = PassObserver()
        self._weights = weights = Weights(source, config, reading, exact=options.exact)
        self._embeddings = weights.matrix("model.embed_tokens.weight")
        self.layers = [Layer(weights, index, config, source, experts, options) for index in config.layers]
        self._head_mix = ResidualMix(weights, "model.output_attn_res", config.eps)
        self._head_norm = weights.floats("model.norm.weight")
        self._head = weights.matrix("lm_head.weight")
        weights.check_all_claimed()

    def load(self) -> None:
        """Wait until every weight is in memory. Raises what reading it raised."""
        self._weights.load()

    @property
    def resident_bytes(self) -> int:
        """Bytes of the dense weights that have been used so far."""
        return self._weights.resident_bytes

    @property
    def embedding_bytes(self) -> int:
        """Bytes of the embeddings, which are part of `resident_bytes`; a token reads one row of them."""
        return self._embeddings.nbytes

    def forward(self, ids: Sequence[int], state: State, *, every_logit: bool = False) -> Array:
        """Take in the tokens `ids` [S], which continue `state`, and advance it.

        Return logits [S, vocab] with `every_logit`, else of the last token only, [1, vocab]. The caller has
        checked that ids are in the vocabulary and that the state has room. After an error the state must not be
        used.
        """
        self.observer.pass_begun(state, len(ids))
        stream = self.embed(ids)
        blocks: list[Array] = []
        for layer in self.layers:
            stream = self.through(layer, blocks, stream, state)
        if not every_logit:
            blocks, stream = [block[-1:] for block in blocks], stream[-1:]
        self.observer.before_head()
        logits = self.logits(blocks, stream)
        state.position += len(ids)
        self.observer.pass_done()
        return logits

    def embed(self, ids: Sequence[int]) -> Array:
        """Return rows of the embedding table, [S, hidden]."""
        table = self._embeddings.tensor
        rows = table.data[np.asarray(ids, dtype=np.int64)]
        scales = None if table.scales is None else table.scales[np.asarray(ids, dtype=np.int64)]
        return to_float32(EncodedTensor(table.name, table.encoding, table.dtype, rows.shape, rows, scales))

    def through(self, layer: Layer, blocks: list[Array], stream: Array, state: State) -> Array:
        """Return the stream after one layer; a layer that starts a block also banks the stream before it."""
        mixed = layer.attention_mix(blocks, stream)
        if layer.starts_block:
            blocks.append(stream)
        self.observer.before_attention(layer, blocks, stream)
        attended = layer.attend(mixed, state)
        stream = attended if layer.starts_block else stream + attended
        self.observer.before_mlp(layer, blocks, stream)
        stream = stream + layer.transform(layer.mlp_mix(blocks, stream), self.observer.experts_requested)
        self.observer.layer_done(layer)
        return stream

    def logits(self, blocks: Sequence[Array], stream: Array) -> Array:
        """Apply the head: last mixture, norm, vocabulary. [S, hidden] -> [S, vocab]."""
        return self._head(kernels.rms_norm(self._head_mix(blocks, stream), self._head_norm(), self.config.eps))
