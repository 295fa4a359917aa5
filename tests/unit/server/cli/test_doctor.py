"""`momentd doctor`: each state of a directory has its finding and a next step; nothing changes."""

import json
import os
import shutil

import pytest
from click.testing import CliRunner

from momentd_server.cli.root import momentd
from momentd_server.storage import datadir
from momentd_server.storage.datadir import DataDir
from momentd_server.storage.doctor import examine
from momentd_wire.units import format_bytes
from tests.support.damage import make_directory


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    return make_directory(tmp_path_factory.mktemp("doctor"))


@pytest.fixture
def directory(good, tmp_path):
    return shutil.copytree(good, tmp_path / "data")


def _state_of(path):
    return {
        str(file): (file.lstat().st_mode, file.lstat().st_mtime_ns, file.read_bytes())
        for file in sorted(path.rglob("*"))
        if file.is_file()
    }


def _problems(path, code=1):
    """Text of all problems; checks that nothing was changed and that each has a next step."""
    before = _state_of(path)
    done = CliRunner().invoke(momentd, ["doctor", "--data-dir", str(path), "--json"])
    assert _state_of(path) == before
    assert done.exit_code == code, done.output
    problems = [f for f in json.loads(done.stdout)["findings"] if f["level"] == "problem"]
    assert all(problem["next_step"] for problem in problems)
    return " ".join(f"{problem['what']}: {problem['next_step']}" for problem in problems)


def test_a_good_directory_has_no_problems(directory):
    assert _problems(directory, code=0) == ""
    done = CliRunner().invoke(momentd, ["doctor", "--data-dir", str(directory)])
    assert "2 tables, 2 snapshots, 2 segments, all there" in done.output
    assert "momentd verify" in done.output


def test_one_that_does_not_exist_is_not_made(tmp_path):
    assert _problems(tmp_path / "none", code=0) == ""
    assert not (tmp_path / "none").exists()


def _newer(path):
    marker = path / "FORMAT"
    marker.write_text(marker.read_text().replace("momentd-data 1", "momentd-data 2"))


def _foreign(path):
    (path / "FORMAT").unlink()
    (path / "notes.txt").write_text("mine")


def _cut(path):
    os.truncate(min(path.rglob("*.seg")), 8192)


def _flip(path):
    with (path / "catalog" / "data.mdb").open("r+b") as file:
        file.seek(16)
        file.write(b"\0")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_newer, ["data format 2, this momentd reads 1", "newer: use the momentd version"]),
        (_foreign, ["not a momentd data directory", "notes.txt", "--data-dir"]),
        (lambda path: min(path.rglob("*.seg")).unlink(), ["is missing", "restore the file"]),
        (_cut, ["has 8192 bytes", "momentd runs drop"]),
        (_flip, ["not a readable LMDB file", "restore it from a copy"]),
        (lambda path: (path / "FORMAT").write_text("x"), ["not a momentd marker"]),
    ],
)
def test_what_keeps_it_from_opening_is_named_with_the_next_step(directory, change, said):
    change(directory)
    text = _problems(directory)
    for part in said:
        assert part in text


def test_a_file_in_place_of_the_directory(tmp_path):
    (tmp_path / "file").write_text("x")
    assert "is not a directory" in _problems(tmp_path / "file")


def test_network_file_systems_are_problems_and_ram_disks_are_noted(directory, monkeypatch):
    monkeypatch.setattr(datadir, "filesystem_type", lambda _path: "nfs4")
    assert "network file system (nfs4)" in _problems(directory)
    monkeypatch.setattr(datadir, "filesystem_type", lambda _path: "ext4")
    monkeypatch.setattr("momentd_server.storage.doctor.filesystem_type", lambda _path: "tmpfs")
    assert any("use a disk" in finding.next_step for finding in examine(directory))


def test_a_lock_names_its_holder_and_a_stale_pid_is_only_history(directory):
    held = DataDir.open(directory)
    try:
        notes = {f.subject: f for f in examine(directory)}
        assert f"pid {os.getpid()}" in notes["lock"].what
        assert "pytest" in notes["lock"].what or "python" in notes["lock"].what
        assert "in use" in notes["contents"].what
    finally:
        held.close()
    (directory / "LOCK").write_text("1\n")  # of somebody else now: no lock, no daemon
    assert {f.subject: f.level for f in examine(directory)}["lock"] == "good"


def test_files_of_another_user_are_named_with_the_command(directory, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, _mode, **_more: path == directory)
    problem = next(f for f in examine(directory) if f.level == "problem")
    assert "may not read and write" in problem.what
    assert "chown -R" in problem.next_step


def test_settings_of_the_machine(tmp_path):
    pages = tmp_path / "sys/kernel/mm/transparent_hugepage"
    pages.mkdir(parents=True)
    (pages / "enabled").write_text("always madvise [never]\n")
    for node in range(2):
        (tmp_path / f"sys/devices/system/node/node{node}").mkdir(parents=True)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 4 kB\nSwapTotal: 1048576 kB\n")
    text = " ".join(f"{f.what} {f.next_step}" for f in examine(tmp_path / "none", tmp_path))
    for part in (
        "huge pages are off",
        f"{format_bytes(1 << 30)} of swap",
        "2 NUMA nodes",
        "numactl",
    ):
        assert part in text
