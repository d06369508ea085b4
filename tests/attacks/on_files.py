"""Attacks on shards as files: cut, empty, foreign, missing, or no files at all."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from k3.base.errors import HeaderError, ShardError, SourceError
from tests.attacks.builders import INDEX, SHARD, add, attack, compact, join, shard_name, split


@attack(ShardError, "is empty")
def empty_file(directory: Path) -> None:
    """A download that never began leaves a file of no bytes."""
    (directory / SHARD).write_bytes(b"")


@attack(ShardError, "4 bytes, not even")
def four_bytes(directory: Path) -> None:
    """Too short for the length field: reading it anyway takes bytes from nowhere."""
    (directory / SHARD).write_bytes(b"\x10\0\0\0")


@attack(ShardError, "git-lfs pointer")
def lfs_pointer(directory: Path) -> None:
    """A clone without git-lfs has pointers of 130 bytes in place of the shards."""
    oid = "oid sha256:" + 64 * "a"
    (directory / SHARD).write_text(f"version https://git-lfs.github.com/spec/v1\n{oid}\nsize 16990000000\n")


@attack(ShardError, "web page")
def web_page(directory: Path) -> None:
    """A download without login saves the login page under the shard's name."""
    (directory / SHARD).write_text("<!DOCTYPE html><html><body>Sign in</body></html>" * 10)


@attack(ShardError, "GGUF")
def gguf_file(directory: Path) -> None:
    """Another format under this name."""
    (directory / SHARD).write_bytes(b"GGUF\x03\0\0\0" + bytes(4096))


@attack(ShardError, "zip archive")
def pytorch_file(directory: Path) -> None:
    """A pickled checkpoint: it must not be read as anything else, let alone be run."""
    (directory / SHARD).write_bytes(b"PK\x03\x04" + bytes(4096))


for _name, _length, _why in (
    (
        "length_all_ones",
        2**64 - 1,
        "The largest length there is: it must not be allocated, nor overflow when 8 is added.",
    ),
    ("length_sign_bit", 2**63, "A length that is negative for a program that takes it as signed."),
    ("length_one_billion", 10**9, "Above the cap, in a small file: it must not be allocated."),
    ("length_above_cap", 100_000_001, "One above the cap."),
):

    def _with_length(directory: Path, length: int = _length) -> None:
        (directory / SHARD).write_bytes(length.to_bytes(8, "little") + b'{"a":' + bytes(87))

    add(_name, _why, HeaderError, "the limit is 100000000", _with_length, offset=0)


@attack(ShardError, "ends inside its header", offset=100)
def length_below_cap(directory: Path) -> None:
    """A length that is allowed but longer than the file: bounded by the file, not by the number."""
    (directory / SHARD).write_bytes((99_999_999).to_bytes(8, "little") + b'{"a":' + bytes(87))


@attack(HeaderError, "does not start with", offset=8)
def length_zero(directory: Path) -> None:
    """A header of no bytes describes nothing; the file is zeros from a sparse or failed copy."""
    (directory / SHARD).write_bytes(bytes(4096))


@attack(ShardError, "1 bytes follow after the last tensor")
def length_one_less(directory: Path) -> None:
    """The length leaves out the header's last space, so every tensor would be read one byte early."""
    header, data = split(directory / SHARD)
    (directory / SHARD).write_bytes((len(header)).to_bytes(8, "little") + header + b" " + data)


@attack(HeaderError, "the header", offset=True)
def length_one_more(directory: Path) -> None:
    """The length takes in the first byte of the data, so every tensor would be read one byte late."""
    header, data = split(directory / SHARD)
    data = b"\x07" + data[1:]
    (directory / SHARD).write_bytes((len(header) + 1).to_bytes(8, "little") + header + data)


@attack(ShardError, "ends inside its header", offset=True)
def cut_in_header(directory: Path) -> None:
    """A download that broke off in the header."""
    os.truncate(directory / SHARD, 200)


@attack(ShardError, "bytes are missing at the end", tensor=True, offset=True)
def header_without_data(directory: Path) -> None:
    """A complete header and nothing behind it: memory-mapped, all weights would be zeros or a crash."""
    header, _ = split(directory / SHARD)
    (directory / SHARD).write_bytes(join(header, b""))


@attack(ShardError, "1 bytes are missing at the end", tensor=True, offset=True)
def cut_by_one_byte(directory: Path) -> None:
    """The smallest truncation."""
    os.truncate(directory / SHARD, (directory / SHARD).stat().st_size - 1)


@attack(ShardError, "bytes are missing at the end", tensor=True, offset=True)
def cut_by_a_quarter(directory: Path) -> None:
    """A shard short by some megabytes loads in many programs and gives nonsense."""
    os.truncate(directory / SHARD, (directory / SHARD).stat().st_size * 3 // 4)


@attack(ShardError, "6 bytes are missing at the end", tensor="w", offset=True)
def cut_small_tensor(directory: Path) -> None:
    """Two bytes for two float32 numbers; the message must speak of an incomplete download."""
    fields = {"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    (directory / SHARD).write_bytes(join(compact(fields), b"\0\0"))


@attack(ShardError, "1 bytes follow after the last tensor", offset=True)
def one_byte_more(directory: Path) -> None:
    """Bytes that belong to no tensor: nothing would ever check them."""
    with (directory / SHARD).open("ab") as file:
        file.write(b"\0")


@attack(ShardError, "bytes follow after the last tensor", offset=True)
def two_files_joined(directory: Path) -> None:
    """A resumed download that started over inside the file."""
    with (directory / SHARD).open("ab") as file:
        file.write((directory / shard_name(1)).read_bytes())


@attack(ShardError, "does not exist")
def shard_missing(directory: Path) -> None:
    """The index names a shard that is not there: other programs run with uninitialised weights."""
    (directory / SHARD).unlink()


@attack(ShardError, "does not exist")
def shard_missing_beside_side_file(directory: Path) -> None:
    """As many files as the index names, but one of them is another: files are counted by the index."""
    (directory / SHARD).rename(directory / "extra.safetensors")


@attack(ShardError, "does not exist", file=shard_name(4))
def last_shard_missing(directory: Path) -> None:
    """Found before the first header is read, even when it is the last one."""
    (directory / shard_name(4)).unlink()
    (directory / SHARD).write_bytes(b"")


@attack(ShardError, "a directory")
def shard_is_directory(directory: Path) -> None:
    """A folder under a shard's name."""
    (directory / SHARD).unlink()
    (directory / SHARD).mkdir()


@attack(ShardError, "a pipe")
def shard_is_pipe(directory: Path) -> None:
    """Opening a pipe that nobody writes to would wait for ever."""
    (directory / SHARD).unlink()
    os.mkfifo(directory / SHARD)


@attack(ShardError, "a device or socket")
def shard_is_socket(directory: Path) -> None:
    """A socket has no bytes to read."""
    (directory / SHARD).unlink()
    here = os.open(directory, os.O_RDONLY)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{here}/{SHARD}")  # the path itself may be too long
    os.close(here)


@attack(ShardError, "a device or socket")
def shard_is_device(directory: Path) -> None:
    """An endless source of zeros."""
    (directory / SHARD).unlink()
    (directory / SHARD).symlink_to("/dev/zero")


@attack(ShardError, "dangling link: its target ../../blobs/")
def dangling_link(directory: Path) -> None:
    """A cache whose blob was deleted, or a relative link that was moved; both ends must be named."""
    (directory / SHARD).unlink()
    (directory / SHARD).symlink_to("../../blobs/" + 64 * "a")


@attack(ShardError, "is a loop of links")
def link_to_itself(directory: Path) -> None:
    """A link in a circle."""
    (directory / SHARD).unlink()
    (directory / SHARD).symlink_to(SHARD)


@attack(ShardError, "neither an index nor model.safetensors", file=INDEX)
def no_shards_at_all(directory: Path) -> None:
    """Only the small files were fetched; the message says what is there instead."""
    for path in [*directory.glob("*.safetensors"), directory / INDEX]:
        path.unlink()


@attack(SourceError, "there are 2 revisions in this folder: aaaa, bbbb", file="snapshots")
def two_revisions(directory: Path) -> Path:
    """A cache folder with two revisions: which one is meant is for the user to say."""
    cache = directory.with_name("models--synthetic--k3")
    (cache / "snapshots").mkdir(parents=True)
    directory.rename(cache / "snapshots" / "aaaa")
    (cache / "snapshots" / "bbbb").mkdir()
    return cache


@attack(SourceError, "there is no revision in this folder", file="snapshots")
def no_revision(directory: Path) -> Path:
    """A cache folder in which nothing was downloaded."""
    cache = directory.with_name("models--synthetic--k3")
    (cache / "snapshots").mkdir(parents=True)
    return cache


@attack(SourceError, "no such directory", file="nowhere")
def no_directory(directory: Path) -> Path:
    """A path that does not exist."""
    return directory / "nowhere"


@attack(SourceError, "a file where a directory is expected", file=SHARD)
def file_for_directory(directory: Path) -> Path:
    """A shard named in place of its directory."""
    return directory / SHARD
