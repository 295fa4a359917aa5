"""The gRPC plane: pieces, aborted streams, exactly once, statuses, attach, health, TLS, tokens."""

import itertools
import socket
import threading
import time
from dataclasses import replace

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from momentd_server.config import Tls
from momentd_server.rpc import transfer
from momentd_server.rpc.grpc_plane import SERVICE
from momentd_wire import addresses, errors, limits
from momentd_wire.v1 import momentd_pb2 as pb
from tests.support.numpy_engine import NumpyEngine
from tests.support.planes import GrpcClient, cut, make_config, schema, serving, update_parts

ROWS = np.array([5, 3, 5, 9])
GRADS = np.arange(16, dtype=np.float32).reshape(4, 4)
TOKEN = "0123456789abcdef-secret"


def eventually(condition, timeout=10.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def update_head(client, table, rows, grads, number=2, stream=1):
    part, arrays = client.table_update(table, rows, grads)
    return pb.UpdateRequest(
        sequence=pb.Sequence(stream=stream, number=number), tables=[part]
    ), arrays


# ------------------------------------------------------------------------------------ streams


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_stream_that_breaks_off_changes_nothing_and_leaves_the_number_free(remote, engine, after):
    table = remote.open_table()
    rows, grads = np.arange(500), np.ones((500, 4), np.float32)
    head, arrays = update_head(remote, table, rows, grads)
    five = list(update_parts(head, arrays, -(-12_000 // 5)))
    assert len(five) == 6
    with pytest.raises(errors.InvalidArgument, match="ended"):
        remote.stream("Update", iter(five[: 1 + after]))
    assert engine.update_calls == 0
    reply, _ = remote.update(2, remote.table_update(table, rows, grads))
    assert reply.tables[0].update_number == 1


def test_a_caller_that_cancels_in_piece_2_of_5_changes_nothing(remote, engine, caplog):
    table = remote.open_table()
    rows, grads = np.arange(500), np.ones((500, 4), np.float32)
    head, arrays = update_head(remote, table, rows, grads)
    sent, hold = threading.Event(), threading.Event()

    def parts():
        for index, part in enumerate(update_parts(head, arrays, 2400)):
            if index == 3:
                sent.set()
                hold.wait(20)
            yield part

    call = remote.stub.Update(parts(), metadata=remote.metadata)
    assert sent.wait(20)
    call.cancel()
    hold.set()
    assert remote.update(2, remote.table_update(table, rows, grads))[0].tables[0].step == 1
    assert engine.update_calls == 1
    assert not caplog.records  # nothing of this is a fault of the daemon


@pytest.mark.parametrize("surplus", [b"x", b"x" * 1000])
def test_more_bytes_than_announced_are_refused(remote, engine, surplus):
    table = remote.open_table()
    head, arrays = update_head(remote, table, ROWS, GRADS)
    parts = itertools.chain(
        update_parts(head, arrays), [pb.UpdatePart(piece=pb.Piece(data=surplus))]
    )
    with pytest.raises(errors.InvalidArgument, match="more than the announced"):
        remote.stream("Update", parts)
    assert engine.update_calls == 0


def test_a_piece_longer_than_allowed_is_refused(remote):
    table = remote.open_table(schema=schema(rows=10**6, width=4))
    rows, grads = np.arange(10**5), np.ones((10**5, 4), np.float32)
    head, arrays = update_head(remote, table, rows, grads)
    with pytest.raises(errors.InvalidArgument, match=str(limits.PIECE_BYTES)):
        remote.stream("Update", update_parts(head, arrays, limits.PIECE_BYTES + 1))


def test_a_stream_must_start_with_its_head(remote):
    with pytest.raises(errors.InvalidArgument, match="head"):
        remote.stream("Update", iter([pb.UpdatePart(piece=pb.Piece(data=b"x"))]))
    with pytest.raises(errors.InvalidArgument, match="head"):
        remote.stream("Gather", iter([]))


def test_arenas_are_refused_here(remote):
    table = remote.open_table()
    head, _ = update_head(remote, table, ROWS, GRADS)
    head.tables[0].row_ids.arena.length = 32
    head.tables[0].grads.arena.length = 64
    with pytest.raises(errors.InvalidArgument, match="arena"):
        remote.stream("Update", iter([pb.UpdatePart(head=head)]))


def test_announced_bytes_beyond_the_limit_are_refused_before_they_are_sent(remote):
    table = remote.open_table()
    head, _ = update_head(remote, table, ROWS, GRADS)
    head.tables[0].grads.streamed = 1 << 50
    with pytest.raises(errors.LimitExceeded, match="beyond the limit"):
        remote.stream("Update", iter([pb.UpdatePart(head=head)]))


def test_garbage_bytes_are_refused_by_status_and_the_daemon_serves_on(remote):
    call = remote.channel.unary_unary(f"/{SERVICE}/OpenTable")
    with pytest.raises(grpc.RpcError):
        call(b"\xff" * 50, metadata=remote.metadata, timeout=10)
    assert remote.open_table().table.id


def test_garbage_on_the_socket_itself_does_not_disturb_others(tmp_path, remote):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(f"{tmp_path}/m.sock.grpc")
        sock.sendall(b"\x00\xff" * 2000)
        sock.settimeout(10)
        try:
            while sock.recv(4096):
                pass
        except ConnectionError:
            pass
    assert remote.open_table().table.id


# ------------------------------------------------------------------------------------ once


def test_a_resent_update_gets_the_stored_bytes(remote, engine):
    table = remote.open_table()
    first, values = remote.update(2, remote.table_update(table, ROWS, GRADS))
    again, values_again = remote.update(2, remote.table_update(table, ROWS, GRADS))
    assert again.repeated_request
    assert not first.repeated_request
    assert values[0][1].tobytes() == values_again[0][1].tobytes()
    assert engine.update_calls == 1


def test_other_bytes_under_the_same_number_are_refused(remote, engine):
    table = remote.open_table()
    remote.update(2, remote.table_update(table, ROWS, GRADS))
    with pytest.raises(errors.OutOfSequence, match="other content"):
        remote.update(2, remote.table_update(table, ROWS, GRADS + 1))
    assert engine.update_calls == 1


def test_a_resend_while_the_first_is_in_work_waits_for_it(remote, engine):
    table = remote.open_table()
    entered, leave = threading.Event(), threading.Event()

    def hold():
        entered.set()
        assert leave.wait(20)

    engine.before_update = hold
    head, arrays = update_head(remote, table, ROWS, GRADS)
    with pytest.raises(grpc.RpcError) as caught:  # the caller's deadline passes in mid-work
        remote.stream("Update", update_parts(head, arrays), timeout=0.5)
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    assert entered.is_set()
    threading.Timer(0.2, leave.set).start()
    reply, _ = remote.update(2, remote.table_update(table, ROWS, GRADS))
    assert reply.repeated_request
    assert engine.update_calls == 1


# ------------------------------------------------------------------------------------ sessions


@pytest.mark.parametrize("session", [None, b"", bytes(16), b"\xff" * 1000])
def test_mutations_need_a_live_session(grpc_target, session):
    with GrpcClient(grpc_target, no_session=True) as client:
        assert client.call("ListTables", pb.ListTablesRequest()).tables == []
        if session is not None:
            client.metadata.append((limits.SESSION_METADATA, session))
        with pytest.raises(errors.SessionNotFound):
            client.open_table()


def test_a_session_of_the_local_plane_is_not_usable_here(grpc_target, local):
    with GrpcClient(grpc_target, no_session=True) as client:
        client.metadata.append((limits.SESSION_METADATA, local.hello.session))
        with pytest.raises(errors.SessionNotFound):
            client.open_table()


def test_attach_holds_the_session_and_its_end_starts_the_grace(config, tmp_path):
    engine = NumpyEngine()
    engine.sessions.attach_grace_s = 0.3
    with serving(config, engine), GrpcClient(f"unix:{tmp_path}/m.sock.grpc") as client:
        attached = client.stub.Attach(pb.AttachRequest(), metadata=client.metadata)
        next(attached)
        client.open_table()
        time.sleep(1.5)  # several rounds of housekeeping, far beyond the grace
        assert len(engine.list_tables()) == 1
        attached.cancel()
        eventually(lambda: engine.list_tables() == [])
        with pytest.raises(errors.SessionNotFound):
            client.open_table(2)


def test_a_session_is_resumed_with_its_numbers(grpc_target, remote):
    remote.open_table()
    with GrpcClient(grpc_target, resume_session=remote.hello.session) as second:
        assert second.hello.resumed
        assert [(d.stream, d.number) for d in second.hello.done] == [(1, 1)]


@pytest.mark.parametrize("version", [0, 99])
def test_another_protocol_is_refused_naming_both_ranges(grpc_target, version):
    with pytest.raises(errors.Incompatible, match=f"{version}..{version}.*1..1"):
        GrpcClient(grpc_target, protocol_min=version, protocol_max=version)


# ------------------------------------------------------------------------------------ the rest


def test_statuses_carry_reason_text_and_particulars(remote):
    with pytest.raises(grpc.RpcError) as caught:
        remote.stub.GetTable(pb.GetTableRequest(id=77), metadata=remote.metadata)
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    assert "77" in caught.value.details()
    table = remote.open_table()
    with pytest.raises(errors.RowOutOfRange) as raised:
        remote.update(2, remote.table_update(table, np.array([3, 1000]), GRADS[:2]))
    assert raised.value.details == {"row": "1000", "position": "1"}


def test_stats_are_watched_at_the_wanted_pace(remote):
    remote.open_table(label="w")
    watched = remote.stub.WatchStats(pb.WatchStatsRequest(interval_s=0.1), timeout=20)
    replies = list(itertools.islice(watched, 3))
    watched.cancel()
    assert [r.stats.tables[0].table.label for r in replies] == ["w"] * 3
    with pytest.raises(errors.InvalidArgument, match="interval_s"):
        with_errors(remote.stub.WatchStats(pb.WatchStatsRequest(interval_s=0.01), timeout=20))


def with_errors(stream):
    try:
        return next(stream)
    except grpc.RpcError as error:
        trailer = dict(error.trailing_metadata())[limits.ERROR_METADATA]
        raise errors.from_wire(pb.Error.FromString(trailer)) from error


def test_health_and_reflection_answer(remote, daemon):
    health = health_pb2_grpc.HealthStub(remote.channel)
    for name in ("", SERVICE):
        reply = health.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    reflection = reflection_pb2_grpc.ServerReflectionStub(remote.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    [reply] = reflection.ServerReflectionInfo(iter([request]), timeout=10)
    assert SERVICE in {s.name for s in reply.list_services_response.service}


def test_a_stalled_upload_gives_its_place_up(config, engine, tmp_path, monkeypatch):
    monkeypatch.setattr(transfer, "STALL_S", 0.2)
    with serving(config, engine), GrpcClient(f"unix:{tmp_path}/m.sock.grpc") as client:
        table = client.open_table()
        head, _ = update_head(client, table, ROWS, GRADS)
        forever = threading.Event()

        def parts():
            yield pb.UpdatePart(head=head)
            forever.wait(30)

        with pytest.raises(grpc.RpcError) as caught:
            client.stream("Update", parts(), timeout=25)
        forever.set()
        assert caught.value.code() == grpc.StatusCode.CANCELLED
        assert client.update(2, client.table_update(table, ROWS, GRADS))[0].tables[0].step == 1


def test_small_calls_overtake_a_queue_of_large_ones(config, tmp_path):
    engine = NumpyEngine()
    config = replace(config, grpc_bytes=32 << 20)
    entered, leave = threading.Semaphore(0), threading.Event()
    with serving(config, engine), GrpcClient(f"unix:{tmp_path}/m.sock.grpc") as client:
        table = client.open_table(schema=schema(rows=1 << 16, width=128))
        large = np.zeros(40_000, np.int64)  # 20 MiB of values each: one fits, two do not

        def hold():
            entered.release()
            assert leave.wait(20)

        engine.before_gather = hold
        threads = [
            threading.Thread(target=client.gather, args=(table, large, ["exp_avg"]))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        assert entered.acquire(timeout=20)
        engine.before_gather = lambda: None
        began = time.monotonic()
        client.gather(table, np.arange(5))
        assert time.monotonic() - began < 1.0
        leave.set()
        for thread in threads:
            thread.join()


def test_a_draining_daemon_says_so_and_leaves_the_number_free(remote, daemon):
    table = remote.open_table()
    daemon._dispatcher.drain()
    with pytest.raises(errors.DaemonUnavailable, match="stopping"):
        remote.update(2, remote.table_update(table, ROWS, GRADS))
    daemon._dispatcher._draining = False
    assert remote.update(2, remote.table_update(table, ROWS, GRADS))[0].tables[0].step == 1


# ------------------------------------------------------------------------------------ TCP


def tcp_config(tmp_path, **changes):
    return make_config(tmp_path, listen=(addresses.parse("127.0.0.1:0"),), **changes)


@pytest.mark.parametrize("shown", [None, "", "0123456789abcdef-secreT", "ü" * 23])
def test_a_wrong_token_is_refused_for_every_call(tmp_path, engine, shown):
    with serving(tcp_config(tmp_path, token=TOKEN), engine) as daemon:
        target = f"127.0.0.1:{daemon.ports[0]}"
        hello = {} if shown is None else {"token": shown}
        with pytest.raises(errors.PermissionDenied, match="token"):
            GrpcClient(target, **hello)
        with GrpcClient(target, greet=False) as client:
            for method, request in (
                ("Stats", pb.StatsRequest()), ("Stop", pb.StopRequest()),
                ("ListTables", pb.ListTablesRequest()),
            ):  # fmt: skip
                with pytest.raises(errors.PermissionDenied):
                    client.call(method, request)
            health = health_pb2_grpc.HealthStub(client.channel)
            assert health.Check(health_pb2.HealthCheckRequest(), timeout=10).status == 1


def test_the_right_token_opens_tcp_and_the_unix_socket_needs_none(tmp_path, engine):
    with serving(tcp_config(tmp_path, token=TOKEN), engine) as daemon:
        target = f"127.0.0.1:{daemon.ports[0]}"
        with GrpcClient(target, metadata=[(limits.TOKEN_METADATA, TOKEN)]) as client:
            assert client.open_table().table.id
        with GrpcClient(f"unix:{tmp_path}/m.sock.grpc") as client:
            assert client.open_table().table.id


def test_tls_serves_those_who_trust_the_certificate(tmp_path, engine):
    certificate, key = _self_signed(tmp_path)
    with serving(tcp_config(tmp_path, tls=Tls(certificate, key)), engine) as daemon:
        credentials = grpc.ssl_channel_credentials(certificate.read_bytes())
        target = f"localhost:{daemon.ports[0]}"
        options = [("grpc.enable_http_proxy", 0)]
        with grpc.secure_channel(target, credentials, options) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            assert stub.Check(health_pb2.HealthCheckRequest(), timeout=10).status == 1
        with pytest.raises(grpc.RpcError):
            GrpcClient(f"127.0.0.1:{daemon.ports[0]}")


def _self_signed(tmp_path):
    openssl = pytest.importorskip("shutil").which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command")
    import subprocess

    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
         "-keyout", key, "-out", certificate, "-days", "1", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost"],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


def test_a_port_in_use_stops_the_start_with_its_name(tmp_path, engine):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = tcp_config(tmp_path, token=TOKEN)
        config = replace(config, listen=(addresses.parse(f"127.0.0.1:{port}"),))
        with pytest.raises(errors.DaemonUnavailable, match=str(port)), serving(config, engine):
            pass


def test_bulk_bytes_are_cut_at_the_limit():
    data = bytes(2 * limits.PIECE_BYTES + 1)
    assert [len(part) for part in cut(data)] == [limits.PIECE_BYTES, limits.PIECE_BYTES, 1]


def test_the_end_of_a_session_drops_its_tables_at_once(remote, engine):
    remote.open_table()
    remote.call("End", pb.EndRequest())
    assert engine.list_tables() == []
    with pytest.raises(errors.SessionNotFound):
        remote.open_table(2)
