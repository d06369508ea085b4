"""Does it fit in memory? Asked once, before anything is loaded, answered with numbers.

The limit is the tightest that `base.memory_limit` finds. Nothing is clamped to fit: a run that needs more
is refused, with the terms of its need, while there is still something the user can change. Pure; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3.base.errors import UnsupportedError
from k3.base.memory_limit import Limit, gb

CHUNK_COPIES = 4
"""Arrays as wide as the widest layer that a pass holds at once, about."""


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that a run will take, term by term, in the order they are printed."""

    dense_bytes: int
    load_bytes: int  # on top while loading: the largest tensors as they are stored in the source
    state_bytes: int
    activation_bytes: int
    working_bytes: int  # experts being read or multiplied
    cache_bytes: int

    @property
    def total_bytes(self) -> int:
        """Most that is held at once: experts are read only after loading has ended."""
        later_bytes = self.activation_bytes + self.working_bytes + self.cache_bytes
        return self.dense_bytes + self.state_bytes + max(self.load_bytes, later_bytes)

    def text(self) -> str:
        """The terms in one phrase."""
        terms = [
            ("dense weights", self.dense_bytes),
            ("tensors being loaded", self.load_bytes),
            ("context", self.state_bytes),
            ("activations", self.activation_bytes),
            ("experts in use", self.working_bytes),
            ("expert cache", self.cache_bytes),
        ]
        return ", ".join(f"{name} {gb(size)}" for name, size in terms)


def check_fits(need: Need, limit: Limit) -> None:
    """UnsupportedError with all numbers when the need exceeds the limit."""
    if need.total_bytes > limit.free_bytes:
        raise UnsupportedError(
            f"this run needs {gb(need.total_bytes)} of memory ({need.text()}) and {limit.set_by} leaves "
            f"{gb(limit.free_bytes)}",
            advice="Give it more memory, a smaller expert cache (--expert-gb), a shorter context "
            "(--max-tokens), or weights of fewer bits",
        )
