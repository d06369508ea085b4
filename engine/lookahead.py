"""Next-layer look-ahead (`--prefetch N`): experts that a layer will probably ask for, named before it does.

Before a layer's attention, the router of the next layer with experts (mostly the layer itself) is applied to the
stream as it is then. What it would choose is mostly what it will choose: the source may read these experts while
the attention is computed and the drive would stand idle. A guess changes no result; it is taken back when the
layer has asked for what it really needs. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from k3 import kernels
from k3.store.source import ExpertSource

Array = npt.NDArray[np.float32]


class LookAhead:
    """Hints to a source: at most `most` experts of one layer at a time."""

    def __init__(self, experts: ExpertSource, most: int, top_k: int) -> None:
        """`top_k` is how many experts a token uses."""
        self._experts = experts
        self._most = most
        self._top_k = top_k
        self._cancel: Callable[[], None] = _nothing
        self.last: Sequence[int] | None = None  # of the last layer that was foreseen, the likeliest first

    def foresee(self, layer: int, choice: Array) -> None:
        """Hint at what `choice` [S, experts], the router's scores as they look now, would choose in a layer."""
        self.last = self.likeliest(layer, choice)
        earlier, self._cancel = self._cancel, self._experts.prefetch(layer, self.last)
        earlier()  # only now: what both name goes on

    def requested(self) -> None:
        """The layer has asked for its experts: what was guessed wrong, and was not read yet, is left."""
        self._cancel()
        self._cancel = _nothing

    def likeliest(self, layer: int, choice: Array) -> Sequence[int]:
        """Experts in the order of their use: by tokens that would choose them, then by their best score."""
        if not np.isfinite(choice).all():
            return []  # the layer's own router will say so
        if len(choice) == 1:
            order = np.argsort(-choice[0], kind="stable")
        else:
            users = np.bincount(kernels.top_k(choice, self._top_k).ravel(), minlength=choice.shape[1])
            order = np.lexsort((-choice.max(axis=0), -users))[: np.count_nonzero(users)]
        likeliest: list[int] = order[: self._most].tolist()
        return likeliest


def _nothing() -> None:
    """What an absent hint is taken back with."""
