"""The kernel decorator, the warm-up registry, and the cache directory of this process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar, cast

import numba
from numba.core import config

from momentd_server.jit import cache

_Function = TypeVar("_Function", bound=Callable[..., Any])

# Set before the first kernel is defined: numba looks it up in the decorator.
CACHE_DIRECTORY: Final[Path] = cache.choose_directory(cache.cache_key())
_settings: Any = config
_settings.CACHE_DIR = str(CACHE_DIRECTORY)

_OPTIONS: Final[dict[str, Any]] = {
    "nogil": True,
    "cache": True,
    "error_model": "numpy",
    "fastmath": False,
    "_nrt": False,
}

_warmups: dict[str, Callable[[], None]] = {}


def kernel(function: _Function) -> _Function:
    """Compile a function for the CPU at its first call; it runs without the GIL.

    Update arithmetic must give the same bits on every CPU and in every version, so there is no
    fast-math (which also keeps the compiler from contracting a product and a sum into one
    operation). Division by zero gives inf or NaN as in numpy, without a branch that would keep
    loops from being vectorised.

    A kernel cannot allocate arrays (numba refuses to compile it): without numba's reference
    counts, slices cost nothing, where each would be two atomic operations and two calls.
    """
    return cast("_Function", numba.njit(**_OPTIONS)(function))


def inline_kernel(function: _Function) -> _Function:
    """A kernel that becomes part of the kernels that call it.

    For what is called once a row: each array is passed as seven words, so a call costs as much as
    the arithmetic of a short row.
    """
    return cast("_Function", numba.njit(forceinline=True, **_OPTIONS)(function))


def register_warmup(function: Callable[[], None]) -> Callable[[], None]:
    """Add a function that calls kernels with each combination of argument types in use.

    Usable as a decorator. Whatever is not called here is compiled while somebody waits for it.
    """
    _warmups[f"{function.__module__}.{function.__qualname__}"] = function
    return function


def is_cached() -> bool:
    """Whether `warm_up` only has to load. False: it compiles, for some seconds; say so."""
    return cache.is_warm(CACHE_DIRECTORY, _warmups)


def warm_up(progress: Callable[[str, int, int], None] | None = None) -> None:
    """Load all kernels, compiling those that are not in the cache.

    `progress` is called with (name, done, total) before each part and with ("", total, total)
    at the end.
    """
    total = len(_warmups)
    for done, (name, function) in enumerate(_warmups.items()):
        if progress is not None:
            progress(name, done, total)
        function()
    if progress is not None:
        progress("", total, total)
    cache.mark_warm(CACHE_DIRECTORY, _warmups)
    cache.remove_stale(CACHE_DIRECTORY)
