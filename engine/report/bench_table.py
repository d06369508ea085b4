"""The output of `k3-run bench`: statistics over repetitions, and tables with llama-bench's columns and ours.

Markdown and CSV come row by row, JSON as one array, which is closed also when a run is interrupted. Pure but for
the stream that is written to.
"""

from __future__ import annotations

import csv
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TextIO

from k3.base.cli_support import format_size

Format = Literal["md", "json", "csv"]

ReadsFrom = Literal["drive", "page cache", "daemon", "memory"]
"""Source of the experts that were not in the engine's own cache; "memory" when all were in it."""


@dataclass(frozen=True, slots=True)
class Workload:
    """One test: `prompt` tokens taken in `batch` at a time, or `gen` tokens one by one.

    Both follow `depth` tokens that are not measured.
    """

    prompt: int
    gen: int
    depth: int
    batch: int

    @property
    def name(self) -> str:
        """The name that llama-bench gives it: pp512, tg128, tg128 @ d4096."""
        name = f"pp{self.prompt}" if self.prompt else f"tg{self.gen}"
        return f"{name} @ d{self.depth}" if self.depth else name

    @property
    def tokens(self) -> int:
        """Tokens that are measured."""
        return self.prompt or self.gen


@dataclass(frozen=True, slots=True)
class Sample:
    """The measurements of one repetition."""

    elapsed_ns: int
    moved_bytes: int  # least bytes that had to be read from memory, see bytes_per_pass.py
    read_bytes: int  # bytes of experts requested from the drives
    wait_ns: int  # time spent waiting for experts
    asked: int  # experts requested
    hits: int  # requested experts that were in the engine's cache
    memory_rate: float  # bytes per second of reading memory, just before and just after


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine and the model, which are the same for all tests of a run."""

    version: str
    cpu: str
    variant: str
    threads: int
    model_path: str
    model_type: str
    model_bytes: int
    parameters: int
    cache_type: str  # type of the latent cache
    exact: bool
    direct: bool


@dataclass(frozen=True, slots=True)
class Result:
    """One test with its measurements.

    `drive_rate` is in bytes per second, None when it was not measured. `repetitions` is the number asked for;
    after an interruption there are fewer samples.
    """

    machine: Machine
    test: Workload
    time: str
    repetitions: int
    samples: Sequence[Sample]
    drive_rate: float | None
    reads_from: ReadsFrom

    @property
    def elapsed_ns(self) -> int:
        """Time of all repetitions together."""
        return sum(sample.elapsed_ns for sample in self.samples)

    @property
    def rates(self) -> list[float]:
        """Tokens per second of each repetition."""
        return [self.test.tokens / sample.elapsed_ns * 1e9 for sample in self.samples]

    @property
    def memory_rate(self) -> float:
        """Bytes per second that memory could have delivered during the repetitions."""
        return sum(sample.memory_rate * sample.elapsed_ns for sample in self.samples) / self.elapsed_ns

    @property
    def memory_share(self) -> float:
        """The least bytes that had to be read from memory, per second, over `memory_rate`."""
        moved_bytes = sum(sample.moved_bytes for sample in self.samples)
        return moved_bytes / self.elapsed_ns * 1e9 / self.memory_rate

    @property
    def drive_share(self) -> float | None:
        """Bytes read per second over the drives' rate; None unless drives delivered them."""
        if self.reads_from != "drive" or self.drive_rate is None:
            return None
        return self.read_bytes / self.elapsed_ns * 1e9 / self.drive_rate

    @property
    def read_bytes(self) -> int:
        """Bytes read in all repetitions together."""
        return sum(sample.read_bytes for sample in self.samples)

    @property
    def hit_share(self) -> float | None:
        """Share of requested experts that were in the engine's cache; None when none was requested."""
        asked = sum(sample.asked for sample in self.samples)
        return sum(sample.hits for sample in self.samples) / asked if asked else None


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and the standard deviation of the sample (0 for a single value)."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def result_fields(result: Result) -> dict[str, Any]:
    """Return a result by llama-bench's names, as far as they apply, and then by ours."""
    machine, test = result.machine, result.test
    tokens = test.tokens * len(result.samples)
    nanoseconds = mean_and_deviation([sample.elapsed_ns for sample in result.samples])
    rate = mean_and_deviation(result.rates)
    return {
        "build_commit": machine.version,
        "cpu_info": machine.cpu,
        "gpu_info": "",
        "backends": "CPU",
        "model_filename": machine.model_path,
        "model_type": machine.model_type,
        "model_size": machine.model_bytes,
        "model_n_params": machine.parameters,
        "n_batch": test.batch,
        "n_ubatch": test.batch,
        "n_threads": machine.threads,
        "type_k": machine.cache_type,
        "type_v": machine.cache_type,
        "use_mmap": False,
        "use_direct_io": machine.direct,
        "n_prompt": test.prompt,
        "n_gen": test.gen,
        "n_depth": test.depth,
        "test_time": result.time,
        "avg_ns": round(nanoseconds[0]),
        "stddev_ns": round(nanoseconds[1]),
        "avg_ts": round(rate[0], 6),
        "stddev_ts": round(rate[1], 6),
        "repetitions": len(result.samples),
        "repetitions_asked": result.repetitions,
        "variant": machine.variant,
        "exact": machine.exact,
        "memory_gb_per_s": round(result.memory_rate / 1e9, 4),
        "memory_share": round(result.memory_share, 4),
        "moved_bytes_per_token": round(sum(sample.moved_bytes for sample in result.samples) / tokens),
        "reads_from": result.reads_from,
        "drive_gb_per_s": None if result.drive_rate is None else round(result.drive_rate / 1e9, 4),
        "drive_share": _rounded(result.drive_share),
        "read_bytes_per_token": round(result.read_bytes / tokens),
        "wait_share": round(sum(sample.wait_ns for sample in result.samples) / result.elapsed_ns, 4),
        "hit_share": _rounded(result.hit_share),
    }


def sample_fields(result: Result) -> dict[str, list[float]]:
    """Return the single repetitions, which only JSON shows."""
    return {
        "samples_ns": [sample.elapsed_ns for sample in result.samples],
        "samples_ts": [round(rate, 6) for rate in result.rates],
    }


class Table(Protocol):
    """A receiver of results, which prints them."""

    def row(self, result: Result) -> None:
        """Print one result."""

    def end(self) -> None:
        """Complete the table."""


def open_table(form: Format, stream: TextIO) -> Table:
    """Return a table of the given format that prints to `stream`."""
    kinds: dict[Format, Callable[[TextIO], Table]] = {"md": MarkdownTable, "json": JsonTable, "csv": CsvTable}
    return kinds[form](stream)


@dataclass(slots=True)
class _Column:
    name: str
    width: int
    right: bool = True


class MarkdownTable:
    """Rows for people, and a note below them that explains the shares."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._columns: list[_Column] = []
        self._rows: list[Result] = []

    def row(self, result: Result) -> None:
        """See `Table.row`."""
        if not self._columns:
            self._begin(result)
        self._rows.append(result)
        cells = _cells(result)
        self._line([_padded(cells[column.name], column) for column in self._columns])

    def end(self) -> None:
        """See `Table.end`."""
        if self._rows:
            self._stream.write("\n" + ceiling_note(self._rows))
            self._stream.flush()

    def _begin(self, result: Result) -> None:
        name = max(len(result.machine.model_type), len("model"))
        self._columns = [
            _Column("model", name, right=False), _Column("size", 10), _Column("params", 9),
            _Column("backend", 7, right=False), _Column("threads", 7), _Column("n_batch", 7), _Column("test", 12),
            _Column("t/s", 18), _Column("of memory", 9), _Column("of drive", 10), _Column("read/token", 10),
            _Column("hits", 5),
        ]  # fmt: skip
        self._line([_padded(column.name, column) for column in self._columns])
        self._line(["-" * (column.width - column.right) + ":" * column.right for column in self._columns])

    def _line(self, cells: Sequence[str]) -> None:
        self._stream.write("| " + " | ".join(cells) + " |\n")
        self._stream.flush()


class CsvTable:
    """A line of names, then a line per result."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._writer: csv.DictWriter[str] | None = None

    def row(self, result: Result) -> None:
        """See `Table.row`."""
        values = result_fields(result)
        if self._writer is None:
            self._writer = csv.DictWriter(self._stream, list(values), quoting=csv.QUOTE_ALL, lineterminator="\n")
            self._writer.writeheader()
        self._writer.writerow({key: "" if value is None else value for key, value in values.items()})
        self._stream.flush()

    def end(self) -> None:
        """See `Table.end`. Every line is complete already."""


@dataclass(slots=True)
class JsonTable:
    """One array of objects."""

    stream: TextIO
    _begun: bool = field(default=False, init=False)

    def row(self, result: Result) -> None:
        """See `Table.row`."""
        text = json.dumps(result_fields(result) | sample_fields(result), indent=2)
        self.stream.write(",\n" if self._begun else "[\n")
        self.stream.write("\n".join("  " + line for line in text.splitlines()))
        self.stream.flush()
        self._begun = True

    def end(self) -> None:
        """See `Table.end`."""
        self.stream.write("\n]\n" if self._begun else "[]\n")
        self.stream.flush()


def ceiling_note(results: Sequence[Result]) -> str:
    """Return the note below a table for people: the ceilings, and the sources that are no drive."""
    memory = statistics.median(result.memory_rate for result in results)
    lines = [
        f"of memory: bytes that had to be read from memory, per second, as a share of its {memory / 1e9:.1f} GB/s",
    ]
    drives = [result.drive_rate for result in results if result.drive_rate is not None]
    if drives:
        drive = statistics.median(drives)
        lines.append(f"of drive: expert bytes read per second, as a share of the drives' {drive / 1e9:.3g} GB/s")
    else:
        lines.append("of drive: the drives were not measured")
    lines.append("Both were measured in this run, memory around each repetition, the drives before each test.")
    if any(result.reads_from == "page cache" for result in results):
        lines.append("page cache: experts came through the page cache, so their rate is not the drives'.")
    if any(result.reads_from == "daemon" for result in results):
        lines.append("daemon: experts came from k3-store, which has drives and a cache of its own.")
    return "\n".join(lines) + "\n"


def _cells(result: Result) -> dict[str, str]:
    """Return the cells of a result's row, by column."""
    machine, test = result.machine, result.test
    mean, deviation = mean_and_deviation(result.rates)
    if result.drive_share is not None:
        drive = f"{result.drive_share:.2f}"
    else:
        drive = "-" if result.reads_from == "memory" else result.reads_from
    tokens = test.tokens * len(result.samples)
    return {
        "model": machine.model_type,
        "size": _scaled(machine.model_bytes, {"GiB": 1 << 30, "MiB": 1 << 20}),
        "params": _scaled(machine.parameters, {"B": 10**9, "M": 10**6}),
        "backend": "CPU",
        "threads": str(machine.threads),
        "n_batch": str(test.batch),
        "test": test.name,
        "t/s": f"{mean:.2f} ± {deviation:.2f}",
        "of memory": f"{result.memory_share:.2f}",
        "of drive": drive,
        "read/token": format_size(result.read_bytes / tokens),
        "hits": "-" if result.hit_share is None else f"{result.hit_share:.0%}",
    }


def _scaled(value: float, units: dict[str, int]) -> str:
    """Return a value in the first unit of which it has at least one, else in the last."""
    unit, size = next(((name, size) for name, size in units.items() if value >= size), list(units.items())[-1])
    return f"{value / size:.2f} {unit}"


def _padded(text: str, column: _Column) -> str:
    return text.rjust(column.width) if column.right else text.ljust(column.width)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
