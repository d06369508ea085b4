"""Holds up: experts of a raw snapshot arrive as the safetensors library reads them, however they lie."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from safetensors import safe_open

from k3.checkpoint.snapshot import Snapshot
from k3.model.keys import ExpertKey
from k3.store.lending.file_source import FileSource
from k3.verify.synthetic.snapshot_writer import SyntheticModel, write_snapshot
from tests.support.plane_faults import noisy
from tests.support.source_suite import Opened, SourceSuite


def true_payloads(snapshot: Snapshot) -> dict[ExpertKey, bytes]:
    """Every expert's bytes by somebody else's reader."""
    tensors: dict[str, bytes] = {}
    for shard in snapshot.shards:
        with safe_open(shard.path, framework="numpy") as file:
            tensors.update((n, file.get_tensor(n).tobytes()) for n in file.keys() if ".experts." in n)  # noqa: SIM118
    payloads = {}
    for layer in snapshot.expert_layers():
        layout = snapshot.expert_layout(layer)
        for expert in range(snapshot.expert_count(layer)):
            names = [f"{layout.prefix}.{expert}.{part.name}" for part in layout.parts]
            payloads[ExpertKey(layer, expert)] = b"".join(tensors[name] for name in names)
    return payloads


class _SnapshotSuite(SourceSuite):
    model: ClassVar[dict[str, Any]] = {}
    noise_seed: ClassVar[int | None] = None

    @pytest.fixture
    def opened(self, tmp_path: Path) -> Iterator[Opened]:
        where = write_snapshot(SyntheticModel(layers=3, experts=6, vision=False, **self.model), tmp_path)
        snapshot = Snapshot.open([where])

        def open_source(*, debug: bool = False) -> FileSource:
            source = FileSource(snapshot, working_slots=12, debug=debug)
            return source if self.noise_seed is None else noisy(source, 0.33, self.noise_seed)

        source = open_source()
        yield Opened(source, true_payloads(snapshot), open_source)
        source.close()


class TestLexicographic(_SnapshotSuite):
    pass


class TestHubCache(_SnapshotSuite):
    model: ClassVar[dict[str, Any]] = {"layout": "hf_cache"}


class TestScattered(_SnapshotSuite):
    """Every expert's six tensors apart from each other, in shards that are cut anywhere."""

    model: ClassVar[dict[str, Any]] = {"expert_order": "scattered", "shards_per_layer": 2}


class TestScatteredShortReads(TestScattered):
    noise_seed = 4


def test_bytes_without_a_digest_are_counted_as_unchecked(tmp_path: Path) -> None:
    write_snapshot(SyntheticModel(layers=2, experts=4, experts_per_token=2, vision=False), tmp_path)
    source = FileSource(Snapshot.open([tmp_path]), verify="always")
    for lease in source.lease(1, range(4)):
        lease.release()
    stats = source.stats()
    assert stats.checked_bytes == 0
    assert stats.unchecked_bytes == stats.read_bytes > 0
    source.close()
