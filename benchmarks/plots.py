"""Bars of milliseconds a step by system, on a log axis, from the JSON of a result.

    python -m benchmarks.plots [FILE ...]        default: all of benchmarks/results

A benchmark that compares systems (`torch_ms` beside `momentd_ms`, and so on) gets a PNG beside its
JSON, others get none. Colours and grey text are such that light and dark pages both show them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import StrMethodFormatter

RESULTS = Path(__file__).parent / "results"
SUFFIX = "_ms"

# Label and colour of each system, in the order of the legend. The colours differ in lightness too,
# and are told apart with colour-blind eyes (after Okabe and Ito).
SYSTEMS = {
    "momentd": ("momentd", "#0072B2"),
    "grpc": ("momentd over gRPC", "#56B4E9"),
    "torch": ("torch SparseAdam in RAM", "#E69F00"),
    "mapping": ("one mapping, in place", "#009E73"),
    "memmap": ("np.memmap files", "#CC79A7"),
    "lmdb": ("rows in LMDB", "#D55E00"),
    "deltas": ("deltas", "#E69F00"),
    "in_place": ("in place", "#56B4E9"),
    "in_place_huge": ("in place, huge pages", "#0072B2"),
}
# Readable on white and on GitHub's dark grey alike.
INK = "#7d8590"
BAR = 0.8


def draw(path: Path) -> list[Path]:
    """The plots of one result, none if it does not compare systems; returns the files."""
    result = json.loads(path.read_text())
    rows = [row for row in result["rows"] if _is_comparison(row)]
    if not rows:
        return []
    systems = [name for name in SYSTEMS if any(name + SUFFIX in row["numbers"] for row in rows)]
    # No pyplot: it would look for a display.
    figure = Figure(figsize=(9, 1.0 + 0.19 * len(rows) * (len(systems) + 1.5)), dpi=144)
    figure.patch.set_alpha(0)
    axes = figure.add_subplot()
    _bars(axes, rows, systems)
    _dress(axes, [row["case"].strip() for row in rows], result)
    plot = path.with_suffix(".png")
    # Nothing of the moment in the file: an equal result gives equal bytes.
    figure.savefig(plot, bbox_inches="tight", metadata={"Software": None})
    return [plot]


def _is_comparison(row: dict[str, Any]) -> bool:
    named = [name for name in SYSTEMS if name + SUFFIX in row["numbers"]]
    # A line below another one adds to it and is in no plot.
    return len(named) > 1 and ("momentd" in named or "deltas" in named)


def _bars(axes: Axes, rows: list[dict[str, Any]], systems: list[str]) -> None:
    thickness = BAR / len(systems)
    for place, system in enumerate(systems):
        label, colour = SYSTEMS[system]
        at, lengths = [], []
        for line, row in enumerate(rows):
            value = row["numbers"].get(system + SUFFIX)
            if value is not None:
                at.append(line + (place + 0.5) * thickness - BAR / 2)
                lengths.append(value)
        drawn = axes.barh(at, lengths, thickness * 0.92, label=label, color=colour)
        axes.bar_label(drawn, [_number(each) for each in lengths], padding=3, color=INK, size=8)


def _dress(axes: Axes, labels: list[str], result: dict[str, Any]) -> None:
    axes.set_xscale("log")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds a step, median, log scale; shorter is better", color=INK)
    machine = result["machine"]
    scale = result["settings"]["scale"]
    trial = f", a trial run at 1/{scale} of the rows" if scale != 1 else ""
    axes.set_title(
        f"{result['benchmark']}: {machine['cores']} cores, "
        f"{machine['memory_bytes'] / 2**30:.0f} GiB, torch {machine['packages']['torch']}{trial}",
        color=INK, size=9, loc="left",
    )  # fmt: skip
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.tick_params(colors=INK, which="both")
    axes.margins(x=0.1)
    axes.grid(axis="x", color=INK, alpha=0.25)
    axes.set_axisbelow(True)
    for spine in axes.spines.values():
        spine.set_visible(False)
    legend = axes.legend(
        loc="upper left", bbox_to_anchor=(0, -0.12 if len(labels) > 2 else -0.3), ncols=3,
        frameon=False, fontsize=9,
    )  # fmt: skip
    for text in legend.get_texts():
        text.set_color(INK)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2g}" if value < 10 else f"{value:.0f}"


def main() -> None:
    for path in [Path(name) for name in sys.argv[1:]] or sorted(RESULTS.glob("*.json")):
        for plot in draw(path):
            print(plot)


if __name__ == "__main__":
    main()
