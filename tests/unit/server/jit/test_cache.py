"""The kernel cache: its key, its place, what is removed, and that a second start loads it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from momentd_server.jit import cache


@pytest.fixture
def home(tmp_path, monkeypatch):
    for variable in ("MOMENTD_KERNEL_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(cache.tempfile, "tempdir", str(tmp_path))
    return tmp_path / "home"


def test_roots_in_order(home, tmp_path, monkeypatch):
    place = Path("momentd", "kernels", "key")
    assert cache.choose_directory("key") == home / ".cache" / place
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.choose_directory("key") == tmp_path / "xdg" / place
    monkeypatch.setenv("MOMENTD_KERNEL_CACHE", str(tmp_path / "own"))
    assert cache.choose_directory("key") == tmp_path / "own" / place


def test_directory_is_for_its_owner_only(home):
    assert cache.choose_directory("key").stat().st_mode & 0o777 == 0o700


def test_directory_that_others_may_write_is_not_used(home, tmp_path, monkeypatch):
    monkeypatch.setenv("MOMENTD_KERNEL_CACHE", str(tmp_path / "open"))
    open_one = tmp_path / "open" / "momentd" / "kernels" / "key"
    open_one.mkdir(parents=True)
    open_one.chmod(0o777)
    assert cache.choose_directory("key").is_relative_to(home)


def test_without_any_place_a_temporary_one_is_used_and_said(home, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(cache, "_private", lambda _: False)
    directory = cache.choose_directory("key")
    assert directory.parent == tmp_path
    assert "MOMENTD_KERNEL_CACHE" in caplog.text


def test_key_changes_with_any_kernel_source(tmp_path, monkeypatch):
    for folder in ("jit", "rules", "storage"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.py").write_text("x = 1\n")
    monkeypatch.setattr(cache, "_SERVER", tmp_path)
    keys = {cache.cache_key()}
    for folder in ("jit", "rules", "storage"):
        (tmp_path / folder / "a.py").write_text("x = 2\n")
        keys.add(cache.cache_key())
    (tmp_path / "rules" / "b.py").write_text("")
    keys.add(cache.cache_key())
    assert len(keys) == 5


@pytest.mark.parametrize(
    ("where", "name"),
    [(cache.numba, "__version__"), (cache.llvmlite, "__version__"), (cache.config, "CPU_NAME"),
     (cache.config, "CPU_FEATURES")],
)  # fmt: skip
def test_key_changes_with_compiler_and_cpu(where, name, monkeypatch):
    before = cache.cache_key()
    monkeypatch.setattr(where, name, "another")
    assert cache.cache_key() != before


def test_warm_means_all_of_these_names(tmp_path):
    assert not cache.is_warm(tmp_path, ["a"])
    cache.mark_warm(tmp_path, ["a", "b"])
    assert cache.is_warm(tmp_path, ["b"])
    assert not cache.is_warm(tmp_path, ["b", "c"])


def test_keys_unused_for_30_days_are_removed(tmp_path):
    now = 1e9
    ages = {"own": 90, "old": 31, "young": 29, "never-warm": 31}
    for name, days in ages.items():
        directory = tmp_path / name
        directory.mkdir()
        if name != "never-warm":
            cache.mark_warm(directory, [])
        used = now - days * 24 * 3600
        for path in (*directory.iterdir(), directory):
            os.utime(path, (used, used))
    removed = cache.remove_stale(tmp_path / "own", now_s=now)
    assert sorted(path.name for path in removed) == ["never-warm", "old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own", "young"]


# In a copy of the package, so that its sources stay the same between the two starts, with one
# kernel of its own, so that the test does not wait for those of the daemon.
_KERNEL = """
from momentd_server.jit import kernel, register_warmup

@kernel
def double(x):
    return 2 * x

@register_warmup
def warm():
    double(1)
"""
_START = """
import json
from momentd_server import jit
from momentd_server.rules_of_test import double
cached = jit.is_cached()
parts = []
jit.warm_up(lambda *part: parts.append(part))
stats = double.stats
print(json.dumps([cached, parts, len(stats.cache_hits), len(stats.cache_misses)]))
"""


def start(directory):
    path = ":".join([str(directory), *sys.path])
    environment = {"PYTHONPATH": path, "MOMENTD_KERNEL_CACHE": str(directory / "cache")}
    command = [sys.executable, "-c", _START]
    run = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(run.stdout)


def test_second_start_compiles_nothing(tmp_path):
    package = tmp_path / "momentd_server"
    shutil.copytree(cache._SERVER, package)
    (package / "rules_of_test.py").write_text(_KERNEL)
    name = "momentd_server.rules_of_test.warm"
    assert start(tmp_path) == [False, [[name, 0, 1], ["", 1, 1]], 0, 1]
    assert start(tmp_path) == [True, [[name, 0, 1], ["", 1, 1]], 1, 0]


def test_a_kernel_of_another_key_is_not_used(tmp_path):
    package = tmp_path / "momentd_server"
    shutil.copytree(cache._SERVER, package)
    (package / "rules_of_test.py").write_text(_KERNEL)
    start(tmp_path)
    with (package / "rules" / "radix.py").open("a") as source:
        source.write("# another version\n")
    assert start(tmp_path)[0] is False
