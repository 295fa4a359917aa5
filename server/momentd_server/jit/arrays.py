"""Arrays as kernels want them."""

from __future__ import annotations

import ctypes
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_Scalar = TypeVar("_Scalar", bound=np.generic)


def mutable_alias(array: NDArray[_Scalar]) -> NDArray[_Scalar]:
    """The same memory without the read-only flag, for kernels that only read it.

    numba takes a read-only array for another type and would compile the kernel again. The result
    does not keep the memory alive: hold on to `array` while it is used.
    """
    if array.flags.writeable:
        return array
    if array.size == 0:
        return np.empty(array.shape, array.dtype)
    memory: Any = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    return np.frombuffer(memory, array.dtype).reshape(array.shape)
