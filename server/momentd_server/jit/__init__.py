"""Compiled kernels: the decorator and its cache, what numba lacks, the thread pool."""

from momentd_server.jit.arrays import mutable_alias
from momentd_server.jit.compiler import (
    CACHE_DIRECTORY,
    inline_kernel,
    is_cached,
    kernel,
    register_warmup,
    warm_up,
)
from momentd_server.jit.intrinsics import fence, prefetch
from momentd_server.jit.pool import Pool

__all__ = [
    "CACHE_DIRECTORY",
    "Pool",
    "fence",
    "inline_kernel",
    "is_cached",
    "kernel",
    "mutable_alias",
    "prefetch",
    "register_warmup",
    "warm_up",
]
