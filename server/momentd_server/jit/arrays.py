"""Arrays as kernels want them."""

from __future__ import annotations

import ctypes
from typing import TypeVar

import numpy as np

_Array = TypeVar("_Array", bound="np.ndarray")


def mutable_alias(array: _Array) -> _Array:
    """The same memory without the read-only flag, for kernels that only read it.

    numba takes a read-only array for another type and would compile the kernel again. The result
    does not keep the memory alive: hold on to `array` while it is used.
    """
    if array.flags.writeable:
        return array
    memory = (ctypes.c_char * array.nbytes).from_address(array.ctypes.data)
    return np.frombuffer(memory, array.dtype).reshape(array.shape)
