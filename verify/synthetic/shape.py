"""The shape of a made-up K3 model, and the ways its snapshot may differ from the published one.

`SyntheticModel` is the one description that the rest of the generator works from (`synthetic_tensors`,
`synthetic_config`, `synthetic_tokenizer`, `synthetic`). It is an immutable value that checks itself; no I/O,
any thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

MXFP4_GROUP = 32
"""Columns of a routed expert's row that share one scale byte."""

SPECIAL_IDS = 256
"""Token ids above the ranks of tiktoken.model, a number that K3's tokenizer has fixed in code."""

A_LOG_MULTIPLE = 128
"""Published A_log tensors hold one number per head, then zeros up to a multiple of this."""

ExpertOrder = Literal["lexicographic", "id", "shuffled", "scattered"]
Layout = Literal["plain", "hf_cache"]
ShardNames = Literal["published", "odd"]
ExpertsPerTokenKey = Literal["num_experts_per_token", "num_experts_per_tok"]


@dataclass(frozen=True, slots=True)
class VisionShape:
    """Dimensions of the vision tower and of the projector behind it."""

    blocks: int = 1
    hidden: int = 8
    qkv: int = 12
    inter: int = 16
    heads: int = 2
    patch: int = 2
    positions: int = 4


K3_VISION = VisionShape(blocks=27, hidden=1024, qkv=1536, inter=4096, heads=12, patch=14, positions=64)


@dataclass(frozen=True, slots=True)
class SyntheticModel:
    """Everything that decides a synthetic snapshot, byte for byte. The defaults are a model of 2.8 MB.

    The first group are dimensions of the network, the second ways in which a snapshot of the same network may
    look different on disk. ValueError for dimensions that no K3 model can have.
    """

    layers: int = 5
    hidden: int = 128
    latent: int = 64  # width of the routed experts' input and output
    moe_inter: int = 96
    experts: int = 16
    experts_per_token: int = 4
    shared_experts: int = 2
    dense_layers: int = 1  # leading layers with a dense MLP
    dense_inter: int = 192
    vocab: int = 512
    heads: int = 6
    q_lora: int = 64
    kv_lora: int = 64
    qk_nope: int = 32
    qk_rope: int = 16
    v_head: int = 32
    kda_heads: int = 4
    kda_head: int = 32
    res_block: int = 2
    routed_scaling: float = 1.0
    vision_shape: VisionShape = VisionShape()
    seed: int = 0

    vision: bool = True  # whether the two vision shards are there; config.json describes them always
    expert_order: ExpertOrder = "lexicographic"  # "scattered" tears experts apart, the others keep them whole
    shards_per_layer: int = 1
    shard_names: ShardNames = "published"  # "odd" names do not sort in storage order
    a_log_padded: bool = True
    flat_config: bool = False
    experts_per_token_key: ExpertsPerTokenKey = "num_experts_per_token"
    layout: Layout = "plain"
    prefix: str = "language_model."

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if type(value) is int and name not in ("seed", "dense_layers") and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")
        if self.latent % MXFP4_GROUP or self.moe_inter % MXFP4_GROUP:
            raise ValueError(f"latent and moe_inter must be multiples of {MXFP4_GROUP}")
        if self.experts_per_token > self.experts:
            raise ValueError(f"{self.experts_per_token} experts per token, but only {self.experts} experts")
        if self.vocab < 2 * SPECIAL_IDS:
            raise ValueError(f"vocab must be at least {2 * SPECIAL_IDS}: every byte and {SPECIAL_IDS} specials")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, not {getattr(self, name)!r}")

    @classmethod
    def tiny(cls, seed: int = 0, **changes: Any) -> SyntheticModel:
        """Return the defaults: five layers (three KDA, two MLA; the first dense) that run in milliseconds."""
        return cls(seed=seed, **changes)

    @classmethod
    def real_slice(
        cls, layers: int = 4, experts: int = 32, vocab: int = 8192, seed: int = 0, **changes: Any
    ) -> SyntheticModel:
        """K3's real widths with fewer layers, experts and tokens. Without vision shards unless asked for.

        Tokens visit 16 experts as in K3, or all of them where a layer has fewer.
        """
        few = {"layers": layers, "experts": experts, "vocab": vocab, "seed": seed, "vision": False}
        return cls.k3(**{**few, "experts_per_token": min(16, experts), **changes})

    @classmethod
    def k3(cls, **changes: Any) -> SyntheticModel:
        """Return the published dimensions: 93 layers of 896 experts, 1.56 TB."""
        return cls(**{**_K3, **changes})

    @property
    def full_attention_layers(self) -> tuple[int, ...]:
        """1-based layers with full attention, as config.json counts: every fourth, and always the last."""
        return tuple(n for n in range(1, self.layers + 1) if n % 4 == 0 or n == self.layers)

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """1-based layers with linear attention."""
        return tuple(n for n in range(1, self.layers + 1) if n not in self.full_attention_layers)

    @property
    def first_special(self) -> int:
        """The lowest special token id, which is the number of ranks in tiktoken.model."""
        return self.vocab - SPECIAL_IDS


_CHOICES: dict[str, tuple[str, ...]] = {
    "expert_order": get_args(ExpertOrder),
    "shard_names": get_args(ShardNames),
    "experts_per_token_key": get_args(ExpertsPerTokenKey),
    "layout": get_args(Layout),
}

_K3: dict[str, Any] = {
    "layers": 93,
    "hidden": 7168,
    "latent": 3584,
    "moe_inter": 3072,
    "experts": 896,
    "experts_per_token": 16,
    "dense_inter": 33792,
    "vocab": 163840,
    "heads": 96,
    "q_lora": 1536,
    "kv_lora": 512,
    "qk_nope": 128,
    "qk_rope": 64,
    "v_head": 128,
    "kda_heads": 96,
    "kda_head": 128,
    "res_block": 12,
    "vision_shape": K3_VISION,
}
