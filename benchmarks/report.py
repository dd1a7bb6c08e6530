"""What was measured, and the tables made of it.

python -m benchmarks.report benchmarks/results/documented.json     # print the tables of a run that was kept
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import Cost

VERBS = ("save", "load")


@dataclass(slots=True)
class Measured:
    """One scenario with a number of ranks: the costs of each way by verb, one a round."""

    scenario: str
    title: str
    mib: int
    ranks: int
    tensors: int
    baseline: str
    costs: dict[str, dict[str, list[Cost]]] = field(default_factory=dict)
    server_cpu_seconds: list[float] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)

    def add(self, way: str, costs: Mapping[str, Cost], server_cpu_seconds: float) -> None:
        """Add one round of a way."""
        kept = self.costs.setdefault(way, {verb: [] for verb in VERBS})
        for verb, cost in costs.items():
            kept[verb].append(cost)
        self.server_cpu_seconds.append(server_cpu_seconds)

    def median(self, way: str, verb: str, value: Callable[[Cost], float]) -> float:
        """Return the median over the rounds."""
        return statistics.median(map(value, self.costs[way][verb]))


def format_table(measured: Measured) -> str:
    """Return a Markdown table: medians, smallest to largest in brackets, and the ratio to the baseline."""
    rounds = max((len(costs["save"]) for costs in measured.costs.values()), default=0)
    gib_both_ways = 2 * measured.mib / 1024
    lines = [
        f"\n{measured.title}: {measured.mib} MiB in {measured.tensors} tensors, "
        f"{measured.ranks} rank{'s' * (measured.ranks > 1)}, {rounds} rounds",
        "",
        "| way | save, s | ratio | CPU, s | ratio | MiB | load, s | ratio | CPU, s | ratio | MiB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [f"| {way} | {' | '.join(_cells(measured, way))} |" for way in measured.costs]
    if any(measured.server_cpu_seconds):
        cost = statistics.median(measured.server_cpu_seconds) / gib_both_ways
        lines += ["", f"The endpoint took {cost:.2f} s of CPU per GiB (median)."]
    lines += [f"{way}: failed, {reason}" for way, reason in measured.failures.items()]
    return "\n".join(lines)


def format_ratios(measured: Measured) -> str:
    """Return a Markdown table: what each of our ways takes, divided by what every other one takes."""
    ours = [way for way in measured.costs if way.startswith("ours")]
    others = [way for way in measured.costs if way not in ours]
    lines = [
        "| ours divided by the other | save, wall | save, CPU | load, wall | load, CPU |",
        "| --- | --- | --- | --- | --- |",
    ]
    for own in ours:
        for other in others:
            ratios = [
                f"{measured.median(own, verb, value) / max(measured.median(other, verb, value), 1e-9):.2f}"
                for verb in VERBS
                for value in (wall, cpu)
            ]
            lines.append(f"| {own} / {other} | {' | '.join(ratios)} |")
    return "\n".join(lines)


def to_json(machine: Mapping[str, Any], tables: Sequence[Measured]) -> str:
    """Return what a run measured as text."""
    return json.dumps({"machine": machine, "tables": [asdict(table) for table in tables]}, indent=1) + "\n"


def from_json(text: str) -> list[Measured]:
    """Return the tables of :func:`to_json`."""
    tables = []
    for found in json.loads(text)["tables"]:
        costs = {
            way: {verb: [Cost(**cost) for cost in rounds] for verb, rounds in verbs.items()}
            for way, verbs in found.pop("costs").items()
        }
        tables.append(Measured(**found, costs=costs))
    return tables


def _cells(measured: Measured, way: str) -> Sequence[str]:
    cells = []
    for verb in VERBS:
        for value in (wall, cpu):
            found = [value(cost) for cost in measured.costs[way][verb]]
            middle = statistics.median(found)
            cells.append(f"{middle:.2f} ({min(found):.2f} to {max(found):.2f})")
            cells.append(_ratio(measured, verb, value, middle))
        cells.append(f"{measured.median(way, verb, lambda cost: cost.extra_mib):.0f}")
    return cells


def _ratio(measured: Measured, verb: str, value: Callable[[Cost], float], middle: float) -> str:
    if measured.baseline not in measured.costs:
        return "-"
    base = measured.median(measured.baseline, verb, value)
    return f"{middle / base:.2f}" if base else "-"


def wall(cost: Cost) -> float:
    """Seconds it took."""
    return cost.wall_seconds


def cpu(cost: Cost) -> float:
    """Seconds of CPU it took."""
    return cost.cpu_seconds


if __name__ == "__main__":
    for table in from_json(Path(sys.argv[1]).read_text()):
        print(format_table(table), format_ratios(table), sep="\n\n")
