"""What an optimizer is told beside hyper-parameters."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from momentd.errors import InvalidArgument, UnsupportedFeature

# The element types that rules have, as torch and as numpy name them.
NUMPY_DTYPE = {torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64)}


@dataclass(frozen=True, slots=True)
class Options:
    """What belongs to this machine and never gets into a checkpoint or a parameter group."""

    address: str | None = None
    run: str | None = None
    state_dtype: torch.dtype | None = None
    checkpoint: str = "snapshot"
    keep_snapshots: int | None = None

    def __post_init__(self) -> None:
        if self.checkpoint not in {"full", "snapshot"}:
            raise InvalidArgument(
                f"checkpoint must be 'snapshot' or 'full', got {self.checkpoint!r}"
            )
        if self.keep_snapshots is not None and (
            self.keep_snapshots < 1 or self.checkpoint != "snapshot"
        ):
            raise InvalidArgument(
                f"keep_snapshots={self.keep_snapshots} with checkpoint={self.checkpoint!r}: it is "
                "how many snapshots of state_dict() are kept, at least 1, and needs "
                "checkpoint='snapshot'"
            )
        if self.state_dtype is not None and self.state_dtype not in NUMPY_DTYPE:
            raise UnsupportedFeature(
                f"state_dtype={self.state_dtype} is not implemented: "
                "choose torch.float32, torch.float64, or None for the parameter's own precision"
            )
