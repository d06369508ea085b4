"""Holds up that every errno of every operation becomes a sentence with advice, in a class that is never damage."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k3.base.direct_io import drive_error, memory_error
from k3.base.errno_advice import FULL, Operation, refusal
from k3.base.errors import (
    EXIT_CODE_HELP,
    DriveError,
    ExitCode,
    NoMemoryError,
    SpaceError,
    UnsupportedError,
)

NUMBERS = sorted(errno.errorcode)


@pytest.mark.parametrize("operation", Operation)
def test_every_errno_has_a_reason_and_advice(operation: Operation) -> None:
    for number in (*NUMBERS, 0, None, 4095, -1):
        found = refusal(operation, number)
        for text in (found.reason, found.advice):
            assert text
            assert not text.endswith((".", " ", ":")), text
        assert found.advice[0].isupper()


@pytest.mark.parametrize("operation", Operation)
def test_every_errno_has_a_documented_class_and_none_means_damage(operation: Operation) -> None:
    for number in NUMBERS:
        error = OSError(number, os.strerror(number))
        for typed in (
            drive_error("no", error, Path("/x"), operation=operation),
            memory_error("no", error, operation),
        ):
            assert typed.exit_code in EXIT_CODE_HELP
            assert typed.exit_code not in (ExitCode.DAMAGED, ExitCode.OK, ExitCode.INTERNAL)
            assert typed.advice
            assert str(typed).count("\n") == 0


@given(st.sampled_from(Operation), st.integers(-5, 5000), st.one_of(st.none(), st.text(min_size=1)))
def test_any_number_and_any_words_give_a_refusal(operation: Operation, number: int, words: str | None) -> None:
    found = refusal(operation, number, words)
    assert found.reason
    assert found.advice
    assert not found.is_full or number in FULL


def test_a_full_drive_and_a_quota_have_their_own_class() -> None:
    for number in FULL:
        assert isinstance(
            drive_error("no", OSError(number, "x"), Path("/x"), operation=Operation.WRITE), SpaceError
        )
        assert isinstance(memory_error("no", OSError(number, "x")), UnsupportedError)
    assert type(drive_error("no", OSError(errno.EFBIG, "x"), Path("/x"))) is DriveError


@pytest.mark.parametrize("operation", Operation)
def test_memory_that_runs_out_is_no_fault_of_a_drive(operation: Operation) -> None:
    typed = drive_error("cannot map", OSError(errno.ENOMEM, "x"), Path("/x"), operation=operation)
    assert isinstance(typed, NoMemoryError)
    assert typed.exit_code == 9


@pytest.mark.parametrize(
    ("operation", "number", "words"),
    [
        (Operation.WRITE, errno.EFBIG, "ulimit -f"),
        (Operation.MAKE, errno.EFBIG, "FAT32"),
        (Operation.MAP, errno.ENODEV, "cannot map"),
        (Operation.MAP, errno.ENOSYS, "cannot map"),
        (Operation.MAP, errno.EINVAL, "cannot map"),
        (Operation.LOCK, errno.ENOLCK, "no locks"),
        (Operation.MEMORY, errno.EMFILE, "ulimit -n"),
        (Operation.MEMORY, errno.ENFILE, "fs.file-max"),
        (Operation.MEMORY, errno.EACCES, "memfd_noexec"),
        (Operation.MEMORY, errno.ENOMEM, "memory.max"),
        (Operation.THREAD, errno.EAGAIN, "pids.max"),
        (Operation.READ, errno.ENODATA, "was truncated"),
        (Operation.READ, errno.EIO, "smartctl"),
        (Operation.READ, errno.ESTALE, "remount it"),
        (Operation.READ, errno.ENOTCONN, "is gone"),
        (Operation.READ, errno.ETIMEDOUT, "does not answer"),
        (Operation.OPEN, errno.ELOOP, "a loop of links"),
        (Operation.MAKE, errno.ENAMETOOLONG, "shorter path"),
        (Operation.WRITE, errno.EROFS, "read-only"),
        (Operation.WRITE, errno.EDQUOT, "quota"),
        (Operation.WRITE, errno.ENOSPC, "Free space"),
        (Operation.SYNC, errno.EIO, "lost writes"),
        (Operation.CONNECT, errno.ENOTSOCK, "--socket"),
    ],
)
def test_the_advice_fits_the_operation(operation: Operation, number: int, words: str) -> None:
    assert words in refusal(operation, number).advice


def test_the_systems_own_words_are_kept_unless_there_are_better_ones() -> None:
    assert refusal(Operation.OPEN, errno.EACCES, "verboten").reason == "verboten"
    assert refusal(Operation.MAP, errno.ENODEV, "No such device").reason == "this file system cannot map files"
