"""The memory that a run needs, in terms, and its comparison with the limit before anything is loaded.

The limit is the tightest that `base.memory_limit` finds. Nothing is reduced to fit: a run that needs more is
refused with all terms, so that the user can change one. Pure; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from k3.base.errors import UnsupportedError
from k3.base.memory_limit import Limit, gb

CHUNK_COPIES = 4
"""Arrays as wide as the widest layer that a pass holds at once, roughly."""


@dataclass(frozen=True, slots=True)
class Need:
    """The bytes that a run takes, by term, in the order in which they are printed."""

    dense_bytes: int
    load_bytes: int  # in addition while loading: the largest tensors, in the source's dtype
    state_bytes: int
    activation_bytes: int
    working_bytes: int  # experts that are being read or multiplied
    cache_bytes: int

    @property
    def total_bytes(self) -> int:
        """The largest amount held at once. Experts are read only after loading has ended."""
        later_bytes = self.activation_bytes + self.working_bytes + self.cache_bytes
        return self.dense_bytes + self.state_bytes + max(self.load_bytes, later_bytes)

    def text(self) -> str:
        """Return all terms in one phrase."""
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
    """Raise UnsupportedError, with all numbers, when the need exceeds the limit."""
    if need.total_bytes > limit.free_bytes:
        raise UnsupportedError(
            f"this run needs {gb(need.total_bytes)} of memory ({need.text()}) and {limit.set_by} leaves "
            f"{gb(limit.free_bytes)}",
            advice="Give the run more memory, a smaller expert cache (--expert-gb), a shorter context "
            "(--max-tokens), or weights of fewer bits",
        )
