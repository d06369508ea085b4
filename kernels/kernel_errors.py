"""Errors of the kernels about values. Both are ValueErrors: callers that know the file and the tensor add them.

The errors do not change once they are made, so that any thread may read them.
"""

from __future__ import annotations


class NonFiniteError(ValueError):
    """A value to be quantized or ranked is infinite or NaN. `row` and `column` are those of the first one."""

    def __init__(
        self, row: int, column: int, value: float, *, what: str = "value", use: str = "quantized"
    ) -> None:
        super().__init__(f"{what} at row {row}, column {column} is {value}, which cannot be {use}")
        self.row = row
        self.column = column
        self.value = value


class ReservedScaleError(ValueError):
    """An MXFP4 scale byte is 255, which is no number. `part` names the matrix ("" when there is only one)."""

    def __init__(self, part: str, row: int, group: int) -> None:
        place = f"{part}, row {row}, group {group}" if part else f"row {row}, group {group}"
        super().__init__(f"scale byte at {place} is 255, which stands for no number")
        self.part = part
        self.row = row
        self.group = group
