# pyright: basic
"""What kernels need of libc and of the CPU: pread, errno, futex, atomics. Only for use in kernels.

Symbols are bound by name (not by address), so kernels that use them can be cached on disk. All
control words are elements of int64 arrays; addresses are plain integers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from momentd_server.jit import kernel

_I32 = ir.IntType(32)
_I64 = ir.IntType(64)

# ssize_t pread64(int fd, void *buffer, size_t count, off64_t offset)
_pread = types.ExternalFunction(
    "pread64", types.int64(types.int32, types.uint64, types.uint64, types.int64)
)
# Gives int *: the address of this thread's errno.
_errno_location = types.ExternalFunction("__errno_location", types.uint64())
# void *memcpy(void *to, const void *from, size_t count)
_memcpy = types.ExternalFunction("memcpy", types.uint64(types.uint64, types.uint64, types.uint64))
# long syscall(long number, uint32_t *word, int op, uint32_t value, NULL, NULL, 0)
_syscall6 = types.ExternalFunction(
    "syscall",
    types.int64(
        types.int64,
        types.uint64,
        types.int64,
        types.uint64,
        types.uint64,
        types.uint64,
        types.int64,
    ),
)

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(os.uname().machine, 98)  # 98: the generic table
_FUTEX_WAIT_PRIVATE = 128
_FUTEX_WAKE_PRIVATE = 129


@intrinsic
def _load_i32(typingctx, address):
    """The int32 at an address."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _I32.as_pointer())
        return builder.load(pointer)

    return types.int32(types.uint64), codegen


@intrinsic
def _atomic_add(typingctx, address, amount):
    """Add to the int64 at an address, sequentially consistent; returns what it was before."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.atomic_rmw("add", pointer, args[1], "seq_cst")

    return types.int64(types.uint64, types.int64), codegen


@intrinsic
def _atomic_load(typingctx, address):
    """The int64 at an address, sequentially consistent."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        return builder.load_atomic(pointer, "seq_cst", 8)

    return types.int64(types.uint64), codegen


@intrinsic
def _atomic_store(typingctx, address, value):
    """Set the int64 at an address, sequentially consistent."""

    def codegen(context, builder, signature, args):
        pointer = builder.inttoptr(args[0], _I64.as_pointer())
        builder.store_atomic(args[1], pointer, "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.uint64, types.int64), codegen


# Casts, because a checker takes an intrinsic for its typing function.
load_i32 = cast("Callable[[Any], Any]", _load_i32)
atomic_add = cast("Callable[[Any, Any], Any]", _atomic_add)
atomic_load = cast("Callable[[Any], Any]", _atomic_load)
atomic_store = cast("Callable[[Any, Any], None]", _atomic_store)


@kernel
def errno():
    """The error number of this thread's last failed call."""
    return load_i32(_errno_location())


@kernel
def pread(fd, address, nbytes, offset):
    """One `pread`: bytes read (0 at the end of the file) or -errno."""
    got = _pread(fd, address, nbytes, offset)
    if got < 0:
        return -int(errno())
    return got


@kernel
def copy(to_address, from_address, nbytes):
    """memcpy between addresses."""
    _memcpy(to_address, from_address, nbytes)


@kernel
def futex_wait(address, value):
    """Sleep while the low half of the int64 at `address` is uint32 `value`. May return early."""
    _syscall6(_FUTEX, address, _FUTEX_WAIT_PRIVATE, value, 0, 0, 0)


@kernel
def futex_wake(address, threads):
    """Wake up to that many threads that sleep on `address`."""
    _syscall6(_FUTEX, address, _FUTEX_WAKE_PRIVATE, threads, 0, 0, 0)


@intrinsic
def _array_at(typingctx, address, count, dtype):
    """The `count` elements of a dtype at an address, as a one-dimensional array: a bare view."""
    element = dtype.dtype
    array_type = types.Array(element, 1, "C")

    def codegen(context, builder, signature, args):
        array = context.make_array(array_type)(context, builder)
        itemsize = context.get_constant(types.intp, element.bitwidth // 8)
        populate_array(
            array,
            data=builder.inttoptr(args[0], array.data.type),
            shape=cgutils.pack_array(builder, [args[1]]),
            strides=cgutils.pack_array(builder, [itemsize]),
            itemsize=itemsize,
            meminfo=None,
        )
        return array._getvalue()

    return array_type(types.uint64, types.intp, dtype), codegen


array_at = cast("Callable[[Any, Any, Any], Any]", _array_at)
