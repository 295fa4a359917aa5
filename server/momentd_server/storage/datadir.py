"""The data directory: whose it is, who uses it, where its files are."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from momentd_server.storage import format as layout
from momentd_server.storage.files import storage_error, sync_directory
from momentd_server.storage.migrations import FORMAT_VERSION, check_version
from momentd_wire.errors import (
    CorruptRecord,
    DaemonUnavailable,
    InvalidArgument,
    PermissionDenied,
)

_MARKER_TEMPORARY: Final = layout.MARKER_NAME + ".tmp"
# What may lie in a directory before its marker does: a start that was killed, a fresh file system.
_BEFORE_MARKER: Final = frozenset({layout.LOCK_NAME, _MARKER_TEMPORARY, "lost+found"})

# Locks, direct I/O or memory mappings (LMDB) of these are not those of a local file system.
_NETWORK: Final = frozenset(
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "smbfs",
        "ncpfs",
        "afs",
        "9p",
        # Folders that a virtual machine shares with its host: truncated reads, lost locks.
        "virtiofs",
        "vboxsf",
        "prl_fs",
        "fuse.osxfs",
        "fuse.grpcfuse",
        "ceph",
        "lustre",
        "gpfs",
        "beegfs",
        "glusterfs",
        "ocfs2",
        "gfs2",
        "pvfs2",
        "orangefs",
        "fuse.glusterfs",
        "fuse.sshfs",
        "fuse.ceph",
        "fuse.s3fs",
        "fuse.gcsfuse",
        "fuse.rclone",
    ]
)


_OCTAL: Final = re.compile(r"\\([0-7]{3})")  # how mountinfo writes blanks


class DataDir:
    """An opened and locked data directory. The lock lives as long as any copy of `lock_fd`."""

    def __init__(self, path: Path, store_id: bytes, lock_fd: int, *, created: bool) -> None:
        self.path = path
        self.store_id = store_id  # 16 random bytes, drawn when the directory was made
        self.lock_fd = lock_fd
        self.created = created  # made by this call
        self.filesystem = filesystem_type(path)

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        allow_network: bool = False,
        lock_fd: int | None = None,
        pid: int | None = None,
    ) -> DataDir:
        """Open or create. `lock_fd`: an inherited descriptor that holds the lock already.

        `pid`: who others are told uses it; default: this process.

        A directory that is not ours, or of another format, is left as it was. Raises
        PermissionDenied, Incompatible (other format), InvalidArgument (foreign files, network file
        system), DaemonUnavailable (another daemon uses it), OutOfSpace, StorageFailed.
        """
        path = path.resolve()
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_access(path)
            _check_filesystem(path, allow_network=allow_network)
            _check_ours(path)
            held = _lock(path, pid or os.getpid()) if lock_fd is None else lock_fd
        except FileExistsError:
            raise InvalidArgument(
                f"{path} is not a directory: name another one as data directory", path=path
            ) from None
        except OSError as error:
            raise _access_error(path, error) from error
        try:
            return cls._open_locked(path, held)
        except BaseException as error:
            if lock_fd is None:
                os.close(held)
            if isinstance(error, OSError):
                raise storage_error(error, "write to", path) from error
            raise

    @classmethod
    def inspect(cls, path: Path) -> DataDir:
        """Lock one that exists, for reading: not a byte of it changes, the disk may be read-only.

        Raises InvalidArgument (there is none), Incompatible, CorruptRecord (its marker),
        PermissionDenied, DaemonUnavailable (a daemon uses it), StorageFailed.
        """
        path = path.resolve()
        try:
            store_id = _read_marker(path) if path.is_dir() else None
            if store_id is None:
                raise InvalidArgument(
                    f"there is no momentd data directory at {path}: name one by --data-dir or "
                    "$MOMENTD_DATA_DIR",
                    path=path,
                )
            lock_fd = _lock_for_reading(path)
        except OSError as error:
            raise _access_error(path, error) from error
        return cls(path, store_id, lock_fd, created=False)

    @classmethod
    def _open_locked(cls, path: Path, lock_fd: int) -> DataDir:
        # Again, under the lock: a daemon that was here first may have made it meanwhile.
        marker = _read_marker(path)
        created = marker is None
        (path / layout.FAMILIES_NAME).mkdir(mode=0o700, exist_ok=True)
        (path / layout.CATALOG_NAME).mkdir(mode=0o700, exist_ok=True)
        store_id = _write_marker(path) if marker is None else marker
        return cls(path, store_id, lock_fd, created=created)

    @property
    def catalog_path(self) -> Path:
        return self.path / layout.CATALOG_NAME

    @property
    def families_path(self) -> Path:
        return self.path / layout.FAMILIES_NAME

    def family_path(self, family_id: int) -> Path:
        return self.families_path / str(family_id)

    def segment_path(self, family_id: int, segment_id: int) -> Path:
        return self.family_path(family_id) / f"{segment_id}{layout.SEGMENT_SUFFIX}"

    def segment_files(self) -> Iterator[tuple[int, int, Path]]:
        """(family id, segment id, path) of every file that is named like a segment of ours."""
        for folder in sorted(self.families_path.iterdir()):
            if not folder.name.isdecimal() or not folder.is_dir():
                continue
            for file in sorted(folder.iterdir()):
                stem = file.name.removesuffix(layout.SEGMENT_SUFFIX)
                if file.name != stem and stem.isdecimal():
                    yield int(folder.name), int(stem), file

    def free_bytes(self) -> int:
        """Bytes an ordinary user may still write on this file system."""
        space = os.statvfs(self.path)
        return space.f_bavail * space.f_frsize

    def close(self) -> None:
        """Give the lock up, unless another process holds a copy of the descriptor."""
        os.close(self.lock_fd)


def check_usable(path: Path) -> None:
    """What `DataDir.open` refuses at first sight, of a directory that exists. Changes nothing."""
    if not path.is_dir():
        raise InvalidArgument(
            f"{path} is not a directory: name another one as data directory", path=path
        )
    _check_access(path)
    if _is_read_only(path):
        raise _access_error(path, OSError(errno.EROFS, os.strerror(errno.EROFS)))
    _check_filesystem(path, allow_network=False)
    _check_ours(path)


def filesystem_type(path: Path) -> str:
    """The type of the file system below a path, e.g. "ext4"; "" if the kernel does not say."""
    best, kind = "", ""
    real = os.path.realpath(path)
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        left, _, right = line.partition(" - ")
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), left.split()[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        # Later lines are mounted over earlier ones.
        if inside and len(point) >= len(best):
            best, kind = point, right.split()[0]
    return kind


def _check_filesystem(path: Path, *, allow_network: bool) -> None:
    kind = filesystem_type(path)
    if kind in _NETWORK and not allow_network:
        raise InvalidArgument(
            f"{path} is on a network file system ({kind}), whose locks and mappings are not "
            "reliable: name a directory on a local disk by --data-dir or $MOMENTD_DATA_DIR",
            path=path,
            filesystem=kind,
        )


def _check_access(path: Path) -> None:
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        raise _access_error(path, PermissionError(errno.EACCES, os.strerror(errno.EACCES)))


def _access_error(path: Path, error: OSError) -> Exception:
    if error.errno == errno.EROFS or _is_read_only(path):
        return PermissionDenied(
            f"{path} is on a read-only file system: "
            "remount it, or name another directory by --data-dir or $MOMENTD_DATA_DIR",
            path=path,
        )
    if error.errno not in (errno.EACCES, errno.EPERM):
        return storage_error(error, "open", path)
    place, owner = _nearest_visible(path)
    uid = os.geteuid()
    return PermissionDenied(
        f"uid {uid} may not use the data directory {path}: {place} belongs to uid {owner}; "
        f"name another directory by --data-dir or $MOMENTD_DATA_DIR, or run: "
        f"sudo chown -R {uid}:{os.getegid()} {place}",
        path=place,
        uid=uid,
        owner=owner,
    )


def _nearest_visible(path: Path) -> tuple[Path, int]:
    """The path or its nearest parent that this user can see, and its owner's uid."""
    for place in (path, *path.parents):
        with contextlib.suppress(OSError):
            return place, place.stat().st_uid
    return path, 0


def _is_read_only(path: Path) -> bool:
    try:
        return bool(os.statvfs(path).f_flag & os.ST_RDONLY)
    except OSError:
        return False


def _check_ours(path: Path) -> None:
    """Refuse foreign files and other formats before anything is written."""
    if _read_marker(path) is not None:
        return
    foreign = sorted({entry.name for entry in path.iterdir()} - _BEFORE_MARKER)
    # A start that was killed leaves these two empty.
    unfinished = {layout.CATALOG_NAME, layout.FAMILIES_NAME}
    foreign = [name for name in foreign if name not in unfinished or any((path / name).iterdir())]
    if foreign:
        shown = ", ".join(foreign[:3]) + (", ..." if len(foreign) > 3 else "")
        raise InvalidArgument(
            f"{path} is not a momentd data directory and not empty ({shown}): "
            "name an empty or new directory by --data-dir or $MOMENTD_DATA_DIR",
            path=path,
        )


def _read_marker(path: Path) -> bytes | None:
    """The store id; None in a directory without a marker."""
    file = path / layout.MARKER_NAME
    try:
        words = file.read_bytes().split()
    except FileNotFoundError:
        return None
    if len(words) < 2 or words[0] != layout.MARKER_MAGIC.encode() or not words[1].isdigit():
        raise InvalidArgument(
            f"{file} is not a momentd marker: name another directory by --data-dir", path=file
        )
    check_version(int(words[1]), path, "data")
    try:
        store_id = bytes.fromhex(words[2].decode())
    except (IndexError, ValueError):
        store_id = b""
    if len(store_id) != 16:
        raise CorruptRecord(f"{file}: the store id is damaged; restore it from a copy", path=file)
    return store_id


def _write_marker(path: Path) -> bytes:
    """Last act of making a directory: from now on it is ours."""
    store_id = secrets.token_bytes(16)
    temporary = path / _MARKER_TEMPORARY
    text = f"{layout.MARKER_MAGIC} {FORMAT_VERSION} {store_id.hex()}\n"
    fd = os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path / layout.MARKER_NAME)
    sync_directory(path)
    return store_id


def _lock(path: Path, pid: int) -> int:
    """Hold the directory. The pid in the file is for people; the lock is what counts."""
    file = path / layout.LOCK_NAME
    fd = os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    _hold(fd, path)
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{pid}\n".encode(), 0)
    return fd


def _lock_for_reading(path: Path) -> int:
    """The same lock through a descriptor that cannot write."""
    fd = os.open(path / layout.LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    _hold(fd, path)
    return fd


def _hold(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(fd, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(fd)
        raise DaemonUnavailable(
            f"another momentd daemon (pid {holder}) uses {path}: use that one, stop it with "
            "`momentd stop`, or name another directory by --data-dir",
            path=path,
            pid=holder,
        ) from None
    except BaseException:
        os.close(fd)
        raise
