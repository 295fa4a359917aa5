# pyright: basic
"""Two operations that numba lacks: a prefetch and a compiler fence. Only for use in kernels."""

from collections.abc import Callable
from typing import Any, cast

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_I32 = ir.IntType(32)
_WILL_WRITE, _KEEP_IN_ALL_CACHES, _DATA = 1, 3, 1


@intrinsic
def _prefetch(typingctx, array, index):
    if not isinstance(array, types.Array) or not isinstance(index, types.Integer):
        return None

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        at = context.cast(builder, args[1], signature.args[1], types.intp)
        pointer = builder.bitcast(builder.gep(data, [at]), cgutils.voidptr_t)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(function, [pointer, _I32(_WILL_WRITE), _I32(_KEEP_IN_ALL_CACHES), _I32(_DATA)])
        return context.get_dummy_value()

    return types.void(array, index), codegen


@intrinsic
def _fence(typingctx):
    def codegen(context, builder, signature, args):
        builder.fence("seq_cst", targetscope="singlethread")
        return context.get_dummy_value()

    return types.void(), codegen


prefetch = cast("Callable[[Any, Any], None]", _prefetch)
"""prefetch(array, index): ask for the cache line of `array[index]`, an index into the flat array.

It will be written or read soon. A hint: never faults, whatever the index. The array must be
C-contiguous.
"""

fence = cast("Callable[[], None]", _fence)
"""fence(): keep the compiler from moving loads and stores across this point; no instruction.

Enough for a process that is killed: what it leaves is a prefix of its executed stores, in program
order, whatever the CPU. It orders nothing between threads.
"""
