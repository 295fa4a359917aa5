"""`momentd serve`: merges defaults, environment and options into one frozen configuration."""

from __future__ import annotations

from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, Final

import click

from momentd_server import config
from momentd_server.cli.options import ADDRESS, DURATION, SIZE, Command, json_option, read_token
from momentd_server.keeper import Keeper
from momentd_server.obs import logs, machine
from momentd_wire.addresses import Address
from momentd_wire.units import format_bytes, format_duration

_PATH: Final = click.Path(path_type=Path)
_FILE: Final = click.Path(exists=True, dir_okay=False, path_type=Path)
_COUNT: Final = click.IntRange(min=1)
_DEFAULTS: Final[dict[str, Any]] = {
    each.name: each.default for each in fields(config.ServeConfig) if each.default is not MISSING
}


def _size(name: str) -> str:
    return f"default: {format_bytes(_DEFAULTS[name])}."


def _duration(name: str) -> str:
    return f"default: {format_duration(_DEFAULTS[name])}."


@click.command(cls=Command)
@click.option(
    "--data-dir",
    type=_PATH,
    metavar="DIR",
    help="Where records are kept, on a local disk; default: $MOMENTD_DATA_DIR, else "
    "momentd in the XDG state directory.",
)
@click.option(
    "--cache",
    "cache_bytes",
    type=SIZE,
    metavar="SIZE",
    help="Bound of the memory for rows, e.g. 8GiB; default: a quarter of what is available, "
    "256MiB to 16GiB. Locations take 12 bytes a row more.",
)
@click.option(
    "--address",
    type=ADDRESS,
    metavar="unix:PATH",
    help="Socket to listen on, gRPC at PATH.grpc; default: $MOMENTD_ADDRESS, else this user's.",
)
@click.option(
    "--listen",
    type=ADDRESS,
    multiple=True,
    metavar="HOST:PORT",
    help="Also serve gRPC over TCP; needs TLS or a token. May be repeated.",
)
@click.option("--tls-cert", type=_FILE, metavar="FILE", help="Certificate for --listen, PEM.")
@click.option("--tls-key", type=_FILE, metavar="FILE", help="Its private key, PEM.")
@click.option(
    "--tls-client-ca",
    type=_FILE,
    metavar="FILE",
    help="Clients over TCP must show a certificate of this authority.",
)
@click.option(
    "--token-file",
    type=_PATH,
    metavar="FILE",
    help="What clients over TCP must present; default: $MOMENTD_TOKEN.",
)
@click.option(
    "--allow-uid",
    "allow_uids",
    type=click.IntRange(min=0),
    multiple=True,
    metavar="UID",
    help="Another user who may use the socket. May be repeated.",
)
@click.option(
    "--threads",
    type=click.IntRange(min=0),
    help="Threads of the update kernels; default: one for each core, at most 16.",
)
@click.option(
    "--read-threads",
    type=_COUNT,
    help=f"Cold reads at a time; default: {_DEFAULTS['read_threads']}.",
)
@click.option(
    "--disk-ratio",
    type=float,
    metavar="X",
    help="Most bytes on disk, in terms of the bytes that are needed; more is compacted. Default: "
    f"{_DEFAULTS['disk_ratio']}; nearer to 1 saves disk and writes more.",
)
@click.option(
    "--arena",
    "arena_bytes",
    type=SIZE,
    metavar="SIZE",
    help=f"Most shared memory of one session; {_size('arena_bytes')}",
)
@click.option(
    "--arenas",
    "arenas_total_bytes",
    type=SIZE,
    metavar="SIZE",
    help=f"Most shared memory of all sessions; {_size('arenas_total_bytes')}",
)
@click.option(
    "--max-sessions",
    type=_COUNT,
    help=f"Most sessions at a time; default: {_DEFAULTS['max_sessions']}.",
)
@click.option(
    "--grpc-memory",
    "grpc_bytes",
    type=SIZE,
    metavar="SIZE",
    help=f"Most bulk bytes in flight over gRPC; {_size('grpc_bytes')}",
)
@click.option(
    "--stop-timeout",
    "stop_timeout_s",
    type=DURATION,
    metavar="DURATION",
    help=f"How long an orderly stop waits for requests in work; {_duration('stop_timeout_s')}",
)
@click.option(
    "--attach-grace",
    "attach_grace_s",
    type=DURATION,
    metavar="DURATION",
    help=f"How long a session lives without a connection; {_duration('attach_grace_s')}",
)
@click.option(
    "--snapshot-every",
    "snapshot_every_s",
    type=DURATION,
    metavar="DURATION",
    help="Make a snapshot of each run so often, e.g. 10min; default: never.",
)
@click.option(
    "--snapshots-kept",
    type=_COUNT,
    help="Of these so many of each run are kept; default: "
    f"{_DEFAULTS['snapshots_kept']}. Pinned ones and those made by hand are not counted.",
)
@click.option(
    "--allow-network-fs",
    is_flag=True,
    default=None,
    help="Accept a data directory on a network file system, at your own risk.",
)
@click.option("--auto", "auto_started", is_flag=True, default=None, hidden=True)
@click.option("--idle-exit", "idle_exit_s", type=DURATION, metavar="DURATION", hidden=True)
@json_option
def serve(*, as_json: bool, **options: Any) -> None:
    """Run the daemon in the foreground until SIGTERM, Ctrl-C or `momentd stop`.

    One line on standard output says that it is ready; its log goes to standard error. A stop
    makes everything durable first.
    """
    settings = build(options)
    logs.configure()
    raise SystemExit(Keeper(settings, _engine, as_json=as_json).run())


def _engine(channel: int, lifeline: int) -> int:
    # Kernels are defined when this is imported: by the engine, and not by the process that keeps.
    from momentd_server import app

    return app.run_engine(channel, lifeline)


def build(options: dict[str, Any]) -> config.ServeConfig:
    """The configuration of these options; None means "not said". Raises InvalidArgument."""
    told = {name: value for name, value in options.items() if value is not None}
    defaults = config.from_environment()
    certificate, key = told.pop("tls_cert", None), told.pop("tls_key", None)
    client_ca: Path | None = told.pop("tls_client_ca", None)
    if (certificate is None) != (key is None):
        raise click.UsageError("--tls-cert and --tls-key belong together")
    if client_ca is not None and certificate is None:
        raise click.UsageError("--tls-client-ca needs --tls-cert and --tls-key")
    listen: tuple[Address, ...] = told.pop("listen", ())
    token = read_token(told.pop("token_file", None)) or defaults.token
    cache_bytes: int | None = told.pop("cache_bytes", None)
    if cache_bytes is None:
        cache_bytes = config.auto_cache_bytes(machine.memory_available_bytes())
    return config.ServeConfig(
        data_dir=Path(told.pop("data_dir", defaults.data_dir)).absolute(),
        cache_bytes=cache_bytes,
        address=told.pop("address", defaults.address),
        listen=listen,
        tls=config.Tls(certificate, key, client_ca) if certificate is not None else None,
        token=token,
        allow_uids=frozenset(told.pop("allow_uids", ())),
        **told,
    )
