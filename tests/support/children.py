"""Work in a forked child of the test's process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable


def in_child(work: Callable[[], object]) -> int:
    """Run something in a forked child; return its exit code: 0 when it came to its end."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forking a process with threads: that is the point
        child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
