"""Where a daemon is looked for, and what the environment says."""

import os
import socket
from pathlib import Path

import pytest

import momentd
from momentd import _autostart, _discovery
from momentd._transport import ConnectionLost
from momentd._waits import Patience
from momentd_wire.errors import DaemonUnavailable, InvalidArgument, PermissionDenied


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch, tmp_path):
    for name in ("MOMENTD_ADDRESS", "MOMENTD_TIMEOUT", "MOMENTD_DATA_DIR", "MOMENTD_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(_discovery.addresses, "MACHINE_SOCKET", str(tmp_path / "machine.sock"))
    monkeypatch.setattr(_discovery, "_settings", _discovery.Settings())


@pytest.fixture
def started(monkeypatch):
    """Addresses that a daemon would have been started for."""
    asked = []
    monkeypatch.setattr(_autostart, "start", lambda address, *_: asked.append(str(address)))
    return asked


@pytest.fixture
def listening():
    """Make something that accepts connections at a path."""
    sockets = []

    def listen(path: Path):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.bind(str(path))
        sock.listen()
        sockets.append(sock)

    yield listen
    for sock in sockets:
        sock.close()


def find(address=None):
    found, transport = _discovery.find(address, [], Patience(1, "a daemon", "?"))
    transport.close()
    return str(found.address)


def user_socket(tmp_path) -> Path:
    return tmp_path / "run" / "momentd" / "momentd.sock"


def test_an_address_that_is_given_beats_everything(tmp_path, listening, monkeypatch):
    listening(tmp_path / "a.sock")
    listening(user_socket(tmp_path))
    momentd.init(address="unix:/b.sock")
    monkeypatch.setenv("MOMENTD_ADDRESS", "unix:/c.sock")
    assert find(f"unix:{tmp_path}/a.sock") == f"unix:{tmp_path}/a.sock"


def test_init_beats_the_environment(tmp_path, listening, monkeypatch):
    listening(tmp_path / "b.sock")
    monkeypatch.setenv("MOMENTD_ADDRESS", "unix:/c.sock")
    momentd.init(address=f"unix:{tmp_path}/b.sock")
    assert find() == f"unix:{tmp_path}/b.sock"


def test_the_environment_beats_the_usual_places(tmp_path, listening, monkeypatch):
    listening(tmp_path / "c.sock")
    listening(user_socket(tmp_path))
    monkeypatch.setenv("MOMENTD_ADDRESS", f"unix:{tmp_path}/c.sock")
    assert find() == f"unix:{tmp_path}/c.sock"


def test_the_users_socket_comes_before_the_machines(tmp_path, listening):
    listening(user_socket(tmp_path))
    listening(tmp_path / "machine.sock")
    assert find() == f"unix:{user_socket(tmp_path)}"


def test_the_machines_socket_is_used_if_there_is_no_other(tmp_path, listening, started):
    listening(tmp_path / "machine.sock")
    assert find() == f"unix:{tmp_path}/machine.sock"
    assert not started


def test_without_any_a_daemon_is_started_at_the_users_socket(tmp_path, started):
    with pytest.raises(ConnectionLost):  # the start is only pretended
        find()
    assert started == [f"unix:{user_socket(tmp_path)}"]


def test_no_daemon_is_started_where_an_address_was_given(started):
    with pytest.raises(ConnectionLost, match="nobody listens"):
        find("unix:/nowhere/x.sock")
    assert not started


def test_no_daemon_is_started_if_that_is_switched_off(started):
    momentd.init(autostart=False)
    with pytest.raises(ConnectionLost):
        find()
    assert not started


@pytest.mark.parametrize("mode", [0o777, 0o720])
def test_a_socket_directory_that_others_can_write_to_is_refused(tmp_path, mode, started):
    directory = user_socket(tmp_path).parent
    directory.mkdir(parents=True)
    directory.chmod(mode)
    with pytest.raises(PermissionDenied, match=f"{mode:04o}") as caught:
        find()
    assert str(directory) in str(caught.value)
    assert not started


def test_a_link_in_place_of_the_socket_directory_is_refused(tmp_path, started):
    directory = user_socket(tmp_path).parent
    directory.parent.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    directory.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionDenied):
        find()


def test_a_socket_path_that_is_too_long_is_refused_with_the_limit(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/" + "x" * 120)
    with pytest.raises(InvalidArgument, match="107"):
        find()


@pytest.mark.parametrize("address", ["nonsense", "unix:relative", "host", "tcp://a:1", "h:99999"])
def test_an_address_that_does_not_read_is_refused_by_init(address):
    with pytest.raises(InvalidArgument):
        momentd.init(address=address)


@pytest.mark.parametrize("cache", [0, -5, "0"])
def test_a_cache_of_nothing_is_refused_by_init(cache):
    with pytest.raises(InvalidArgument, match="must be above 0"):
        momentd.init(cache=cache)


def test_init_reads_sizes():
    momentd.init(cache="1.5GiB")
    assert _discovery.settings().cache_bytes == 3 << 29
    with pytest.raises(InvalidArgument):
        momentd.init(cache="much")


def test_the_data_directory_is_chosen_by_init_environment_and_state_home(tmp_path, monkeypatch):
    assert _discovery.settings().data_dir == tmp_path / "state" / "momentd"
    monkeypatch.setenv("MOMENTD_DATA_DIR", str(tmp_path / "env"))
    assert _discovery.settings().data_dir == tmp_path / "env"
    momentd.init(data_dir=tmp_path / "told")
    assert _discovery.settings().data_dir == tmp_path / "told"


@pytest.mark.parametrize(("text", "seconds"), [("5", 5.0), ("2m", 120.0), ("500ms", 0.5)])
def test_the_timeout_is_a_duration(monkeypatch, text, seconds):
    monkeypatch.setenv("MOMENTD_TIMEOUT", text)
    assert _discovery.timeout_s() == seconds


@pytest.mark.parametrize("text", ["0", "soon", "-1"])
def test_a_timeout_that_makes_no_sense_is_refused(monkeypatch, text):
    monkeypatch.setenv("MOMENTD_TIMEOUT", text)
    with pytest.raises(InvalidArgument, match="MOMENTD_TIMEOUT"):
        _discovery.timeout_s()


def test_the_run_names_program_host_and_time(monkeypatch):
    monkeypatch.setattr(_discovery.sys, "argv", ["/home/u/train.py", "--lr"])
    run = _discovery.default_run()
    assert run.startswith(f"train.py @ {socket.gethostname()} 2")
    assert _discovery.program() == "/home/u/train.py --lr"


def test_labels_are_printable_and_short(monkeypatch):
    monkeypatch.setattr(_discovery.sys, "argv", ["a\nb\x00", "x" * 1000])
    assert _discovery.program().isprintable()
    assert len(_discovery.program()) == 255


def test_without_the_servers_package_nothing_is_started(monkeypatch, tmp_path):
    monkeypatch.setattr(_autostart.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DaemonUnavailable, match=r"pip install 'momentd\[server\]'"):
        _autostart.start(
            _discovery.user_address(), _discovery.settings(), Patience(1, "a daemon", "?")
        )


def test_the_default_cache_is_a_quarter_of_what_is_available(monkeypatch):
    for available, cache in ((8 << 30, 2 << 30), (100 << 20, 256 << 20), (1 << 40, 16 << 30)):
        monkeypatch.setattr(_autostart, "available_bytes", lambda value=available: value)
        assert _autostart.default_cache_bytes() == cache


def test_a_uid_other_than_the_directorys_owner_is_told(tmp_path, monkeypatch):
    directory = user_socket(tmp_path).parent
    directory.mkdir(mode=0o700, parents=True)
    monkeypatch.setattr(_discovery.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(PermissionDenied, match=f"uid {os.geteuid()}"):
        _discovery.check_private(directory)
