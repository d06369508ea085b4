"""Made-up routing of known structure in the shape of K3: 92 layers of 896 experts, 16 for each token.

There is no public routing trace of the real model, so these span what is known or claimed about it: a router
trained to be flat over all texts, with locality within one text that different people measured very differently.
Each family has a *model* part (which experts are popular, which topics they serve; the same for every seed) and a
*text* part (from the seed), so that what was learned on one text can be tried on another.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from k3.store.routing.route_trace import Choice, RoutedPass, RouteHeader, TracedLayer

Tokens = Iterator[npt.NDArray[np.uint16]]  # one token after the other, [layers, top_k], ascending in each layer
Scores = npt.NDArray[np.float32]

MODEL_SEED = 3
K3_PAYLOAD_BYTES = 17_547_264
K3_SHAPE = RouteHeader("made-up", 16, tuple(TracedLayer(layer, 896, K3_PAYLOAD_BYTES) for layer in range(1, 93)))


@dataclass(frozen=True)
class Text:
    """The length of a text: prompt tokens, taken `chunk` at a time, and generated ones."""

    prompt: int
    generate: int
    chunk: int = 64


def passes(tokens: Tokens, text: Text) -> Iterator[RoutedPass]:
    """Return the passes of a text whose tokens route like this."""
    cuts = [min(text.chunk, text.prompt - start) for start in range(0, text.prompt, text.chunk)]
    position = 0
    for size in (*cuts, *[1] * text.generate):
        block = np.stack([next(tokens) for _ in range(size)])  # [tokens, layers, top_k]
        counts = np.full(size, block.shape[2], np.uint16)
        choices = tuple(Choice(counts, block[:, layer].reshape(-1)) for layer in range(block.shape[1]))
        yield RoutedPass(position, size, choices)
        position += size


def uniform(shape: RouteHeader, seed: int) -> Tokens:
    """Every token chooses anew among all experts: what a model of random weights does."""
    random = np.random.default_rng(seed)
    while True:
        yield top(_noise(random, shape), shape)


def zipf(shape: RouteHeader, seed: int, exponent: float = 0.8) -> Tokens:
    """Each layer has popular experts, the same for all texts; tokens choose independently."""
    random = np.random.default_rng(seed)
    popularity = _shuffled_zipf(np.random.default_rng(MODEL_SEED), shape, exponent)
    while True:
        yield top(popularity + _gumbel(random, shape), shape)


def sticky(shape: RouteHeader, seed: int, memory: float = 0.9) -> Tokens:
    """Flat over time, but each score keeps `memory` of its value from token to token."""
    random = np.random.default_rng(seed)
    scores = _noise(random, shape)
    fresh = np.float32(np.sqrt(1 - memory**2))
    while True:
        yield top(scores, shape)
        scores = np.float32(memory) * scores + fresh * _noise(random, shape)


def topics(
    shape: RouteHeader,
    seed: int,
    *,
    exponent: float = 1.0,
    topics: int = 12,
    stay: float = 0.98,
    memory: float = 0.0,
) -> Tokens:
    """Each topic has its own popular experts; a text goes on with its topic with probability `stay` per token.

    With `memory` part of the noise is kept from token to token, as in `sticky`.
    """
    random, model = np.random.default_rng(seed), np.random.default_rng(MODEL_SEED)
    favours = [_shuffled_zipf(model, shape, exponent) for _ in range(topics)]
    topic = int(random.integers(topics))
    noise = _noise(random, shape)
    fresh = np.float32(np.sqrt(1 - memory**2))
    while True:
        yield top(favours[topic] + np.float32(np.pi / np.sqrt(6)) * noise, shape)
        noise = np.float32(memory) * noise + fresh * _noise(random, shape)
        if random.random() > stay:
            topic = int(random.integers(topics))


def top(scores: Scores, shape: RouteHeader) -> npt.NDArray[np.uint16]:
    """Return the experts with the highest scores, [layers, experts] -> [layers, top_k] ascending."""
    best = np.argpartition(scores, -shape.top_k, axis=-1)[:, -shape.top_k :]
    return np.sort(best, axis=-1).astype(np.uint16)


def _dimensions(shape: RouteHeader) -> tuple[int, int]:
    experts = {entry.experts for entry in shape.layers}
    assert len(experts) == 1, "made-up models have equally many experts in each layer"
    return len(shape.layers), experts.pop()


def _noise(random: np.random.Generator, shape: RouteHeader) -> Scores:
    return random.standard_normal(_dimensions(shape), dtype=np.float32)


def _gumbel(random: np.random.Generator, shape: RouteHeader) -> Scores:
    """Return noise that, added to log weights, makes the top k a draw without replacement by them."""
    draws = random.standard_exponential(_dimensions(shape), dtype=np.float32)
    found: npt.NDArray[np.float32] = -np.log(np.maximum(draws, np.finfo(np.float32).tiny))
    return found


def _shuffled_zipf(random: np.random.Generator, shape: RouteHeader, exponent: float) -> Scores:
    """Log weights: the r-th of a layer's experts has weight r ** -exponent, in an order of its own."""
    layers, experts = _dimensions(shape)
    weights = -exponent * np.log(np.arange(1, experts + 1, dtype=np.float32))
    return random.permuted(np.tile(weights, (layers, 1)), axis=1)
