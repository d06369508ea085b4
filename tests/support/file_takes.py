"""Experts taken from a source, and the bytes that they must have: for the tests of `FileSource`."""

from __future__ import annotations

from typing import Any

from k3.model.keys import ExpertKey
from tests.support.containers import Built

EXPERTS = 5
"""Number of experts in each layer that `build_container` makes."""


def take(source: Any, layer: int, experts: Any) -> dict[int, bytes]:
    got = {}
    for lease in source.lease(layer, experts):
        with lease:
            got[lease.expert] = lease.payload.tobytes()
    return got


def right(built: Built, layer: int, experts: Any) -> dict[int, bytes]:
    return {expert: built.payloads[ExpertKey(layer, expert)] for expert in experts}
