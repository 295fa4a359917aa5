"""momentd: optimizer state of sparse embeddings, out of the trainer's memory.

    import momentd
    optimizer = momentd.SparseAdam(model.parameters(), lr=1e-3)

Importing this package starts nothing: no thread, no connection, no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from momentd import errors as errors

if TYPE_CHECKING:
    from momentd import rules as rules
    from momentd._discovery import init as init
    from momentd._lookahead import lookahead as lookahead
    from momentd.client import Client as Client
    from momentd.client import connect as connect
    from momentd.clip import clip_grad_norm_ as clip_grad_norm_
    from momentd.optim.sparse_adam import SparseAdam as SparseAdam
    from momentd.table import Table as Table

# Public name -> module that has it; imported on first use (PEP 562).
_LAZY: dict[str, str] = {
    "Client": "momentd.client",
    "Table": "momentd.table",
    "connect": "momentd.client",
    "init": "momentd._discovery",
    "lookahead": "momentd._lookahead",
    # These import torch.
    "SparseAdam": "momentd.optim.sparse_adam",
    "clip_grad_norm_": "momentd.clip",
}
_LAZY_MODULES = ("optim", "rules")

__all__ = [
    "Client",
    "SparseAdam",
    "Table",
    "clip_grad_norm_",
    "connect",
    "errors",
    "init",
    "lookahead",
    "rules",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(f"momentd.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module 'momentd' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        hint = f"momentd.{name} needs PyTorch: pip install 'momentd[torch]'"
        raise ModuleNotFoundError(hint, name="torch") from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
