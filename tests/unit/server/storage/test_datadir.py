"""The data directory: made once, held by one, refused when it is not ours, never changed then."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from momentd_server.storage import datadir as module
from momentd_server.storage.datadir import DataDir, filesystem_type
from momentd_wire.errors import (
    CorruptRecord,
    DaemonUnavailable,
    Incompatible,
    InvalidArgument,
    OutOfSpace,
    PermissionDenied,
)


def _snapshot(path):
    return {
        str(file.relative_to(path)): (file.stat().st_mtime_ns, file.is_file() and file.read_bytes())
        for file in sorted(path.rglob("*"))
    }


def test_made_private_and_found_again(tmp_path):
    path = tmp_path / "new" / "data"
    made = DataDir.open(path)
    assert made.created
    assert path.stat().st_mode & 0o777 == 0o700
    assert (path / "FORMAT").read_text() == f"momentd-data 1 {made.store_id.hex()}\n"
    assert made.filesystem == filesystem_type(tmp_path) != ""
    assert made.free_bytes() > 0
    made.close()
    again = DataDir.open(path)
    assert not again.created
    assert again.store_id == made.store_id
    again.close()


def test_two_daemons_on_one_directory(tmp_path):
    first = DataDir.open(tmp_path / "d")
    script = (
        "import sys, pathlib\n"
        "from momentd_server.storage.datadir import DataDir\n"
        "from momentd_wire.errors import DaemonUnavailable\n"
        "try:\n    DataDir.open(pathlib.Path(sys.argv[1]))\n"
        "except DaemonUnavailable as error:\n    print(error)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, str(tmp_path / "d")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env, timeout=60)
    assert f"(pid {os.getpid()}) uses {tmp_path / 'd'}" in done.stdout
    first.close()
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env, timeout=60)
    assert done.stdout == ""


def test_lock_is_shared_by_inherited_descriptors(tmp_path):
    first = DataDir.open(tmp_path / "d")
    copy = os.dup(first.lock_fd)
    engine = DataDir.open(tmp_path / "d", lock_fd=copy)  # as a restarted engine does
    first.close()
    with pytest.raises(DaemonUnavailable):
        DataDir.open(tmp_path / "d")
    engine.close()
    DataDir.open(tmp_path / "d").close()


def test_foreign_files_are_refused_and_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    (tmp_path / "catalog").mkdir()
    (tmp_path / "catalog" / "cards").write_text("y")
    before = _snapshot(tmp_path)
    with pytest.raises(InvalidArgument, match=r"not empty \(catalog, thesis\.tex\)"):
        DataDir.open(tmp_path)
    assert _snapshot(tmp_path) == before


def test_a_start_that_was_killed_early_is_continued(tmp_path):
    for name in ("catalog", "families", "lost+found"):
        (tmp_path / name).mkdir()
    for name in ("LOCK", "FORMAT.tmp"):
        (tmp_path / name).write_text("12")
    made = DataDir.open(tmp_path)
    assert made.created
    made.close()


def test_newer_format_is_refused_untouched_naming_both(tmp_path):
    (tmp_path / "FORMAT").write_text(f"momentd-data 7 {'0' * 32}\n")
    (tmp_path / "something-new").mkdir()
    before = _snapshot(tmp_path)
    with pytest.raises(Incompatible, match=r"data format 7, this momentd reads 1"):
        DataDir.open(tmp_path)
    assert _snapshot(tmp_path) == before


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", InvalidArgument),
        ("PNG \x00 1", InvalidArgument),
        ("momentd-data 1", CorruptRecord),
        ("momentd-data 1 abcd", CorruptRecord),
        ("momentd-data 1 " + "zz" * 16, CorruptRecord),
    ],
)
def test_damaged_markers_are_refused(tmp_path, text, error):
    (tmp_path / "FORMAT").write_text(text)
    before = _snapshot(tmp_path)
    with pytest.raises(error, match="FORMAT"):
        DataDir.open(tmp_path)
    assert _snapshot(tmp_path) == before


def test_a_file_in_the_directorys_place(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InvalidArgument, match="not a directory"):
        DataDir.open(tmp_path / "file")


def test_lock_that_is_a_link_elsewhere_is_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "LOCK").symlink_to(victim)
    with pytest.raises(Exception, match="cannot open"):
        DataDir.open(tmp_path / "d")
    assert victim.read_text() == "precious"


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "lustre"])
def test_network_file_systems_are_refused_unless_allowed(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(module, "filesystem_type", lambda _path: kind)
    with pytest.raises(InvalidArgument, match=rf"\({kind}\).*MOMENTD_DATA_DIR"):
        DataDir.open(tmp_path / "d")
    assert list((tmp_path / "d").iterdir()) == []
    DataDir.open(tmp_path / "d", allow_network=True).close()


def test_file_system_type_is_that_of_the_innermost_mount(monkeypatch):
    mounts = (
        "22 1 254:0 / / rw - ext4 /dev/vda rw\n"
        "23 22 0:21 / /mnt/my\\040disk rw,relatime shared:1 - nfs4 server:/x rw\n"
        "24 22 0:22 / /mnt/my rw - xfs /dev/sdb rw\n"
        "25 22 0:23 / /mnt/my rw - btrfs /dev/sdc rw\n"
    )
    monkeypatch.setattr(Path, "read_text", lambda _self: mounts)
    assert filesystem_type(Path("/mnt/my disk/data")) == "nfs4"
    assert filesystem_type(Path("/mnt/my/data")) == "btrfs"  # mounted over the other
    assert filesystem_type(Path("/mnt/mystery")) == "ext4"


def test_a_directory_of_another_user_names_everybody(tmp_path, monkeypatch):
    (tmp_path / "d").mkdir()
    monkeypatch.setattr(os, "access", lambda *_args, **_kwargs: False)
    owner = (tmp_path / "d").stat().st_uid
    with pytest.raises(PermissionDenied) as caught:
        DataDir.open(tmp_path / "d")
    text = str(caught.value)
    uid = os.geteuid()
    assert f"uid {uid} may not" in text
    assert f"belongs to uid {owner}" in text
    assert f"sudo chown -R {uid}:{os.getegid()} {tmp_path / 'd'}" in text


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_an_unprivileged_user_in_a_foreign_directory(tmp_path):
    script = (
        "import os, pathlib, sys\n"
        "from momentd_server.storage.datadir import DataDir\n"
        "os.setgroups([]); os.setgid(12345); os.setuid(12345)\n"
        "from momentd_wire.errors import PermissionDenied\n"
        "try:\n    DataDir.open(pathlib.Path(sys.argv[1]))\n"
        "except PermissionDenied as error:\n    print(error)\n"
    )
    (tmp_path / "d").mkdir()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    for path in (tmp_path / "d", tmp_path / "d" / "below"):
        command = [sys.executable, "-c", script, str(path)]
        done = subprocess.run(
            command, capture_output=True, text=True, check=True, env=env, timeout=60
        )
        assert "uid 12345 may not use" in done.stdout
        assert "chown -R 12345:12345" in done.stdout


def test_read_only_file_system(tmp_path, monkeypatch):
    (tmp_path / "d").mkdir()
    real = os.statvfs
    monkeypatch.setattr(os, "access", lambda *_args, **_kwargs: False)

    class ReadOnly:
        f_flag = os.ST_RDONLY

    monkeypatch.setattr(os, "statvfs", lambda path: real(path) and ReadOnly)
    with pytest.raises(PermissionDenied, match="read-only file system"):
        DataDir.open(tmp_path / "d")


def test_disk_full_while_making_the_directory(tmp_path, monkeypatch):
    def full(_fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutOfSpace):
        DataDir.open(tmp_path / "d")
    monkeypatch.undo()
    made = DataDir.open(tmp_path / "d")  # not locked, not half made
    assert made.created
    made.close()


def test_only_files_named_like_segments_are_listed(datadir):
    family = datadir.family_path(4)
    family.mkdir()
    for name in ("12.seg", "13.seg.bak", "notes.txt", "x.seg", "14"):
        (family / name).write_text("")
    (datadir.families_path / "old").mkdir()
    (datadir.families_path / "old" / "1.seg").write_text("")
    assert list(datadir.segment_files()) == [(4, 12, datadir.segment_path(4, 12))]
