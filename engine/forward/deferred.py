"""A value that is made when it is first used: weights are built before their bytes are in memory.

Used by one thread until the value is there, by any thread afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Deferred(Generic[T]):
    """A value behind the function that makes it. Calling returns the value, made at the first call and kept."""

    __slots__ = ("_make", "_value")

    def __init__(self, make: Callable[[], T]) -> None:
        """`make` is called once; an error of it is raised to the caller, and the next call tries again."""
        self._make: Callable[[], T] | None = make

    @property
    def ready(self) -> bool:
        """True once the value has been made."""
        return self._make is None

    def __call__(self) -> T:
        """Return the value. Raises what making it raises."""
        if self._make is not None:
            self._value = self._make()
            self._make = None
        return self._value
