"""Types of arrays, and of the fixtures that call kernels with every variant and thread count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
Arrays: TypeAlias = tuple[Array, ...]


class Everyway(Protocol):
    """Make a call with every variant and thread count, and return the one result as a tuple of arrays."""

    def __call__(self, call: Callable[[], object], /) -> Arrays: ...


class SameBits(Protocol):
    """Assert equal shape, dtype and bits."""

    def __call__(self, have: object, want: object, /) -> None: ...
