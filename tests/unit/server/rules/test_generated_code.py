"""What the compiler made of the kernels: vectors, no contraction, the order of the protocol."""

import json
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

# A cached kernel has no code to look at, so this compiles all into an empty cache, in a process of
# its own, and prints the code.
_COMPILE = """
import json
import numpy as np
from momentd_server.rules import adam_kernels, sparse_adam
codes = {}
for kernel, mask in (("apply_dense", None), ("apply_masked", np.ones((2, 1), np.uint8))):
    compiled = getattr(adam_kernels, kernel)
    for dtype in ("float32", "float64"):
        sparse_adam._apply_once(dtype, mask)
        signature = compiled.signatures[-1]
        codes[f"{dtype} {kernel} llvm"] = compiled.inspect_llvm(signature)
        codes[f"{dtype} {kernel} asm"] = compiled.inspect_asm(signature)
print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    """code(dtype, kernel, form): what the compiler made of a kernel, as "llvm" or "asm"."""
    cache = str(tmp_path_factory.mktemp("kernels"))
    environment = {"PYTHONPATH": ":".join(sys.path), "HOME": cache, "MOMENTD_KERNEL_CACHE": cache}
    command = [sys.executable, "-c", _COMPILE]
    made = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    codes = json.loads(made.stdout)
    return lambda dtype, kernel, form: codes[f"{dtype} {kernel} {form}"]


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


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86 instructions")
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
    if " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("no AVX2")
    assert re.search(r"vsqrtps\s+%[yz]mm", code("float32", "apply_dense", "asm"))


@pytest.mark.parametrize("kernel", ["apply_dense", "apply_masked"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_are_free_of_reference_counts(code, dtype, kernel):
    body = function(code(dtype, kernel, "llvm"), kernel, "llvm")
    assert "NRT_" not in body
    assert "atomicrmw" not in body


class Regions:
    """The control flow of a function, cut at its fences.

    A region is what can run after a fence before another one: `stores[fence]` are its stores as
    (kind, instruction), kind "word" for 64-bit integers and "row" for floating point;
    `after[fence]` are the fences that may come next, None for the end of the function.
    """

    def __init__(self, body):
        self.blocks = {}
        label = "entry"
        for line in body.splitlines():
            if found := re.match(r"([\w.$-]+|\"[^\"]+\"):", line):
                label = found[1]
            self.blocks.setdefault(label, []).append(line.strip())
        self.stores, self.after = {}, {}
        for name, lines in self.blocks.items():
            for at, line in enumerate(lines):
                if line.startswith('fence syncscope("singlethread") seq_cst'):
                    self._explore((name, at))

    def _explore(self, fence):
        self.stores[fence], self.after[fence] = set(), set()
        seen, todo = set(), [(fence[0], fence[1] + 1)]
        while todo:
            name, start = todo.pop()
            for at, line in enumerate(self.blocks[name][start:], start):
                if line.startswith("fence"):
                    self.after[fence].add((name, at))
                    break
                if found := re.match(r"store (i64|(?:<\d+ x )?(?:float|double))", line):
                    self.stores[fence].add(("word" if found[1] == "i64" else "row", line))
                elif "llvm.mem" in line:
                    self.stores[fence].add(("row", line))
                elif line.startswith("ret "):
                    self.after[fence].add(None)
                for target in re.findall(r"label %([\w.$-]+|\"[^\"]+\")", line):
                    if target not in seen:
                        seen.add(target)
                        todo.append((target, 0))

    def kinds(self, fence):
        return [kind for kind, _ in sorted(self.stores[fence])]

    def only_next(self, fence):
        (following,) = self.after[fence]
        return following


@pytest.mark.parametrize("kernel", ["apply_dense", "apply_masked"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_stores_of_the_row_protocol_stay_in_order(code, dtype, kernel):
    """dirty word | undo copy | row in work | record and result | row done | the next row."""
    body = function(code(dtype, kernel, "llvm"), kernel, "llvm")
    regions = Regions(body)
    # The dirty word is the kernel's argument with the row's use count.
    (word,) = re.findall(r"(%[\w.$-]+) = or i64 .*%arg\.word\b", body)
    (dirty,) = (
        at
        for at in regions.stores
        if any(re.search(re.escape(word) + r"\b", s) for _, s in regions.stores[at])
    )
    undo = regions.only_next(dirty)
    in_work = regions.only_next(undo)
    record = regions.only_next(in_work)
    done = regions.only_next(record)
    next_row = regions.only_next(done)
    assert regions.kinds(dirty) == ["word"]
    assert set(regions.kinds(undo)) == {"row"}
    assert regions.kinds(in_work) == ["word"]
    assert set(regions.kinds(record)) == {"row"}
    assert regions.kinds(done) == ["word"]
    assert regions.kinds(next_row) == []
    assert regions.after[next_row] <= {dirty, None}


def test_prefetches_reach_the_code(code):
    assert "llvm.prefetch" in code("float32", "apply_dense", "llvm")
