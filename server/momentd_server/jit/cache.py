"""Where compiled kernels are kept, and under which key.

numba notices a change of the function it compiles but not of the functions that one calls, and it
takes globals for constants: after an upgrade it would go on running old arithmetic without a word.
So the directory is named by everything that decides the machine code: the sources of all kernels,
numba, llvmlite, Python, and the CPU.

    <root>/momentd/kernels/<key>/      one key; numba's files, and WARM once a warm-up has finished
    <root>    $MOMENTD_KERNEL_CACHE, else $XDG_CACHE_HOME, else ~/.cache, else the temporary folder
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import llvmlite
import llvmlite.binding as llvm
import numba
from numba.core import config

_LOG = logging.getLogger(__name__)
_SERVER: Final = Path(__file__).resolve().parent.parent
_KERNEL_FOLDERS: Final = ("jit", "rules", "storage")
_WARM: Final = "WARM"
STALE_AFTER_S: Final = 30 * 24 * 3600.0


def cache_key() -> str:
    """The key of this process: 32 hexadecimal digits."""
    return _digest(
        [
            *_sources(),
            numba.__version__.encode(),
            llvmlite.__version__.encode(),
            platform.python_version().encode(),
            platform.machine().encode(),
            _cpu().encode(),
        ]
    )


def _cpu() -> str:
    """CPU name and features that numba compiles for; its own settings may override the host's."""
    settings: Any = config
    name = settings.CPU_NAME or llvm.get_host_cpu_name()
    features = settings.CPU_FEATURES or llvm.get_host_cpu_features().flatten()
    return f"{name} {features}"


def _sources() -> Iterator[bytes]:
    for folder in _KERNEL_FOLDERS:
        for path in sorted((_SERVER / folder).glob("*.py")):
            yield f"{folder}/{path.name}".encode()
            yield path.read_bytes()


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def choose_directory(key: str) -> Path:
    """The first usable directory for a key, made if need be.

    Compiled code is run as it is found, so a directory that others own or may write is not used.
    """
    for root in _roots():
        directory = root / "momentd" / "kernels" / key
        if _private(directory):
            return directory
    directory = Path(tempfile.mkdtemp(prefix="momentd-kernels-"))
    _LOG.warning(
        "no place to keep compiled kernels: they are compiled anew at every start, into %s; "
        "set MOMENTD_KERNEL_CACHE to a folder that only uid %d may write",
        directory,
        os.geteuid(),
    )
    return directory


def _roots() -> Iterator[Path]:
    for variable in ("MOMENTD_KERNEL_CACHE", "XDG_CACHE_HOME"):
        if value := os.environ.get(variable):
            yield Path(value)
    with suppress(RuntimeError):
        yield Path.home() / ".cache"
    yield Path(tempfile.gettempdir()) / f"momentd-{os.geteuid()}"


def _private(directory: Path) -> bool:
    """Make a directory and say whether only we (and root) decide what is in it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
        return all(_ours(path) for path in (directory, directory.parent))
    except OSError:
        return False


def _ours(path: Path) -> bool:
    status = path.stat()
    return status.st_uid in {0, os.geteuid()} and not status.st_mode & 0o022


def is_warm(directory: Path, names: Iterable[str]) -> bool:
    """Whether a warm-up of all these kernels has finished under this key."""
    with suppress(OSError):
        return set(names) <= set((directory / _WARM).read_text().split())
    return False


def mark_warm(directory: Path, names: Iterable[str]) -> None:
    """Note a finished warm-up; also says that the key is in use (see `remove_stale`)."""
    with suppress(OSError):  # A cache that fills up or vanishes costs time, nothing else.
        (directory / _WARM).write_text("\n".join(sorted(names)) + "\n")


def remove_stale(directory: Path, *, now_s: float | None = None) -> list[Path]:
    """Remove the directories of keys that no daemon has used for 30 days; returns them."""
    limit = (time.time() if now_s is None else now_s) - STALE_AFTER_S
    removed: list[Path] = []
    with suppress(OSError):
        for other in directory.parent.iterdir():
            if other != directory and _last_use_s(other) < limit:
                shutil.rmtree(other, ignore_errors=True)
                removed.append(other)
    return removed


def _last_use_s(directory: Path) -> float:
    mark = directory / _WARM
    return (mark if mark.exists() else directory).stat().st_mtime
