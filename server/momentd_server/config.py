"""What a daemon is told at its start: frozen values, merged once by the command line.

The only place of the daemon that reads the environment is `from_environment`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from momentd_wire import addresses
from momentd_wire.addresses import Address
from momentd_wire.errors import InvalidArgument
from momentd_wire.units import format_bytes


def _version() -> str:
    try:
        return metadata.version("momentd")
    except metadata.PackageNotFoundError:  # run from a source tree
        return "0+source"


VERSION: Final = _version()
MIB: Final = 1 << 20
GIB: Final = 1 << 30
MIN_CACHE_BYTES: Final = 16 * MIB
# Bounds of the cache that a daemon chooses by itself: a quarter of the memory, within these.
AUTO_CACHE_BYTES: Final = (256 * MIB, 16 * GIB)
MIN_TOKEN_BYTES: Final = 16
MIN_DISK_RATIO: Final = 1.2
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


_POSITIVE: Final = (
    "arena_bytes", "arenas_total_bytes", "max_sessions", "grpc_bytes", "read_threads",
    "stop_timeout_s", "attach_grace_s", "idle_exit_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of a TCP listener. With `client_ca` clients must show a certificate of it."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """Everything `momentd serve` is told. Bytes, seconds and counts."""

    data_dir: Path
    cache_bytes: int
    # The local plane's socket; gRPC listens beside it, at the same path + ".grpc".
    address: Address
    # HOST:PORT each; needs `tls` or `token`.
    listen: tuple[Address, ...] = ()
    tls: Tls | None = None
    # What callers over TCP must present.
    token: str | None = None
    # Other users that may use the local socket.
    allow_uids: frozenset[int] = frozenset()
    # Threads of the kernels, and of cold reads.
    threads: int = 0
    read_threads: int = 32
    # Most arena bytes of one session, and of all.
    arena_bytes: int = 4 * GIB
    arenas_total_bytes: int = 16 * GIB
    max_sessions: int = 256
    # Bytes on disk, in terms of the bytes that are needed, above which compaction works.
    disk_ratio: float = 2.0
    # Bulk bytes in flight over gRPC, requests and replies together.
    grpc_bytes: int = 4 * GIB
    # Seconds that an orderly stop may take.
    stop_timeout_s: float = 60.0
    # Seconds that a session lives without a connection.
    attach_grace_s: float = 600.0
    # Started by a client: ends by itself after this time without sessions and their tables.
    auto_started: bool = False
    idle_exit_s: float = 900.0
    # Seconds between snapshots of all runs, 0 for none, and how many of each run are kept.
    snapshot_every_s: float = 0.0
    snapshots_kept: int = 3
    # Segments on a network file system are refused unless the user insists.
    allow_network_fs: bool = False

    def __post_init__(self) -> None:
        """Refuses what cannot work. Raises InvalidArgument naming the setting."""
        if self.address.plane != "local":
            raise InvalidArgument(
                f"--address {self.address}: a daemon listens on unix:PATH; for gRPC over TCP add "
                "--listen HOST:PORT"
            )
        if self.cache_bytes < MIN_CACHE_BYTES:
            raise InvalidArgument(
                f"--cache {format_bytes(self.cache_bytes)}: the least is "
                f"{format_bytes(MIN_CACHE_BYTES)}"
            )
        for name in _POSITIVE:
            if getattr(self, name) <= 0:
                raise InvalidArgument(f"{name} is {getattr(self, name)}, it must be above 0")
        if not self.disk_ratio >= MIN_DISK_RATIO:
            raise InvalidArgument(
                f"--disk-ratio {self.disk_ratio}: the least is {MIN_DISK_RATIO}; nearer to 1 "
                "almost everything would be written again all the time"
            )
        if self.threads < 0:
            raise InvalidArgument(f"threads is {self.threads}: 0 means one for each core")
        self._check_listeners()

    def _check_listeners(self) -> None:
        for listener in self.listen:
            if listener.kind != "tcp":
                raise InvalidArgument(f"--listen {listener}: write HOST:PORT")
        if self.listen and self.tls is None and self.token is None:
            raise InvalidArgument(
                f"--listen {self.listen[0].target}: TCP has no user ids to check, so it needs "
                "--tls-cert and --tls-key, or --token-file"
            )
        if self.token is not None and len(self.token) < MIN_TOKEN_BYTES:
            raise InvalidArgument(
                f"the token has {len(self.token)} characters, the least is {MIN_TOKEN_BYTES}: "
                "make one with `openssl rand -hex 32`"
            )

    def plain(self) -> dict[str, Any]:
        """As JSON can carry it."""
        tls = self.tls and {
            name: str(path) for name in ("certificate", "key", "client_ca")
            if (path := getattr(self.tls, name)) is not None
        }  # fmt: skip
        return {f.name: getattr(self, f.name) for f in fields(self)} | {
            "data_dir": str(self.data_dir), "address": str(self.address),
            "listen": [str(at) for at in self.listen], "tls": tls,
            "allow_uids": sorted(self.allow_uids),
        }  # fmt: skip

    @classmethod
    def of(cls, plain: dict[str, Any]) -> ServeConfig:
        """The reverse of `plain`."""
        tls: dict[str, str] | None = plain["tls"]
        changed: dict[str, Any] = {
            "data_dir": Path(plain["data_dir"]), "address": addresses.parse(plain["address"]),
            "listen": tuple(map(addresses.parse, plain["listen"])),
            "tls": tls and Tls(**{name: Path(path) for name, path in tls.items()}),
            "allow_uids": frozenset(plain["allow_uids"]),
        }  # fmt: skip
        return cls(**{**plain, **changed})

    @property
    def worker_threads(self) -> int:
        """Threads of the kernels: as told, else the cores this process may use, at most 16."""
        return self.threads or min(16, len(os.sched_getaffinity(0)))

    @property
    def token_in_the_clear(self) -> bool:
        """Whether a token would cross a network without TLS."""
        outside = [at for at in self.listen if at.target.rpartition(":")[0] not in _LOOPBACK]
        return self.tls is None and bool(outside)


@dataclass(frozen=True, slots=True)
class Defaults:
    """What the environment says where the command line does not."""

    data_dir: Path
    address: Address
    token: str | None


def from_environment(environ: Mapping[str, str] | None = None) -> Defaults:
    """Defaults of this process. Raises InvalidArgument for an address that does not parse."""
    env = os.environ if environ is None else environ
    token = env.get(addresses.TOKEN_VARIABLE) or None
    data_dir = addresses.default_data_dir(env, Path(env.get("HOME", "/")))
    told = env.get(addresses.ADDRESS_VARIABLE, "")
    parsed = addresses.parse(told) if told else None
    if parsed is None or parsed.plane != "local":
        # A remote daemon's address tells clients where to go, not a new daemon where to listen.
        parsed = addresses.parse(f"unix:{addresses.user_socket(env, os.geteuid())}")
    return Defaults(data_dir, parsed, token)


def auto_cache_bytes(available_bytes: int) -> int:
    """The cache of a daemon that nobody sized: 25 % of the available memory, within bounds."""
    low, high = AUTO_CACHE_BYTES
    return min(high, max(low, available_bytes // 4 // (2 * MIB) * (2 * MIB)))
