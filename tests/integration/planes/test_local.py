"""The local plane: bad packets, bad regions, clients that die, and exactly once."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from momentd_server.rpc import local as local_plane
from momentd_wire import errors, limits
from momentd_wire.v1 import momentd_pb2 as pb
from tests.support.numpy_engine import NumpyEngine
from tests.support.planes import HYPER, LocalClient, schema, serving

ROWS = np.array([5, 3, 5, 9])
GRADS = np.arange(16, dtype=np.float32).reshape(4, 4)


def state(local, table):
    return [v.tobytes() for v in local.gather(table, np.arange(table.schema.rows))]


def eventually(condition, timeout=10.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


# ------------------------------------------------------------------------------------ packets


@pytest.mark.parametrize("garbage", [b"\xff" * 100, b"GET / HTTP/1.1\r\n\r\n", b"\x0a\xff\xff"])
def test_garbage_is_answered_with_an_error_and_the_door(socket_path, local, garbage):
    with LocalClient(socket_path, greet=False) as bad:
        bad.sock.send(garbage)
        reply = bad.receive()
        assert reply.error.reason == pb.REASON_INVALID_ARGUMENT
        assert str(len(garbage)) in reply.error.message
        with pytest.raises(EOFError):
            bad.receive()
    assert local.open_table().table.id  # others notice nothing


def test_a_packet_longer_than_allowed_is_refused_with_the_limit(socket_path, local):
    with LocalClient(socket_path, greet=False) as bad:
        bad.sock.send(bytes(limits.PACKET_BYTES + 1))
        assert str(limits.PACKET_BYTES) in bad.receive().error.message
        with pytest.raises(EOFError):
            bad.receive()


def test_random_packets_never_take_the_daemon_down(socket_path, local):
    rng = np.random.default_rng(0)
    valid = pb.Request(id=1, hello=pb.HelloRequest(protocol_min=1, protocol_max=1, run="x"))
    for _ in range(200):
        packet = bytearray(valid.SerializeToString())
        for _ in range(rng.integers(1, 4)):
            packet[rng.integers(len(packet))] = rng.integers(256)
        with LocalClient(socket_path, greet=False) as bad:
            bad.sock.send(packet)
            bad.receive()
    assert local.open_table().table.id


def test_descriptors_sent_to_the_daemon_are_not_kept(socket_path, local):
    before = len([*Path("/proc/self/fd").iterdir()])
    with LocalClient(socket_path) as client:
        packet = pb.Request(id=9, list_tables=pb.ListTablesRequest()).SerializeToString()
        for _ in range(20):
            socket.send_fds(client.sock, [packet], [0, 1, 2])
            assert client.receive().id == 9
        assert len([*Path("/proc/self/fd").iterdir()]) <= before + 2


def test_an_unknown_call_of_a_newer_client_is_refused_and_the_connection_lives(local):
    local.sock.send(b"\x08\x07\xf2\x3f\x00")  # id 7, field 1022
    reply = local.receive()
    assert (reply.id, reply.error.reason) == (7, pb.REASON_NOT_IMPLEMENTED)
    assert local.open_table().table.id


def test_a_long_request_travels_in_the_arena(local):
    table = local.open_table()
    ids = [*range(10**9, 10**9 + 20_000)]
    inner = pb.Request(flush=pb.FlushRequest(ids=[table.table.id] * 20_000)).SerializeToString()
    assert len(inner) > 20_000
    region = local.put(np.frombuffer(inner, np.uint8))
    reply = local.call(oversize=region)
    assert reply.flush.bytes_written == 20_000 * table.record_bytes
    bad = pb.Request(flush=pb.FlushRequest(ids=ids)).SerializeToString()
    with pytest.raises(errors.TableNotFound):
        local.call(oversize=local.put(np.frombuffer(bad, np.uint8)))


def test_a_long_reply_comes_in_fragments(local):
    for number in range(1, 601):
        local.open_table(number, label="x" * 200)
    tables = local.call(list_tables=pb.ListTablesRequest()).list_tables.tables
    assert len(tables) == 600
    assert pb.ListTablesReply(tables=tables).ByteSize() > limits.PACKET_BYTES


# ------------------------------------------------------------------------------------ hello


@pytest.mark.parametrize("version", [0, 99])
def test_another_protocol_is_refused_naming_both_ranges(socket_path, version):
    with pytest.raises(errors.Incompatible) as caught:
        LocalClient(socket_path, protocol_min=version, protocol_max=version)
    assert f"{version}..{version}" in str(caught.value)
    assert f"{limits.PROTOCOL_MIN}..{limits.PROTOCOL_MAX}" in str(caught.value)


def test_a_newer_client_with_a_common_version_and_unknown_features_works(socket_path):
    with LocalClient(socket_path, protocol_max=99, features=["teleport"]) as client:
        assert client.hello.protocol == limits.PROTOCOL_MAX
        assert "teleport" not in client.hello.features


def test_a_missing_required_feature_is_named(socket_path):
    with pytest.raises(errors.Incompatible, match="teleport"):
        LocalClient(socket_path, required_features=["mask", "teleport"])


def test_calls_before_hello_are_refused(socket_path, daemon):
    with LocalClient(socket_path, greet=False) as client:
        with pytest.raises(errors.SessionNotFound, match="hello"):
            client.call(stats=pb.StatsRequest())
        with pytest.raises(errors.SessionNotFound, match="hello"):
            client.call(grow_arena=pb.GrowArenaRequest(bytes=1))


def test_a_question_opens_no_session(socket_path, engine, daemon):
    with LocalClient(socket_path, no_session=True) as client:
        assert client.hello.session == b""
        assert client.call(stats=pb.StatsRequest()).stats.totals.state == "serving"
        assert len(engine.sessions) == 0
        with pytest.raises(errors.SessionNotFound):
            client.open_table()


def test_the_limit_of_sessions_is_named_and_heals(config, tmp_path):
    with serving(config, NumpyEngine(max_sessions=2)):
        path = tmp_path / "m.sock"
        with LocalClient(path), LocalClient(path) as second:
            with pytest.raises(errors.LimitExceeded, match="limit is 2"):
                LocalClient(path)
            second.close()
            eventually(lambda: _connects(path))


def _connects(path):
    try:
        LocalClient(path).close()
    except errors.LimitExceeded:
        return False
    return True


# ------------------------------------------------------------------------------------ arenas


def test_the_arena_is_sealed_and_rounded_up(local):
    reply = local.grow(5)
    assert reply.bytes == limits.ARENA_GRANULE
    assert local.memory.size() == limits.ARENA_GRANULE


def test_neither_side_can_resize_an_arena(socket_path, daemon):
    with LocalClient(socket_path) as client:
        client.send(grow_arena=pb.GrowArenaRequest(bytes=1))
        _, fds, _, _ = socket.recv_fds(client.sock, 4096, 1)
        for size in (0, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(fds[0], size)
        os.close(fds[0])


def test_the_quota_of_a_session_holds_and_is_given_back(config, engine, tmp_path):
    config = replace(config, arena_bytes=8 << 20)
    with serving(config, engine), LocalClient(tmp_path / "m.sock") as client:
        first = client.grow(6 << 20)
        with pytest.raises(errors.LimitExceeded, match="8 MiB"):
            client.grow(4 << 20)
        client.call(drop_arena=pb.DropArenaRequest(arena=first.arena))
        assert client.grow(8 << 20).arena != first.arena
        assert engine.sessions.all()[0].arena_bytes == 8 << 20


def test_arenas_of_all_sessions_have_a_bound_and_end_with_them(config, engine, tmp_path):
    config = replace(config, arenas_total_bytes=8 << 20)
    with serving(config, engine):
        with LocalClient(tmp_path / "m.sock") as first:
            first.grow(6 << 20)
            with (
                LocalClient(tmp_path / "m.sock") as second,
                pytest.raises(errors.LimitExceeded, match="all sessions"),
            ):
                second.grow(4 << 20)
        eventually(lambda: _grows(tmp_path / "m.sock", 8 << 20))


def _grows(path, nbytes):
    with LocalClient(path) as client:
        try:
            client.grow(nbytes)
        except errors.LimitExceeded:
            return False
        return True


def test_an_arena_beyond_the_machines_memory_is_refused_with_the_numbers(config, engine, tmp_path):
    config = replace(config, arena_bytes=1 << 50, arenas_total_bytes=1 << 50)
    with serving(config, engine), LocalClient(tmp_path / "m.sock") as client:
        with pytest.raises(errors.OutOfMemory, match="available"):
            client.grow(1 << 45)
        assert client.grow(1).bytes


def _spoil_misaligned(part, local):
    part.grads.arena.offset += 4


def _spoil_beyond(part, local):
    part.grads.arena.offset = local.arena.bytes


def _spoil_wrapping(part, local):
    part.grads.arena.offset = (1 << 64) - 64


def _spoil_unknown(part, local):
    part.row_ids.arena.arena += 77


def _spoil_short(part, local):
    part.grads.arena.length -= 4


def _spoil_no_room(part, local):
    part.result_values.length -= 1


def _spoil_no_results(part, local):
    part.ClearField("result_values")


def _spoil_count(part, local):
    part.count = 1 << 62


def _spoil_streamed(part, local):
    part.grads.streamed = 64


def _spoil_dtype(part, local):
    part.dtype = pb.D_TYPE_FLOAT64


def _spoil_hyper(part, local):
    part.sparse_adam.lr = float("nan")


def _spoil_rows(part, local):
    local.array(part.row_ids.arena, np.int64, (4,))[1] = 1000


SPOILS = [value for name, value in sorted(globals().items()) if name.startswith("_spoil_")]


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda f: f.__name__.removeprefix("_spoil_"))
def test_a_bad_request_changes_nothing_and_uses_its_number_up(local, spoil):
    table = local.open_table()
    local.update(2, local.table_update(table, ROWS, GRADS))
    before = state(local, table)
    part = local.table_update(table, ROWS, GRADS)
    spoil(part, local)
    with pytest.raises(errors.InvalidArgument):
        local.update(3, part)
    assert state(local, table) == before
    assert local.update(4, local.table_update(table, ROWS, GRADS)).tables[0].step == 2


def test_an_update_is_all_or_none_over_its_tables(local):
    one, two = local.open_table(1), local.open_table(2)
    before = state(local, one)
    parts = [
        local.table_update(one, ROWS, GRADS),
        local.table_update(two, np.array([1, -1]), GRADS[:2], keep=True),
    ]
    with pytest.raises(errors.RowOutOfRange, match="-1"):
        local.update(3, *parts)
    assert state(local, one) == before


def test_row_ids_that_change_after_the_check_are_never_used(local, engine):
    table = local.open_table(schema=schema(rows=64, width=4))
    rows = np.arange(32)
    part = local.table_update(table, rows, np.ones((32, 4), np.float32))
    ids = local.array(part.row_ids.arena, np.int64, (32,))
    engine.before_update = lambda: ids.fill(1 << 40)
    reply = local.update(2, part)
    assert reply.tables[0].rows == 32
    updated, _ = local.results(part, reply.tables[0], 4)
    assert np.array_equal(updated, rows)


# ------------------------------------------------------------------------------------ once


def test_a_resent_request_gets_the_stored_outcome(local, engine):
    table = local.open_table()
    part = local.table_update(table, ROWS, GRADS)
    first = local.update(2, part)
    after = state(local, table)
    again = local.update(2, part)
    assert not first.repeated_request
    assert again.repeated_request
    again.repeated_request = False
    assert again == first
    assert engine.update_calls == 1
    assert state(local, table) == after


def test_a_resent_refusal_is_refused_again_without_being_tried(local, engine):
    table = local.open_table()
    part = local.table_update(table, np.array([10**6]), GRADS[:1])
    for _ in range(2):
        with pytest.raises(errors.RowOutOfRange):
            local.update(2, part)
    assert engine.update_calls == 1


def test_a_resent_open_makes_one_table(local):
    assert local.open_table(1) == local.open_table(1)
    assert len(local.call(list_tables=pb.ListTablesRequest()).list_tables.tables) == 1


@pytest.mark.parametrize("number", [1, 4, 1 << 63])
def test_a_number_that_is_neither_last_nor_next_is_refused(local, number):
    table = local.open_table(1)
    local.update(2, local.table_update(table, ROWS, GRADS))
    with pytest.raises(errors.OutOfSequence, match="2"):
        local.update(number, local.table_update(table, ROWS, GRADS))


def test_other_content_under_the_last_number_is_refused(local):
    table = local.open_table(1)
    local.update(2, local.table_update(table, ROWS, GRADS))
    with pytest.raises(errors.OutOfSequence, match="other content"):
        local.update(2, local.table_update(table, ROWS, GRADS, step=9))


def test_a_mutation_without_a_number_is_refused(local):
    with pytest.raises(errors.InvalidArgument, match="sequence"):
        local.call(open_table=pb.OpenTableRequest(schema=schema()))


def test_streams_count_for_themselves(local):
    assert local.open_table(1, stream=1).table.id != local.open_table(1, stream=2).table.id


def test_a_busy_daemon_leaves_the_number_free(local, engine):
    table = local.open_table(1)
    part = local.table_update(table, ROWS, GRADS)

    def refuse():
        raise errors.DaemonUnavailable("not now")

    engine.before_update = refuse
    with pytest.raises(errors.DaemonUnavailable):
        local.update(2, part)
    engine.before_update = lambda: None
    assert not local.update(2, part).repeated_request


def test_a_fault_of_the_daemon_is_told_as_such_and_it_serves_on(local, engine):
    table = local.open_table(1)

    def fail():
        raise ZeroDivisionError("a bug")

    engine.before_update = fail
    with pytest.raises(errors.InternalError, match="ZeroDivisionError"):
        local.update(2, local.table_update(table, ROWS, GRADS))
    engine.before_update = lambda: None
    assert local.update(3, local.table_update(table, ROWS, GRADS)).tables[0].step == 1


# ------------------------------------------------------------------------------------ lifetime


def test_the_tables_of_a_closed_connection_are_dropped(socket_path, engine, daemon):
    with LocalClient(socket_path) as client:
        client.open_table(1)
        client.open_table(2, name="kept")
    eventually(lambda: [t.name for t in engine.list_tables()] == ["kept"])
    assert len(engine.sessions) == 0


CHILD = """
    import sys
    import numpy as np
    from tests.support.planes import LocalClient
    client = LocalClient(sys.argv[1], arena_bytes=2 << 20)
    table = client.open_table(1)
    part = client.table_update(table, np.arange(8), np.ones((8, 4), np.float32))
    print("ready", flush=True)
    client.update(2, part)
"""


def test_a_client_killed_in_mid_request_leaves_nothing_behind(
    socket_path, engine, local, daemon, source_environment
):
    entered, leave = threading.Event(), threading.Event()

    def hold():
        entered.set()
        assert leave.wait(20)

    engine.before_update = hold
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD), str(socket_path)],
        env=source_environment, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert entered.wait(20)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert len(engine.sessions) == 2  # its request is still in work
    leave.set()
    eventually(lambda: len(engine.sessions) == 1)
    eventually(lambda: engine.list_tables() == [])
    stats = local.call(stats=pb.StatsRequest()).stats
    assert stats.totals.arena_bytes == local.arena.bytes


def test_a_resumed_session_keeps_its_tables_and_numbers(socket_path, engine, daemon):
    first = LocalClient(socket_path, arena_bytes=2 << 20)
    first.open_table(1)
    with LocalClient(socket_path, resume_session=first.hello.session) as second:
        assert second.hello.resumed
        assert [(d.stream, d.number) for d in second.hello.done] == [(1, 1)]
        first.close()
        assert second.open_table(1).table.id == 1  # the stored outcome
        assert len(engine.list_tables()) == 1


def test_an_unknown_session_is_never_made_anew_silently(socket_path, daemon):
    with LocalClient(socket_path, resume_session=bytes(16)) as client:
        assert not client.hello.resumed
        assert client.hello.session != bytes(16)


def test_progress_is_reported_only_if_asked_for(local):
    table = local.open_table(1)
    local.update(2, local.table_update(table, ROWS, GRADS))
    assert local.progress == []
    local.update(3, local.table_update(table, ROWS, GRADS), report_progress=True)
    assert [(p.table, p.rows_done, p.rows) for p in local.progress] == [(0, 3, 3)]


def test_a_client_that_takes_no_replies_is_cut_off(config, engine, tmp_path, monkeypatch):
    monkeypatch.setattr(local_plane, "SEND_TIMEOUT_S", 1)
    with serving(config, engine), LocalClient(tmp_path / "m.sock") as client:
        client.sock.settimeout(0.2)
        packet = pb.Request(id=1, stats=pb.StatsRequest()).SerializeToString()
        with pytest.raises(OSError):  # noqa: PT011  # timed out, broken pipe: both are the door
            _send_forever(client.sock, packet)
        eventually(lambda: len(engine.sessions) == 0)


def _send_forever(sock, packet):
    while True:
        sock.send(packet)


def test_statistics_name_sessions_and_memory(local, daemon):
    table = local.open_table(1, label="entities.weight")
    local.update(2, local.table_update(table, ROWS, GRADS))
    stats = local.call(stats=pb.StatsRequest()).stats
    [session], [of_table] = stats.sessions, stats.tables
    assert (session.pid, session.uid, session.plane) == (os.getpid(), os.getuid(), "local")
    assert list(session.tables) == [table.table.id]
    assert of_table.updates == 1
    assert of_table.rows_touched == 3
    assert of_table.owner == session.session
    totals = stats.totals
    assert totals.rss_anonymous_bytes > 1 << 20
    assert totals.arena_bytes == session.arena_bytes == local.arena.bytes
    assert totals.requests == 3
    assert list(totals.addresses) == daemon.addresses


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_another_user_is_turned_away_and_one_who_is_allowed_is_not(config, engine, tmp_path):
    for path in (tmp_path, *tmp_path.parents):
        if path.owner() == "root" and path != path.parent and str(path).startswith("/tmp/pytest"):
            path.chmod(0o755)
    config = replace(config, allow_uids=frozenset({4242}))
    with serving(config, engine):
        assert _as_user(4242, tmp_path / "m.sock") == "hello"
        refusal = _as_user(4343, tmp_path / "m.sock")
        assert "uid 4343" in refusal
        assert "--allow-uid" in refusal
        overflow = _as_user(65534, tmp_path / "m.sock")
        assert "uid 65534" in overflow


def _as_user(uid, path):
    """What a process of this user is told on the socket."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            os.setgid(uid)
            os.setuid(uid)
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
                sock.connect(str(path))
                hello = pb.HelloRequest(protocol_min=1, protocol_max=1)
                with contextlib.suppress(BrokenPipeError):  # turned away already
                    sock.send(pb.Request(id=1, hello=hello).SerializeToString())
                reply = pb.Reply.FromString(sock.recv(60_000))
            theirs.send((reply.error.message or reply.WhichOneof("result")).encode())
        except BaseException as error:  # a child must never come back into pytest
            theirs.send(repr(error).encode())
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    theirs.close()
    with ours:
        return ours.recv(4000).decode()


def test_hyper_parameters_arrive(local):
    table = local.open_table(1)
    part = local.table_update(table, ROWS[:1], GRADS[1:2], hyper=pb.SparseAdamHyper(
        lr=0.5, beta1=0.5, beta2=0.25, eps=1e-3, maximize=True))  # fmt: skip
    local.update(2, part)
    exp_avg, exp_avg_sq = local.gather(table, ROWS[:1])
    assert np.array_equal(exp_avg[0], -GRADS[1] * np.float32(0.5))
    assert np.array_equal(exp_avg_sq[0], GRADS[1] ** 2 * np.float32(0.75))
    assert HYPER.lr != 0.5
