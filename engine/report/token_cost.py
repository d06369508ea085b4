"""The cost of a token in bytes and seconds, from the shapes of a model and the rates of a machine. Pure.

The one assumption is that all experts are used alike, whatever token came before: then a full cache of c of a
layer's e experts holds c / e of those requested. Routers are trained to be flat. Text that keeps to its subject
does better, a cache that is still filling does worse.

Seconds are a lower bound: they count the bytes that must come from the drives and those that must come from
memory (`bytes_per_pass`), each at its rate, with the faster of the two hidden by the slower. Arithmetic is
not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from k3.engine.report.bytes_per_pass import Traffic
from k3.model.architecture import ModelConfig
from k3.model.model_source import ModelSource
from k3.model.tensor_names import tensor_use


@dataclass(frozen=True, slots=True)
class Forecast:
    """The bytes of a pass that takes in `tokens` after `position` others."""

    tokens: int
    position: int
    experts: float  # different experts that the pass uses, in all layers together
    hit_share: float
    drive_bytes: float
    memory_bytes: float

    def drive_s(self, bytes_per_s: float) -> float:
        """Return the seconds per token at this rate of all drives together."""
        return self.drive_bytes / bytes_per_s / self.tokens

    def memory_s(self, bytes_per_s: float) -> float:
        """Return the seconds per token at this rate of memory."""
        return self.memory_bytes / bytes_per_s / self.tokens


def forecast_pass(
    source: ModelSource, config: ModelConfig, names: Sequence[str], *, hit_share: float, tokens: int, position: int
) -> Forecast:
    """Return the bytes of a pass over the dense tensors `names` and the experts of all layers that are run."""
    multiplied_bytes = embedding_bytes = 0
    for name in names:
        stored_bytes = source.dense(name).stored_bytes
        if tensor_use(name, config) == "embeddings":
            embedding_bytes += stored_bytes
        else:
            multiplied_bytes += stored_bytes
    used = expert_bytes = 0.0
    for layer in config.layers:
        if layer in config.moe_layers:
            count = used_experts(source.expert_count(layer), config.moe.top_k, tokens)
            used += count
            expert_bytes += count * source.expert_layout(layer).payload_bytes
    traffic = Traffic(config, multiplied_bytes, embedding_bytes // config.vocab, 0)
    return Forecast(
        tokens=tokens,
        position=position,
        experts=used,
        hit_share=hit_share,
        drive_bytes=expert_bytes * (1 - hit_share),
        memory_bytes=traffic.pass_bytes(tokens, position, 0) + expert_bytes,
    )


def used_experts(experts: int, top_k: int, tokens: int) -> float:
    """Return the number of different experts of a layer that `tokens` tokens use together, on average."""
    return experts * (1 - (1 - top_k / experts) ** tokens)
