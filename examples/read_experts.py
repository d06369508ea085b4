"""Read experts of Kimi K3 from Python: from a container's or a snapshot's files, or from a k3-store daemon.

    python examples/read_experts.py --container /nvme0/k3 --layer 1 17 211
    python examples/read_experts.py --store "$XDG_RUNTIME_DIR/k3-store/k3-store.sock" --layer 1 17 211

Prints every part of each expert with its dtype and shape as a NumPy array, the same memory as a tensor, and the
first row of w1 as numbers. docs/python_api.md explains the steps.
"""

from __future__ import annotations

import argparse
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from k3.base.errors import K3Error
from k3.checkpoint.snapshot import Snapshot
from k3.container.reader import Container
from k3.kernels import dequantize_mxfp4
from k3.model.model_source import ModelSource
from k3.store import ExpertSource, FileSource, attach, expert_arrays


def opened(place: argparse.Namespace, stack: ExitStack) -> tuple[ModelSource, ExpertSource]:
    """Open the model and a source of its experts. Both are closed with the stack, the source first."""
    if place.store is not None:
        model, experts = attach(place.store, name="read_experts")
        stack.callback(model.close)
        stack.callback(experts.close)
        return model, experts
    if place.container is not None:
        container = Container.open(place.container, place.dirs)
        stack.callback(container.close)
        files: ModelSource = container
    else:
        files = Snapshot.open([place.snapshot])
    source = FileSource(files, layers=[place.layer], cache_bytes=0)
    stack.callback(source.close)
    return files, source


def tensor(array: npt.NDArray[Any]) -> Any:
    """Return the memory of an array as a tensor, through DLPack: of torch if it is installed, else of NumPy.

    Nothing is copied. Leases are read-only, which DLPack can say from its version 1.0 on: NumPy 2.1 exports it.
    Tensors of torch do not know that they are read-only: never write to one.
    """
    try:
        from torch import from_dlpack
    except ImportError:
        from numpy import from_dlpack
    return from_dlpack(array)


def show(layer: int, expert: int, parts: dict[str, npt.NDArray[Any]]) -> None:
    """Print what an expert is made of. Its arrays must not be read when its lease is released."""
    print(f"layer {layer} expert {expert}")
    for name, array in parts.items():
        try:
            seen = tensor(array)
            dlpack = f"{type(seen).__module__.partition('.')[0]} {seen.dtype} {tuple(seen.shape)}"
        except BufferError as error:  # NumPy before 2.1, or a torch that asks for the old protocol
            dlpack = f"not without a copy ({error})"
        print(f"  {name:18}{array.dtype} {array.shape}  as a tensor: {dlpack}")
    w1 = dequantize_mxfp4(parts["w1.weight_packed"], parts["w1.weight_scale"])
    with np.printoptions(precision=5, suppress=True):
        print(f"  w1[0, :6] = {w1[0, :6]}, {w1.dtype} {w1.shape}")


def main() -> None:
    """Lease the experts that the command line names, and show each as it arrives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--container", type=Path, help="home of a container")
    where.add_argument("--snapshot", type=Path, help="directory of a snapshot")
    where.add_argument("--store", type=Path, help="socket of a k3-store daemon")
    parser.add_argument("--dirs", type=Path, nargs="*", default=[], help="other roots of the container")
    parser.add_argument("--layer", type=int, required=True)
    parser.add_argument("experts", type=int, nargs="+", metavar="EXPERT")
    arguments = parser.parse_args()
    try:
        with ExitStack() as stack:
            model, source = opened(arguments, stack)
            layout = model.expert_layout(arguments.layer)
            for lease in source.lease(arguments.layer, arguments.experts):  # in the order in which they arrive
                with lease:
                    show(lease.layer, lease.expert, expert_arrays(lease.payload, layout))
    except K3Error as error:  # names file, layer, expert and offset, and says what to do
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
