"""What the compiler made of the kernels: vectors, no contraction, the order of the protocol."""

import re
import subprocess
import sys

import pytest

# A cached kernel has no code to look at, so this compiles into an empty cache, in a process of
# its own, and prints the code of one kernel.
_COMPILE = """
import sys
from momentd_server.rules import adam_kernels, sparse_adam
import numpy as np
dtype, kernel, form = sys.argv[1:]
mask = None if kernel == "apply_dense" else np.ones((2, 1), np.uint8)
sparse_adam._apply_once(dtype, mask)
compiled = getattr(adam_kernels, kernel)
code = compiled.inspect_llvm() if form == "llvm" else compiled.inspect_asm()
print("".join(code.values()))
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """code(dtype, kernel, form): the code, compiled once for each combination."""
    known = {}

    def compile_code(dtype, kernel, form):
        key = (dtype, kernel, form)
        if key not in known:
            cache = tmp_path_factory.mktemp("kernels")
            known[key] = subprocess.run(
                [sys.executable, "-c", _COMPILE, *key],
                env={"PATH": "", "PYTHONPATH": ":".join(sys.path), "HOME": str(cache),
                     "MOMENTD_KERNEL_CACHE": str(cache)},
                check=True, capture_output=True, text=True,
            ).stdout  # fmt: skip
        return known[key]

    return compile_code


def function(text, name, form):
    """The body of the function whose mangled name has `name` in it, without its Python wrapper."""
    pattern = {
        "llvm": rf"^define [^\n]*@_ZN14momentd_server[^\n]*{name}[^\n]*\{{\n(.*?)^\}}",
        "asm": rf"^_ZN14momentd_server\w*{name}\w*:\n(.*?)^\.Lfunc_end",
    }[form]
    return re.search(pattern, text, re.DOTALL | re.MULTILINE)[1]


@pytest.mark.parametrize("kernel", ["apply_dense", "apply_masked"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_no_operation_may_be_contracted_or_reordered(code, dtype, kernel):
    text = code(dtype, kernel, "llvm")
    flags = re.findall(r"= f(?:add|sub|mul|div) (\w+ )", text)
    assert flags
    assert {flag.strip() for flag in flags} <= {"float", "double"}
    assert "fmuladd" not in text
    assert "llvm.fma" not in text
    assert not re.search(r"call (fast|contract|reassoc|afn)\b", text)


@pytest.mark.skipif("x86" not in sys.implementation._multiarch, reason="names of x86 instructions")
@pytest.mark.parametrize("kernel", ["apply_dense", "apply_masked"])
@pytest.mark.parametrize(("dtype", "suffix"), [("float32", "ps"), ("float64", "pd")])
def test_the_arithmetic_is_done_in_vectors_without_fma(code, dtype, suffix, kernel):
    text = code(dtype, kernel, "asm")
    assert not re.search(r"\bvfn?m(add|sub)", text)
    assert "rsqrt" not in text
    assert "rcp" not in text
    for operation in ("sqrt", "div", "mul", "add", "sub"):
        assert re.search(rf"\bv?{operation}{suffix}\s", text), operation


def test_vectors_have_at_least_256_bits_where_the_cpu_has_them(code):
    with open("/proc/cpuinfo") as cpu:
        if " avx2 " not in cpu.read():
            pytest.skip("no AVX2")
    assert re.search(r"vsqrtps\s+%[yz]mm", code("float32", "apply_dense", "asm"))


@pytest.mark.parametrize("kernel", ["apply_dense", "apply_masked"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_are_free_of_reference_counts(code, dtype, kernel):
    body = function(code(dtype, kernel, "llvm"), kernel, "llvm")
    assert "NRT_" not in body
    assert "atomicrmw" not in body


@pytest.mark.parametrize("kernel", ["apply_dense", "apply_masked"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_stores_of_the_row_protocol_are_between_fences_and_in_order(code, dtype, kernel):
    """dirty word | undo copy | row in work | record and result | row done, and nothing moved."""
    body = function(code(dtype, kernel, "llvm"), kernel, "llvm")
    pieces = re.split(r"fence syncscope\(\"singlethread\"\) seq_cst", body)
    real = {"float32": "float", "float64": "double"}[dtype]
    # What is stored between two fences: "w" one 64-bit word, "r" records, undo or results.
    kinds = []
    for piece in pieces:
        stored = re.findall(r"^\s+store (?:<\d+ x (?:float|double)>|float|double|i64)", piece, re.M)
        kinds.append("".join(sorted({"w" if "i64" in line else "r" for line in stored})))
    protocol = "|".join(kinds)
    copied = f"llvm.memcpy" in body  # noqa: F541
    assert real in body
    assert not copied
    # begin_part: four words; begin_row: word, undo, word; the row; end_row: word.
    assert re.search(r"\|w\|w\|w\|w\|.*\|w\|r\|w\|r.*\|w\|", protocol + "|"), protocol


def test_prefetches_reach_the_code(code):
    assert "llvm.prefetch" in code("float32", "apply_dense", "llvm")
