"""Where experts come from while a model runs: memory, files, or a daemon that owns the drives.

What the engine needs: an `ExpertSource`, and for the daemon `DaemonSource` and `DaemonModel`. Modules are imported
when a name is first used, so that commands answer at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3.store.client import DaemonSource
    from k3.store.daemon_model import DaemonModel
    from k3.store.file import FileSource
    from k3.store.memory import MemorySource
    from k3.store.source import BudgetError, ExpertSource, Lease, SourceStats

__all__ = [
    "BudgetError", "DaemonModel", "DaemonSource", "ExpertSource", "FileSource", "Lease", "MemorySource",
    "SourceStats",
]  # fmt: skip

_HOME = {
    "BudgetError": "source", "DaemonModel": "daemon_model", "DaemonSource": "client", "ExpertSource": "source",
    "FileSource": "file", "Lease": "source", "MemorySource": "memory", "SourceStats": "source",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
