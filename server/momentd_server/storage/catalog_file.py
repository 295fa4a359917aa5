"""The catalog's LMDB environment: opened with suspicion, written in whole transactions."""

from __future__ import annotations

import enum
import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import lmdb

from momentd_server.storage import files, records
from momentd_server.storage.datadir import DataDir
from momentd_server.storage.lmdb_pages import DamagedPages, check_pages
from momentd_server.storage.migrations import FORMAT_VERSION, check_version
from momentd_wire.errors import CorruptRecord, MomentdError, StorageFailed

_DATA_NAME: Final = "data.mdb"
_FIRST_MAP_BYTES: Final = 4 << 20
_NEARLY_FULL_BYTES: Final = 1 << 20
_PREFIX_BYTES: Final = 1
_META_KEY: Final = b"m"
_MAGIC: Final = "momentd-catalog"


class Kind(enum.Enum):
    """What an entry is: the first byte of its key."""

    TABLE = b"t"  # table id, 8 bytes big-endian
    FAMILY = b"f"  # family id, 8 bytes big-endian
    SESSION = b"s"  # session id, 16 bytes
    SNAPSHOT = b"n"  # its name
    COUNTER = b"c"  # name


Write = tuple[Kind, bytes, dict[str, Any] | None]  # kind, key, body or None to delete


class CatalogFile:
    """One LMDB environment with one database. One thread writes.

    LMDB keeps no checksums. So each value ends with its own hash, and the entry `m` has the number
    of all others and the sum of their hashes: a page that is lost or stale is noticed too.

    The disk blocks of the whole map are reserved ahead. So a commit does not fail for lack of
    space (a table can be dropped on a full disk, though that writes pages too), and where the map
    has to grow, space is known to be there or to be missing before anything is written.
    """

    def __init__(self, path: Path, environment: lmdb.Environment, meta: dict[str, Any]) -> None:
        self.path = path
        self._environment = environment
        self._meta = meta

    @classmethod
    def open(cls, datadir: DataDir) -> CatalogFile:
        """Open, or create in a data directory without segments. What is refused stays untouched."""
        path = datadir.catalog_path / _DATA_NAME
        try:
            if path.exists() and path.stat().st_size > 0:
                _inspect(path, datadir.store_id)
            elif any(datadir.segment_files()):
                raise CorruptRecord(
                    f"{path} is missing although there are segments: restore it from a copy, "
                    f"or move {datadir.path} away to start afresh",
                    path=path,
                )
            _reserve_map(path)
            environment = _open_environment(path, read_only=False)
            try:
                environment.reader_check()
                file = cls(path, environment, {})
                file._meta = file._read_meta() or file._create(datadir.store_id)
            except BaseException:
                environment.close()
                raise
        except lmdb.Error as error:
            raise _translate(error, path) from error
        except OSError as error:
            raise files.storage_error(error, "open", path) from error
        return file

    @classmethod
    def open_for_reading(cls, datadir: DataDir) -> CatalogFile:
        """Open one that exists; not a byte of it changes. Raises as `open` does."""
        path = datadir.catalog_path / _DATA_NAME
        try:
            if not path.exists() or path.stat().st_size == 0:
                raise CorruptRecord(f"{path} is missing: restore it from a copy", path=path)
            _inspect(path, datadir.store_id)
            environment = _open_environment(path, read_only=True)
            try:
                file = cls(path, environment, {})
                meta = file._read_meta()
                if meta is None:
                    raise CorruptRecord(
                        f"{path} is empty: the first start did not end; start the daemon once",
                        path=path,
                    )
                file._meta = meta
            except BaseException:
                environment.close()
                raise
        except lmdb.Error as error:
            raise _translate(error, path) from error
        except OSError as error:
            raise files.storage_error(error, "open", path) from error
        return file

    def entries(self) -> Iterator[tuple[Kind, bytes, dict[str, Any]]]:
        """All entries, checked. Raises CorruptRecord."""
        count = digest = 0
        try:
            with self._environment.begin() as transaction:
                for key, value in transaction.cursor():
                    if key == _META_KEY:
                        continue
                    body = records.unseal(key, value, self.path)
                    count += 1
                    digest += records.value_hash(value)
                    yield Kind(key[:_PREFIX_BYTES]), key[_PREFIX_BYTES:], body
        except lmdb.Error as error:
            raise _translate(error, self.path) from error
        if count != self._meta["count"] or digest % (1 << 64) != self._meta["digest"]:
            raise CorruptRecord(
                f"{self.path}: {count} entries were found, {self._meta['count']} were written, or "
                "one is an older one; restore the file from a copy",
                path=self.path,
            )

    def write(self, writes: Sequence[Write]) -> None:
        """One durable transaction. Raises OutOfSpace (nothing changed), StorageFailed."""
        while True:
            try:
                meta = self._write_once(writes)
            except lmdb.MapFullError:
                self._grow()
                continue
            except lmdb.Error as error:
                raise _translate(error, self.path) from error
            except OSError as error:
                raise files.storage_error(error, "write", self.path) from error
            self._meta = meta
            return

    def check_pages(self) -> None:
        """Walk the pages as they are on disk, in the writer's thread. Raises CorruptRecord."""
        _check_pages(self.path)

    def close(self) -> None:
        self._environment.close()

    def _write_once(self, writes: Sequence[Write]) -> dict[str, Any]:
        count = int(self._meta["count"])
        digest = int(self._meta["digest"])
        with self._environment.begin(write=True) as transaction:
            for kind, raw_key, body in writes:
                key = kind.value + raw_key
                old = transaction.get(key)
                if old is not None:
                    count -= 1
                    digest -= records.value_hash(old)
                if body is None:
                    transaction.delete(key)
                    continue
                value = records.seal(key, body)
                transaction.put(key, value)
                count += 1
                digest += records.value_hash(value)
            meta = {**self._meta, "count": count, "digest": digest % (1 << 64)}
            transaction.put(_META_KEY, records.seal(_META_KEY, meta))
        return meta

    def _grow(self) -> None:
        wanted = 2 * self._environment.info()["map_size"]
        try:
            files.reserve_blocks(self.path, wanted)
        except OSError as error:
            raise files.storage_error(error, "enlarge", self.path) from error
        self._environment.set_mapsize(wanted)

    def _read_meta(self) -> dict[str, Any] | None:
        with self._environment.begin() as transaction:
            value = transaction.get(_META_KEY)
        return None if value is None else records.unseal(_META_KEY, value, self.path)

    def _create(self, store_id: bytes) -> dict[str, Any]:
        self._meta = {
            "magic": _MAGIC,
            "format": FORMAT_VERSION,
            "store": store_id.hex(),
            "count": 0,
            "digest": 0,
        }
        self.write([])
        files.sync_directory(self.path.parent)
        return self._meta


def _open_environment(path: Path, *, read_only: bool) -> lmdb.Environment:
    return lmdb.open(
        str(path.parent),
        map_size=_map_bytes(path),
        readonly=read_only,
        # The data directory's lock keeps others away; an inspection must not create a lock file.
        lock=not read_only,
        mode=0o600,
        # A disk error must be an error of a call: no page is ever written through the mapping.
        writemap=False,
        max_dbs=0,
    )


def _map_bytes(path: Path) -> int:
    size = path.stat().st_size if path.exists() else 0
    return max(_FIRST_MAP_BYTES, 1 << (2 * size - 1).bit_length() if size else 0)


def _reserve_map(path: Path) -> None:
    """Reserve the map's blocks; an old catalog is opened on a full disk too, to drop tables."""
    is_new = not path.exists() or path.stat().st_size == 0
    try:
        files.reserve_blocks(path, _map_bytes(path))
    except OSError:
        if is_new:
            path.unlink(missing_ok=True)
            raise


def _inspect(path: Path, store_id: bytes) -> None:
    """Refuse what is not this store's catalog in this format, without changing a byte."""
    # LMDB follows what it reads: a wrong or missing page would be a crash, not an error.
    _check_pages(path)
    environment = _open_environment(path, read_only=True)
    try:
        with environment.begin() as transaction:
            value = transaction.get(_META_KEY)
            others = transaction.stat()["entries"]
    finally:
        environment.close()
    if value is None:
        if others:
            raise CorruptRecord(
                f"{path} is an LMDB file, but not a catalog of momentd: name another directory",
                path=path,
            )
        return  # a start that was killed before its first commit
    _check_meta(path, records.unseal(_META_KEY, value, path), store_id)


def _check_pages(path: Path) -> None:
    try:
        check_pages(path.read_bytes())
    except DamagedPages as damage:
        raise CorruptRecord(
            f"{path} is not a readable LMDB file (page {damage.page}: {damage}): "
            "restore it from a copy, or name another directory",
            path=path,
            page=damage.page,
        ) from damage


def _check_meta(path: Path, meta: dict[str, Any], store_id: bytes) -> None:
    check_version(meta.get("format") if meta.get("magic") == _MAGIC else None, path, "catalog")
    if meta["store"] != store_id.hex():
        raise CorruptRecord(
            f"{path} belongs to store {meta['store']}, the directory is {store_id.hex()}: "
            "one of the two was copied here; restore the right one",
            path=path,
        )


def _translate(error: lmdb.Error, path: Path) -> MomentdError:
    text = str(error)
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS):
        if os.strerror(code) in text:
            return files.storage_error(OSError(code, os.strerror(code)), "write", path)
    # LMDB calls a write that the disk took only in part an input/output error.
    space = os.statvfs(path.parent)
    short = os.strerror(errno.EIO) in text and not isinstance(error, lmdb.DiskError)
    if short and space.f_bavail * space.f_frsize < _NEARLY_FULL_BYTES:
        return files.storage_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "write", path)
    damaged = (lmdb.InvalidError, lmdb.CorruptedError, lmdb.PageNotFoundError)
    if isinstance(error, (*damaged, lmdb.VersionMismatchError)):
        return CorruptRecord(
            f"{path} is not a readable LMDB file ({text}): restore it from a copy, "
            "or name another directory",
            path=path,
        )
    return StorageFailed(f"the catalog {path} failed: {text}; check the disk (dmesg)", path=path)
