"""How many bytes a pass must move at the least, and how large a model is. Pure; any thread.

The accounting, for a pass that takes in S tokens behind `position` earlier ones:

* every dense weight that is multiplied, once, with its scales, norms and biases; of the embeddings S rows;
* every expert that some token uses, once, as it lies on disk;
* the state of every KDA layer, read once and written once;
* of every MLA layer's latent cache the rows of all tokens so far, read once.

What a program moves besides (activations, copies, experts on their way from the drive to memory) is overhead: it
is not counted, and so it shows as a smaller share of the memory's rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from k3.engine.definition.state_size import kda_bytes, mla_bytes
from k3.model.architecture import ModelConfig
from k3.model.tensor_names import expected_tensors


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of a loaded model, by how they are touched."""

    config: ModelConfig
    multiplied_bytes: int  # dense weights without the embeddings
    embedding_row_bytes: int
    expert_bytes: int  # one expert

    def pass_bytes(self, tokens: int, position: int, experts: int) -> int:
        """Least bytes of a pass over `tokens` behind `position`, whose tokens use `experts` different experts
        (over all layers)."""
        kda_layers = sum(layer in self.config.kda_layers for layer in self.config.layers)
        mla_layers = len(self.config.layers) - kda_layers
        state_bytes = 2 * kda_layers * kda_bytes(self.config) if kda_layers else 0
        cache_bytes = mla_layers * mla_bytes(self.config, position + tokens) if mla_layers else 0
        weight_bytes = self.multiplied_bytes + tokens * self.embedding_row_bytes
        return weight_bytes + experts * self.expert_bytes + state_bytes + cache_bytes

    def run_bytes(self, passes: list[int], position: int, experts: int) -> int:
        """Least bytes of several passes of so many tokens each, one behind the other."""
        total = experts * self.expert_bytes
        for tokens in passes:
            total += self.pass_bytes(tokens, position, 0)
            position += tokens
        return total


def parameter_count(config: ModelConfig) -> int:
    """Weights of the layers that are run and of what is around them, routed experts included."""
    dense = sum(math.prod(shape) for shape in expected_tensors(config, config.layers).values())
    moe_layers = sum(layer in config.moe_layers for layer in config.layers)
    return dense + moe_layers * config.moe.experts * 3 * config.moe.latent * config.moe.inner


def chunks(tokens: int, chunk: int) -> list[int]:
    """Sizes of the passes in which a prompt is taken."""
    return [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
