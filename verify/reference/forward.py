"""Kimi K3 in plain NumPy, written to be read: the definition that engines are compared with.

Reads any `ModelSource`, raw snapshot or container, and computes in float32. It runs a prompt at once, in
chunks or token by token; the results agree to rounding. Everything in between can be tapped.

    model = ReferenceModel(source)
    state = model.new_state()
    logits = model.forward([1, 2, 3], state)          # [3, vocab]; the state now holds three tokens
    ids, margins = model.greedy(logits[-1], state, 12)

A `ReferenceModel` may be shared by threads once its weights have been read, a `ReferenceState` may not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from k3.model.model_source import ModelSource
from k3.verify.reference.arithmetic import Array, linear, rms_norm, softmax
from k3.verify.reference.attention import KdaState, MlaState, kda, mla
from k3.verify.reference.mlp import dense_mlp, latent_moe
from k3.verify.reference.reference_config import MIX_EPS, MLA_LATENT_NORM_EPS, ReferenceConfig
from k3.verify.reference.reference_weights import ReferenceWeights

__all__ = [
    "MLA_LATENT_NORM_EPS",
    "KdaState",
    "MlaState",
    "ReferenceConfig",
    "ReferenceModel",
    "ReferenceState",
    "Taps",
]


@dataclass
class ReferenceState:
    """The state after the tokens so far: one for each layer. `forward` changes it."""

    layers: list[KdaState | MlaState]
    tokens: int = 0


@dataclass
class Taps:
    """Collects intermediate values: `taps["attn_out", 3]` is layer 3's, of all tokens since the taps are in use.

    Per layer, [N, D]: attn_mix (before input_layernorm), attn_out, mlp_mix (before post_attention_layernorm),
    mlp_out, layer_out (the stream); where there are experts also router_ids and router_weights [N, K].
    Per model, `taps["logits"]`: final_mix, final_norm [N, D], logits [N, V]; block_residual of block b as
    `taps["block_residual", b]`.
    """

    _values: dict[tuple[str, int | None], list[npt.NDArray[Any]]] = field(default_factory=dict)

    def record(self, name: str, layer: int | None, value: npt.NDArray[Any]) -> None:
        """Append the rows of `value`."""
        self._values.setdefault((name, layer), []).append(value)

    def __getitem__(self, key: str | tuple[str, int]) -> npt.NDArray[Any]:
        name, layer = (key, None) if isinstance(key, str) else key
        return np.concatenate(self._values[name, layer])


class ReferenceModel:
    """The network over one model's weights."""

    def __init__(
        self,
        source: ModelSource,
        *,
        layers: int | None = None,
        mla_latent_norm_eps: float = MLA_LATENT_NORM_EPS,
        keep_weights: bool = True,
    ) -> None:
        """`layers` cuts the model off after that many; `keep_weights` holds read weights in memory."""
        self.config = ReferenceConfig.of(source, mla_latent_norm_eps=mla_latent_norm_eps, layers=layers)
        self.weights = ReferenceWeights(source, keep=keep_weights)

    def new_state(self) -> ReferenceState:
        """Return the state before the first token."""
        kinds = (KdaState if self.config.is_kda(i) else MlaState for i in range(self.config.layers))
        return ReferenceState([kind.empty(self.config) for kind in kinds])

    def forward(self, ids: Sequence[int], state: ReferenceState, taps: Taps | None = None) -> Array:
        """Run the tokens `ids` behind those that `state` holds; their logits [N, vocab]. Advances `state`."""
        taps = Taps() if taps is None else taps
        stream = self._embed(ids)
        blocks: list[Array] = []  # streams at block starts: depth, not time, so every call begins anew

        for i in range(self.config.layers):
            h = self._mix([*blocks, stream], f"model.layers.{i}.self_attention_res") if blocks else stream
            attn_out, state.layers[i] = self.attention(i, h, state.layers[i])
            taps.record("attn_mix", i, h)
            taps.record("attn_out", i, attn_out)

            if i % self.config.residual_block == 0:
                taps.record("block_residual", len(blocks), stream)
                blocks.append(stream)
                stream = attn_out
            else:
                stream = stream + attn_out

            m = self._mix([*blocks, stream], f"model.layers.{i}.mlp_res")
            mlp_out = self.mlp(i, m, taps)
            stream = stream + mlp_out
            taps.record("mlp_mix", i, m)
            taps.record("mlp_out", i, mlp_out)
            taps.record("layer_out", i, stream)

        state.tokens += len(ids)
        return self._logits(self._mix([*blocks, stream], "model.output_attn_res"), taps)

    def attention(self, layer: int, h: Array, state: KdaState | MlaState) -> tuple[Array, KdaState | MlaState]:
        """One layer's norm and attention of `h` [N, D]: its output after o_proj, and the state after."""
        w = self.weights.layer(layer)
        x = rms_norm(h, w["input_layernorm"], self.config.rms_norm_eps)
        if isinstance(state, KdaState):
            return kda(x, w.below("self_attn"), state, self.config)
        return mla(x, w.below("self_attn"), state, self.config)

    def mlp(self, layer: int, m: Array, taps: Taps | None = None) -> Array:
        """One layer's norm and MLP or mixture of experts of `m` [N, D]."""
        w = self.weights.layer(layer)
        x = rms_norm(m, w["post_attention_layernorm"], self.config.rms_norm_eps)
        if not self.config.is_moe(layer):
            return dense_mlp(x, w.below("mlp"), self.config)
        out, ids, shares = latent_moe(x, layer, self.weights, self.config)
        if taps is not None:
            taps.record("router_ids", layer, ids)
            taps.record("router_weights", layer, shares)
        return out

    def greedy(self, logits: Array, state: ReferenceState, count: int) -> tuple[list[int], list[float]]:
        """Return the `count` likeliest continuations one by one, from the last token's `logits` [vocab].

        Returns ids and the lead of each over the runner-up in logits. Of equals the lower id is taken.
        Advances `state` by count - 1: the last id is not run.
        """
        ids: list[int] = []
        margins: list[float] = []
        while len(ids) < count:
            if ids:
                logits = self.forward(ids[-1:], state)[-1]
            ids.append(int(np.argmax(logits)))
            second, first = np.partition(logits, -2)[-2:]
            margins.append(float(first - second))
        return ids, margins

    def _embed(self, ids: Sequence[int]) -> Array:
        table = self.weights.dense("model.embed_tokens.weight")
        if not len(ids) or min(ids) < 0 or max(ids) >= len(table):
            raise ValueError(f"a forward pass takes token ids from 0 to {len(table) - 1}, at least one")
        vectors: Array = table[np.asarray(ids)]
        return vectors

    def _mix(self, streams: list[Array], name: str) -> Array:
        """Attention Residuals: every token picks from its banked streams and the present one, over depth."""
        query = self.weights.dense(f"{name}_norm.weight") * self.weights.dense(f"{name}_proj.weight")[0]
        values = np.stack(streams)  # [blocks + 1, N, D]
        scores = np.sum(rms_norm(values, None, MIX_EPS) * query, axis=-1)
        mixed: Array = np.sum(softmax(scores, axis=0)[..., None] * values, axis=0)
        return mixed

    def _logits(self, final: Array, taps: Taps) -> Array:
        normed = rms_norm(final, self.weights.dense("model.norm.weight"), self.config.rms_norm_eps)
        logits = linear(normed, self.weights.dense("lm_head.weight"))
        taps.record("final_mix", None, final)
        taps.record("final_norm", None, normed)
        taps.record("logits", None, logits)
        return logits
