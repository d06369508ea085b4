"""Where experts come from while a model runs: memory, files, or a daemon that owns the drives.

These names are the room's public interface (docs/python_api.md). Modules are imported when a name is first used,
so that commands answer at once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from k3.model.encoded_tensor import expert_arrays
    from k3.store.client.attachment import attach
    from k3.store.client.daemon_model import DaemonModel
    from k3.store.client.daemon_source import DaemonSource
    from k3.store.lending.file_source import FileSource
    from k3.store.lending.memory_source import MemorySource
    from k3.store.source import BudgetError, ExpertSource, Lease, SourceStats

__all__ = [
    "BudgetError", "DaemonModel", "DaemonSource", "ExpertSource", "FileSource", "Lease", "MemorySource",
    "SourceStats", "attach", "expert_arrays",
]  # fmt: skip

_HOME = {
    "BudgetError": "k3.store.source", "DaemonModel": "k3.store.client.daemon_model",
    "DaemonSource": "k3.store.client.daemon_source", "ExpertSource": "k3.store.source",
    "FileSource": "k3.store.lending.file_source", "Lease": "k3.store.source",
    "MemorySource": "k3.store.lending.memory_source", "SourceStats": "k3.store.source",
    "attach": "k3.store.client.attachment", "expert_arrays": "k3.model.encoded_tensor",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
