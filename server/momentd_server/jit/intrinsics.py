# pyright: basic
"""Two operations that numba lacks: a prefetch and a compiler fence. Only for use in kernels."""

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_I32 = ir.IntType(32)
_WILL_WRITE, _KEEP_IN_ALL_CACHES, _DATA = 1, 3, 1


@intrinsic
def prefetch(typingctx, array, index):
    """Ask for the cache line of `array[index]` (flat index), which will be written or read soon.

    A hint: never faults, whatever the index. The array must be C-contiguous.
    """
    if not isinstance(array, types.Array) or not isinstance(index, types.Integer):
        return None

    def codegen(context, builder, signature, args):
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        at = context.cast(builder, args[1], signature.args[1], types.intp)
        pointer = builder.bitcast(builder.gep(data, [at]), cgutils.voidptr_t)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        builder.call(
            function, [pointer, _I32(_WILL_WRITE), _I32(_KEEP_IN_ALL_CACHES), _I32(_DATA)]
        )
        return context.get_dummy_value()

    return types.void(array, index), codegen


@intrinsic
def fence(typingctx):
    """Keep the compiler from moving loads and stores across this point; emits no instruction.

    Enough for a process that is killed: what it leaves is a prefix of its executed stores, in
    program order, whatever the CPU. It orders nothing between threads.
    """

    def codegen(context, builder, signature, args):
        builder.fence("seq_cst", targetscope="singlethread")
        return context.get_dummy_value()

    return types.void(), codegen
