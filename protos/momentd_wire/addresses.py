"""Addresses of a daemon: how they are written, and where one listens if nobody says.

    unix:PATH            the local plane, and gRPC at PATH + ".grpc"
    grpc+unix:PATH       gRPC over a Unix socket
    grpc://HOST:PORT     gRPC over TCP; HOST:PORT alone means the same

Both ends look for a daemon in the same places, so they are written here once. No I/O: what the
environment says is an argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from momentd_wire.errors import InvalidArgument

ADDRESS_VARIABLE: Final = "MOMENTD_ADDRESS"
TIMEOUT_VARIABLE: Final = "MOMENTD_TIMEOUT"
TOKEN_VARIABLE: Final = "MOMENTD_TOKEN"
TLS_CA_VARIABLE: Final = "MOMENTD_TLS_CA"
DATA_DIR_VARIABLE: Final = "MOMENTD_DATA_DIR"
# Seconds a client waits for a daemon that does not answer.
DEFAULT_TIMEOUT_S: Final = 60.0
# A daemon that serves every user it admits; started by the machine's administrator.
MACHINE_SOCKET: Final = "/run/momentd/momentd.sock"
GRPC_SUFFIX: Final = ".grpc"
# sockaddr_un holds 108 bytes with the closing zero.
SOCKET_PATH_BYTES: Final = 107
_FORMS: Final = "unix:PATH, grpc+unix:PATH, grpc://HOST:PORT or HOST:PORT"


@dataclass(frozen=True, slots=True)
class Address:
    """One parsed address. `target` is a socket path, or HOST:PORT."""

    plane: Literal["local", "grpc"]
    kind: Literal["unix", "tcp"]
    target: str

    def __str__(self) -> str:
        if self.kind == "tcp":
            return f"grpc://{self.target}"
        return f"{'unix' if self.plane == 'local' else 'grpc+unix'}:{self.target}"

    @property
    def control(self) -> Address:
        """Where the same daemon speaks gRPC."""
        if self.plane == "grpc":
            return self
        return Address("grpc", "unix", self.target + GRPC_SUFFIX)


def parse(text: str) -> Address:
    """Reads an address. Raises InvalidArgument naming the accepted forms."""
    scheme, colon, rest = text.partition(":")
    if scheme in ("unix", "grpc+unix") and colon:
        return _unix(text, "local" if scheme == "unix" else "grpc", rest)
    host_port = text.removeprefix("grpc://")
    host, colon, port = host_port.rpartition(":")
    # An IPv6 address needs its brackets: without them its last group would pass for a port.
    bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not (colon and host and port.isdecimal()) or "/" in host or bare_ipv6:
        raise InvalidArgument(f"address {text!r} is not understood: write {_FORMS}")
    if not 0 <= int(port) <= 65535:
        raise InvalidArgument(f"address {text!r}: port {port} is not in 0..65535")
    return Address("grpc", "tcp", host_port)


def _unix(text: str, plane: Literal["local", "grpc"], path: str) -> Address:
    path = path.removeprefix("//") if path.startswith("///") else path
    if not path.startswith("/"):
        raise InvalidArgument(f"address {text!r}: the socket's path must be absolute")
    suffix = GRPC_SUFFIX if plane == "local" else ""
    nbytes = len((path + suffix).encode())
    if nbytes > SOCKET_PATH_BYTES:
        raise InvalidArgument(
            f"address {text!r}: the socket's path has {nbytes} bytes"
            f"{' with the suffix ' + suffix if suffix else ''}, Linux allows {SOCKET_PATH_BYTES}: "
            f"choose a shorter directory, e.g. unix:/tmp/momentd/momentd.sock"
        )
    return Address(plane, "unix", path)


def user_socket(environ: Mapping[str, str], uid: int) -> Path:
    """Where this user's own daemon listens. Its directory must be private (0700) to be trusted."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        return Path(runtime) / "momentd" / "momentd.sock"
    return Path(f"/tmp/momentd-{uid}") / "momentd.sock"  # noqa: S108  # checked to be ours


def default_data_dir(environ: Mapping[str, str], home: Path) -> Path:
    """$MOMENTD_DATA_DIR, else `momentd` in the XDG state directory."""
    if chosen := environ.get(DATA_DIR_VARIABLE, ""):
        return Path(chosen)
    state = environ.get("XDG_STATE_HOME", "")
    base = Path(state) if state.startswith("/") else home / ".local" / "state"
    return base / "momentd"
