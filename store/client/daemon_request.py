"""What one request of a `DaemonSource` has still to come.

A request is guarded by its source's lock, except that its stream's thread may take from `ready` without it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from k3.store.source import Lease, LeaseStream


@dataclass(eq=False, slots=True)
class Request:
    """Experts that were asked for: not yet of the daemon (`unstarted`), of the daemon (`awaited`), or `ready`.

    `tickets` are rights to leases that it has not used; `delegate` is the fallback's stream, once it took over.
    """

    layer: int
    tag: int
    unstarted: deque[int]
    awaited: set[int] = field(default_factory=set)
    ready: deque[Lease] = field(default_factory=deque)
    errors: deque[Exception] = field(default_factory=deque)
    tickets: int = 0
    busy_since_ns: int | None = None
    closed: bool = False
    delegate: LeaseStream | None = None
