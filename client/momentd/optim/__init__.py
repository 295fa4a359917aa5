"""Optimizers whose state lives in a momentd daemon."""

from momentd.optim.sparse_adam import SparseAdam

__all__ = ["SparseAdam"]
