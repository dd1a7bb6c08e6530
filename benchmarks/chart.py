"""Draws what was measured: wall time and CPU of each way, a row a scenario."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import VERBS, Measured, cpu, wall

COLOURS = {"save": "#1f77b4", "load": "#ff7f0e"}


def draw(tables: Sequence[Measured], path: Path) -> None:
    """Write a PNG; shorter bars are better."""
    import matplotlib as mpl  # type: ignore[import-not-found, unused-ignore]

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # type: ignore[import-not-found, unused-ignore]

    rows = len(tables)
    figure, axes = plt.subplots(rows, 2, figsize=(11, 3.2 * rows), squeeze=False, layout="constrained")
    for row, measured in enumerate(tables):
        gib = measured.mib / 1024
        for axis, (what, value) in zip(axes[row], (("wall", wall), ("client's CPU", cpu)), strict=True):
            _bars(axis, measured, value, gib)
            ranks = f", {measured.ranks} ranks" if measured.ranks > 1 else ""
            axis.set_title(f"{measured.title}{ranks}: {what}, s per GiB", fontsize=9)
    axes[0][0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def _bars(axis: Any, measured: Measured, value: Any, gib: float) -> None:
    ways = list(measured.costs)
    for number, verb in enumerate(VERBS):
        places = [place + 0.4 * number - 0.2 for place in range(len(ways))]
        lengths = [measured.median(way, verb, value) / gib for way in ways]
        bars = axis.barh(places, lengths, height=0.38, label=verb, color=COLOURS[verb])
        axis.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    axis.set_yticks(range(len(ways)), ways, fontsize=8)
    axis.invert_yaxis()
    axis.margins(x=0.12)
