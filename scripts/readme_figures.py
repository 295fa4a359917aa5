"""Writes the README's figures from benchmarks/results, between its markers.

python scripts/readme_figures.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
# Benchmarks whose goals are shown, in this order.
JUDGED = ("hot", "cold", "lookahead", "zipf", "rows", "clients", "tail", "grpc")
BLOCK = re.compile(r"(<!-- figures:begin.*?-->\n).*?(<!-- figures:end -->)", re.DOTALL)


def main() -> None:
    """Replaces the block; fails if a result or a marker is missing."""
    hot, memory = _read("hot"), _read("memory")
    lines = [
        "A whole `optimizer.step()` as the trainer sees it, CPU weights, side by side in one run:",
        "",
        "| rows x width, rows a step | momentd, cache holds the state "
        "| `torch.optim.SparseAdam` in RAM | momentd over gRPC | memmap files "
        "| one mapping in place | LMDB |",
        "|---|---|---|---|---|---|---|",
        *(_hot_line(row) for row in hot["rows"] if "torch_ms" in row["numbers"]),
        "",
        "![milliseconds a step by system](benchmarks/results/hot.png)",
        "",
        "Out of core, and what else has a goal (all ratios; hot ones are of the first two columns "
        "above):",
        "",
        "| benchmark | case | measured | goal | reached |",
        "|---|---|---|---|---|",
        *(
            _goal_line(name, row)
            for name in JUDGED
            for row in _read(name)["rows"]
            if row["reached"] is not None
        ),
        "",
        *(_memory_line(row) for row in memory["rows"]),
        "",
        _machine(hot),
        "",
    ]
    readme = ROOT / "README.md"
    text, found = BLOCK.subn(
        lambda match: match[1] + "\n".join(lines) + match[2], readme.read_text()
    )
    if not found:
        raise SystemExit("README.md has no figures:begin and figures:end markers")
    readme.write_text(text)


def _read(name: str) -> dict[str, Any]:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"{path} is missing: run `make bench ARGS={name}` first")
    return json.loads(path.read_text())


def _hot_line(row: dict[str, Any]) -> str:
    """Ours in milliseconds; the others beside it as multiples of it."""
    numbers = row["numbers"]
    ours = numbers["momentd_ms"]
    cells = [f"{ours:.1f} ms"]
    for system in ("torch", "grpc", "memmap", "mapping", "lmdb"):
        theirs = numbers.get(f"{system}_ms")
        cells.append("" if theirs is None else f"{theirs:.0f} ms ({theirs / ours:.1f} x)")
    return f"| {row['case']} | " + " | ".join(cells) + " |"


def _goal_line(name: str, row: dict[str, Any]) -> str:
    """A row that was judged: what, the measured value, the goal, and whether it was reached."""
    numbers = row["numbers"]
    key, limit = re.match(r"(.*?) ?([<>]= ?[0-9.]+)", row["goal"]).groups()  # type: ignore[union-attr]
    named = [key, "ratio", "written/evicted"]
    value = next(numbers[each] for each in named if each in numbers)
    what = key if key and key != "ratio" else ""
    case = row["case"].strip()
    return (
        f"| {name} | {case}{': ' + what if what and what not in case else ''} | {value:.2f} "
        f"| {limit} | {'yes' if row['reached'] else '**no**'} |"
    )


def _memory_line(row: dict[str, Any]) -> str:
    numbers = row["numbers"]
    limit = f", bound {numbers['limit']:.0f}" if numbers.get("limit") else ""
    return f"* Memory, {row['case'].strip()}: {numbers['measured']:.0f}{limit}."


def _machine(result: dict[str, Any]) -> str:
    machine = result["machine"]
    memory = machine["memory_bytes"] / 2**30
    return (
        f"Measured on {machine['cores']} cores ({machine['cpu']}), {memory:.0f} GiB, "
        f"{machine['disk']['file_system']} on a virtual NVMe disk, torch "
        f"{machine['packages']['torch']}, with `make bench`; all of it is in "
        "[benchmarks](benchmarks)."
    )


if __name__ == "__main__":
    main()
