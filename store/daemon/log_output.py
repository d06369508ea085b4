"""The daemon's log: lines on stderr that nobody ever waits for.

A pipe that nobody empties, a terminal that was stopped, or a disk that is full or hangs must not hold up the
control loop. So a thread of its own writes, from a queue of bounded length. Lines that find no room there, or that
the system refuses, are lost; the next one that can be written says how many. `PeerLog` bounds the lines that
strangers can cause, who could fill a disk with them otherwise.

`LogOutput` may be used from any thread; `PeerLog` belongs to the control loop's.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, BinaryIO

from k3.base.safe_text import counted, visible, visible_text

LINES_MAX = 1000
"""Lines that may wait to be written."""

END_S = 2.0
"""Longest time that the end of the daemon waits for lines to be written."""

PEER_LINES_MAX = 200
PEER_PERIOD_S = 10.0

_log = logging.getLogger("k3.store")


class PlainFormatter(logging.Formatter):
    """A record as a line of text in which nothing has power over a terminal; a traceback has lines of its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the name is Python's
        """See logging.Formatter."""
        return visible(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        return visible_text(super().format(record))


class JsonFormatter(logging.Formatter):
    """A record as one JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        fields: Mapping[str, Any] = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
            "pid": os.getpid(),
        }
        if record.exc_info:
            fields = {**fields, "traceback": self.formatException(record.exc_info)}
        return json.dumps(fields)


class LogOutput(logging.Handler):
    """Writes records to a stream from a thread of its own, until `close`."""

    def __init__(self, stream: BinaryIO, formatter: logging.Formatter, encoding: str = "utf-8") -> None:
        """Write to a stream without a buffer: a buffer's lock would be held by a write that may never return."""
        super().__init__()
        self.setFormatter(formatter)
        self._stream = stream
        self._encoding = encoding
        self._is_cut = False
        self._changed = threading.Condition()
        self._lines: deque[str] = deque()
        self._is_writing = self._is_closed = False
        self._lost = 0
        # A daemon thread: a stream that takes nothing must not keep the process from ending.
        self._thread = threading.Thread(target=self._write_all, name="k3-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Put a record's line into the queue, or count it as lost. Never waits for the stream."""
        line = self.format(record)
        with self._changed:
            if len(self._lines) >= LINES_MAX or self._is_closed:
                self._lost += 1
                return
            self._lines.append(line)
            self._changed.notify_all()

    def close(self) -> None:
        """Write what waits, for at most END_S, and end. A second call does nothing."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines and not self._is_writing, END_S)
            self._is_closed = True
            self._changed.notify_all()
        super().close()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._lines or self._is_closed)
                if self._is_closed:
                    return
                self._is_writing = True
                line = self._lines.popleft()
                lost, self._lost = self._lost, 0
            if lost and not self._write(self._told_of(lost)):
                self._lose(lost + 1)
            elif not self._write(line):
                self._lose(1)

    def _write(self, line: str) -> bool:
        """Write one line. False when the stream refuses it, or takes a part only."""
        data = f"{line}\n".encode(self._encoding, "backslashreplace")
        if self._is_cut:
            data = b"\n" + data
        while data:
            try:
                count = self._stream.write(data)
            except OSError:
                count = None
            if not count:  # None also when the stream is one that never waits, and is full
                return False
            data = data[count:]
            self._is_cut = bool(data)
        return True

    def _lose(self, lines: int) -> None:
        with self._changed:
            self._lost += lines

    def _told_of(self, lost: int) -> str:
        text = f"lost {counted(lost, 'line')} of this log, which could not be written"
        return self.format(logging.LogRecord(_log.name, logging.WARNING, "", 0, text, (), None))


class PeerLog:
    """Logs what peers cause: at most PEER_LINES_MAX lines in each PEER_PERIOD_S, and a count of the rest."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._lines = 0

    def log(self, level: int, text: str, *arguments: object) -> None:
        """Log a line, or only count it."""
        self.turn(time.monotonic())
        self._lines += 1
        if self._lines <= PEER_LINES_MAX:
            _log.log(level, text, *arguments)

    def turn(self, now_s: float) -> None:
        """Begin another period when one is over, and tell of what the last one did not log."""
        if now_s < self._began_s + PEER_PERIOD_S:
            return
        unsaid = self._lines - PEER_LINES_MAX
        self._began_s, self._lines = now_s, 0
        if unsaid > 0:
            _log.warning(
                "%s about connections were not logged within %.0f s: somebody connects very often",
                counted(unsaid, "line"), PEER_PERIOD_S,
            )  # fmt: skip
