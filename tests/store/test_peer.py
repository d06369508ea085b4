"""Holds up: the kernel's word decides who may connect, and no user can take every place of the others."""

from __future__ import annotations

import os
import socket
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.store.protocol.peer import SPARE_KEPT, Census, Limits, Owner, Peer, overflow_ids, peer_of

OWNER = Owner(uid=500, group=4242)
MEMBERS = (1001, 1002, 1003)


def member(uid: int) -> Peer:
    return Peer(1, uid, uid, (4242,))


@pytest.mark.parametrize(
    ("peer", "admitted"),
    [
        (Peer(1, 500, 1), True),
        (Peer(1, 0, 0), True),
        (Peer(1, 7, 4242), True),
        (Peer(1, 7, 7, (1, 4242)), True),
        (Peer(1, 7, 7, (1,)), False),
        (Peer(1, 65534, 65534, (65534,)), False),
    ],
)
def test_who_may_connect(peer: Peer, admitted: bool) -> None:
    assert OWNER.admits(peer) is admitted


def test_a_number_that_stands_for_unknown_users_proves_nothing() -> None:
    """Everybody of an unmapped user namespace comes as 65534, also to a daemon that runs as nobody."""
    nobody = Owner(uid=65534, group=65534)
    assert not nobody.admits(Peer(1, 65534, 65534, (65534,)))
    assert nobody.admits(Peer(1, 0, 0))
    elsewhere = Owner(uid=65534, overflow_uid=99)
    assert elsewhere.admits(Peer(1, 65534, 1))
    assert not Owner(uid=99, overflow_uid=99).admits(Peer(1, 99, 1))


@given(
    st.integers(2, 64),
    st.none() | st.integers(1, 64),
    st.lists(st.tuples(st.sampled_from(MEMBERS), st.sampled_from(["connect", "hello", "leave"])), max_size=300),
)
def test_members_leave_a_place_and_a_connection_to_the_owner(
    clients: int, per_user: int | None, events: list[tuple[int, str]]
) -> None:
    census = Census.empty(Limits(clients, per_user), OWNER)
    for uid, event in events:
        peer = member(uid)
        if event == "connect" and census.connection_problem(peer) is None:
            census.connections[uid] += 1
        elif (
            event == "hello"
            and census.clients[uid] < census.connections[uid]
            and census.client_problem(peer) is None
        ):
            census.clients[uid] += 1
        elif event == "leave" and census.connections[uid]:
            census.clients[uid] -= bool(census.clients[uid])
            census.connections[uid] -= 1
        assert all(census.clients[uid] <= (per_user or clients) for uid in MEMBERS)
    for owner in (500, 0):
        assert census.client_problem(Peer(1, owner, 1)) is None
        for _ in range(SPARE_KEPT + 1):
            assert census.connection_problem(Peer(1, owner, 1)) is None
            census.connections[owner] += 1
        census.connections[owner] = 0


def test_one_member_may_have_all_places_but_one_unless_told_otherwise() -> None:
    census = Census.empty(Limits(8), OWNER)
    census.clients = Counter({1001: 7})
    assert "7 clients of other users" in (census.client_problem(member(1002)) or "")
    assert census.client_problem(Peer(1, 500, 1)) is None
    census = Census.empty(Limits(8, 3), OWNER)
    census.clients = Counter({1001: 3})
    assert "3 clients of user 1001" in (census.client_problem(member(1001)) or "")
    assert census.client_problem(member(1002)) is None


def test_a_daemon_with_one_place_gives_it_to_whoever_comes_first() -> None:
    census = Census.empty(Limits(1), OWNER)
    assert census.client_problem(member(1001)) is None
    census.clients[1001] += 1
    assert "1 clients are attached" in (census.client_problem(Peer(1, 500, 1)) or "")


def test_the_kernel_is_asked() -> None:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with here, there:
        peer = peer_of(here)
    assert (peer.pid, peer.uid, peer.gid) == (os.getpid(), os.geteuid(), os.getegid())
    assert set(peer.groups) == set(os.getgroups())
    assert all(number > 0 for number in overflow_ids())
