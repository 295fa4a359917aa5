"""File operations that either happen completely or raise: short writes, EINTR, direct I/O."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import logging
import mmap
import os
import resource
from pathlib import Path
from typing import Final

import numpy as np

from momentd_server.storage.format import BLOCK
from momentd_wire.errors import MomentdError, OutOfSpace, PermissionDenied, StorageFailed

_log = logging.getLogger("momentd.storage")
_libc = ctypes.CDLL(None, use_errno=True)
_statx = getattr(_libc, "statx", None)  # glibc 2.28
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)

_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_RIGHT: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_ATTEMPTS: Final = 8
_AT_EMPTY_PATH: Final = 0x1000
_STATX_DIOALIGN: Final = 0x2000
_DIO_OFFSET_ALIGN_WORD: Final = 39  # struct statx, byte 156
_FALLOC_KEEP_SIZE: Final = 1
_CACHESTAT: Final = 451


def storage_error(error: OSError, action: str, path: Path) -> MomentdError:
    """The error of ours for one of the operating system's."""
    text = f"cannot {action} {path}: {error.strerror}"
    if error.errno in _NO_SPACE:
        return OutOfSpace(
            f"{text}; nothing was lost: free space on that file system or drop tables", path=path
        )
    if error.errno in _NO_RIGHT:
        return PermissionDenied(f"{text}; the daemon runs as uid {os.geteuid()}", path=path)
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return StorageFailed(f"{text}; raise the limit of open files (ulimit -n)", path=path)
    return StorageFailed(f"{text}; see the kernel log (dmesg) for the disk's errors", path=path)


def open_direct(path: Path, flags: int) -> int:
    """Open for direct I/O in 4 KiB blocks, or buffered where that is refused (said once)."""
    try:
        fd = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    else:
        if _takes_blocks(fd):
            return fd
        os.close(fd)
    _say_buffered(path.parents[1])
    # The refused open may have made the file already.
    return open_buffered(path, flags & ~os.O_EXCL)


def reads_directly(path: Path) -> bool:
    """Whether a file that exists can be read around the page cache."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return False
    takes = _takes_blocks(fd)
    os.close(fd)
    return takes


def takes_direct_io(folder: Path) -> bool:
    """Whether files in this folder can be opened for direct I/O, tried on a nameless file."""
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return error.errno == errno.EOPNOTSUPP  # no nameless files here: not said
    takes = _takes_blocks(fd)
    os.close(fd)
    return takes


@functools.cache
def _say_buffered(where: Path) -> None:
    _log.warning("direct I/O is refused in %s: using the page cache", where)


def open_buffered(path: Path, flags: int) -> int:
    """Open through the page cache, without read-ahead."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
    return fd


def _takes_blocks(fd: int) -> bool:
    """Whether direct I/O in 4 KiB blocks is possible, as far as the kernel (6.1+) says."""
    answer = (ctypes.c_uint32 * 64)()
    if _statx is None or _statx(fd, b"", _AT_EMPTY_PATH, _STATX_DIOALIGN, answer) != 0:
        return True
    if not answer[0] & _STATX_DIOALIGN:
        return True
    offset_align = answer[_DIO_OFFSET_ALIGN_WORD]
    return offset_align != 0 and BLOCK % offset_align == 0


def remove_with_folder(path: Path) -> int:
    """Unlink a file, and its folder if it was the last; returns the bytes freed on disk."""
    try:
        freed = path.stat().st_blocks * 512
        path.unlink()
    except FileNotFoundError:
        freed = 0
    except OSError as error:
        raise storage_error(error, "delete", path) from error
    with contextlib.suppress(OSError):
        path.parent.rmdir()
    return freed


def cut(path: Path, nbytes: int) -> int:
    """Shorten a file that is longer than `nbytes`; returns the bytes freed on disk."""
    try:
        before = path.stat()
        if before.st_size <= nbytes:
            return 0
        os.truncate(path, nbytes)
        return (before.st_blocks - path.stat().st_blocks) * 512
    except OSError as error:
        raise storage_error(error, "shorten", path) from error


def cached_bytes(path: Path) -> int:
    """Bytes of a file in the page cache; 0 where the kernel (before 6.5) cannot say."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        whole_file = (ctypes.c_uint64 * 2)(0, 0)
        counts = (ctypes.c_uint64 * 5)()
        if _libc.syscall(_CACHESTAT, fd, ctypes.byref(whole_file), ctypes.byref(counts), 0) != 0:
            return 0
        return counts[0] * mmap.PAGESIZE
    finally:
        os.close(fd)


def drop_cached(path: Path) -> None:
    """Take a file out of the page cache."""
    with contextlib.suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def write_all(fd: int, data: np.ndarray, offset: int) -> None:
    """Write uint8 `data`, whole blocks at a multiple of 4 KiB. Raises OSError."""
    done = 0
    attempts = 0
    while done < data.size:
        written = os.pwrite(fd, data[done:].data, offset + done)
        # Direct I/O goes on from a block's start only; a part of a block is written again.
        whole = written - written % BLOCK
        attempts = 0 if whole else attempts + 1
        if attempts > _ATTEMPTS:
            raise OSError(errno.EIO, f"the disk takes {written} bytes at a time")
        done += whole


def read_up_to(fd: int, data: np.ndarray, offset: int) -> int:
    """Fill uint8 `data` from a file; returns the bytes read, fewer only at its end."""
    done = 0
    while done < data.size:
        got = os.preadv(fd, [data[done:].data], offset + done)
        if got == 0:
            break
        done += got
        if done % BLOCK and done < data.size:
            break  # the end of the file: direct I/O cannot go on from here
    return done


def reserve(fd: int, start: int, nbytes: int) -> bool:
    """Allocate disk blocks behind `start`, extending the file; False where not supported.

    The system call, not glibc's function: its emulation would write zeros. A failure leaves the
    file as long as it was, without the blocks it may have got.
    """
    while _libc.fallocate(fd, 0, start, nbytes) != 0:
        code = ctypes.get_errno()
        if code == errno.EINTR:
            continue
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        os.ftruncate(fd, start)
        raise OSError(code, os.strerror(code))
    return True


def reserve_blocks(path: Path, nbytes: int) -> None:
    """Allocate a file's first `nbytes` on disk without making it longer. Raises OSError.

    Does nothing where the file system cannot.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while _libc.fallocate(fd, _FALLOC_KEEP_SIZE, 0, nbytes) != 0:
            code = ctypes.get_errno()
            if code in (errno.EOPNOTSUPP, errno.ENOSYS):
                return
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))
    finally:
        os.close(fd)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit of open files to the hard one; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 1 << 20 if hard == resource.RLIM_INFINITY else hard
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return wanted if soft == resource.RLIM_INFINITY else soft
