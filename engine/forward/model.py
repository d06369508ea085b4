"""The model: embeddings, layers, head. The forward pass reads as it is written in the paper.

    p = embed[token];  blocks = []
    for each layer:
        h = mix(blocks, p)                      before a block's first layer is banked
        if a block starts here: bank p
        a = attention(norm(h));                 p = a at a block start, else p + a
        p = p + mlp(norm(mix(blocks, p)))
    logits = head(norm(mix(blocks, p)))

A `Model` is immutable once loaded and knows no timeline; what a timeline remembers is a `State`, passed in. Its
weights may still be loading when it is built: a pass waits for each where it first needs it.
Every row of every product depends on that row alone, so tokens may be taken one at a time or many at once:
the bits are the same. One forward pass at a time.
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
    """All weights that stay in memory, and the way through them. `observer` may be changed between passes."""

    def __init__(
        self,
        source: ModelSource,
        config: ModelConfig,
        experts: ExpertSource,
        options: ModelOptions,
        reading: TensorReader,
    ) -> None:
        """Build the layers of `config.layers`, and wait for nothing.

        `reading` reads the dense tensors already, and stays open until each was used once or `load` has returned.
        A weight is taken from it at its first use, and an error of reading it is raised there.
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
        """Bytes of dense weights that are in use so far."""
        return self._weights.resident_bytes

    @property
    def embedding_bytes(self) -> int:
        """Of `resident_bytes`, the embeddings: the one matrix of which a token reads a row and no more."""
        return self._embeddings.nbytes

    def forward(self, ids: Sequence[int], state: State, *, every_logit: bool = False) -> Array:
        """Take in the tokens `ids` [S], which follow on `state`, and advance it.

        Returns logits [S, vocab] with `every_logit`, else of the last token only, [1, vocab]. The caller has
        checked that ids are in the vocabulary and that the state has room. After an error the state is of no
        further use.
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
