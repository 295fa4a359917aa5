"""What the commands have in common: parameter types, `--address`, `--json`, reports of errors."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeVar

import click

from momentd_server.cli.control import Control
from momentd_wire import addresses, units
from momentd_wire.addresses import Address
from momentd_wire.errors import InvalidArgument, MomentdError
from momentd_wire.v1 import momentd_pb2 as pb

_Function = TypeVar("_Function", bound=Callable[..., Any])
_CONTROL_TIMEOUT_S: Final = 10.0


class _Parsed(click.ParamType):
    """A parameter that one function reads; what the function refuses is a usage error."""

    def __init__(self, name: str, read: Callable[[str], object]) -> None:
        self.name = name
        self._read = read

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> object:
        if not isinstance(value, str):
            return value
        try:
            return self._read(value)
        except InvalidArgument as error:
            self.fail(error.message, param, ctx)


SIZE: Final = _Parsed("size", units.parse_bytes)
DURATION: Final = _Parsed("duration", units.parse_duration)
ADDRESS: Final = _Parsed("address", addresses.parse)


class Command(click.Command):
    """A command whose momentd errors end it with exit code 1 and one line, not a traceback."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except MomentdError as error:
            _fail(ctx, error)


def _fail(ctx: click.Context, error: MomentdError) -> NoReturn:
    if ctx.params.get("as_json"):
        document = {
            "reason": pb.Reason.Name(error.reason).removeprefix("REASON_"),
            "message": error.message,
            "details": error.details,
        }
        click.echo(json.dumps({"error": document}), err=True)
    else:
        click.echo(f"{click.style('Error:', fg='red')} {error.message}", err=True)
    ctx.exit(1)


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print JSON, with the names of the protocol's fields."
)


@dataclass(frozen=True, slots=True)
class Target:
    """Which daemon a command talks to, and how."""

    address: Address
    timeout_s: float
    token: str
    tls_ca: bytes | None

    def connect(self) -> Control:
        return Control(self.address, timeout_s=self.timeout_s, token=self.token, tls_ca=self.tls_ca)


_CONTROL_OPTIONS: Final = (
    click.option(
        "--address",
        type=ADDRESS,
        envvar=addresses.ADDRESS_VARIABLE,
        metavar="ADDRESS",
        help="unix:PATH, grpc+unix:PATH or HOST:PORT; default: $MOMENTD_ADDRESS, this user's "
        "socket, the machine's socket.",
    ),
    json_option,
    click.option(
        "--timeout",
        type=DURATION,
        default=_CONTROL_TIMEOUT_S,
        metavar="DURATION",
        help="How long to wait for an answer; default 10s.",
    ),
    click.option(
        "--token-file",
        type=click.Path(path_type=Path),
        metavar="FILE",
        help="The token of a TCP daemon; default: $MOMENTD_TOKEN.",
    ),
    click.option(
        "--tls-ca",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        envvar=addresses.TLS_CA_VARIABLE,
        metavar="FILE",
        help="Certificate authority of a TCP daemon, PEM; turns TLS on; default: $MOMENTD_TLS_CA.",
    ),
)


def control_options(function: _Function) -> _Function:
    """Adds `--address` and its companions, as one argument `target`, and `--json`."""

    @functools.wraps(function)
    def wrapper(
        address: Address | None,
        timeout: float,
        token_file: Path | None,
        tls_ca: Path | None,
        **arguments: Any,
    ) -> Any:
        token = read_token(token_file) or os.environ.get(addresses.TOKEN_VARIABLE, "")
        target = Target(
            address or find_daemon(),
            timeout,
            token,
            tls_ca.read_bytes() if tls_ca is not None else None,
        )
        return function(target=target, **arguments)

    for option in reversed(_CONTROL_OPTIONS):
        wrapper = option(wrapper)
    return wrapper  # type: ignore[return-value]


def read_token(path: Path | None) -> str:
    """The token in a file, without white space around it; empty without a file."""
    if path is None:
        return ""
    try:
        token = path.read_text("utf-8").strip()
    except OSError as error:
        raise InvalidArgument(f"--token-file {path}: {error.strerror}") from None
    if not token:
        raise InvalidArgument(f"--token-file {path}: the file is empty")
    return token


def find_daemon() -> Address:
    """The user's socket if there is one, else the machine's; the user's if there is neither."""
    mine = addresses.user_socket(os.environ, os.geteuid())
    machine = Path(addresses.MACHINE_SOCKET)
    chosen = machine if machine.exists() and not mine.exists() else mine
    return addresses.parse(f"unix:{chosen}")
