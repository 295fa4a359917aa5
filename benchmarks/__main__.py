"""python -m benchmarks [NAME ...] [options]"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from pathlib import Path

from . import plots
from .harness import RESULTS, Settings, Skipped, publish

# One a line and in the order in which `make bench` runs them.
BENCHMARKS = (
    "device",
    "hot",
    "rows",
    "inplace",
    "gpu",
    "overhead",
    "memory",
    "cold",
    "lookahead",
    "victims",
    "zipf",
    "clients",
    "tail",
    "grpc",
    "promises",
)


def main(arguments: list[str] | None = None) -> int:
    """Exit code 1 if a goal was missed."""
    parser = argparse.ArgumentParser(prog="benchmarks", description="See benchmarks/README.md.")
    parser.add_argument(
        "which", nargs="*", metavar="BENCHMARK", help=f"of {', '.join(BENCHMARKS)}; default: all"
    )
    parser.add_argument("--repeats", type=int, default=5, help="blocks of each side (default 5)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the JSON files")
    parser.add_argument("--work-dir", type=Path, default=_work_dir(), help="on a local disk")
    parser.add_argument("--scale", type=int, default=1, help="divide table sizes: a trial run")
    parser.add_argument(
        "--side", choices=("momentd", "torch"), default="momentd",
        help="torch: on both sides, to try the harness without a daemon",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    unknown = set(options.which) - set(BENCHMARKS)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    settings = Settings(
        work_dir=options.work_dir,
        results=options.results,
        repeats=options.repeats,
        scale=options.scale,
        side=options.side,
    )
    settings.work_dir.mkdir(parents=True, exist_ok=True)
    missed, skipped = False, []
    for name in options.which or BENCHMARKS:
        try:
            result = importlib.import_module(f"benchmarks.bench_{name}").run(settings)
        except Skipped as reason:
            skipped.append(f"SKIPPED {name}: {reason}")
            settings.console.print(skipped[-1], style="yellow")
            continue
        settings.console.print(f"written to {publish(result, settings)}")
        for plot in plots.draw(settings.results / f"{name}.json"):
            settings.console.print(f"drawn in {plot}")
        missed |= any(row.reached is False for row in result.rows)
    if skipped and len(options.which or BENCHMARKS) > 1:
        # Once more where it is seen: at the end.
        settings.console.print("\n".join(skipped), style="yellow")
    return int(missed)


def _end(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def _work_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


if __name__ == "__main__":
    # As Ctrl-C does: daemons and folders of a benchmark go with it.
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main())
