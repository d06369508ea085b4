"""From a dense tensor's source bytes to its stored bytes, a few rows at a time.

Whole rows are gathered, quantized into page-aligned output buffers, digested and handed to the destination. The
digest covers what was computed, before any copy of it reaches a drive.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from k3 import kernels
from k3.base import checksum
from k3.base.direct_io import Bytes
from k3.base.errors import QuantizeError
from k3.base.pages import PAGE_BYTES, page_ceil
from k3.model.encoded_tensor import NUMPY_DTYPES
from k3.model.keys import Encoding
from k3.repack.buffers import BufferPool
from k3.repack.destination import Destination
from k3.repack.plan import PlannedExtent, PlannedTensor, row_bytes

GATHER_BYTES = 1 << 20
OUTPUT_BYTES = 4 << 20


class _Output:
    """Collects one stored run (weights or scales) in whole pages and digests it."""

    def __init__(
        self, tensor: PlannedTensor, planned: PlannedExtent, destination: Destination, pool: BufferPool
    ) -> None:
        self._tensor = tensor
        self._planned = planned
        self._destination = destination
        self._pool = pool
        self._hasher = checksum.Hasher()
        self._buffer: Bytes | None = None
        self._fill = 0
        self._written = 0

    def push(self, data: Bytes) -> None:
        """Append bytes."""
        done = 0
        while done < len(data):
            if self._buffer is None:
                self._buffer = self._pool.take()
                self._fill = 0
            count = min(len(data) - done, len(self._buffer) - self._fill)
            self._buffer[self._fill : self._fill + count] = data[done : done + count]
            self._fill += count
            done += count
            if self._fill == len(self._buffer):
                self._flush()

    def finish(self) -> bytes:
        """Pad with zeros to the stored size, hand over the rest, and return the digest."""
        assert self._written + self._fill == self._planned.payload_bytes
        if self._buffer is not None:
            end = page_ceil(self._fill)
            self._buffer[self._fill : end] = 0
            self._fill = end
            self._flush()
        assert self._written == self._planned.stored_bytes
        return self._hasher.digest()

    def _flush(self) -> None:
        assert self._buffer is not None
        data = self._buffer[: self._fill]
        self._hasher.update(data.data)
        offset = self._planned.offset + self._written
        self._written += self._fill
        buffer, self._buffer, self._fill = self._buffer, None, 0
        self._destination.dense_block(self._tensor, self._planned, offset, data, buffer, self._pool)


class DenseSink:
    """Takes one dense tensor's source bytes in order and hands its stored bytes to the destination."""

    def __init__(self, tensor: PlannedTensor, path: Path, destination: Destination, pool: BufferPool) -> None:
        assert pool.nbytes % PAGE_BYTES == 0
        self._tensor = tensor
        self._path = path
        self._destination = destination
        self._weights = _Output(tensor, tensor.weights, destination, pool)
        self._scales = None
        self._row_bytes = 0
        self._rows_done = 0
        self._gathered = 0
        self._gather = np.empty(0, np.uint8)
        if tensor.scales is not None:
            self._scales = _Output(tensor, tensor.scales, destination, pool)
        if tensor.encoding is not Encoding.RAW:
            self._row_bytes = row_bytes(tensor.source)
            rows = min(max(1, GATHER_BYTES // self._row_bytes), tensor.source.shape[0])
            self._gather = np.empty(rows * self._row_bytes, np.uint8)

    def feed(self, data: Bytes) -> None:
        """Take the next source bytes. QuantizeError names the tensor, row and offset of a non-finite weight."""
        if self._tensor.encoding is Encoding.RAW:
            self._weights.push(data)
            return
        done = 0
        while done < len(data):
            if self._gathered == 0 and len(data) - done >= len(self._gather):
                self._rows(data[done : done + len(self._gather)])  # whole rows as they lie: no copy
                done += len(self._gather)
                continue
            count = min(len(data) - done, len(self._gather) - self._gathered)
            self._gather[self._gathered : self._gathered + count] = data[done : done + count]
            self._gathered += count
            done += count
            if self._gathered == len(self._gather):
                self._rows(self._gather)
                self._gathered = 0

    def finish(self) -> None:
        """Hand over what is left of a tensor whose bytes have all come, and report its digests."""
        if self._gathered:
            assert self._gathered % self._row_bytes == 0
            self._rows(self._gather[: self._gathered])
            self._gathered = 0
        digests = [self._weights.finish()]
        if self._scales is not None:
            digests.append(self._scales.finish())
        self._destination.tensor(self._tensor, tuple(digests))

    def _rows(self, data: Bytes) -> None:
        """Encode whole rows."""
        source = self._tensor.source
        dtype = np.dtype(NUMPY_DTYPES[source.dtype])
        if data.ctypes.data % dtype.itemsize:
            data = data.copy()
        matrix: npt.NDArray[Any] = data.view(dtype).reshape(-1, source.shape[1])
        if self._tensor.encoding is Encoding.F32:
            self._weights.push(kernels.widen(matrix).reshape(-1).view(np.uint8))
        else:
            assert self._scales is not None
            quantize = kernels.quantize_int8 if self._tensor.encoding is Encoding.INT8 else kernels.quantize_int4
            try:
                weights, scales = quantize(matrix)
            except kernels.NonFiniteError as error:
                row = self._rows_done + error.row
                raise QuantizeError(
                    f"the weight in row {row}, column {error.column} is {error.value}: it has no quantized form",
                    path=self._path,
                    tensor=source.name,
                    offset=source.offset + (row * source.shape[1] + error.column) * dtype.itemsize,
                    advice="The shard is damaged: fetch it again. --bits 16 keeps the tensor as it is",
                ) from error
            self._weights.push(weights.reshape(-1))
            self._scales.push(scales.reshape(-1).view(np.uint8))
        self._rows_done += len(matrix)
