"""The rate of k3-repack, against what the drive could do with the same bytes and nothing in between.

    python bench/repack.py --work DIR [--rounds 3] [--experts 64] [--vocab 8192]

Makes a slice of K3 in real dimensions (hidden 7168, latent 3584, expert inner 3072; layers KDA + dense, KDA +
MoE, KDA + MoE, MLA + MoE), then in every round, in turn: reads the same source while writing as many bytes (the
ceiling of a repack), repacks, reads source and container (the ceiling of a verification), verifies. Drives and
machines are noisy, so only ratios within a round mean something; the medians are printed, and all rounds as JSON.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from drive import BLOCK_BYTES, read_and_write, read_files

from k3.verify.synthetic.snapshot_writer import SyntheticModel, write_snapshot


def main() -> None:
    """Run the benchmark and print a table and a JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a directory on the drive to measure")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--bits", default="8")
    parser.add_argument("--keep", action="store_true", help="leave the slice for the next run")
    arguments = parser.parse_args()
    source = arguments.work / "slice"
    if not (source / "config.json").exists():
        print(f"making a slice in {source}", file=sys.stderr)
        model = SyntheticModel.real_slice(arguments.layers, arguments.experts, arguments.vocab)
        write_snapshot(model, source)
    shards = sorted(source.glob("*.safetensors"))
    rounds = []
    try:
        for number in range(arguments.rounds):
            rounds.append(one_round(shards, source, arguments))
            print(f"round {number + 1}: {json.dumps(rounds[-1])}", file=sys.stderr)
    finally:
        shutil.rmtree(arguments.work / "container", ignore_errors=True)
        (arguments.work / "ceiling.bin").unlink(missing_ok=True)
        if not arguments.keep:
            shutil.rmtree(source)
    report(rounds, arguments)


def one_round(shards: list[Path], source: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Ceiling, repack, ceiling, verification."""
    container = arguments.work / "container"
    shutil.rmtree(container, ignore_errors=True)
    command = [sys.executable, "-m", "k3.repack.cli", str(source), str(container), "--json"]
    for name in ("--bits", "--mla-bits", "--head-bits"):
        command += [name, arguments.bits]
    source_bytes = sum(path.stat().st_size for path in shards)
    planned = last_line([*command, "--plan"])
    write_bytes = sum(file["bytes"] for file in planned["files"])
    ceiling_file = arguments.work / "ceiling.bin"
    ceiling_s = read_and_write(shards, ceiling_file, -(-write_bytes // BLOCK_BYTES) * BLOCK_BYTES)
    ceiling_file.unlink()
    repacked = last_line(command)
    written = list(container.rglob("*.safetensors"))
    read_s = read_files([*shards, *written])
    verified = last_line([*command, "--verify-full"])
    assert verified["verdict"] == "equal"
    return {
        "source_gb": round(source_bytes / 1e9, 3),
        "written_gb": round(write_bytes / 1e9, 3),
        "ceiling_gb_per_s": round(source_bytes / ceiling_s / 1e9, 3),
        "repack_gb_per_s": repacked["gb_per_s"],
        "repack_ratio": round(ceiling_s / repacked["seconds"], 3),
        "peak_rss_mb": round(repacked["peak_rss_bytes"] / 1e6),
        "raw_read_gb_per_s": round((source_bytes + write_bytes) / read_s / 1e9, 3),
        "verify_gb_per_s": verified["gb_per_s"],
        "verify_ratio": round(verified["gb_per_s"] * 1e9 * read_s / (source_bytes + write_bytes), 3),
    }


def last_line(command: list[str]) -> dict[str, Any]:
    """Return the summary that a command prints last."""
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    summary: dict[str, Any] = json.loads(output.splitlines()[-1])
    assert summary["type"] == "summary"
    return summary


def report(rounds: list[dict[str, Any]], arguments: argparse.Namespace) -> None:
    """Medians as a table, then everything as one JSON line."""
    medians = {key: statistics.median(item[key] for item in rounds) for key in rounds[0]}
    for key, value in medians.items():
        print(f"{key:>20}  {value:g}")
    machine = f"{platform.machine()} {platform.processor() or ''}".strip()
    stamp = datetime.now(timezone.utc).date().isoformat()
    print(
        json.dumps(
            {"date": stamp, "machine": machine, "bits": arguments.bits, "medians": medians, "rounds": rounds}
        )
    )


if __name__ == "__main__":
    main()
