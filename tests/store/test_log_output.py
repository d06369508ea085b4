"""Holds up: the daemon's log holds nobody up, whatever its stream does, and no stranger can make it grow fast."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from k3.store.client.socket_link import connect
from k3.store.daemon import log_output
from k3.store.daemon.log_output import JsonFormatter, LogOutput, PeerLog, PlainFormatter
from tests.support.containers import Built, build_container
from tests.support.daemons import answers, daemon_inside, serve_command
from tests.support.mounts import small_tmpfs
from tests.support.waiting import wait_until

LOG = logging.getLogger("k3.store.test_log_output")


class Stream(io.BytesIO):
    """A stream that is held up until `flows` is set, and refuses as many writes as `refusals` says."""

    def __init__(self) -> None:
        super().__init__()
        self.flows = threading.Event()
        self.refusals = 0
        self.most = 1 << 20

    def write(self, data: Any) -> int:
        assert self.flows.wait(60)
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.ENOSPC, "no space")
        return super().write(data[: self.most])

    def lines(self) -> list[str]:
        return self.getvalue().decode().splitlines()


@pytest.fixture
def stream() -> Iterator[Stream]:
    made = Stream()
    yield made
    made.flows.set()


@pytest.fixture
def output(stream: Stream) -> Iterator[LogOutput]:
    made = LogOutput(stream, logging.Formatter("%(message)s"))
    LOG.addHandler(made)
    LOG.setLevel(logging.INFO)
    LOG.propagate = False
    yield made
    LOG.removeHandler(made)
    stream.flows.set()
    made.close()


def test_lines_come_in_order_and_whole(stream: Stream, output: LogOutput) -> None:
    stream.flows.set()
    for number in range(100):
        LOG.info("line %d", number)
    output.close()
    assert stream.lines() == [f"line {number}" for number in range(100)]


def test_a_stream_that_takes_nothing_holds_nobody_up(
    stream: Stream, output: LogOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_output, "LINES_MAX", 10)
    for number in range(50):  # not one of these may wait
        LOG.info("line %d", number)
    stream.flows.set()
    wait_until(lambda: "line 9" in stream.lines())
    wait_until(lambda: not output._lines)
    LOG.info("the last")
    output.close()
    lines = stream.lines()
    kept = [line for line in lines if line.startswith("line")]
    assert kept == [f"line {number}" for number in range(len(kept))]
    assert 10 <= len(kept) <= 11
    assert lines[-1] == "the last"
    assert f"lost {50 - len(kept)} lines of this log, which could not be written" in lines


def test_lines_that_the_system_refuses_are_counted(stream: Stream, output: LogOutput) -> None:
    stream.refusals = 3
    stream.flows.set()
    for word in ("a", "b", "c", "d"):
        LOG.info(word)
    output.close()
    # The first word about what is lost is refused as well, and the line after it.
    assert stream.lines()[0] in (
        "lost 2 lines of this log, which could not be written",
        "lost 3 lines of this log, which could not be written",
    )
    assert stream.lines()[-1] == "d"


def test_a_line_that_was_cut_keeps_apart_from_the_next(stream: Stream, output: LogOutput) -> None:
    stream.most = 3
    stream.flows.set()
    LOG.info("whole")
    wait_until(lambda: stream.lines() == ["whole"])

    def write(data: Any, whole: Any = stream.write) -> int | None:
        taken = len(stream.getvalue())
        return None if taken > len("whole\n") else whole(data)

    stream.write = write  # type: ignore[method-assign, assignment]
    LOG.info("a line")
    wait_until(lambda: output._lost)
    del stream.write
    LOG.info("the next")
    output.close()
    assert stream.lines() == ["whole", "a l", "lost 1 line of this log, which could not be written", "the next"]


def test_the_end_waits_for_a_stream_that_flows_and_for_no_other(
    stream: Stream, output: LogOutput, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_output, "END_S", 0.05)
    LOG.info("a line")
    output.close()
    assert stream.lines() == []
    LOG.info("after the end")
    output.close()


def test_the_formats() -> None:
    record = logging.LogRecord("k3.store", logging.WARNING, "x", 1, "client %s", ("\x1b[2J",), None)
    assert PlainFormatter().format(record).endswith("WARNING client \\x1b[2J")
    assert json.loads(JsonFormatter().format(record))["message"] == "client \x1b[2J"
    forged = logging.LogRecord(
        "k3.store", logging.INFO, "x", 1, "on %s", ("/a\n2026-01-01 INFO all is well",), None
    )
    assert "\n" not in PlainFormatter().format(forged)
    try:
        raise ValueError("a\x1b[2J")
    except ValueError:
        failed = logging.LogRecord("k3.store", logging.ERROR, "x", 1, "a fault", (), sys.exc_info())
    lines = PlainFormatter().format(failed).splitlines()
    assert lines[0].endswith("ERROR a fault")
    assert lines[-1] == "ValueError: a\\x1b[2J"


def test_what_peers_cause_is_bounded_and_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_output, "PEER_LINES_MAX", 5)
    caplog.set_level(logging.INFO, logger="k3.store")
    peers = PeerLog()
    began_s = peers._began_s
    for number in range(20):
        peers.log(logging.INFO, "peer %d", number)
    assert [record.message for record in caplog.records] == [f"peer {number}" for number in range(5)]
    peers.turn(began_s + log_output.PEER_PERIOD_S - 0.1)
    assert len(caplog.records) == 5
    peers.turn(began_s + log_output.PEER_PERIOD_S)
    assert "15 lines about connections were not logged" in caplog.records[-1].message
    peers.turn(began_s + 3 * log_output.PEER_PERIOD_S)
    assert len(caplog.records) == 6, "nothing was left out since"


# Whole daemons


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    place = tmp_path_factory.mktemp("container")
    return build_container(place / "home", [place / "a"], [1, 2])


def test_a_reader_of_the_log_that_stands_still_stops_nobody(built: Built, tmp_path: Path) -> None:
    """The pipe is full after some dozen lines; the daemon's loop must not wait in it."""
    socket = tmp_path / "s"
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    with open(reading, "rb") as _:
        process = subprocess.Popen(serve_command(socket, built.directories), stderr=writing)
        os.close(writing)
        try:
            wait_until(lambda: answers(socket), 60)
            for _ in range(300):
                with connect(socket) as connection:
                    connection.send(b"nonsense")
                    assert connection.recv(1 << 16)
            assert answers(socket)
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()


def test_a_full_disk_under_the_log_ends_nothing(built: Built, tmp_path: Path) -> None:
    socket = tmp_path / "s"
    with small_tmpfs(tmp_path / "log", "64k") as place:
        with open(place / "log", "ab") as log:
            process = subprocess.Popen(serve_command(socket, built.directories), stderr=log)
        try:
            wait_until(lambda: answers(socket), 60)
            filler = place / "filler"
            with filler.open("wb", buffering=0) as file, contextlib.suppress(OSError):
                while file.write(bytes(512)):
                    pass
            for _ in range(100):
                with connect(socket) as connection:
                    connection.send(b"nonsense")
                    assert connection.recv(1 << 16)
            assert answers(socket)
            filler.unlink()
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            assert "SIGTERM: ending" in (place / "log").read_text()
        finally:
            process.kill()
            process.wait()


def test_a_flood_of_refusals_is_not_all_logged(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(log_output, "PEER_LINES_MAX", 20)
    monkeypatch.setattr(log_output, "PEER_PERIOD_S", 3600.0)  # however slow the machine, one period
    with caplog.at_level(logging.INFO, "k3.store"), daemon_inside(tmp_path / "s", built.directories) as daemon:
        for _ in range(100):
            with connect(daemon.socket) as connection:
                connection.send(b"nonsense")
                assert connection.recv(1 << 16)
    refused = [record for record in caplog.records if "refused" in record.message]
    assert len(refused) == 20
