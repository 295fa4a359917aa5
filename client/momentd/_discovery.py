"""Finding a daemon. The only place of the client that reads the environment.

In this order: `address=`, `momentd.init(address=...)`, $MOMENTD_ADDRESS, the user's socket, the
machine's socket if it admits this user, and else a daemon is started.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
import time
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Final

from momentd._transport import ConnectionLost, Hook, Transport
from momentd._transport.local import LocalTransport
from momentd._waits import Patience
from momentd_wire import addresses, units
from momentd_wire.addresses import Address
from momentd_wire.errors import InvalidArgument, PermissionDenied

_MAX_TEXT: Final = 255


@dataclass(frozen=True, slots=True)
class Settings:
    """What `momentd.init` was told."""

    address: str | None = None
    cache_bytes: int | None = None
    data_dir: Path | None = None
    autostart: bool = True


_settings = Settings()
_started_s: Final = time.time()


def init(
    *,
    address: str | None = None,
    cache: str | int | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    autostart: bool = True,
) -> None:
    """Set the defaults of this process for finding or starting a daemon. Starts nothing.

    Args:
        address: Of a running daemon: "unix:PATH", "grpc+unix:PATH" or "HOST:PORT".
        cache: RAM for rows of a daemon that this process starts: bytes, or "8GiB". Default: a
            quarter of the available memory, 256 MiB to 16 GiB.
        data_dir: Where a daemon that this process starts keeps its files.
        autostart: Whether to start one if none is found.

    Raises:
        InvalidArgument: An address or a size does not read, or the size is not above 0.
    """
    global _settings  # noqa: PLW0603  # the defaults of the process are what this is about
    if address is not None:
        addresses.parse(address)
    if cache is not None:
        asked, cache = cache, units.parse_bytes(cache) if isinstance(cache, str) else int(cache)
        if cache <= 0:
            raise InvalidArgument(f"cache is {asked!r}, it must be above 0 bytes")
    _settings = Settings(
        address=address,
        cache_bytes=cache,
        data_dir=None if data_dir is None else Path(data_dir).expanduser().absolute(),
        autostart=autostart,
    )


def settings() -> Settings:
    """The defaults of this process; the data directory is filled in."""
    if _settings.data_dir is not None:
        return _settings
    chosen = addresses.default_data_dir(os.environ, Path.home())
    return replace(_settings, data_dir=chosen.absolute())


@dataclass(frozen=True, slots=True)
class Found:
    """Where the daemon is, and how it is spoken to."""

    address: Address
    token: str | None = None
    tls_ca: str | None = None

    def connect(self, hooks: list[tuple[Hook, Hook | None]]) -> Transport:
        """A new connection. Raises ConnectionLost (nobody listens), PermissionDenied."""
        if self.address.plane == "local":
            return LocalTransport(self.address.target, hooks)
        from momentd._transport import grpc  # slow to import, and not needed on one machine

        if self.address.kind == "unix":
            return grpc.GrpcTransport(grpc.unix_target(self.address.target))
        credentials = None if self.tls_ca is None else grpc.tls(self.tls_ca)
        return grpc.GrpcTransport(self.address.target, token=self.token, credentials=credentials)


def asked_for(address: str | None) -> str | None:
    """The address that was asked for, by whichever means; None: look around, or start one."""
    return address or _settings.address or os.environ.get(addresses.ADDRESS_VARIABLE) or None


def find(
    address: str | None, hooks: list[tuple[Hook, Hook | None]], patience: Patience
) -> tuple[Found, Transport]:
    """A connection to the daemon, started if need be.

    Raises ConnectionLost (nobody there, yet), DaemonUnavailable (it could not be started),
    PermissionDenied, InvalidArgument (an address that does not read).
    """
    told = asked_for(address)
    if told is not None:
        patience.where = told
        found = _found(addresses.parse(told))
        return found, found.connect(hooks)
    user = user_address()
    patience.where = str(user)
    try:
        check_private(Path(user.target).parent)
        return Found(user), Found(user).connect(hooks)
    except ConnectionLost as lost:
        nobody = lost
    try:
        machine = Found(Address("local", "unix", addresses.MACHINE_SOCKET))
        return machine, machine.connect(hooks)
    except (ConnectionLost, PermissionDenied):
        if not _settings.autostart:
            raise nobody from None
    from momentd import _autostart  # needed by the first process of a user only

    _autostart.start(user, settings(), patience)
    return Found(user), Found(user).connect(hooks)


def _found(address: Address) -> Found:
    if address.kind == "unix":
        return Found(address)
    token = os.environ.get(addresses.TOKEN_VARIABLE) or None
    return Found(address, token, os.environ.get(addresses.TLS_CA_VARIABLE) or None)


def user_address() -> Address:
    """Where this user's own daemon listens. Raises InvalidArgument if the path is too long."""
    return addresses.parse(f"unix:{addresses.user_socket(os.environ, os.getuid())}")


def check_private(directory: Path) -> None:
    """A socket is trusted because nobody else can make one there. Raises PermissionDenied."""
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return
    uid = os.getuid()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != uid or status.st_mode & 0o022:
        raise PermissionDenied(
            f"{directory} must be a directory of uid {uid} that nobody else can write to; it is of "
            f"uid {status.st_uid}, mode {stat.S_IMODE(status.st_mode):04o}. Remove it, or set "
            f"XDG_RUNTIME_DIR or {addresses.ADDRESS_VARIABLE}"
        )


def timeout_s() -> float:
    """Seconds to wait for a daemon. Raises InvalidArgument for a text that is no duration."""
    text = os.environ.get(addresses.TIMEOUT_VARIABLE)
    if not text:
        return addresses.DEFAULT_TIMEOUT_S
    try:
        seconds = units.parse_duration(text)
    except InvalidArgument as error:
        raise InvalidArgument(f"${addresses.TIMEOUT_VARIABLE}: {error.message}") from None
    if seconds <= 0:
        raise InvalidArgument(f"${addresses.TIMEOUT_VARIABLE} is {text!r}, it must be above 0")
    return seconds


def program() -> str:
    """What runs here, for people: the command line, or the notebook."""
    notebook = os.environ.get("JPY_SESSION_NAME") or os.environ.get("VSCODE_NOTEBOOK")
    text = Path(notebook).name if notebook else " ".join(sys.argv) or "python"
    return _printable(text)


def default_run() -> str:
    """A label for this process's tables: script or notebook, host, start time."""
    notebook = os.environ.get("JPY_SESSION_NAME") or os.environ.get("VSCODE_NOTEBOOK")
    name = Path(notebook or (sys.argv[0] if sys.argv and sys.argv[0] else "python")).name
    started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(_started_s))
    return _printable(f"{name} @ {socket.gethostname()} {started}")


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)[:_MAX_TEXT]


def version() -> str:
    """The installed version of momentd."""
    try:
        return metadata.version("momentd")
    except metadata.PackageNotFoundError:  # from a source tree
        return "0+source"
