"""Holds up: a stranger's descriptors are seen before they are taken, and no close of theirs is ever waited for."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from k3.store.daemon.closer import Closer, Next, can_bring_descriptors, look
from k3.store.protocol.peer import refuse_descriptors
from tests.support.lingering import lingering
from tests.support.waiting import wait_until


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Our end, of a kind that descriptors may come to, and a stranger's."""
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    here.setblocking(False)
    assert can_bring_descriptors(here)
    yield here, there
    for end in (here, there):
        end.close()


def test_a_packet_is_known_before_it_is_taken(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    assert look(here) is Next.NOTHING
    there.send(b"plain")
    there.send(b"")
    socket.send_fds(there, [b"x"], [0])
    socket.send_fds(there, [b""], [0, 1, 2])
    for _ in range(2):  # looking changes nothing
        assert look(here) is Next.PLAIN
    assert here.recv(10) == b"plain"
    assert look(here) is Next.PLAIN
    assert here.recv(10) == b""
    for _ in range(2):
        assert look(here) is Next.WITH_DESCRIPTORS
        here.recv(10)
    assert look(here) is Next.NOTHING
    there.close()
    assert look(here) is Next.END
    assert len(os.listdir("/proc/self/fd")) == before - 1  # noqa: PTH208


def test_what_came_without_descriptors_is_closed_at_once(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    for data in (b"a", b"", b"b"):
        there.send(data)
    closer = Closer()
    closer.close(here, with_descriptors=True)
    assert here.fileno() == -1
    assert closer.pending == 0


def test_descriptors_in_any_packet_are_closed_by_a_thread(pair: tuple[socket.socket, socket.socket]) -> None:
    here, there = pair
    closer = Closer()
    with lingering() as (item,):
        there.send(b"plain")
        there.send(b"")
        item.sent_over(there, b"")
        closer.close(here, with_descriptors=True)
        assert closer.pending == 1
        assert there.recv(1) == b""  # the end is seen at once
        item.release()
        wait_until(lambda: closer.pending == 0)


def test_threads_are_bounded_and_each_connection_has_its_turn() -> None:
    closer = Closer(threads_max=2)
    with lingering(4) as items:
        ends = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in items]
        for item, (here, there) in zip(items, ends, strict=True):
            assert can_bring_descriptors(here)
            item.sent_over(there, b"x")
            closer.close(here, with_descriptors=True)
        assert closer.is_full
        wait_until(lambda: closer.pending == 4)
        for item in items:
            item.release()
        wait_until(lambda: closer.pending == 0)
        assert closer.pending == 0
        for _, there in ends:
            there.close()


def test_the_kernel_refuses_them_where_it_can() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        if not refuse_descriptors(listening):
            pytest.skip("this kernel has no SO_PASSRIGHTS")
        listening.bind(b"\0k3-test-%d" % os.getpid())
        listening.listen()
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as there:
            there.connect(listening.getsockname())
            here, _ = listening.accept()
            with here:
                assert not can_bring_descriptors(here)
                with pytest.raises(PermissionError):
                    socket.send_fds(there, [b"x"], [0])
                socket.send_fds(here, [b"x"], [0])  # the other direction is open
