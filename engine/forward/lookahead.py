"""Next-layer look-ahead (`--prefetch N`): experts that a layer will probably ask for, named before it does.

The router of the next layer with experts is applied to the stream as it is some half layers before: when the
layer before it has asked for its own experts, and again before its attention, when the stream is nearly final.
The experts that the router would choose are mostly those that it will choose, so the source may read them while
the drive would be idle. A guess changes no result; it is cancelled when the layer has asked for its experts.

A guess that is still being read when the layer asks holds up what was asked for as long as a right one would have
spared. So it pays to name an expert whose chance is a half or more, and `HitRecord` keeps count of what the
chances were: experts further down a ranking, and guesses made further ahead, are right less often. Where nothing
can be predicted, nothing is read ahead. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from k3 import kernels
from k3.engine.forward.layer import Layer
from k3.engine.forward.moe import Routing
from k3.engine.forward.observer import PassObserver
from k3.store.source import ExpertSource

Array = npt.NDArray[np.float32]

PAYING_CHANCE = 0.5
"""Chance from which on an expert is worth naming."""

MEMORY_GUESSES = 64
"""Guesses after which those before count for half: routing changes with what a text is about."""


class HitRecord:
    """How often the experts at each place of a ranking were right, for guesses of one kind."""

    def __init__(self, places: int) -> None:
        """Starts as if each of `places` places had been right once, so that each is tried."""
        self._right = np.ones(places)
        self._guessed = np.ones(places)

    @property
    def chances(self) -> npt.NDArray[np.float64]:
        """Estimated chance of each place."""
        return self._right / self._guessed

    def add(self, ranking: Sequence[int], wanted: set[int]) -> None:
        """Take in what became of one guess."""
        full = self._guessed >= MEMORY_GUESSES
        self._right[full] /= 2
        self._guessed[full] /= 2
        self._right[: len(ranking)] += [expert in wanted for expert in ranking]
        self._guessed[: len(ranking)] += 1

    def worth(self, places: int) -> int:
        """How many of the first `places` places it pays to name. Chances fall along a ranking: what is behind the
        last place that pays is left out, and a place before it that does not (by accident) is not."""
        paying = np.flatnonzero(self.chances[:places] >= PAYING_CHANCE)
        return int(paying[-1]) + 1 if len(paying) else 0


class LookAhead(PassObserver):
    """Hints to a source: at most `most` experts of one layer at a time.

    A layer is predicted once the weights of its router have been used, that is from the second pass on.
    """

    def __init__(self, experts: ExpertSource, most: int, top_k: int, layers: Sequence[Layer] = ()) -> None:
        """`top_k` is the number of experts that a token uses; `layers` are the model's, in order."""
        self._experts = experts
        self._most = most
        self._top_k = top_k
        self._layers = layers
        self._at: tuple[Sequence[Array], Array] | None = None  # blocks and stream before the MLP at hand
        self._cancel: Callable[[], None] = _no_cancel
        self._records: dict[tuple[int, bool], HitRecord] = {}  # by steps ahead, and whether it is for one token
        self._open: list[tuple[int, HitRecord, Sequence[int]]] = []  # guesses, each with the layer that is to ask
        self._named: Sequence[int] | None = None
        self.last: Sequence[int] | None = None  # what was named last before the latest request

    def before_attention(self, layer: Layer, blocks: Sequence[Array], stream: Array) -> None:
        """Predict the next router, which may be this layer's own."""
        self._predict_from(layer.index, 0, blocks, stream)

    def before_mlp(self, layer: Layer, blocks: Sequence[Array], stream: Array) -> None:
        """Predict the router behind a dense layer; one with experts asks for its own first."""
        self._at = blocks, stream
        if not layer.has_experts:
            self._predict_from(layer.index, 1, blocks, stream)

    def experts_requested(self, layer: Layer, routing: Routing) -> None:
        """Compare the guesses with what was asked for, and predict the router behind this layer."""
        self.requested(layer.index, routing.wanted())
        assert self._at is not None
        self._predict_from(layer.index, 1, *self._at)

    def _predict_from(self, index: int, half: int, blocks: Sequence[Array], stream: Array) -> None:
        """Predict the next router from before the attention (`half` 0) or the MLP (1) of layer `index`."""
        following = next((one for one in self._layers if one.index >= index + half and one.has_experts), None)
        if following is not None and following.can_rank_experts:
            steps = 2 * (following.index - index) + 1 - half
            self.predict(following.index, following.rank_experts(blocks, stream), steps)

    def predict(self, layer: int, choice: Array, steps: int) -> None:
        """Hint at the experts that `choice` [S, experts], the router's scores as they look now, would choose in
        a layer that is `steps` half layers (attentions and MLPs) away."""
        ranking = self.likeliest(layer, choice)
        record = self._records.setdefault((steps, len(choice) == 1), HitRecord(self._most))
        self._open.append((layer, record, ranking))
        self._named = ranking[: record.worth(len(ranking))]
        earlier, self._cancel = self._cancel, self._experts.prefetch(layer, self._named)
        earlier()  # only now: what both name goes on

    def requested(self, layer: int, wanted: Sequence[int]) -> None:
        """Cancel the open hints, since a layer has asked for the experts `wanted`, and count which were right."""
        self._cancel()
        self._cancel = _no_cancel
        self.last, self._named = self._named, None
        asked = set(wanted)
        for predicted, record, ranking in self._open:
            if predicted == layer:  # not so where a pass ended early
                record.add(ranking, asked)
        self._open.clear()

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


def _no_cancel() -> None:
    """Cancel callback when nothing was prefetched."""
