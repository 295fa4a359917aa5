"""The momentd optimizers of this process, as long as somebody else holds them."""

from __future__ import annotations

import os
import weakref
from typing import Any

_optimizers: weakref.WeakSet[Any] = weakref.WeakSet()


def register(optimizer: Any) -> None:
    _optimizers.add(optimizer)


def optimizers() -> list[Any]:
    """Those that were made, or used since the fork, in this process."""
    return [optimizer for optimizer in list(_optimizers) if optimizer.pid == os.getpid()]
