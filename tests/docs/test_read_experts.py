"""docs/python_api.md and examples/read_experts.py: experts from Python, through files and through a daemon."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

import k3.store
from k3.base.errors import ExitCode
from k3.container.reader import Container
from k3.kernels import dequantize_mxfp4
from k3.store import FileSource, attach, expert_arrays
from k3.verify.reference.reference_weights import ReferenceWeights
from k3.verify.synthetic.shape import SyntheticModel
from k3.verify.synthetic.snapshot_writer import write_snapshot
from tests.support.daemons import daemon_outside
from tests.support.engines import VECTORS
from tests.support.repacked import command

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "python_api.md").read_text(encoding="utf-8")
SNAPSHOT = VECTORS / "tiny_s1"
NUMPY_EXPORTS_READ_ONLY = tuple(map(int, np.__version__.split(".")[:2])) >= (2, 1)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("container") / "home"
    assert command(SNAPSHOT, home).exit_code == 0
    return home


def example(*options: object) -> subprocess.CompletedProcess[str]:
    """Run the example."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("K3_")}
    words = [sys.executable, str(ROOT / "examples" / "read_experts.py"), *map(str, options)]
    return subprocess.run(words, capture_output=True, text=True, env=environment, timeout=120)


def blocks(text: str) -> dict[str, str]:
    """Return what was printed of each expert, by its first line: they arrive in any order."""
    return {
        block.partition("\n")[0]: block for block in re.split(r"^(?=layer )", text, flags=re.MULTILINE) if block
    }


def test_the_example_shows_the_same_through_files_and_through_a_daemon(home: Path, tmp_path: Path) -> None:
    wanted = ["--layer", 1, 5, 0, 3]
    from_container = example("--container", home, *wanted)
    assert from_container.returncode == 0, from_container.stderr
    shown = blocks(from_container.stdout)
    assert set(shown) == {"layer 1 expert 0", "layer 1 expert 3", "layer 1 expert 5"}
    with closing(Container.open(home)) as container:
        layout = container.expert_layout(1)
    for part in layout.parts:
        assert all(f"  {part.name:18}uint8 {part.shape}  as a tensor: " in block for block in shown.values())
    assert all("not without a copy" not in block for block in shown.values()) == NUMPY_EXPORTS_READ_ONLY

    from_snapshot = example("--snapshot", SNAPSHOT, *wanted)
    assert (from_snapshot.returncode, blocks(from_snapshot.stdout)) == (0, shown)
    with daemon_outside(tmp_path / "socket", [home]):
        from_daemon = example("--store", tmp_path / "socket", *wanted)
    assert (from_daemon.returncode, blocks(from_daemon.stdout)) == (0, shown)


@pytest.mark.skipif(not NUMPY_EXPORTS_READ_ONLY, reason="the page shows what NumPy 2.1 and newer can export")
def test_the_pages_transcript_is_what_the_example_prints(tmp_path: Path) -> None:
    shown = PAGE.split("<!-- transcript: tests/docs/test_read_experts.py runs these lines -->\n```console\n")[1]
    lines = shown.split("\n```")[0].splitlines()
    made, repacked, from_files, *printed, served, from_store = lines
    assert made == "$ python -m k3.verify.synthetic snapshot --preset tiny --seed 7"
    write_snapshot(SyntheticModel.tiny(seed=7), tmp_path / "snapshot")
    assert repacked == "$ k3-repack snapshot container"
    assert command(tmp_path / "snapshot", tmp_path / "container").exit_code == 0
    assert from_files == "$ python examples/read_experts.py --container container --layer 1 3"
    plain = example("--container", tmp_path / "container", "--layer", 1, 3).stdout
    assert plain.replace("torch torch.uint8", "numpy uint8").splitlines() == printed
    assert served == "$ k3-store serve --dirs container --socket socket &"
    assert from_store == "$ python examples/read_experts.py --store socket --layer 1 3"
    with daemon_outside(tmp_path / "socket", [tmp_path / "container"]):
        assert example("--store", tmp_path / "socket", "--layer", 1, 3).stdout == plain


def test_the_example_ends_with_the_code_of_the_error(home: Path, tmp_path: Path) -> None:
    ended = example("--container", home, "--layer", 1, 4096)
    assert (ended.returncode, ended.stdout) == (ExitCode.SOURCE, "")
    assert "expert 4096" in ended.stderr
    assert example("--container", tmp_path, "--layer", 1, 0).returncode == ExitCode.NOT_A_CONTAINER
    assert example("--store", tmp_path / "none", "--layer", 1, 0).returncode == ExitCode.DAEMON


def test_arrays_are_the_reference_models_experts(home: Path, tmp_path: Path) -> None:
    with closing(Container.open(home)) as container, daemon_outside(tmp_path / "socket", [home]):
        model, experts = attach(tmp_path / "socket", name="a test")
        files = FileSource(container)
        reference = ReferenceWeights(container)
        assert model.identity == container.identity
        for source, described in ((experts, model), (files, container)):
            seen = set()
            for lease in source.lease(2, [7, 1]):
                with lease:
                    seen.add(lease.expert)
                    parts = expert_arrays(lease.payload, described.expert_layout(2))
                    wanted = reference.expert(2, lease.expert)
                    for name, matrix in (("w1", wanted.w1), ("w2", wanted.w2), ("w3", wanted.w3)):
                        numbers = dequantize_mxfp4(parts[f"{name}.weight_packed"], parts[f"{name}.weight_scale"])
                        np.testing.assert_array_equal(numbers, matrix)
            assert seen == {1, 7}
        files.close()
        experts.close()
        model.close()


def test_arrays_share_the_payload_and_cannot_be_written(home: Path) -> None:
    with closing(Container.open(home)) as container:
        layout = container.expert_layout(1)
        source = FileSource(container)
        (lease,) = source.lease(1, [4])
        with lease:
            payload = lease.payload
            parts = expert_arrays(payload, layout)
            assert list(parts) == [part.name for part in layout.parts]
            for part in layout.parts:
                array = parts[part.name]
                assert (array.shape, array.dtype.name, array.flags.writeable) == (part.shape, "uint8", False)
                assert np.shares_memory(array, payload)
                if NUMPY_EXPORTS_READ_ONLY:
                    seen = np.from_dlpack(array)
                    assert np.shares_memory(seen, payload)
                    assert not seen.flags.writeable
                with pytest.raises(BufferError):
                    array.__dlpack__()  # the old protocol cannot say that memory is read-only
            with pytest.raises(ValueError, match="is not the layout's"):
                expert_arrays(payload[:-1], layout)
        with pytest.raises(ValueError, match="was released"):
            lease.payload  # noqa: B018
        source.close()


def test_attach_lets_the_connection_go_when_the_model_is_refused(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(link: object) -> None:
        raise ValueError("not understood")

    monkeypatch.setattr("k3.store.client.attachment.DaemonModel", refuse)
    with daemon_outside(tmp_path / "socket", [home], "--max-clients", "1"):
        for _ in range(3):  # with room for one client, a connection that is kept would be in the way
            with pytest.raises(ValueError, match="not understood"):
                attach(tmp_path / "socket")


def test_every_name_that_the_page_calls_public_is_there() -> None:
    rows = re.findall(r"^\| `(k3\.[\w.]+)` \| (.+) \|$", PAGE.split("## What is public")[1], re.MULTILINE)
    assert len(rows) > 5
    for module, names in rows:
        for name in re.findall(r"`([A-Z]\w+|[a-z_0-9]+)`", names):
            if name in ("open", "close"):
                continue
            assert hasattr(importlib.import_module(module), name), f"{module}.{name}"
    listed = " ".join(names for module, names in rows if module == "k3.store")
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(k3.store.__all__)
