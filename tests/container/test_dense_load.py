"""Holds up that a load hands out what was written and nothing else, in time, and ends when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3.base.direct_io import ReadFile
from k3.base.errors import DamageError, DriveError
from k3.base.notes import forget_notes, take_notes
from k3.base.pages import PAGE_BYTES
from k3.container import dense_load
from k3.container.dense_load import DenseLoad
from k3.container.reader import Container
from tests.support.containers import DENSE, Built, build_container, flip
from tests.support.faults import DriveFaults, Fault
from tests.support.waiting import wait_until, wait_until_standing

NAMES = [name for name, *_ in DENSE]


@pytest.fixture
def built(tmp_path: Path) -> Built:
    return build_container(tmp_path / "home")


@pytest.fixture
def container(built: Built) -> Iterator[Container]:
    container = Container.open(built.home)
    yield container
    container.close()


def place(built: Built, name: str) -> tuple[Path, int, int]:
    """File, offset and stored bytes of a tensor's weights."""
    extent = next(tensor.weights for tensor in built.tensors if tensor.name == name)
    return built.path(extent.file), extent.offset, extent.stored_bytes


def same(found: Any, wanted: Any) -> bool:
    scales = (found.scales is None) == (wanted.scales is None)
    if scales and found.scales is not None:
        scales = np.array_equal(found.scales, wanted.scales)
    return (
        scales
        and (found.name, found.encoding, found.dtype, found.shape)
        == (wanted.name, wanted.encoding, wanted.dtype, wanted.shape)
        and found.data.tobytes() == wanted.data.tobytes()
    )


@pytest.mark.parametrize("read_bytes_max", [PAGE_BYTES, 3 * PAGE_BYTES, 8 << 20])
@pytest.mark.parametrize("names", [NAMES, NAMES[::-1], NAMES[1::2], []], ids=["all", "backwards", "some", "none"])
def test_tensors_are_those_that_are_read_one_by_one(
    container: Container, names: list[str], read_bytes_max: int
) -> None:
    told: list[str] = []
    with DenseLoad(container, names, read_bytes_max=read_bytes_max, on_read=told.append) as load:
        for name in names[::-1]:  # in another order than they are read
            tensor = load.take(name)
            assert same(tensor, container.read_tensor(name))
            assert not tensor.data.flags.writeable
    assert told == names
    assert load.retries == 0


def test_noise_of_the_drive_changes_nothing(container: Container) -> None:
    for seed in range(10):
        drive = DriveFaults(noise=0.5, seed=seed)
        with DenseLoad(container, NAMES, read_bytes_max=PAGE_BYTES, opener=drive.open) as load:
            assert all(same(load.take(name), container.read_tensor(name)) for name in NAMES), f"{seed=}"


def test_a_tensor_can_be_taken_while_later_ones_are_read(built: Built, container: Container) -> None:
    path, offset, _ = place(built, NAMES[-1])
    drive = DriveFaults([Fault("stall", path, offset)])
    with DenseLoad(container, NAMES, read_bytes_max=PAGE_BYTES, opener=drive.open) as load:
        for name in NAMES[:-1]:
            assert same(load.take(name), container.read_tensor(name))
        late: list[Any] = []
        waiting = threading.Thread(target=lambda: late.append(load.take(NAMES[-1])))
        waiting.start()
        wait_until_standing(waiting)
        assert waiting.is_alive()
        assert load.ended_s is None
        drive.resume()
        waiting.join()
        assert same(late[0], container.read_tensor(NAMES[-1]))
    assert load.ended_s is not None


@pytest.mark.parametrize("kind", ["eio", "flip"])
@pytest.mark.parametrize("name", [NAMES[0], NAMES[-1]])
def test_one_fault_is_mended_and_counted(built: Built, container: Container, kind: Any, name: str) -> None:
    path, offset, _ = place(built, name)
    drive = DriveFaults([Fault(kind, path, offset)])
    with DenseLoad(container, NAMES, read_bytes_max=PAGE_BYTES, opener=drive.open) as load:
        assert all(same(load.take(item), container.read_tensor(item)) for item in NAMES)
    assert load.retries == 1


def test_damage_is_named_and_nothing_of_it_is_handed_out(built: Built, container: Container) -> None:
    path, offset, stored_bytes = place(built, NAMES[2])
    flip(path, offset + stored_bytes // 2)
    told: list[str] = []
    with DenseLoad(container, NAMES, on_read=told.append) as load:
        assert same(load.take(NAMES[1]), container.read_tensor(NAMES[1]))
        for name in NAMES[2:]:
            with pytest.raises(DamageError, match="digest") as caught:
                load.take(name)
            assert (caught.value.tensor, caught.value.path) == (NAMES[2], str(path))
            assert caught.value.offset == offset
            assert caught.value is not load._failure  # each taker has a traceback of its own
        assert load.take(NAMES[0]).name == NAMES[0]  # it was sound, and there
    assert told == NAMES[:2]


def test_the_first_in_the_order_of_use_is_reported(built: Built, container: Container) -> None:
    bad = [place(built, NAMES[index]) for index in (3, 1)]
    drive = DriveFaults([Fault("eio", path, offset, times=9) for path, offset, _ in bad])
    with (
        DenseLoad(container, NAMES, read_bytes_max=PAGE_BYTES, opener=drive.open) as load,
        pytest.raises(DriveError, match="Input/output error") as caught,
    ):
        load.take(NAMES[4])
    assert caught.value.tensor == NAMES[1]


def test_a_file_that_is_gone_is_an_error(built: Built, container: Container) -> None:
    place(built, NAMES[0])[0].unlink()
    with DenseLoad(container, NAMES) as load, pytest.raises(DriveError) as caught:
        load.take(NAMES[0])
    assert caught.value.tensor == NAMES[0]


def test_memory_that_is_refused_is_an_error(container: Container, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(buffer: object) -> None:
        raise MemoryError("cannot populate")

    monkeypatch.setattr(dense_load, "populate", refuse)
    with DenseLoad(container, NAMES) as load, pytest.raises(MemoryError):
        load.take(NAMES[0])


@pytest.mark.parametrize("started", range(6))
def test_threads_that_are_refused_are_an_error(
    container: Container, monkeypatch: pytest.MonkeyPatch, started: int
) -> None:
    before, start = threading.active_count(), threading.Thread.start
    left = [started]
    opened: list[ReadFile] = []

    def opener(path: Path, direct: bool) -> ReadFile:
        opened.append(dense_load.open_file(path, direct))
        return opened[-1]

    def refusing(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refusing)
    with pytest.raises(RuntimeError, match="new thread"):
        DenseLoad(container, NAMES, opener=opener)
    assert threading.active_count() == before
    assert all(file._fd < 0 for file in opened)


def test_a_close_that_fails_is_noted_and_ends_no_thread_in_a_traceback(container: Container) -> None:
    """The bytes matched their digests; a drive that reports a fault afterwards is worth a word, not the run."""

    class Failing(ReadFile):
        def close(self) -> None:
            super().close()
            raise DriveError("cannot close: Input/output error", path=self.path)

    forget_notes()
    with DenseLoad(container, NAMES, opener=lambda path, direct: Failing(path, direct=direct)) as load:
        assert all(same(load.take(name), container.read_tensor(name)) for name in NAMES)
    (note,) = take_notes()
    assert "cannot close: Input/output error" in note
    assert "matched its digests" in note


def test_what_the_listener_raises_is_raised(container: Container) -> None:
    def closed(name: str) -> None:
        raise BrokenPipeError

    with DenseLoad(container, NAMES, on_read=closed) as load, pytest.raises(BrokenPipeError):
        load.take(NAMES[0])


@pytest.mark.parametrize("late", [False, True])
def test_the_end_is_told_once_before_the_last_tensor(container: Container, late: bool) -> None:
    ends: list[bool] = []
    made = threading.Event()

    def ended() -> None:
        made.wait()
        ends.append(NAMES[-1] in load._ready)

    load = DenseLoad(container, NAMES, on_end=ended)
    made.set()
    if late:
        load.take(NAMES[-1])
    else:
        wait_until(lambda: ends)
    load.close()
    assert ends == [False]
    load.close()
    assert len(ends) == 1


def test_closing_ends_waiting_and_reading(built: Built, container: Container) -> None:
    path, offset, _ = place(built, NAMES[0])
    drive = DriveFaults([Fault("stall", path, offset)])
    load = DenseLoad(container, NAMES, read_bytes_max=PAGE_BYTES, opener=drive.open)
    failures: list[BaseException] = []

    def wait() -> None:
        try:
            load.take(NAMES[0])
        except ValueError as error:
            failures.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    closing = threading.Thread(target=load.close)
    closing.start()
    waiting.join()  # at once, although a read still hangs in the drive
    assert "closed" in str(failures[0])
    drive.resume()
    closing.join()
    assert not [thread for thread in threading.enumerate() if thread.name == "k3-dense"]
