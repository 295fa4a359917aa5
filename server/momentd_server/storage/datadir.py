"""The data directory: whose it is, who uses it, where its files are."""

from __future__ import annotations

from pathlib import Path


class DataDir:
    """An opened and locked data directory. The lock lives as long as a descriptor of it."""

    path: Path
    store_id: bytes  # 16 random bytes, drawn when the directory was made
    lock_fd: int
    created: bool  # made by this call
    filesystem: str  # type by /proc/self/mountinfo, e.g. "ext4"

    @classmethod
    def open(
        cls, path: Path, *, allow_network: bool = False, lock_fd: int | None = None
    ) -> DataDir:
        """Open or create. `lock_fd`: an inherited descriptor that holds the lock already.

        Raises PermissionDenied, Incompatible (other format), InvalidArgument (foreign files,
        network file system), DaemonUnavailable (another daemon uses it), OutOfSpace, StorageFailed.
        """
        raise NotImplementedError

    @property
    def catalog_path(self) -> Path:
        raise NotImplementedError

    def family_path(self, family_id: int) -> Path:
        raise NotImplementedError

    def segment_path(self, family_id: int, segment_id: int) -> Path:
        raise NotImplementedError

    def free_bytes(self) -> int:
        """Bytes an ordinary user may still write on this file system."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
