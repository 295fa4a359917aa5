"""Command line of the demo. The defaults depend on the size of the tree."""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .evaluation import Goal

# Trees smaller than this get the small defaults.
SMALL_TREE_ROWS = 200_000

LARGE: dict[str, Any] = {
    "dim": 128, "cache": "512MiB", "batch": 2048, "negatives": 512, "matched": 50,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "dim": 32, "cache": "16MiB", "batch": 256, "negatives": 256, "matched": 10,
}  # fmt: skip
LARGE_GOAL = Goal(mrr=0.20, hits=0.40, baseline_mrr=0.03, before_mrr=0.07)
# Among 1 + 2 x 10 candidates chance alone reaches 0.17, and "more descendants first" 0.09.
SMALL_GOAL = Goal(mrr=0.33)
GOAL_PASSES = 2


@dataclass(frozen=True)
class Options:
    """What a run is told."""

    seconds: float | None
    passes: int
    dim: int
    rows: int | None
    cache: str
    device: torch.device
    batch: int
    ancestors: int
    negatives: int
    pairs: int
    matched: int
    lr: float
    seed: int
    optimizer: str
    compare_steps: int
    work_dir: Path
    goal: Goal


def parse(arguments: list[str] | None = None) -> Options:
    """Options from the command line; exits with a message if they do not parse."""
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    rows = given["rows"]
    small = rows is not None and rows < SMALL_TREE_ROWS
    chosen = {name: value for name, value in given.items() if value is not None}
    values = {"seconds": None, "rows": None, **(SMALL if small else LARGE), **chosen}
    values["device"] = _device(parser, values["device"])
    return Options(**values, goal=SMALL_GOAL if small else LARGE_GOAL)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="taxonomy",
        description="Learn the NCBI taxonomy with moments that do not fit the cache. Exits with 1 "
        "if the embedding is not as good as it should be.",
    )
    add = parser.add_argument
    add("--seconds", type=_positive(float), help="end training after this time, unjudged")
    add("--passes", type=_positive(int), default=2, help="over all nodes (default 2)")
    add("--dim", type=_positive(int), help="of the embedding (default 128)")
    add(
        "--rows",
        type=_positive(int),
        help="train on whole clades of about so many nodes; below 200,000 with smaller defaults: "
        "dim 32, cache 16MiB, batch 256, 256 negatives, 10 + 10 rivals",
    )
    add("--cache", metavar="SIZE", help="bound of the daemon's row cache (default 512MiB)")
    add("--device", default="auto", help="cpu, cuda or auto (default)")
    add("--batch", type=_positive(int), help="nodes in a step (default 2048)")
    add("--ancestors", type=_positive(int), default=8, help="drawn for each node (default 8)")
    add("--negatives", type=_positive(int), help="shared by a batch (default 512)")
    add("--pairs", type=_positive(int), default=2000, help="held out (default 2000)")
    add("--matched", type=_positive(int), help="larger, and smaller, rivals of each (default 50)")
    add("--lr", type=_positive(float), default=0.05, help="learning rate (default 0.05)")
    add("--seed", type=int, default=0)
    add(
        "--optimizer",
        choices=("momentd", "torch"),
        default="momentd",
        help="torch: torch.optim.SparseAdam with all moments in memory, no daemon",
    )
    add(
        "--compare-steps",
        type=int,
        default=50,
        help="steps of torch.optim.SparseAdam in memory that are timed at the end (default 50)",
    )
    add(
        "--work-dir",
        type=Path,
        default=_default_work_dir(),
        metavar="DIR",
        help="local disk for the daemon's temporary data directory (default %(default)s)",
    )
    return parser


def _positive(kind: type[int | float]) -> Any:
    def convert(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"{text} is not above 0")
        return value

    convert.__name__ = f"{kind.__name__} above 0"  # argparse shows it for what does not parse
    return convert


def _device(parser: argparse.ArgumentParser, name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        parser.error(f"--device {name}: not a device of torch")
    if device.type == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this torch has no CUDA device; see README, `make demo TORCH=`")
    return device


def _default_work_dir() -> Path:
    """The user's cache directory: the temporary directory is often memory, not disk."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    try:
        Path(home).mkdir(parents=True, exist_ok=True)
    except OSError:
        return Path(tempfile.gettempdir())
    return Path(home)
