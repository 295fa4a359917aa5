"""Why a data directory does not open, and what of the machine is in its way. Changes nothing."""

from __future__ import annotations

import fcntl
import os
import resource
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from momentd_server.storage import format as layout
from momentd_server.storage.catalog import Contents, read_contents
from momentd_server.storage.catalog_check import check_entries
from momentd_server.storage.datadir import DataDir, check_usable, filesystem_type
from momentd_server.storage.files import reads_directly
from momentd_wire.errors import DaemonUnavailable, MomentdError
from momentd_wire.units import format_bytes

Level = Literal["good", "note", "problem"]
_TEMPORARY: Final = layout.MARKER_NAME + ".tmp"
_OURS: Final = frozenset(
    {layout.MARKER_NAME, layout.LOCK_NAME, layout.CATALOG_NAME, layout.FAMILIES_NAME, _TEMPORARY,
     "lost+found"}
)  # fmt: skip
# Less than this, and an update may soon find no room: a segment and its successor.
_LITTLE_BYTES: Final = 2 * layout.SEGMENT_BYTES
_LITTLE_INODES: Final = 1000
_MOST_NAMED: Final = 5


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level  # a "problem" keeps the daemon from serving, or tables from being whole
    subject: str
    what: str
    next_step: str = ""


def examine(path: Path, machine: Path = Path("/")) -> list[Finding]:
    """Everything there is to say; never raises for what it finds.

    machine: the root of /proc and /sys.
    """
    path = path.absolute()
    findings: list[Finding] = []
    for part in (_access, _disk, _names, _lock, _contents):
        findings += _guarded(part, path)
        if part is _access and not path.is_dir():
            break  # nothing more to see
    return findings + list(_machine(machine))


def _guarded(part: Callable[[Path], Iterator[Finding]], path: Path) -> list[Finding]:
    found: list[Finding] = []
    try:
        found += part(path)
    except MomentdError as error:
        what, _, step = error.message.partition(": ")
        found.append(Finding("problem", part.__name__[1:], what, step))
    except OSError as error:
        step = "see who may read it (ls -l), and the kernel log (dmesg)"
        what = f"cannot look at {error.filename or path}: {error.strerror}"
        found.append(Finding("problem", part.__name__[1:], what, step))
    return found


def _access(path: Path) -> Iterator[Finding]:
    if not os.path.lexists(path):
        yield Finding(
            "note", "access", f"{path} does not exist", "nothing: `momentd serve` makes it"
        )
        return
    check_usable(path)
    status = path.stat()
    if status.st_uid != os.geteuid():
        yield Finding(
            "note", "access", f"{path} belongs to uid {status.st_uid}, you are {os.geteuid()}",
            "let one user own the directory and run the daemon",
        )  # fmt: skip
    if stat.S_IMODE(status.st_mode) & 0o077:
        yield Finding(
            "note", "access", f"others may look into it (mode {stat.S_IMODE(status.st_mode):o})",
            f"chmod 700 {path}",
        )  # fmt: skip
    closed = [
        file
        for file in (path / layout.MARKER_NAME, path / layout.LOCK_NAME, *path.rglob("*.mdb"),
                     *path.rglob("*" + layout.SEGMENT_SUFFIX))
        if file.exists() and not os.access(file, os.R_OK | os.W_OK, effective_ids=True)
    ]  # fmt: skip
    if closed:
        yield Finding(
            "problem", "access", f"uid {os.geteuid()} may not read and write {_some(closed)}",
            f"sudo chown -R {os.geteuid()}:{os.getegid()} {path}",
        )  # fmt: skip
    else:
        yield Finding("good", "access", f"uid {os.geteuid()} may read and write {path}")


def _disk(path: Path) -> Iterator[Finding]:
    kind = filesystem_type(path)
    files = sorted(path.rglob("*" + layout.SEGMENT_SUFFIX))
    direct = "not known before there is a segment"
    if files:
        direct = "yes" if reads_directly(files[0]) else "no: the page cache is used, slower"
    level: Level = "note" if kind in ("tmpfs", "ramfs") else "good"
    step = "nothing survives a restart of the machine there: use a disk" if level == "note" else ""
    yield Finding(level, "disk", f"file system {kind or 'unknown'}, direct I/O: {direct}", step)
    space = os.statvfs(path)
    free = space.f_bavail * space.f_frsize
    little = free < _LITTLE_BYTES or (0 < space.f_files and space.f_favail < _LITTLE_INODES)
    yield Finding(
        "problem" if little else "good",
        "disk",
        f"{format_bytes(free)} and {space.f_favail} files are left for this user",
        "free space there, or drop tables (`momentd runs drop`)" if little else "",
    )


def _names(path: Path) -> Iterator[Finding]:
    names = {entry.name for entry in path.iterdir()}
    if layout.MARKER_NAME not in names:
        if names - _OURS:
            return  # said by _access: not ours
        yield Finding("note", "files", f"{path} is empty", "nothing: `momentd serve` fills it")
        return
    foreign = [path / name for name in sorted(names - _OURS)]
    if foreign:
        yield Finding(
            "note", "files", f"{_some(foreign)} are not momentd's", "move them to another place"
        )
    if _TEMPORARY in names:
        yield Finding(
            "note", "files", f"{_TEMPORARY} is left of a start that was killed",
            f"nothing, or delete it while no daemon runs: rm {path / _TEMPORARY}",
        )  # fmt: skip


def _lock(path: Path) -> Iterator[Finding]:
    """The lock is what counts; the pid in the file is what its holder wrote."""
    file = path / layout.LOCK_NAME
    if not file.exists():
        return
    with file.open("rb") as opened:
        pid = opened.read(32).decode(errors="replace").strip() or "unknown"
        try:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            yield Finding(
                "note", "lock", f"a daemon uses it (pid {pid}, as it says: {_command(pid)})",
                "`momentd status` shows it, `momentd stop` ends it",
            )  # fmt: skip
        else:
            yield Finding("good", "lock", f"no daemon uses it (the last one was pid {pid})")


def _contents(path: Path) -> Iterator[Finding]:
    if not (path / layout.MARKER_NAME).exists():
        return
    try:
        datadir = DataDir.inspect(path)
    except DaemonUnavailable:
        yield Finding(
            "note", "contents", "not looked at, because it is in use",
            "ask the daemon: `momentd status`, `momentd tables`",
        )  # fmt: skip
        return
    except FileNotFoundError:
        yield Finding("note", "contents", "there is no lock file", "start the daemon")
        return
    try:
        contents = read_contents(datadir)
        yield from _files(datadir, contents)
    finally:
        datadir.close()


def _files(datadir: DataDir, contents: Contents) -> Iterator[Finding]:
    problems = 0
    needs = contents.needs()
    for damage in check_entries(contents.path, contents.tables, needs):
        problems += 1
        yield Finding("problem", "catalog", *damage.what.split(": ", 1))
    listed: set[tuple[int, int]] = set()
    for need in needs:
        for segment, counted in need.manifest.segments:
            listed.add((need.family, segment))
            file = datadir.segment_path(need.family, segment)
            length = file.stat().st_size if file.exists() else -1
            if length >= counted:
                continue
            problems += 1
            what = "is missing" if length < 0 else f"has {length} bytes, {counted} count"
            yield Finding(
                "problem", "files", f"{file} of {need.whose} {what}",
                "restore the file from a copy, or drop the table's run (`momentd runs drop`) and "
                "go on from a checkpoint; a snapshot: `momentd snapshot delete`",
            )  # fmt: skip
    unlisted = [file for *key, file in datadir.segment_files() if tuple(key) not in listed]
    if unlisted:
        yield Finding(
            "note", "files", f"{_some(unlisted)} belong to no table and no snapshot",
            "nothing: they are of what was not committed, the next start deletes them",
        )  # fmt: skip
    if not problems:
        yield Finding(
            "good", "contents",
            f"{len(contents.tables)} tables, {len(contents.snapshots)} snapshots, "
            f"{len(listed)} segments, all there and long enough",
            "`momentd verify --data-dir` compares every byte of them",
        )  # fmt: skip


def _machine(root: Path) -> Iterator[Finding]:
    pages = _chosen(root / "sys/kernel/mm/transparent_hugepage/enabled")
    if pages == "never":
        yield Finding(
            "note", "memory", "transparent huge pages are off: updates take up to a tenth longer",
            "echo madvise | sudo tee /sys/kernel/mm/transparent_hugepage/enabled",
        )  # fmt: skip
    elif pages:
        yield Finding("good", "memory", f"transparent huge pages: {pages}")
    swap = _meminfo(root, "SwapTotal")
    if swap:
        yield Finding(
            "note", "memory", f"{format_bytes(swap)} of swap: a cache that is swapped out is slow",
            "choose --cache so that everything fits the memory",
        )  # fmt: skip
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield Finding("good", "memory", f"memlock limit: {_limit(soft)} of {_limit(hard)}; not needed")
    nodes = list((root / "sys/devices/system/node").glob("node[0-9]*"))
    if len(nodes) > 1:
        yield Finding(
            "note", "memory", f"{len(nodes)} NUMA nodes: memory of another node is slower",
            "run daemon and trainer on one: numactl --cpunodebind=0 --membind=0 momentd serve ...",
        )  # fmt: skip
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield Finding("good", "limits", f"open files: {_limit(files)}; the daemon raises it by itself")


def _chosen(file: Path) -> str:
    """The word in brackets of a setting of the kernel."""
    try:
        return file.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def _meminfo(root: Path, key: str) -> int:
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{key}:")), 0)


def _command(pid: str) -> str:
    """What that process is now; it may be another one than wrote the file."""
    try:
        words = Path(f"/proc/{int(pid)}/cmdline").read_bytes().split(b"\0")
    except (OSError, ValueError):
        return "no such process here; it may be in another container"
    return b" ".join(words).decode(errors="replace").strip()[:80]


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)


def _some(paths: list[Path]) -> str:
    shown = ", ".join(str(path) for path in paths[:_MOST_NAMED])
    return shown + (f" and {len(paths) - _MOST_NAMED} more" if len(paths) > _MOST_NAMED else "")
