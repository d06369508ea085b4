"""Dense tensors by name, each claimed exactly once.

`Weights` gives out each tensor of `tensor_names.expected_tensors` once, and checks its shape when it arrives. A
tensor may be claimed before its bytes are in memory: the first use waits for them. `Matrix` is a weight that
stays in its stored encoding and is multiplied by the kernels. One thread claims tensors and uses them first; any
thread may use a weight afterwards, which is immutable then.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from k3 import kernels
from k3.base.errors import SourceError, UnsupportedError
from k3.engine.forward.deferred import Deferred
from k3.model.architecture import ModelConfig
from k3.model.k3_tensors import REAL_DTYPES
from k3.model.keys import Encoding
from k3.model.model_source import EncodedTensor, ModelSource, TensorReader
from k3.model.tensor_names import check_shape, expected_tensors, text_prefix

Array = npt.NDArray[np.float32]

DAMAGED_OR_PUBLISHED = (
    "k3-verify --read-data all tells whether weights are damaged or were published like this; the latter needs "
    "another revision of the model"
)
"""Advice for numbers that no sound model gives; their cause cannot be seen in the engine."""


class Matrix:
    """A weight [rows, columns] in its stored encoding. A call multiplies by it."""

    __slots__ = ("_exact", "_tensor")

    def __init__(self, tensor: Deferred[EncodedTensor], *, exact: bool) -> None:
        self._tensor = tensor
        self._exact = exact

    @property
    def ready(self) -> bool:
        """True once the weight has been used."""
        return self._tensor.ready

    @property
    def tensor(self) -> EncodedTensor:
        """The weight as stored. Waits for it, and raises what reading it raised."""
        return self._tensor()

    def __call__(self, x: Array) -> Array:
        """Return the product [S, rows] of `x` [S, columns]. A row of it depends only on the same row of `x`.

        SourceError for an input that is not finite, where the kernel has to notice.
        """
        try:
            return kernels.matmul(x, self.tensor, exact=self._exact)
        except kernels.NonFiniteError as error:
            raise SourceError(
                f"an input of the product is {error.value} (token {error.row} of the chunk)",
                tensor=self.tensor.name,
                advice=DAMAGED_OR_PUBLISHED,
            ) from error

    @property
    def nbytes(self) -> int:
        """Bytes held in memory."""
        return _nbytes(self.tensor)


class Weights:
    """The dense tensors of one model, given out by name without the checkpoint's prefix.

    Each waits for its bytes at its first use.
    """

    def __init__(
        self,
        source: ModelSource,
        config: ModelConfig,
        reading: TensorReader,
        *,
        exact: bool,
    ) -> None:
        """Give out tensors from `reading`, which must give those of `needed_names` as long as one was not used."""
        self._exact = exact
        self._reading = reading
        self.prefix = text_prefix(source.tensor_names())
        self._shapes = expected_tensors(config, config.layers)
        self._unclaimed = set(self._shapes)
        self._given: list[Deferred[EncodedTensor] | Deferred[Array]] = []  # in the order of claiming
        self.resident_bytes = 0

    def matrix(self, name: str, *, exact: bool | None = None) -> Matrix:
        """Return a weight to multiply by. `exact=True` computes in float32 whatever the run's setting."""
        self._claim(name)
        tensor = Deferred(partial(self._take, name))
        self._given.append(tensor)
        return Matrix(tensor, exact=self._exact if exact is None else exact)

    def floats(self, name: str) -> Deferred[Array]:
        """Return a tensor as float32 values in its own shape: norms, biases, convolutions."""
        self._claim(name)
        values = Deferred(lambda: to_float32(self._take(name)))
        self._given.append(values)
        return values

    def check_all_claimed(self) -> None:
        """Raise AssertionError unless the model, once built, uses every tensor of the table."""
        if self._unclaimed:
            raise AssertionError(f"tensors of the table that no layer claimed: {sorted(self._unclaimed)}")

    def load(self) -> None:
        """Wait for every tensor that was claimed. Raises what reading it raised."""
        for weight in self._given:
            weight()

    def _claim(self, name: str) -> None:
        if name not in self._unclaimed:
            raise AssertionError(f"{name} is claimed twice, or is not in the table of tensors")
        self._unclaimed.remove(name)

    def _take(self, name: str) -> EncodedTensor:
        """Return a claimed tensor as soon as it is read."""
        full_name = self.prefix + name
        tensor = self._reading.take(full_name)
        check_shape(full_name, tensor.shape, self._shapes[name])
        self.resident_bytes += _nbytes(tensor)
        return tensor


def _nbytes(tensor: EncodedTensor) -> int:
    return tensor.data.nbytes + (0 if tensor.scales is None else tensor.scales.nbytes)


def to_float32(tensor: EncodedTensor) -> Array:
    """Return a tensor's numbers as float32. UnsupportedError for a dtype that holds no real numbers."""
    if tensor.encoding is Encoding.INT8:
        assert tensor.scales is not None
        return kernels.dequantize_int8(tensor.data, tensor.scales)
    if tensor.encoding is Encoding.INT4:
        assert tensor.scales is not None
        return kernels.dequantize_int4(tensor.data, tensor.scales, tensor.shape[1])
    if tensor.encoding is Encoding.F32 or tensor.dtype in REAL_DTYPES:
        return kernels.widen(tensor.data)
    raise UnsupportedError(
        f"dtype {tensor.dtype} where {' or '.join(REAL_DTYPES)} is expected", tensor=tensor.name
    )
