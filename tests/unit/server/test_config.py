"""Configuration values: what cannot work is refused by name; the environment is read once."""

from pathlib import Path

import pytest

from momentd_server.config import GIB, MIB, ServeConfig, auto_cache_bytes, from_environment
from momentd_wire import addresses, errors

UNIX = addresses.parse("unix:/tmp/m/m.sock")


def make(**changes):
    return ServeConfig(**{"data_dir": Path("/d"), "cache_bytes": GIB, "address": UNIX, **changes})


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"cache_bytes": MIB}, "--cache"),
        ({"address": addresses.parse("localhost:1")}, "--address"),
        ({"listen": (UNIX,), "token": "x" * 16}, "--listen"),
        ({"listen": (addresses.parse("h:1"),)}, "token"),
        ({"arena_bytes": 0}, "arena_bytes"),
        ({"stop_timeout_s": -1.0}, "stop_timeout_s"),
        ({"threads": -1}, "threads"),
    ],
)
def test_what_cannot_work_is_refused_by_name(changes, named):
    with pytest.raises(errors.InvalidArgument, match=named):
        make(**changes)


def test_the_cache_nobody_sized_is_a_quarter_within_bounds():
    assert auto_cache_bytes(8 * GIB) == 2 * GIB
    assert auto_cache_bytes(MIB) == 256 * MIB
    assert auto_cache_bytes(1000 * GIB) == 16 * GIB


def test_the_environment_gives_defaults():
    env = {"HOME": "/home/u", "XDG_RUNTIME_DIR": "/run/user/7", "MOMENTD_TOKEN": "secret"}
    defaults = from_environment(env)
    assert defaults.data_dir == Path("/home/u/.local/state/momentd")
    assert defaults.address.target == "/run/user/7/momentd/momentd.sock"
    assert defaults.token == "secret"
    told = from_environment({**env, "MOMENTD_ADDRESS": "unix:/x/y", "MOMENTD_DATA_DIR": "/big"})
    assert told.address.target == "/x/y"
    assert told.data_dir == Path("/big")


def test_an_address_of_a_remote_daemon_is_not_where_to_listen():
    env = {"HOME": "/h", "XDG_RUNTIME_DIR": "/run/user/7", "MOMENTD_ADDRESS": "far:7070"}
    assert from_environment(env).address.target == "/run/user/7/momentd/momentd.sock"
