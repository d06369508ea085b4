"""K3's two kinds of attention, token by token: Kimi Delta Attention and gated latent attention.

Each takes the normed input of a stretch of tokens and the state that the tokens before left, and returns the
output and the state after. States are immutable values. Float32; N tokens, H heads. Pure; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from k3.verify.reference.arithmetic import Array, causal_conv, l2_norm, linear, rms_norm, sigmoid, silu, softmax
from k3.verify.reference.reference_config import L2_NORM_EPS, ReferenceConfig
from k3.verify.reference.reference_weights import LayerWeights


@dataclass(frozen=True, slots=True)
class KdaState:
    """The state of a KDA layer, of the same size after any number of tokens.

    `memory` [H, dk, dv] maps keys to values; the windows [P, taps - 1] are the last inputs of the three
    convolutions, oldest first.
    """

    memory: Array
    q_window: Array
    k_window: Array
    v_window: Array

    @classmethod
    def empty(cls, config: ReferenceConfig) -> KdaState:
        """Before the first token."""
        heads, head = config.kda_heads, config.kda_head
        window = np.zeros((heads * head, config.conv_taps - 1), dtype=np.float32)
        return cls(np.zeros((heads, head, head), dtype=np.float32), window, window, window)


@dataclass(frozen=True, slots=True)
class MlaState:
    """The state of a full-attention layer after N tokens: `latent` [N, kv_lora] (normed), `rope` [N, qk_rope]."""

    latent: Array
    rope: Array

    @classmethod
    def empty(cls, config: ReferenceConfig) -> MlaState:
        """Before the first token."""
        widths = (config.kv_lora, config.qk_rope)
        return cls(*(np.zeros((0, width), dtype=np.float32) for width in widths))


def kda(x: Array, w: LayerWeights, state: KdaState, config: ReferenceConfig) -> tuple[Array, KdaState]:
    """Kimi Delta Attention of `x` [N, D]: a memory that forgets per channel and learns by the delta rule."""
    tokens, heads, head = len(x), config.kda_heads, config.kda_head
    per_head = (tokens, heads, head)

    q, q_window = _short_conv(linear(x, w["q_proj"]), w["q_conv1d"], state.q_window)
    k, k_window = _short_conv(linear(x, w["k_proj"]), w["k_conv1d"], state.k_window)
    v, v_window = _short_conv(linear(x, w["v_proj"]), w["v_conv1d"], state.v_window)
    q = l2_norm(q.reshape(per_head), L2_NORM_EPS) * np.float32(head**-0.5)
    k = l2_norm(k.reshape(per_head), L2_NORM_EPS)
    v = v.reshape(per_head)

    decay = np.exp(_log_decay(x, w, config))
    beta = sigmoid(linear(x, w["b_proj"]))

    memory = state.memory
    read = np.empty(per_head, dtype=np.float32)
    for t in range(tokens):
        memory = decay[t][:, :, None] * memory
        surprise = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", memory, k[t]))
        memory = memory + k[t][:, :, None] * surprise[:, None, :]
        read[t] = np.einsum("hkv,hk->hv", memory, q[t])

    gate = sigmoid(linear(x, w["g_proj"])).reshape(per_head)
    out = rms_norm(read, w["o_norm"], config.rms_norm_eps) * gate
    return linear(out.reshape(tokens, -1), w["o_proj"]), KdaState(memory, q_window, k_window, v_window)


def _short_conv(new: Array, taps: Array, window: Array) -> tuple[Array, Array]:
    """Convolve `new` [N, P] behind its history `window`; the result after SiLU, and the window after."""
    inputs = np.concatenate([window.T, new])
    return silu(causal_conv(inputs, taps)), inputs[len(new) :].T.copy()


def _log_decay(x: Array, w: LayerWeights, config: ReferenceConfig) -> Array:
    """Logarithm of each channel's decay [N, H, dk], between the lower bound and 0.

    The bound scales a sigmoid; it does not clip. A_log may be stored with padding behind the heads.
    """
    shape = (len(x), config.kda_heads, config.kda_head)
    drive = (linear(linear(x, w["f_a_proj"]), w["f_b_proj"]) + w["dt_bias"]).reshape(shape)
    rate = np.exp(w["A_log"][: config.kda_heads])
    return np.float32(config.gate_lower_bound) * sigmoid(rate[:, None] * drive)


def mla(x: Array, w: LayerWeights, state: MlaState, config: ReferenceConfig) -> tuple[Array, MlaState]:
    """Full attention of `x` [N, D] over all tokens so far, keys and values expanded from their latents.

    No position is encoded: the "rope" part is a key that all heads share, and nothing rotates.
    """
    tokens, heads = len(x), config.heads
    eps = config.mla_latent_norm_eps

    query_latent = rms_norm(linear(x, w["q_a_proj"]), w["q_a_layernorm"], eps)
    q = linear(query_latent, w["q_b_proj"]).reshape(tokens, heads, config.qk_nope + config.qk_rope)
    q_nope, q_rope = np.split(q, [config.qk_nope], axis=-1)

    latent, rope = np.split(linear(x, w["kv_a_proj_with_mqa"]), [config.kv_lora], axis=-1)
    latent = np.concatenate([state.latent, rms_norm(latent, w["kv_a_layernorm"], eps)])
    rope = np.concatenate([state.rope, rope])
    kv = linear(latent, w["kv_b_proj"]).reshape(len(latent), heads, config.qk_nope + config.v_head)
    keys, values = np.split(kv, [config.qk_nope], axis=-1)

    scores = np.einsum("qhd,khd->hqk", q_nope, keys) + np.einsum("qhd,kd->hqk", q_rope, rope)
    scores *= np.float32((config.qk_nope + config.qk_rope) ** -0.5)
    positions = np.arange(len(latent))
    future = positions[None, :] > positions[-tokens:, None]
    attention = softmax(np.where(future, np.float32(-np.inf), scores))
    out = np.einsum("hqk,khd->qhd", attention, values).reshape(tokens, -1)

    gate = sigmoid(linear(x, w["g_proj"]))
    return linear(out * gate, w["o_proj"]), MlaState(latent, rope)
