"""The model: embeddings, layers, head. The forward pass reads as it is written in the paper.

    p = embed[token];  blocks = []
    for each layer:
        h = mix(blocks, p)                      before a block's first layer is banked
        if a block starts here: bank p
        a = attention(norm(h));                 p = a at a block start, else p + a
        p = p + mlp(norm(mix(blocks, p)))
    logits = head(norm(mix(blocks, p)))

A `Model` is immutable once loaded and knows no timeline; what a timeline remembers is a `State`, passed in. Its
weights may still be on their way when it is made: a pass waits for each where it first needs it.
Every row of every product depends on that row alone, so tokens may be taken one at a time or many at once:
the bits are the same. One forward pass at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from k3 import kernels
from k3.container.errors import ExpertError
from k3.container.keys import ExpertLayout
from k3.container.source import EncodedTensor, ModelSource
from k3.engine.config import ModelConfig
from k3.engine.kda import KdaAttention
from k3.engine.lookahead import LookAhead
from k3.engine.mla import LatentAttention
from k3.engine.mlp import GatedMlp
from k3.engine.moe import LatentMoe
from k3.engine.reading import ReadAhead, TensorReader
from k3.engine.residual import ResidualMix
from k3.engine.state import State
from k3.engine.tensor_names import needed_names
from k3.engine.trace import Tracer
from k3.engine.weights import Matrix, Weights, to_float32
from k3.store.route_trace import RouteTraceWriter
from k3.store.source import ExpertSource

Array = npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """`exact` computes with float32 activations everywhere; otherwise quantized weights meet int8 ones.
    `keep_share` is the pruning of experts described at `moe.Router`."""

    exact: bool = False
    keep_share: float = 1.0


class Layer:
    """One decoder layer: two sub-layers, each with its mixture and its norm.

    Each part is made when it is first asked for, so that a layer can be at work while its last weights, and the
    layers after it, are still on their way.
    """

    def __init__(
        self, weights: Weights, index: int, config: ModelConfig, source: ModelSource, experts: ExpertSource,
        options: ModelOptions,
    ) -> None:  # fmt: skip
        self.index = index
        self.starts_block = index % config.residual_block == 0
        self._name = f"model.layers.{index}"
        self._weights = weights
        self._config = config
        self._experts = experts
        self._options = options
        self._layout: ExpertLayout | None = None
        if index in config.moe_layers:
            _check_experts(source, index, config)
            self._layout = source.expert_layout(index)

    @cached_property
    def attention_mix(self) -> ResidualMix:
        """The mixture that the attention reads."""
        return ResidualMix(self._weights, f"{self._name}.self_attention_res", self._config.eps)

    @cached_property
    def mlp_mix(self) -> ResidualMix:
        """The mixture that the MLP reads."""
        return ResidualMix(self._weights, f"{self._name}.mlp_res", self._config.eps)

    @cached_property
    def mlp(self) -> GatedMlp | LatentMoe:
        """The dense MLP, or the experts."""
        if self._layout is None:
            return GatedMlp(self._weights, f"{self._name}.mlp", self._config)
        return LatentMoe(
            self._weights, f"{self._name}.block_sparse_moe", self.index, self._config, self._experts, self._layout,
            exact=self._options.exact, keep_share=self._options.keep_share,
        )  # fmt: skip

    @cached_property
    def _attention(self) -> KdaAttention | LatentAttention:
        kind = KdaAttention if self.index in self._config.kda_layers else LatentAttention
        return kind(self._weights, f"{self._name}.self_attn", self._config)

    @cached_property
    def _attention_norm(self) -> Array:
        return self._weights.floats(f"{self._name}.input_layernorm.weight")

    @cached_property
    def _mlp_norm(self) -> Array:
        return self._weights.floats(f"{self._name}.post_attention_layernorm.weight")

    def make_parts(self) -> None:
        """Make every part now, in the order in which their weights lie."""
        _ = self.attention_mix, self._attention_norm, self._attention
        _ = self.mlp_mix, self._mlp_norm, self.mlp

    def attend(self, mixed: Array, state: State) -> Array:
        """The attention half of the layer for a mixture [S, hidden], before it joins the stream."""
        normed = kernels.rms_norm(mixed, self._attention_norm, self._config.eps)
        # Which kind of state belongs to a layer follows from the same list as its kind of attention.
        attention: Callable[[Array, Any, int], Array] = self._attention
        return attention(normed, state.layers[self.index], state.position)

    def transform(self, mixed: Array, on_request: Callable[[Sequence[int]], None] = lambda wanted: None) -> Array:
        """The MLP half of the layer for a mixture [S, hidden], before it joins the stream. `on_request` is told
        which experts the layer has asked for, when it has."""
        normed = kernels.rms_norm(mixed, self._mlp_norm, self._config.eps)
        return self.mlp(normed, on_request) if isinstance(self.mlp, LatentMoe) else self.mlp(normed)

    def foresee(self, blocks: Sequence[Array], stream: Array) -> Array:
        """What the layer's router would rank experts by for the stream [S, hidden] as it is now: [S, experts]."""
        assert isinstance(self.mlp, LatentMoe)
        return self.mlp.router.choice(
            kernels.rms_norm(self.mlp_mix(blocks, stream), self._mlp_norm, self._config.eps)
        )


class Model:
    """All weights that stay in memory, and the way through them."""

    def __init__(
        self,
        source: ModelSource,
        config: ModelConfig,
        experts: ExpertSource,
        options: ModelOptions,
        *,
        tracer: Tracer | None = None,
        routes: RouteTraceWriter | None = None,
        on_read: Callable[[str], None] | None = None,
        loading: TensorReader | None = None,
        look_ahead: LookAhead | None = None,
    ) -> None:
        """Load every dense tensor of `config.layers`; `on_read` is told the name of each that was read.

        With `loading`, which reads them already, nothing is waited for: each weight is taken from it when the
        first pass comes to it, and what reading it raised is raised there. `loading` must live as long.

        `tracer` and `routes` are told what happens; they are the caller's. `look_ahead` is asked to guess experts
        in every pass after the first; it may be changed between passes.

        SourceError, UnsupportedError and the like name the tensor; nothing is read before all names agree.
        """
        self.config = config
        self.options = options
        self._source = source
        self.identity = source.identity
        self._experts = experts
        self._tracer = tracer or Tracer()
        self._routes = routes
        self.look_ahead = look_ahead
        self._passes = 0
        self._complete = False
        if loading is not None:
            self._make(Weights(source, config, loading, exact=options.exact, lazy=True, on_read=on_read))
            return
        with ReadAhead(source, needed_names(source.tensor_names(), config)) as reading:
            self._make(Weights(source, config, reading, exact=options.exact, on_read=on_read))
            for layer in self.layers:
                layer.make_parts()
            _ = self._head
            self._weights.finish()
            self._complete = True

    def _make(self, weights: Weights) -> None:
        self._weights = weights
        self._embeddings = weights.matrix("model.embed_tokens.weight")
        self.layers = [
            Layer(weights, index, self.config, self._source, self._experts, self.options)
            for index in self.config.layers
        ]
        # A layer takes two steps, attention and MLP. For each step: the next one behind it with experts, if any.
        self._next_router: dict[int, tuple[int, Layer] | None] = {}
        following = None
        for layer in reversed(self.layers):
            self._next_router[2 * layer.index + 1] = following
            if layer.index in self.config.moe_layers:
                following = (2 * layer.index + 1, layer)
            self._next_router[2 * layer.index] = following

    @cached_property
    def _head(self) -> tuple[ResidualMix, Array, Matrix]:
        """The last mixture, its norm, and the vocabulary's matrix."""
        mix = ResidualMix(self._weights, "model.output_attn_res", self.config.eps)
        return mix, self._weights.floats("model.norm.weight"), self._weights.matrix("lm_head.weight")

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
        began_ns, read_before = time.monotonic_ns(), self._read_bytes()
        stream = self.embed(ids)
        blocks: list[Array] = []
        for layer in self.layers:
            stream = self.through(layer, blocks, stream, state)
        head_ns = time.monotonic_ns()
        if not every_logit:
            blocks, stream = [block[-1:] for block in blocks], stream[-1:]
        logits = self.logits(blocks, stream)
        if self._tracer.enabled:
            self._tracer.record(
                "pass", **self._place(state, ids), ms=_ms(began_ns), head_ms=_ms(head_ns),
                read_bytes=self._read_bytes() - read_before,
            )  # fmt: skip
            self._tracer.end_pass()
        if self._routes is not None:
            self._routes.end_pass(state.position)
        if not self._complete:
            self._weights.finish()  # a whole pass asks for every tensor
            self._complete = True
        state.position += len(ids)
        self._passes += 1
        return logits

    def embed(self, ids: Sequence[int]) -> Array:
        """Rows of the embedding table, [S, hidden]."""
        table = self._embeddings.tensor
        rows = table.data[np.asarray(ids, dtype=np.int64)]
        scales = None if table.scales is None else table.scales[np.asarray(ids, dtype=np.int64)]
        return to_float32(EncodedTensor(table.name, table.encoding, table.dtype, rows.shape, rows, scales))

    def logits(self, blocks: Sequence[Array], stream: Array) -> Array:
        """The head: last mixture, norm, vocabulary. [S, hidden] -> [S, vocab]."""
        mix, norm, matrix = self._head
        return matrix(kernels.rms_norm(mix(blocks, stream), norm, self.config.eps))

    def through(self, layer: Layer, blocks: list[Array], stream: Array, state: State) -> Array:
        """The stream after one layer; a layer that starts a block also banks the stream before it."""
        began_ns, read_before = time.monotonic_ns(), self._read_bytes()
        mixed = layer.attention_mix(blocks, stream)
        if layer.starts_block:
            blocks.append(stream)
        self._foresee(2 * layer.index, blocks, stream)
        attended = layer.attend(mixed, state)
        stream = attended if layer.starts_block else stream + attended
        middle_ns = time.monotonic_ns()
        if layer.index not in self.config.moe_layers:
            self._foresee(2 * layer.index + 1, blocks, stream)
        requested = partial(self._requested, layer, blocks, stream)
        stream = stream + layer.transform(layer.mlp_mix(blocks, stream), requested)
        if self._tracer.enabled:
            self._trace_layer(layer, state, stream, began_ns, middle_ns, read_before)
        if self._routes is not None and isinstance(layer.mlp, LatentMoe):
            routing = layer.mlp.last_routing
            assert routing is not None
            self._routes.add(layer.index, routing.kept.sum(axis=-1), routing.experts[routing.kept])
        return stream

    def _requested(self, layer: Layer, blocks: Sequence[Array], stream: Array, wanted: Sequence[int]) -> None:
        """A layer has asked for its experts: time to guess for the one behind it."""
        if self.look_ahead is not None:
            self.look_ahead.requested(layer.index, wanted)
            self._foresee(2 * layer.index + 1, blocks, stream)

    def _foresee(self, step: int, blocks: Sequence[Array], stream: Array) -> None:
        """Guess, at a step of the pass, what the next layer with experts behind it will ask for. Not before all
        weights are there."""
        following = self._next_router[step]
        if self.look_ahead is not None and self._complete and following is not None:
            router_step, layer = following
            self.look_ahead.foresee(layer.index, layer.foresee(blocks, stream), router_step - step)

    def _trace_layer(
        self, layer: Layer, state: State, stream: Array, began_ns: int, middle_ns: int, read_before: int
    ) -> None:
        moe = layer.mlp if isinstance(layer.mlp, LatentMoe) else None
        routing = None if moe is None else moe.last_routing
        self._tracer.record(
            "layer",
            **self._place(state, stream),
            layer=layer.index,
            attention="kda" if layer.index in self.config.kda_layers else "mla",
            mlp="dense" if moe is None else "moe",
            attention_ms=round((middle_ns - began_ns) / 1e6, 3),
            mlp_ms=_ms(middle_ns),
            wait_ms=0.0 if moe is None else round(moe.last_wait_ns / 1e6, 3),
            read_bytes=self._read_bytes() - read_before,
            experts=None if routing is None else routing.per_token(),
            foreseen=None if moe is None or self.look_ahead is None else self.look_ahead.last,
        )

    def _place(self, state: State, tokens: Sequence[int] | Array) -> dict[str, int]:
        return {"pass": self._passes, "position": state.position, "tokens": len(tokens)}

    def _read_bytes(self) -> int:
        return self._experts.stats().read_bytes if self._tracer.enabled else 0


def _check_experts(source: ModelSource, layer: int, config: ModelConfig) -> None:
    """The layer's routed experts must be there, all of them. ExpertError otherwise."""
    if layer not in source.expert_layers():
        raise ExpertError("the layer's routed experts are not in the model", layer=layer)
    count = source.expert_count(layer)
    if count != config.moe.experts:
        raise ExpertError(
            f"the layer has {count} routed experts, the configuration gives {config.moe.experts}", layer=layer
        )


def _ms(since_ns: int) -> float:
    return round((time.monotonic_ns() - since_ns) / 1e6, 3)
