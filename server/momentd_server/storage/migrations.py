"""Format versions: which are read, and how an older one becomes the current.

A directory says its version in `FORMAT`, in the catalog, and in each segment. A newer one is
refused untouched. An older one is never changed in passing: it is refused as well, until somebody
asks for the migration, which is the function in the table below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from momentd_wire.errors import Incompatible

FORMAT_VERSION: Final = 1

# Version -> what makes the next one of it, in a copy of the directory. Version 1 is the first.
MIGRATIONS: Final[Mapping[int, Callable[[Path], None]]] = {}


def check_version(found: object, path: Path | object, what: str) -> None:
    """Raises Incompatible, before anything is written, unless it is the current one.

    found: as it stands on disk, whatever it is; what: "data", "catalog" or "segment".
    """
    if found == FORMAT_VERSION:
        return
    raise Incompatible(
        f"{path} has {what} format {found}, this momentd reads {FORMAT_VERSION}: {_advice(found)}; "
        "nothing was changed",
        path=path,
        found=found,
        reads=FORMAT_VERSION,
    )


def _advice(found: object) -> str:
    another = "or name another directory by --data-dir"
    if not isinstance(found, int) or found < 1:
        return f"no momentd ever wrote that: restore the directory from a copy, {another}"
    if found > FORMAT_VERSION:
        return f"it is newer: use the momentd version that wrote it, or a later one, {another}"
    if all(version in MIGRATIONS for version in range(found, FORMAT_VERSION)):
        return "it is older, and can be migrated: see docs/storage-format.md, Versions"
    return f"it is older, and cannot be migrated: use the momentd version that wrote it, {another}"
