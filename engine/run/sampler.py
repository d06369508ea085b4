"""Logits to the next token: the likeliest, or drawn by temperature and top-p from a seeded generator.

The same logits, settings and seed give the same tokens: the arithmetic is float64 and the generator PCG64; only a
draw within a rounding error of a boundary could differ between machines. The random number of a token follows
from the seed and the token's position in the timeline, so a generation in several runs draws the same tokens as
one in a single run. A logit that is not finite raises: it can only come from damaged weights or a fault, which a
token chosen from it would hide. One instance per timeline, one thread.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from k3.base.errors import SourceError
from k3.engine.definition.settings import SamplerOptions
from k3.engine.forward.weights import DAMAGED_OR_PUBLISHED


class Sampler:
    """Chooses tokens one by one, and owns the random generator."""

    def __init__(self, options: SamplerOptions, position: int = 0) -> None:
        """Begin at `position`, that of the first token to be chosen."""
        self.options = options
        bits = np.random.PCG64(options.seed)
        bits.advance(position)  # each token takes one number
        self._random = np.random.Generator(bits)

    def choose(self, logits: npt.NDArray[np.float32]) -> int:
        """Return the next token for logits [vocab]; ties go to the lowest id. SourceError if one is not finite."""
        check_finite(logits)
        if self.options.temperature == 0:
            return int(np.argmax(logits))
        tokens, shares = kept_shares(logits, self.options.temperature, self.options.top_p)
        point = self._random.random() * shares[-1]
        return int(tokens[min(np.searchsorted(shares, point, side="right"), len(tokens) - 1)])


def kept_shares(
    logits: npt.NDArray[np.float32], temperature: float, top_p: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """Return the tokens that may be drawn, and their cumulative probabilities.

    The likeliest token comes first (ties: lowest id). The set is the shortest one whose probability reaches
    `top_p`; it is never empty.
    """
    scaled = (logits.astype(np.float64) - float(logits.max())) / temperature
    tokens = np.argsort(-scaled, kind="stable")
    weights = np.exp(scaled[tokens])
    shares = np.cumsum(weights / weights.sum())
    if top_p < 1:
        keep = int(np.searchsorted(shares, top_p, side="left")) + 1
        tokens, shares = tokens[:keep], shares[:keep]
    return tokens, shares


def check_finite(logits: npt.NDArray[np.float32]) -> None:
    """Raise SourceError for the first token whose logit is not a finite number."""
    finite = np.isfinite(logits)
    if not finite.all():
        token = int(np.argmin(finite))
        raise SourceError(
            f"the logit of token {token} is {logits[token]}",
            advice=DAMAGED_OR_PUBLISHED,
        )
