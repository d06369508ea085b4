"""Where experts come from while a model runs: memory, files, or a daemon that owns the drives.

What the engine needs: an `ExpertSource`, and for the daemon `DaemonSource` and `DaemonModel`. Modules are imported
when a name is first used, so that commands answer at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3.store.client.daemon_model import DaemonModel
    from k3.store.client.daemon_source import DaemonSource
    from k3.store.local.file_source import FileSource
    from k3.store.local.memory_source import MemorySource
    from k3.store.source import BudgetError, ExpertSource, Lease, SourceStats

__all__ = [
    "BudgetError", "DaemonModel", "DaemonSource", "ExpertSource", "FileSource", "Lease", "MemorySource",
    "SourceStats",
]  # fmt: skip

_HOME = {
    "BudgetError": "source", "DaemonModel": "client.daemon_model", "DaemonSource": "client.daemon_source",
    "ExpertSource": "source", "FileSource": "local.file_source", "Lease": "source",
    "MemorySource": "local.memory_source", "SourceStats": "source",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
