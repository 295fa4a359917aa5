"""The daemon as a process: readiness, signals, restarts, addresses, auto-exit, no second daemon."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from momentd_server.app import Daemon
from momentd_server.rpc.socket_path import SocketPath
from momentd_wire import errors
from momentd_wire.v1 import momentd_pb2 as pb
from tests.support.numpy_engine import NumpyEngine
from tests.support.planes import GrpcClient, LocalClient, make_config, serving

ROWS = np.arange(4)
GRADS = np.ones((4, 4), np.float32)


class DaemonProcess:
    def __init__(self, directory, environment, *settings, umask=-1):
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.numpy_daemon", str(directory), *settings],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, umask=umask,
            cwd=Path(__file__).parents[3],
        )  # fmt: skip
        self.errors = ""

    def ready(self):
        line = self.process.stdout.readline()
        assert line, self.process.communicate(timeout=20)[1]
        return json.loads(line)

    def wait(self, timeout=20):
        _, self.errors = self.process.communicate(timeout=timeout)
        return self.process.returncode

    def events(self):
        lines = [line for line in self.errors.splitlines() if line.startswith("{")]
        return [json.loads(line)["event"] for line in lines]


@pytest.fixture
def start(tmp_path, source_environment):
    started = []

    def start(*settings, umask=-1, **environment):
        daemon = DaemonProcess(
            tmp_path, {**source_environment, **environment}, *settings, umask=umask
        )
        started.append(daemon)
        return daemon

    yield start
    for daemon in started:
        if daemon.process.poll() is None:
            daemon.process.kill()
        daemon.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_it_in_order_and_leaves_no_socket(start, tmp_path, number):
    daemon = start()
    facts = daemon.ready()
    assert facts["pid"] == daemon.process.pid
    assert facts["addresses"][0] == f"unix:{tmp_path}/m.sock"
    daemon.process.send_signal(number)
    assert daemon.wait() == 0
    assert daemon.events() == ["serving", "stopped"]
    assert not (tmp_path / "m.sock").exists()
    assert not (tmp_path / "m.sock.grpc").exists()


def test_the_stop_call_stops_it_on_either_plane(start, tmp_path):
    daemon = start()
    daemon.ready()
    with LocalClient(tmp_path / "m.sock", no_session=True) as client:
        client.call(stop=pb.StopRequest())
    assert daemon.wait() == 0
    daemon = start()
    daemon.ready()
    with GrpcClient(f"unix:{tmp_path}/m.sock.grpc", no_session=True) as client:
        client.call("Stop", pb.StopRequest())
    assert daemon.wait() == 0


def test_a_request_in_work_is_finished_and_answered_before_the_stop(start, tmp_path):
    daemon = start("delay_s=1")
    daemon.ready()
    with LocalClient(tmp_path / "m.sock", arena_bytes=2 << 20) as client:
        table = client.open_table()
        part = client.table_update(table, ROWS, GRADS)
        sequence = pb.Sequence(stream=1, number=2)
        client.send(update=pb.UpdateRequest(sequence=sequence, tables=[part]))
        time.sleep(0.3)
        daemon.process.terminate()
        assert client.receive().update.tables[0].step == 1
        with pytest.raises((EOFError, ConnectionError)):
            client.receive()
    assert daemon.wait() == 0


def test_a_stop_that_takes_too_long_ends_with_its_own_exit_code(start, tmp_path):
    daemon = start("delay_s=60", "stop_timeout_s=0.5")
    daemon.ready()
    with LocalClient(tmp_path / "m.sock", arena_bytes=2 << 20) as client:
        part = client.table_update(client.open_table(), ROWS, GRADS)
        sequence = pb.Sequence(stream=1, number=2)
        client.send(update=pb.UpdateRequest(sequence=sequence, tables=[part]))
        time.sleep(0.3)
        began = time.monotonic()
        daemon.process.terminate()
        assert daemon.wait() == 3
        assert time.monotonic() - began < 5


def test_a_second_signal_stops_it_at_once(start, tmp_path):
    daemon = start("delay_s=60", "stop_timeout_s=60")
    daemon.ready()
    with LocalClient(tmp_path / "m.sock", arena_bytes=2 << 20) as client:
        part = client.table_update(client.open_table(), ROWS, GRADS)
        sequence = pb.Sequence(stream=1, number=2)
        client.send(update=pb.UpdateRequest(sequence=sequence, tables=[part]))
        time.sleep(0.3)
        daemon.process.terminate()
        time.sleep(0.3)
        daemon.process.terminate()
        assert daemon.wait(5) == 128 + signal.SIGTERM
        assert "second SIGTERM" in daemon.errors


def test_sessions_survive_an_orderly_restart_with_their_outcomes(start, tmp_path):
    daemon = start()
    daemon.ready()
    with LocalClient(tmp_path / "m.sock", arena_bytes=2 << 20) as client:
        table = client.open_table()
        part = client.table_update(table, ROWS, GRADS)
        first = client.update(2, part)
        daemon.process.terminate()
        assert daemon.wait() == 0
        start().ready()
        with LocalClient(tmp_path / "m.sock", resume_session=client.hello.session) as again:
            assert again.hello.resumed
            assert [(d.stream, d.number) for d in again.hello.done] == [(1, 2)]
            assert again.grow(1).arena > client.arena.arena
            reply = again.update(2, part)  # the old region: it is not looked at again
            assert reply.repeated_request
            assert reply.tables == first.tables


GREETER = """
import sys
from tests.support.numpy_engine import NumpyEngine
from tests.support.planes import LocalClient
client = LocalClient(sys.argv[1])
print(client.hello.session.hex(), flush=True)
sys.stdin.read()
"""


def test_a_session_whose_process_is_gone_is_not_restored(start, tmp_path, source_environment):
    daemon = start()
    daemon.ready()
    child = subprocess.Popen(
        [sys.executable, "-c", GREETER, str(tmp_path / "m.sock")], env=source_environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    session = bytes.fromhex(child.stdout.readline())
    daemon.process.terminate()
    assert daemon.wait() == 0
    child.communicate("")
    start().ready()
    with LocalClient(tmp_path / "m.sock", resume_session=session) as client:
        assert not client.hello.resumed


def test_an_auto_started_daemon_ends_some_time_after_its_last_session(start, tmp_path):
    daemon = start("auto=1", "idle_exit_s=1.2")
    daemon.ready()
    with LocalClient(tmp_path / "m.sock") as client:
        assert client.hello.auto_started
        time.sleep(2.5)
        assert daemon.process.poll() is None
    assert daemon.wait(15) == 0
    assert "idle" in daemon.events()


def test_two_daemons_on_one_address_are_one_daemon(start, tmp_path):
    daemon = start()
    daemon.ready()
    second = start()
    assert second.wait() == 1
    assert f"pid {daemon.process.pid}" in second.errors
    assert "momentd stop" in second.errors
    with LocalClient(tmp_path / "m.sock") as client:  # the first serves on
        assert client.hello.pid == daemon.process.pid


def test_a_socket_left_over_by_a_kill_is_replaced(start, tmp_path):
    daemon = start()
    daemon.ready()
    daemon.process.kill()
    daemon.wait()
    assert (tmp_path / "m.sock").exists()
    start().ready()
    LocalClient(tmp_path / "m.sock").close()
    GrpcClient(f"unix:{tmp_path}/m.sock.grpc").close()


def test_a_proxy_in_the_environment_is_not_asked(start, tmp_path):
    proxy = "http://127.0.0.1:9"
    start(http_proxy=proxy, https_proxy=proxy, grpc_proxy=proxy).ready()
    LocalClient(tmp_path / "m.sock").close()
    GrpcClient(f"unix:{tmp_path}/m.sock.grpc").close()


def test_umask_000_leaves_sockets_private(start, tmp_path):
    start(umask=0).ready()
    for name in ("m.sock", "m.sock.grpc", "m.sock.lock"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600, name


# ------------------------------------------------------------------------------------ addresses


def test_a_directory_is_made_private_whatever_the_umask(tmp_path):
    umask = os.umask(0)
    try:
        where = SocketPath(tmp_path / "run" / "m.sock", shared=False)
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "run").stat().st_mode) == 0o700
    where.close()


def test_a_path_too_long_for_a_socket_is_refused_with_the_limit(tmp_path):
    longest = 107 - len(".grpc")
    name = "x" * (longest - len(str(tmp_path)) - 1)
    SocketPath(tmp_path / name, shared=False).close()
    with pytest.raises(errors.InvalidArgument, match="107"):
        SocketPath(tmp_path / f"{name}y", shared=False)


def test_the_longest_path_serves(tmp_path, engine):
    name = "x" * (107 - len(".grpc") - len(str(tmp_path)) - 1)
    from momentd_wire import addresses

    config = make_config(tmp_path, address=addresses.parse(f"unix:{tmp_path}/{name}"))
    with serving(config, engine):
        LocalClient(tmp_path / name).close()
        GrpcClient(f"unix:{tmp_path}/{name}.grpc").close()


@pytest.mark.parametrize("content", ["1", str(os.getpid()), "999999999", "garbage", ""])
def test_what_a_lock_file_says_does_not_matter_only_who_holds_it(tmp_path, content):
    (tmp_path / "m.sock.lock").write_text(content)
    where = SocketPath(tmp_path / "m.sock", shared=False)
    with pytest.raises(errors.DaemonUnavailable, match=f"pid {os.getpid()}"):
        SocketPath(tmp_path / "m.sock", shared=False)
    where.close()
    SocketPath(tmp_path / "m.sock", shared=False).close()


def test_a_foreign_file_in_the_sockets_place_is_not_removed(tmp_path):
    (tmp_path / "m.sock").write_text("mine")
    with pytest.raises(errors.InvalidArgument, match="not a socket"):
        SocketPath(tmp_path / "m.sock", shared=False)
    assert (tmp_path / "m.sock").read_text() == "mine"


def test_a_directory_where_others_can_swap_files_is_refused(tmp_path):
    directory = tmp_path / "open"
    directory.mkdir()
    directory.chmod(0o777)
    with pytest.raises(errors.PermissionDenied, match="0777"):
        SocketPath(directory / "m.sock", shared=False)
    directory.chmod(0o1777)  # as /tmp: nobody can replace our files
    SocketPath(directory / "m.sock", shared=False).close()


def test_the_socket_appears_only_when_it_is_served(tmp_path):
    where = SocketPath(tmp_path / "m.sock", shared=False)
    assert not (tmp_path / "m.sock").exists()
    seen = []
    stop = threading.Event()

    def connect():
        while not stop.is_set():
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                try:
                    sock.connect(str(tmp_path / "m.sock"))
                    seen.append("connected")
                    return
                except FileNotFoundError:
                    continue
                except ConnectionRefusedError:
                    seen.append("refused")

    thread = threading.Thread(target=connect)
    thread.start()
    listener = where.listen()
    thread.join(20)
    stop.set()
    listener.close()
    where.close()
    assert seen == ["connected"]


def test_threads_have_names_and_end_with_the_daemon(config, engine, tmp_path):
    before = set(threading.enumerate())
    with serving(config, engine), LocalClient(tmp_path / "m.sock"):
        names = {thread.name for thread in set(threading.enumerate()) - before}
        assert {"momentd-accept", "momentd-housekeeping", f"momentd-local-{os.getpid()}"} <= names
    left = [t.name for t in set(threading.enumerate()) - before if t.name.startswith("momentd-")]
    assert [name for name in left if not name.startswith("momentd-grpc")] == []


def test_a_stop_while_a_connection_gets_its_thread(tmp_path, monkeypatch):
    config = make_config(tmp_path)
    where = SocketPath(Path(config.address.target), shared=False)
    daemon = Daemon(config, NumpyEngine(), where)
    daemon.open()
    outcomes, real = [], threading.Thread.start

    def close():
        try:
            outcomes.append(daemon.close())
        except BaseException as error:
            outcomes.append(error)

    closer = threading.Thread(target=close)

    def start(thread):
        if thread.name.startswith("momentd-local-"):
            real(closer)
            closer.join(0.3)  # as far as it gets before the thread runs
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.connect(config.address.target)
        assert client.recv(1) == b""  # the daemon ends the connection
    closer.join(20)
    where.close()
    assert outcomes == [True]
