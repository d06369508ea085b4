"""Collects the routed experts of a snapshot and proves that they are complete and alike.

Every expert of a layer must have the same parts with the same dtypes and shapes, and the ids must run from 0
without gaps: an expert that is missing or differs is found here, not when the router chooses it. The number, names
and order of an expert's parts, and the number of files that hold them, are up to the checkpoint.

For one thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from k3.base.errors import ExpertError
from k3.checkpoint.expert_table import ExpertTable
from k3.checkpoint.safetensors_header import HeaderTensor
from k3.checkpoint.shard import Shard
from k3.model.keys import EXPERTS_MAX, ExpertLayout, ExpertPart, parse_expert_name

_REFETCH = "Fetch the shard again, or a snapshot in which every expert is complete"
_MARK = ".experts."

_Kind = tuple[str, str, tuple[int, ...]]  # part name, dtype, shape


class _Rows:
    """The expert tensors of one layer in the order of their arrival: each column has one number per tensor."""

    def __init__(self, layer: int, prefix: str) -> None:
        self.layer = layer
        self.prefix = prefix
        self.kinds: dict[_Kind, int] = {}
        self.nbytes: list[int] = []  # by kind
        self.experts = array("i")
        self.kind = array("i")
        self.shards = array("i")
        self.offsets = array("q")

    def add(self, expert: int, part: str, tensor: HeaderTensor, shard: int) -> None:
        kind = (part, tensor.dtype, tensor.shape)
        number = self.kinds.get(kind)
        if number is None:
            number = self.kinds[kind] = len(self.kinds)
            self.nbytes.append(tensor.nbytes)
        self.experts.append(expert)
        self.kind.append(number)
        self.shards.append(shard)
        self.offsets.append(tensor.offset)


class ExpertCensus:
    """Collects expert tensors one by one, then builds the tables."""

    def __init__(self, shards: Sequence[Shard]) -> None:
        """Begin without tensors. `shards` may grow while tensors are added; it is used for messages."""
        self._shards = shards
        self._layers: dict[int, _Rows] = {}
        self._by_prefix: dict[str, _Rows] = {}  # by the part of the name before ".experts."

    def add(self, tensor: HeaderTensor, shard: int) -> bool:
        """Add `tensor` and return True if it belongs to a routed expert, else return False.

        Raises ExpertError when a layer has two groups of experts, or for an id that is not plain decimal.
        """
        before, _, after = tensor.name.partition(_MARK)
        rows = self._by_prefix.get(before)
        if rows is not None:
            number, _, part = after.partition(".")
            # Avoids the regular expression, with the same result for names with one "layers" and one "experts".
            if number.isdecimal() and part and "layers" not in part and "experts" not in part:
                self._take(rows, number, part, tensor, shard)
                return True
        name = parse_expert_name(tensor.name)
        if name is None:
            return False
        layer = name.key.layer
        rows = self._layers.setdefault(layer, _Rows(layer, name.prefix))
        if rows.prefix != name.prefix:
            problem = f"the layer has two groups of experts, {rows.prefix} and {name.prefix}"
            raise self._error(problem, shard, layer, name.key.expert, tensor.name)
        if name.prefix.endswith(_MARK[:-1]):
            self._by_prefix[name.prefix.removesuffix(_MARK[:-1])] = rows
        number = tensor.name[len(name.prefix) + 1 :].partition(".")[0]
        self._take(rows, number, name.part, tensor, shard)
        return True

    def tables(self, num_experts: int | None) -> dict[int, ExpertTable]:
        """Return the table of every layer, ascending. `num_experts` is the configuration's number, or None.

        Raises ExpertError naming layer, expert and tensor when a layer is not complete and uniform.
        """
        return {layer: self._table(self._layers[layer], num_experts) for layer in sorted(self._layers)}

    def _take(self, rows: _Rows, number: str, part: str, tensor: HeaderTensor, shard: int) -> None:
        expert = int(number)
        if str(expert) != number or expert >= EXPERTS_MAX:
            problem = f"{number[:40]} is not a plain expert number below {EXPERTS_MAX}"
            raise self._error(problem, shard, rows.layer, None, tensor.name)
        rows.add(expert, part, tensor, shard)

    def _table(self, rows: _Rows, num_experts: int | None) -> ExpertTable:
        experts = np.array(rows.experts, np.int64)
        kinds = np.array(rows.kind, np.int64)
        count = self._checked_count(rows, experts, num_experts)
        has = np.zeros((count, len(rows.kinds)), np.bool_)
        has[experts, kinds] = True
        usual = self._usual(rows, has)
        by_name = sorted((kind, number) for kind, number in rows.kinds.items() if usual[number])
        column_of = np.full(len(rows.kinds), -1)
        column_of[[number for _, number in by_name]] = np.arange(len(by_name))
        columns = column_of[kinds]
        shards = np.zeros((count, len(by_name)), np.int32)
        offsets = np.zeros((count, len(by_name)), np.int64)
        shards[experts, columns] = rows.shards
        offsets[experts, columns] = rows.offsets
        return ExpertTable(rows.layer, _layout(rows, by_name), shards, offsets)

    def _checked_count(self, rows: _Rows, experts: npt.NDArray[np.int64], num_experts: int | None) -> int:
        """Return the number of the layer's experts.

        Raises ExpertError unless it is `num_experts`, without gaps.
        """
        present = np.unique(experts)
        count = int(present[-1]) + 1 if num_experts is None else num_experts
        missing = np.setdiff1d(np.arange(count), present)
        if len(missing):
            expert = int(missing[0])
            problem = f"the expert is missing; the layer has {len(present)} of {max(count, int(present[-1]) + 1)}"
            raise self._error(problem, rows.shards[0], rows.layer, expert, f"{rows.prefix}.{expert}")
        if len(present) > count:
            extra = int(present[count])
            at = int(np.argmax(experts == extra))
            problem = f"the configuration has {count} experts, the layer {len(present)}"
            raise self._error(problem, rows.shards[at], rows.layer, extra, f"{rows.prefix}.{extra}")
        return count

    def _usual(self, rows: _Rows, has: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return a mask of the kinds that every expert has.

        Raises ExpertError when an expert differs from most.
        """
        variants, votes = np.unique(has, axis=0, return_counts=True)
        # With equal votes the variant with more tensors wins: a missing one is likelier than a surplus one.
        winner = max(range(len(votes)), key=lambda number: (votes[number], variants[number].sum()))
        usual: npt.NDArray[np.bool_] = variants[winner]
        if len(variants) > 1:
            expert = int(np.argmax((has != usual).any(axis=1)))
            raise self._odd_expert(rows, expert, has[expert], usual)
        return usual

    def _odd_expert(
        self, rows: _Rows, expert: int, has: npt.NDArray[np.bool_], usual: npt.NDArray[np.bool_]
    ) -> ExpertError:
        """Return the error that names the difference between an expert and most others of its layer."""
        own = {kind[0]: kind for kind, number in rows.kinds.items() if has[number]}
        wanted = {kind[0]: kind for kind, number in rows.kinds.items() if usual[number]}
        shard = rows.shards[rows.experts.index(expert)]
        for part in sorted(wanted.keys() - own.keys()):
            problem = f"the expert has {len(own)} of {len(wanted)} tensors; {part} is missing"
            return self._error(problem, shard, rows.layer, expert, f"{rows.prefix}.{expert}.{part}")
        for part in sorted(own.keys() - wanted.keys()):
            problem = f"the expert has a tensor that the others do not have, {part}"
            return self._error(problem, shard, rows.layer, expert, f"{rows.prefix}.{expert}.{part}")
        part = min(part for part in own if own[part] != wanted[part])
        problem = "the tensor is {} {}, but {} {} in most experts".format(*own[part][1:], *wanted[part][1:])
        return self._error(problem, shard, rows.layer, expert, f"{rows.prefix}.{expert}.{part}")

    def _error(self, problem: str, shard: int, layer: int, expert: int | None, tensor: str) -> ExpertError:
        return ExpertError(
            problem,
            path=self._shards[shard].path,
            tensor=tensor,
            layer=layer,
            expert=expert,
            advice=_REFETCH,
        )


def _layout(rows: _Rows, by_name: Sequence[tuple[_Kind, int]]) -> ExpertLayout:
    parts = []
    offset = 0
    for (name, dtype, shape), number in by_name:
        parts.append(ExpertPart(name, dtype, shape, offset, rows.nbytes[number]))
        offset += rows.nbytes[number]
    return ExpertLayout(rows.prefix, tuple(parts))
