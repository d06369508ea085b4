"""A value that is made at its first use, so that a model can be built before its weights are in memory.

One thread uses it until the value exists; any thread may use it afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Deferred(Generic[T]):
    """A value and the function that makes it. A call returns the value, which the first call makes."""

    __slots__ = ("_make", "_value")

    def __init__(self, make: Callable[[], T]) -> None:
        """Keep `make`. An error that it raises goes to the caller, and the next call tries again."""
        self._make: Callable[[], T] | None = make

    @property
    def ready(self) -> bool:
        """True once the value has been made."""
        return self._make is None

    def __call__(self) -> T:
        """Return the value. Raises what `make` raises."""
        if self._make is not None:
            self._value = self._make()
            self._make = None
        return self._value
