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

    def __post_init__(self) -> None:
        if self.state_dtype is not None and self.state_dtype not in NUMPY_DTYPE:
            raise UnsupportedFeature(
                f"state_dtype={self.state_dtype} is not implemented: "
                "choose torch.float32, torch.float64, or None for the parameter's own precision"
            )


def check_checkpoint(checkpoint: str | None, keep_snapshots: int | None) -> None:
    """Refuse what this version does not do yet, and what does not exist."""
    if checkpoint not in {None, "full", "snapshot"}:
        raise InvalidArgument(f"checkpoint must be 'full' or 'snapshot', got {checkpoint!r}")
    if checkpoint == "snapshot" or keep_snapshots is not None:
        raise UnsupportedFeature(
            "snapshots are not implemented in this version: leave out checkpoint='snapshot' and "
            "keep_snapshots; state_dict() then returns the complete moments (checkpoint='full')"
        )
