"""Next-layer look-ahead (`--prefetch N`): prefetch the experts that a layer will probably use.

The router of the next layer with experts is applied to the stream a few half layers early: when the layer before
has requested its own experts, and again before its attention, when the stream is nearly final. The experts that
it would choose are mostly those that it will choose, so the source can read them while the drive is idle. A
prediction changes no result, and is cancelled when the layer has requested its experts.

A wrong prefetch that is still being read when the layer requests its experts delays them by as much as a right
one saves. So it pays to prefetch an expert whose chance is a half or more. `HitRecord` estimates the chances:
experts further down a ranking, and predictions made further ahead, are right less often. Where nothing can be
predicted, nothing is prefetched. One thread.
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
"""The least chance of being used at which an expert is prefetched."""

RECORD_PREDICTIONS = 64
"""Predictions after which earlier ones count for half, since routing changes with the subject of a text."""


class HitRecord:
    """Success of predictions of one kind, by place in their ranking."""

    def __init__(self, places: int) -> None:
        """Begin as if each of `places` places had been right once, so that each is tried."""
        self._right = np.ones(places)
        self._predicted = np.ones(places)

    @property
    def chances(self) -> npt.NDArray[np.float64]:
        """Estimated chance of each place."""
        return self._right / self._predicted

    def add(self, ranking: Sequence[int], wanted: set[int]) -> None:
        """Count a prediction by the experts that were then `wanted`."""
        full = self._predicted >= RECORD_PREDICTIONS
        self._right[full] /= 2
        self._predicted[full] /= 2
        self._right[: len(ranking)] += [expert in wanted for expert in ranking]
        self._predicted[: len(ranking)] += 1

    def paying_places(self, places: int) -> int:
        """Return the number of places, of the first `places`, that pay to be prefetched.

        Chances fall along a ranking: places after the last that pays are left out, and a place before it that
        does not pay, by accident, is kept.
        """
        paying = np.flatnonzero(self.chances[:places] >= PAYING_CHANCE)
        return int(paying[-1]) + 1 if len(paying) else 0


class LookAhead(PassObserver):
    """Prefetches at most `most` experts of one layer at a time.

    A layer is predicted from the second pass on, once the weights of its router have been used.
    """

    def __init__(self, experts: ExpertSource, most: int, top_k: int, layers: Sequence[Layer] = ()) -> None:
        """Predict for `layers`, the model's in order, whose tokens use `top_k` experts each."""
        self._experts = experts
        self._most = most
        self._top_k = top_k
        self._layers = layers
        self._at: tuple[Sequence[Array], Array] | None = None  # blocks and stream before the current MLP
        self._cancel: Callable[[], None] = _no_cancel
        # Records by half layers ahead, separately for passes of one token (True).
        self._records: dict[tuple[int, bool], HitRecord] = {}
        self._open: list[tuple[int, HitRecord, Sequence[int]]] = []  # predictions: layer, record, ranking
        self._named: Sequence[int] | None = None
        self.last: Sequence[int] | None = None  # the last prefetch before the latest request

    def before_attention(self, layer: Layer, blocks: Sequence[Array], stream: Array) -> None:
        """Predict the next router, which may be this layer's own."""
        self._predict_from(layer.index, 0, blocks, stream)

    def before_mlp(self, layer: Layer, blocks: Sequence[Array], stream: Array) -> None:
        """Predict the router after a dense layer. A layer with experts requests its own first."""
        self._at = blocks, stream
        if not layer.has_experts:
            self._predict_from(layer.index, 1, blocks, stream)

    def experts_requested(self, layer: Layer, routing: Routing) -> None:
        """Compare predictions with the request, and predict the router after this layer."""
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
        """Prefetch the experts of `layer` that `choice` [S, experts] would choose.

        `choice` are the router's scores as they are now, `steps` the half layers (attentions and MLPs) until it
        is asked.
        """
        ranking = self.likeliest(layer, choice)
        record = self._records.setdefault((steps, len(choice) == 1), HitRecord(self._most))
        self._open.append((layer, record, ranking))
        self._named = ranking[: record.paying_places(len(ranking))]
        earlier, self._cancel = self._cancel, self._experts.prefetch(layer, self._named)
        earlier()  # only now, so that reads of experts in both are not cancelled

    def requested(self, layer: int, wanted: Sequence[int]) -> None:
        """Cancel open prefetches of a layer that has requested the experts `wanted`, and count the right ones."""
        self._cancel()
        self._cancel = _no_cancel
        self.last, self._named = self._named, None
        asked = set(wanted)
        for predicted, record, ranking in self._open:
            if predicted == layer:  # another layer, where a pass ended early
                record.add(ranking, asked)
        self._open.clear()

    def likeliest(self, layer: int, choice: Array) -> Sequence[int]:
        """Return experts by the number of tokens that would choose them, then by their best score."""
        if not np.isfinite(choice).all():
            return []  # the layer's own router raises for that
        if len(choice) == 1:
            order = np.argsort(-choice[0], kind="stable")
        else:
            users = np.bincount(kernels.top_k(choice, self._top_k).ravel(), minlength=choice.shape[1])
            order = np.lexsort((-choice.max(axis=0), -users))[: np.count_nonzero(users)]
        likeliest: list[int] = order[: self._most].tolist()
        return likeliest


def _no_cancel() -> None:
    """Cancel callback when nothing was prefetched."""
