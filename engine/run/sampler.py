"""Logits to the next token: greedy, or drawn by temperature and top-p from a seeded generator.

The same logits, settings and seed give the same tokens: the arithmetic is float64 and the generator PCG64; only
a draw within a rounding error of a boundary could differ between machines. The number that a token is drawn with
follows from the seed and the token's position in the timeline, so a generation in pieces draws what one in one
go does. A logit that is not finite is an error: it can only come from damaged weights or from a fault, and a
token chosen from it would hide that. One instance per timeline, one thread.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from k3.base.errors import SourceError
from k3.engine.definition.settings import SamplerOptions
from k3.engine.forward.weights import DAMAGED_OR_PUBLISHED


class Sampler:
    """Chooses tokens, one after the other, and owns the random stream."""

    def __init__(self, options: SamplerOptions, position: int = 0) -> None:
        """`position` is that of the first token to be chosen."""
        self.options = options
        bits = np.random.PCG64(options.seed)
        bits.advance(position)  # one number per token
        self._random = np.random.Generator(bits)

    def choose(self, logits: npt.NDArray[np.float32]) -> int:
        """The next token for logits [vocab]. Ties go to the lowest id. SourceError if one is not finite."""
        check_finite(logits)
        if self.options.temperature == 0:
            return int(np.argmax(logits))
        tokens, shares = kept_shares(logits, self.options.temperature, self.options.top_p)
        point = self._random.random() * shares[-1]
        return int(tokens[min(np.searchsorted(shares, point, side="right"), len(tokens) - 1)])


def kept_shares(
    logits: npt.NDArray[np.float32], temperature: float, top_p: float
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The tokens that may be drawn, likeliest first (ties: lowest id), and their cumulative probabilities.

    The set is the shortest one whose probability reaches `top_p`; it is never empty.
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
    """SourceError naming the first token whose logit is not a finite number."""
    finite = np.isfinite(logits)
    if not finite.all():
        token = int(np.argmin(finite))
        raise SourceError(
            f"the logit of token {token} is {logits[token]}",
            advice=DAMAGED_OR_PUBLISHED,
        )
