"""The body of `k3-store bench`: find the container, measure, print. Main thread only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from k3.base.cli_support import echo, emit_json
from k3.base.drive_info import drive_info
from k3.container.reader import Container
from k3.store.client.socket_link import ask_status, reading_status
from k3.store.commands.drive_bench import BenchOptions, RawBench, Row, measure_daemon
from k3.store.daemon.container_home import find_home


def measure(
    directories: Sequence[Path], named: Path | None, socket: Path | None, options: BenchOptions, *, as_json: bool
) -> None:
    """Measure the drives and, with a socket, the daemon. Raises K3Error."""
    roots = list(directories)
    if socket is not None:
        status = ask_status(socket)
        if named is None and not roots:
            with reading_status(socket):
                named = Path(status["home"])
                roots = [Path(drive["path"]) for drive in status["drives"]]
    container = Container.open(find_home(roots, named), roots)
    rows: list[Row] = []

    def on_row(row: Row) -> None:
        rows.append(row)
        if as_json:
            emit_json("bench", **asdict(row), gb_per_s=round(row.gb_per_s, 4))
        else:
            read_mb = row.read_bytes / max(1, row.reads) / 1e6
            echo(
                f"{row.where:<32} depth {row.depth:>2}  {row.reads:>7} reads of {read_mb:.3f} MB  "
                f"{row.gb_per_s:.3f} GB/s"
            )

    try:
        raw = RawBench(container, options)
        if not as_json:
            for drive in raw.drives:
                info = drive_info(drive)
                echo(f"{drive}: {info.model or info.device or 'unknown drive'}")
        raw.run(on_row)
        if socket is not None:
            measure_daemon(socket, options, on_row)
    finally:
        container.close()
    best = {
        where: max(row.gb_per_s for row in rows if row.where == where) for where in {row.where for row in rows}
    }
    if as_json:
        emit_json("summary", best_gb_per_s={where: round(rate, 4) for where, rate in sorted(best.items())})
    elif "daemon" in best:
        drives = best.get("all drives") or max(rate for where, rate in best.items() if where != "daemon")
        echo(f"through the daemon: {best['daemon'] / drives:.3f} of the drives' best")
