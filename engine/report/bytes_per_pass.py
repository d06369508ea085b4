"""The least bytes that a pass must move, and the size of a model. Pure; any thread.

A pass that takes in S tokens after `position` earlier ones is counted as:

* every dense weight that is multiplied, once, with its scales, norms and biases; of the embeddings S rows;
* every expert that at least one token uses, once, as it lies on disk;
* the state of every KDA layer, read once and written once;
* of every MLA layer's latent cache the rows of all tokens so far, read once.

Everything else that a program moves (activations, copies, experts between drive and memory) is overhead: it is
not counted, so it shows as a smaller share of the memory's rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from k3.engine.definition.state_size import kda_bytes, mla_bytes
from k3.model.architecture import ModelConfig
from k3.model.tensor_names import expected_tensors


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes of a loaded model, by the way that a pass touches them."""

    config: ModelConfig
    multiplied_bytes: int  # dense weights but the embeddings
    embedding_row_bytes: int
    expert_bytes: int  # bytes of one expert

    def pass_bytes(self, tokens: int, position: int, experts: int) -> int:
        """Return the least bytes of a pass over `tokens` after `position`.

        `experts` is the number of different experts that its tokens use, over all layers.
        """
        kda_layers = sum(layer in self.config.kda_layers for layer in self.config.layers)
        mla_layers = len(self.config.layers) - kda_layers
        state_bytes = 2 * kda_layers * kda_bytes(self.config) if kda_layers else 0
        cache_bytes = mla_layers * mla_bytes(self.config, position + tokens) if mla_layers else 0
        weight_bytes = self.multiplied_bytes + tokens * self.embedding_row_bytes
        return weight_bytes + experts * self.expert_bytes + state_bytes + cache_bytes

    def run_bytes(self, passes: list[int], position: int, experts: int) -> int:
        """Return the least bytes of consecutive passes, each over as many tokens as `passes` says."""
        total = experts * self.expert_bytes
        for tokens in passes:
            total += self.pass_bytes(tokens, position, 0)
            position += tokens
        return total


def parameter_count(config: ModelConfig) -> int:
    """Return the number of weights in the layers that are run and around them, routed experts included."""
    dense = sum(math.prod(shape) for shape in expected_tensors(config, config.layers).values())
    moe_layers = sum(layer in config.moe_layers for layer in config.layers)
    return dense + moe_layers * config.moe.experts * 3 * config.moe.latent * config.moe.inner


def chunk_sizes(tokens: int, chunk: int) -> list[int]:
    """Return the sizes of the passes by which a prompt is taken in."""
    return [min(chunk, tokens - start) for start in range(0, tokens, chunk)]
