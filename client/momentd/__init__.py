"""momentd: optimizer state of sparse embeddings, out of the trainer's memory.

    import momentd
    optimizer = momentd.SparseAdam(model.parameters(), lr=1e-3)

Importing this package starts nothing: no thread, no connection, no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from momentd import errors

if TYPE_CHECKING:
    from momentd import rules
    from momentd.client import Client, connect
    from momentd._discovery import init
    from momentd.table import Table

# Public name -> module that has it; imported on first use (PEP 562).
_LAZY: dict[str, str] = {
    "Client": "momentd.client",
    "Table": "momentd.table",
    "connect": "momentd.client",
    "init": "momentd._discovery",
    # These import torch.
    "SparseAdam": "momentd.optim.sparse_adam",
    "clip_grad_norm_": "momentd.clip",
}
_LAZY_MODULES = ("optim", "rules")


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"momentd.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'momentd' has no attribute {name!r}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_LAZY_MODULES})
