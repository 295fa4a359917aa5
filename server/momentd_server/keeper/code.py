"""Which code runs: memory is only handed to an engine of the same."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import momentd_wire

_PACKAGES = (Path(__file__).resolve().parents[1], Path(momentd_wire.__file__).resolve().parent)


@lru_cache(maxsize=1)
def code_version() -> int:
    """63 bits of a hash over all sources of the daemon, as they are on disk at the first call."""
    digest = hashlib.blake2b(digest_size=8)
    for package in _PACKAGES:
        for path in sorted(package.rglob("*.py")):
            digest.update(str(path.relative_to(package)).encode())
            digest.update(path.read_bytes())
    return int.from_bytes(digest.digest(), "little") >> 1


def forget_version() -> None:
    """Look at the disk again: what runs may have been forked from an older process."""
    code_version.cache_clear()
