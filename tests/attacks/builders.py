"""What attacks are made of: a sound tiny snapshot, and tools to break one thing in a copy of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k3.base.errors import K3Error
from k3.verify.synthetic.snapshot_writer import SyntheticModel, write_snapshot

MODEL = SyntheticModel(
    layers=3,
    hidden=32,
    latent=32,
    moe_inter=32,
    experts=4,
    experts_per_token=2,
    dense_inter=64,
    heads=2,
    q_lora=16,
    kv_lora=16,
    kda_heads=2,
    kda_head=16,
    qk_nope=16,
    qk_rope=8,
    v_head=16,
    vision=False,
)
"""Layer 0 is KDA with a dense MLP, 1 is KDA with experts, 2 is MLA with experts; the heads come last."""

INDEX = "model.safetensors.index.json"
CONFIG = "config.json"
LAYER_1 = "language_model.model.layers.1."
EXPERTS_1 = f"{LAYER_1}block_sparse_moe.experts."
NORM_1 = f"{LAYER_1}input_layernorm.weight"
ROUTER_1 = f"{LAYER_1}block_sparse_moe.gate.weight"
A_LOG_1 = f"{LAYER_1}self_attn.A_log"


def shard_name(number: int) -> str:
    """Return the published name of the snapshot's shard `number` (1-based)."""
    return f"model-{number:05d}-of-{MODEL.layers + 1:06d}.safetensors"


SHARD = shard_name(2)
"""The shard of layer 1, which most attacks break."""

Build = Callable[[Path], "Path | None"]


@dataclass(frozen=True)
class Attack:
    """One broken snapshot and how it must be refused.

    `says` is part of the message, `file` the file that it names, `tensor` and `offset` (exact, or True for any)
    where there is one. `stage` is "open" for what must be found before any work, "model" for what the
    questions about the model show, also before any work, "read" for what only the weights' bytes show.
    """

    name: str
    why: str
    error: type[K3Error]
    says: str
    build: Build
    file: str = SHARD
    tensor: str | bool | None = None
    offset: int | bool = False
    stage: str = "open"

    def make(self, sound: Path, target: Path) -> Path:
        """Copy the `sound` snapshot to `target` and break it; the path that a user would name."""
        shutil.copytree(sound, target)
        return self.build(target) or target


_REGISTERED: list[Attack] = []


def attack(error: type[K3Error], says: str, **where: Any) -> Callable[[Build], Build]:
    """Register a function as an attack: its name is the attack's name, its docstring says why."""

    def register(build: Build) -> Build:
        assert build.__doc__, build
        add(build.__name__, build.__doc__, error, says, build, **where)
        return build

    return register


def add(name: str, why: str, error: type[K3Error], says: str, build: Build, **where: Any) -> None:
    """Register one attack."""
    assert all(other.name != name for other in _REGISTERED), name
    _REGISTERED.append(Attack(name, " ".join(why.split()), error, says, build, **where))


def registered() -> list[Attack]:
    """Every attack registered so far."""
    return list(_REGISTERED)


def base(directory: Path) -> Path:
    """Write the sound snapshot into `directory`."""
    return write_snapshot(MODEL, directory)


# --- taking shards apart and putting them together, right or wrong ---


def split(path: Path) -> tuple[bytes, bytes]:
    """Return a shard's header text and its data section."""
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    return raw[8 : 8 + length], raw[8 + length :]


def join(header: bytes, data: bytes) -> bytes:
    """Return a file with this header text and data section."""
    return len(header).to_bytes(8, "little") + header + data


def fields_of(path: Path) -> dict[str, Any]:
    """Return a shard's header as a table."""
    fields: dict[str, Any] = json.loads(split(path)[0])
    return fields


def compact(value: Any) -> bytes:
    """JSON as published headers are written."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def put_header(directory: Path, header: bytes) -> None:
    """Replace the header text of SHARD and keep its data."""
    path = directory / SHARD
    path.write_bytes(join(header, split(path)[1]))


def edit_header(directory: Path, edit: Callable[[dict[str, Any]], Any], shard: str = SHARD) -> None:
    """Change a shard's header table and keep its data."""
    path = directory / shard
    fields = fields_of(path)
    edit(fields)
    path.write_bytes(join(compact(fields), split(path)[1]))


def edit_json(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Change a JSON file."""
    value = json.loads(path.read_text())
    edit(value)
    path.write_bytes(compact(value))


def edit_map(directory: Path, edit: Callable[[dict[str, str]], Any]) -> None:
    """Change the index's weight_map."""
    edit_json(directory / INDEX, lambda index: edit(index["weight_map"]))


def tensors_of(path: Path) -> list[tuple[str, str, list[int], bytes]]:
    """(name, dtype, shape, bytes) of a sound shard's tensors in storage order."""
    _, data = split(path)
    entries = sorted(fields_of(path).items(), key=lambda item: item[1]["data_offsets"])
    return [(name, entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]) for name, entry in entries]


def write_tensors(path: Path, tensors: list[tuple[str, str, list[int], bytes]]) -> None:
    """Write a sound shard."""
    fields = {}
    cursor = 0
    for name, dtype, shape, data in tensors:
        fields[name] = {"dtype": dtype, "shape": shape, "data_offsets": [cursor, cursor + len(data)]}
        cursor += len(data)
    path.write_bytes(join(compact(fields), b"".join(data for *_, data in tensors)))


def reshard(
    directory: Path, change: Callable[[list[tuple[str, str, list[int], bytes]]], Any], shard: str = SHARD
) -> None:
    """Change the list of a shard's tensors and make shard and index agree on it again."""
    path = directory / shard
    tensors = tensors_of(path)
    change(tensors)
    write_tensors(path, tensors)

    def rename(weight_map: dict[str, str]) -> None:
        for name in [name for name, place in weight_map.items() if place == shard]:
            del weight_map[name]
        weight_map.update((name, shard) for name, *_ in tensors)

    edit_map(directory, rename)


def drop(tensors: list[tuple[str, str, list[int], bytes]], start: str) -> None:
    """Remove every tensor whose name starts like this."""
    tensors[:] = [tensor for tensor in tensors if not tensor[0].startswith(start)]


def replace(tensors: list[tuple[str, str, list[int], bytes]], name: str, *new: Any) -> None:
    """Put (name, dtype, shape, bytes) in place of the tensor `name`."""
    place = [tensor[0] for tensor in tensors].index(name)
    tensors[place] = new


def offset_of(directory: Path, tensor: str) -> int:
    """Where a tensor of SHARD starts in the file."""
    path = directory / SHARD
    header, _ = split(path)
    return 8 + len(header) + int(fields_of(path)[tensor]["data_offsets"][0])
