"""Log messages of the store's threads on stderr while tokens are printed on stdout.

A daemon that goes away or comes back is reported at once. On a terminal a line of text has usually been begun;
the message then starts on a new line. Nothing is added to stdout itself.
"""

from __future__ import annotations

import logging
import sys
from types import TracebackType

from k3.base.safe_text import visible
from k3.engine.run.token_output import Output

_LOGGER = logging.getLogger("k3.store")


class Notices(logging.Handler):
    """A context manager that prints the store's warnings inside the block. They may come from any thread."""

    def __init__(self, output: Output) -> None:
        super().__init__(logging.WARNING)
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        try:
            broken = self._output.mid_line and sys.stdout.isatty()
            sys.stderr.write(("\n" if broken else "") + visible(self.format(record)) + "\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)

    def __enter__(self) -> Notices:
        _LOGGER.addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _LOGGER.removeHandler(self)
