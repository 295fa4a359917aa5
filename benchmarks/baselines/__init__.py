"""Other ways to keep the moments of a large sparse table, each as an optimizer of one parameter.

All do the arithmetic of `torch.optim.SparseAdam`; a test compares each with it.
"""

from .base import Baseline
from .lmdb_rows import LmdbRows
from .mapped_records import MappedRecords
from .memmap_files import MemmapFiles

BASELINES: dict[str, type[Baseline]] = {
    "memmap": MemmapFiles,
    "mapping": MappedRecords,
    "lmdb": LmdbRows,
}

__all__ = ["BASELINES", "Baseline", "LmdbRows", "MappedRecords", "MemmapFiles"]
