"""Importing momentd starts nothing and loads little."""

import json
import subprocess
import sys

import pytest

import momentd

PROBE = """
import json, os, sys, threading
import momentd
names = dir(momentd)
seen = {
    "threads": threading.active_count(),
    "descriptors": len(os.listdir("/proc/self/fd")),
    "modules": [m for m in ("torch", "grpc", "lmdb", "numba") if m in sys.modules],
    "names": [n for n in momentd.__all__ if n not in names],
}
client = momentd.connect("unix:/nowhere.sock")
seen["threads_after"] = threading.active_count()
seen["modules_after"] = [m for m in ("torch", "grpc", "lmdb", "numba") if m in sys.modules]
print(json.dumps(seen))
"""


def probe():
    paths = ["client", "server", "protos"]
    root = str(__import__("pathlib").Path(momentd.__file__).parents[2])
    code = f"import sys; sys.path[:0] = [{root!r} + '/' + p for p in {paths!r}]\n{PROBE}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    return json.loads(done.stdout)


def test_import_starts_no_thread_and_loads_neither_torch_nor_grpc():
    seen = probe()
    assert seen["threads"] == seen["threads_after"] == 1
    assert seen["modules"] == seen["modules_after"] == []
    assert seen["names"] == []


def test_every_public_name_resolves():
    for name in momentd.__all__:
        assert getattr(momentd, name) is not None


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nothing"):
        momentd.nothing  # noqa: B018
