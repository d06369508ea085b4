"""Draws the roofline of a decode step from what bench/breakdown.py measured.

    python bench/breakdown.py --container HOME --out breakdown.json
    python bench/roofline.py breakdown.json docs/roofline.png

Left, every kind of work at its products per byte and products per second, under the roof that memory and the
cores' integer products make; a disc's area is its share of the step. Right, the time of each kind and the part of
it that reading its bytes at the memory's rate would take. Needs matplotlib (the extra `bench`).
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

ACCENT, PALE, INK, REST = "#1f5f8b", "#a9cce3", "#333333", "#c0c0c0"
LABELS = [(0.52, 0.66), (0.52, 0.56), (0.52, 0.38), (0.3, 0.24), (0.3, 0.14), (0.3, 0.06)]  # from the top down


def main() -> None:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("breakdown", type=Path)
    parser.add_argument("picture", type=Path)
    arguments = parser.parse_args()
    result = json.loads(arguments.breakdown.read_text())
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5.6), gridspec_kw={"width_ratios": [1, 1]})
    roofline(left, result)
    times(right, result)
    figure.suptitle(
        f"A decode step: {result['touched_bytes'] / 1e9:.2f} GB in {result['step_ns'] / 1e6:.0f} ms, "
        f"{result['touched_bytes'] / result['step_ns'] * 1e9 / result['memory_rate']:.2f} of the memory's rate",
        fontsize=13, color=INK,
    )  # fmt: skip
    figure.text(
        0.01, 0.01,
        f"{result['cpu']}, {result['threads']} threads, {result['variant']}, {result['date']}. Four layers in "
        f"real dimensions, all experts in memory, {result['past']} tokens before.",
        fontsize=8, color=INK,
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.03, 1, 0.97))
    figure.savefig(arguments.picture, dpi=110)
    print(f"{arguments.picture}: {arguments.picture.stat().st_size / 1e3:.0f} kB")


def roofline(axes: Any, result: dict[str, Any]) -> None:
    """Products per second over products per byte, both on logarithmic scales."""
    memory, peak = result["memory_rate"] / 1e9, result["product_rate"]
    ends = (0.3, 100.0)
    roof = [min(memory * x, peak / 1e9) if peak else memory * x for x in (ends[0], *_knee(memory, peak), ends[1])]
    axes.plot([ends[0], *_knee(memory, peak), ends[1]], roof, color=INK, linewidth=1.6)
    axes.annotate(
        f"memory {memory:.1f} GB/s", (ends[0], memory * ends[0]), xytext=(0, 26), textcoords="offset points",
        rotation=38, fontsize=9, color=INK,
    )  # fmt: skip
    if peak:
        axes.annotate(
            f"int8 products {peak / 1e9:.0f} G/s", (ends[1], peak / 1e9), xytext=(-6, 5),
            textcoords="offset points", ha="right", fontsize=9, color=INK,
        )  # fmt: skip
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(ends)
    axes.set_ylim(1, (peak / 1e9 if peak else memory * ends[1]) * 1.8)
    for place, group in enumerate(groups(result)):
        for point in group:
            axes.scatter([point.x], [point.y], s=30 + 2500 * point.share, color=ACCENT, alpha=0.55, linewidths=0)
        text = "\n".join(f"{point.name} ({point.share:.1%})" for point in group)
        axes.annotate(
            text, (group[0].x, group[0].y), xytext=LABELS[place], textcoords="axes fraction", fontsize=8,
            color=INK, va="center", arrowprops={"arrowstyle": "-", "color": REST, "lw": 0.8},
        )  # fmt: skip
    axes.set_xlabel("products per byte read from memory")
    axes.set_ylabel("G products per second")
    _plain(axes)


def _knee(memory: float, peak: float | None) -> list[float]:
    return [peak / 1e9 / memory] if peak else []


@dataclass(frozen=True)
class Point:
    """A kind of work: products per byte, G products per second, share of the step."""

    name: str
    x: float
    y: float
    share: float


def groups(result: dict[str, Any]) -> list[list[Point]]:
    """Kinds of work that lie so close together that they need one label, the largest first."""
    points = [
        Point(
            name,
            one["products"] / one["weight_bytes"],
            one["products"] / one["ns"],
            one["ns"] / result["clocked_ns"],
        )
        for name, one in result["work"].items()
        if one["products"] and one["weight_bytes"]
    ]
    found: list[list[Point]] = []
    for point in sorted(points, key=lambda point: -point.share):
        near = [group for group in found if 0.8 < point.x / group[0].x < 1.25 and 0.7 < point.y / group[0].y < 1.4]
        if near:
            near[0].append(point)
        else:
            found.append([point])
    top = found[: len(LABELS)]
    top.sort(key=lambda group: -group[0].y)
    return top


def times(axes: Any, result: dict[str, Any]) -> None:
    """Milliseconds of each kind of work; dark, what its bytes need at the memory's rate."""
    work = list(result["work"].items())[::-1]
    names = [name for name, _ in work]
    taken = [one["ns"] / 1e6 for _, one in work]
    least = [one["weight_bytes"] / result["memory_rate"] * 1e3 for _, one in work]
    axes.barh(names, taken, color=[PALE if one["weight_bytes"] else REST for _, one in work])
    axes.barh(names, [min(pair) for pair in zip(least, taken, strict=True)], color=ACCENT)
    for place, (_, one) in enumerate(work):
        rate = f", {one['weight_bytes'] / one['ns']:.1f} GB/s" if one["weight_bytes"] else ""
        axes.annotate(
            f"{taken[place]:.1f} ms{rate}", (taken[place], place), xytext=(4, 0), textcoords="offset points",
            va="center", fontsize=8, color=INK,
        )  # fmt: skip
    axes.set_xlim(0, max(taken) * 1.3)
    axes.set_xlabel("ms of a step; dark: its bytes at the memory's rate")
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=9, colors=INK)


if __name__ == "__main__":
    main()
