"""Dense weights that load in the background, with a progress bar.

Nothing here imports NumPy or the kernels: the first read begins before either is in memory.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from dataclasses import replace

from k3.base.cli_support import Progress
from k3.base.memory_limit import Limit
from k3.engine.definition.settings import ModelSettings
from k3.engine.launch.memory_plan import plan_memory
from k3.engine.launch.model_files import OpenedModel
from k3.model.model_source import TensorLoad

GIL_SWITCH_INTERVAL_S = 0.0005
"""While loading, reader and hash threads need the GIL between reads; CPython's 5 ms is longer than a read."""


def check_dense_fits(opened: OpenedModel, settings: ModelSettings, limit: Limit) -> None:
    """Raise UnsupportedError, with all numbers, when not even a run of one token fits in memory."""
    plan_memory(opened, settings, limit, capacity=1, chunk=1, every_logit=False).check()


@contextlib.contextmanager
def loading_weights(opened: OpenedModel, *, as_json: bool = False) -> Iterator[TensorLoad]:
    """Load the model's dense weights in the background, with a progress bar, until the end of the block."""
    sizes = {name: opened.source.dense(name).resident_bytes for name in opened.names}
    with contextlib.ExitStack() as display:  # closed when reading ends, or with the block if that is earlier
        bar = Progress("loading", sum(sizes.values()), as_json=as_json)
        display.callback(bar.close)
        display.enter_context(_gil_switch_interval(GIL_SWITCH_INTERVAL_S))
        loading = opened.source.begin_load(
            opened.names, on_read=lambda name: bar.advance(sizes[name]), on_end=display.close
        )
        try:
            yield loading
        finally:
            loading.close()  # close before the bar: a closing load still updates it


@contextlib.contextmanager
def _gil_switch_interval(seconds: float) -> Iterator[None]:
    """Set the interpreter's switch interval inside the block."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before_s)


def reduce_limit(limit: Limit, nbytes: int) -> Limit:
    """Return the limit with `nbytes` less free memory, but at least none."""
    return replace(limit, free_bytes=max(0.0, limit.free_bytes - nbytes))
