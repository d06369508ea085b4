"""The steps of a forward pass as calls, which the model makes and look-ahead and traces receive.

Calls of one pass, in this order and on the thread that runs it: `pass_begun`; for each layer `before_attention`,
`before_mlp`, `experts_requested` (layers with experts only) and `layer_done`; `before_head`; `pass_done`. A pass
that raises makes no further call. An observer must not change the arrays that it is given, and changes no result.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from k3.engine.forward.layer import Layer
from k3.engine.forward.moe import Routing
from k3.engine.forward.state import State

Array = npt.NDArray[np.float32]


class PassObserver:
    """A receiver of the steps of forward passes. Its methods do nothing; an observer overrides some.

    `blocks` are the residual blocks banked so far and `stream` is the running sum, arrays [S, hidden].
    """

    def pass_begun(self, state: State, tokens: int) -> None:
        """Receive the beginning of a pass over `tokens` tokens; `state.position` is that of the first."""

    def before_attention(self, layer: Layer, blocks: Sequence[Array], stream: Array) -> None:
        """Receive the input of a layer's attention."""

    def before_mlp(self, layer: Layer, blocks: Sequence[Array], stream: Array) -> None:
        """Receive the input of a layer's MLP; `stream` includes the attention."""

    def experts_requested(self, layer: Layer, routing: Routing) -> None:
        """Receive a layer's routing, after its experts were requested and the drives have begun to read."""

    def layer_done(self, layer: Layer) -> None:
        """Receive the end of a layer."""

    def before_head(self) -> None:
        """Receive the end of the last layer, before the logits are computed."""

    def pass_done(self) -> None:
        """Receive the end of a pass, after the logits were computed."""


class Observers(PassObserver):
    """Several observers as one; they are called in the order given."""

    def __init__(self, observers: Sequence[PassObserver]) -> None:
        self._observers = tuple(observers)

    def pass_begun(self, state: State, tokens: int) -> None:
        """See `PassObserver.pass_begun`."""
        for observer in self._observers:
            observer.pass_begun(state, tokens)

    def before_attention(self, layer: Layer, blocks: Sequence[Array], stream: Array) -> None:
        """See `PassObserver.before_attention`."""
        for observer in self._observers:
            observer.before_attention(layer, blocks, stream)

    def before_mlp(self, layer: Layer, blocks: Sequence[Array], stream: Array) -> None:
        """See `PassObserver.before_mlp`."""
        for observer in self._observers:
            observer.before_mlp(layer, blocks, stream)

    def experts_requested(self, layer: Layer, routing: Routing) -> None:
        """See `PassObserver.experts_requested`."""
        for observer in self._observers:
            observer.experts_requested(layer, routing)

    def layer_done(self, layer: Layer) -> None:
        """See `PassObserver.layer_done`."""
        for observer in self._observers:
            observer.layer_done(layer)

    def before_head(self) -> None:
        """See `PassObserver.before_head`."""
        for observer in self._observers:
            observer.before_head()

    def pass_done(self) -> None:
        """See `PassObserver.pass_done`."""
        for observer in self._observers:
            observer.pass_done()
