"""What the client offers, over both planes."""

import itertools
import pickle

import numpy as np
import pytest
import torch

import momentd
from momentd import rules
from momentd import table as table_module
from momentd._session import Session
from momentd._stream import UpdateSpec
from momentd.errors import (
    InvalidArgument,
    LimitExceeded,
    RowOutOfRange,
    SchemaMismatch,
    TableInUse,
    TableNotFound,
)
from momentd_wire.v1 import momentd_pb2 as pb

F4 = np.dtype(np.float32)
_numbers = itertools.count()


@pytest.fixture
def table(client):
    return client.open_table(f"t{next(_numbers)}", rows=1000, dim=4)


def test_an_update_returns_distinct_rows_and_what_to_add(table):
    result = table.update([7, 3, 7], np.ones((3, 4), np.float32), lr=0.1)
    assert result.rows.tolist() == [3, 7]
    np.testing.assert_allclose(result.values, -0.1, rtol=1e-5)
    assert (result.step, result.update_number) == (1, 1)
    np.testing.assert_allclose(table.gather([3, 7, 8], "exp_avg")[:, 0], [0.1, 0.2, 0], rtol=1e-6)


def test_results_of_an_update_stay_when_the_next_one_is_made(table):
    first = table.update([1], np.ones((1, 4)), lr=0.1)
    kept = first.values.copy()
    table.update([2], np.full((1, 4), -9.0), lr=7)
    np.testing.assert_array_equal(first.values, kept)
    assert first.rows.tolist() == [1]


def test_hyper_parameters_step_and_mask_travel_with_an_update(table):
    mask = np.array([[1, 0, 1, 0]], bool)
    up = table.update(
        [1], np.ones((1, 4)), mask=mask, step=10, lr=1, betas=(0.5, 0.5), maximize=True
    )
    assert up.step == 10
    assert (up.values[0, [1, 3]] == 0).all()
    assert (up.values[0, [0, 2]] > 0).all()
    np.testing.assert_array_equal(table.gather([1], "exp_avg"), [[-0.5, 0, -0.5, 0]])


def test_tensors_go_in_and_come_out(table):
    result = table.update(torch.tensor([5]), torch.ones(1, 4, dtype=torch.bfloat16), lr=0.1)
    assert isinstance(result.values, torch.Tensor)
    assert result.rows.dtype == torch.int64
    moments = table.gather(torch.tensor([5]))
    assert isinstance(moments["exp_avg_sq"], torch.Tensor)
    table.scatter(torch.tensor([6]), exp_avg=torch.full((1, 4), 3.0))
    assert table.gather([6], "exp_avg").tolist() == [[3, 3, 3, 3]]


def test_a_bad_row_is_refused_and_nothing_changes(table):
    with pytest.raises(RowOutOfRange, match="1000"):
        table.update([3, 1000], np.ones((2, 4)), lr=0.1)
    with pytest.raises(RowOutOfRange, match="-1"):
        table.gather([2, -1])
    assert table.refresh().update_number == 0
    assert not table.gather([3], "exp_avg").any()
    assert table.update([3], np.ones((1, 4)), lr=0.1).update_number == 1


@pytest.mark.parametrize("rows", [[0, 999, 5, 5], range(3, 9), slice(990, None), None, []])
def test_rows_are_gathered_in_the_order_asked_for(table, rows):
    everything = np.arange(4000, dtype=np.float32).reshape(1000, 4)
    table.scatter(None, exp_avg=everything, step=3)
    chosen = (
        everything
        if rows is None
        else everything[
            np.r_[rows]
            if isinstance(rows, range)
            else rows
            if not isinstance(rows, list)
            else np.array(rows, int)
        ]
    )
    np.testing.assert_array_equal(table.gather(rows, ["exp_avg"]), chosen)
    assert table.step == 3


def test_large_requests_go_in_pieces(table, monkeypatch):
    monkeypatch.setattr(table_module, "_PIECE_BYTES", 1000)
    values = np.random.default_rng(1).random((1000, 4), np.float32)
    rows = np.random.default_rng(2).permutation(1000)
    table.scatter(rows, exp_avg=values, exp_avg_sq=2 * values)
    found = table.gather(rows)
    np.testing.assert_array_equal(found["exp_avg"], values)
    np.testing.assert_array_equal(found["exp_avg_sq"], 2 * values)
    np.testing.assert_array_equal(table.gather(None, "exp_avg")[rows], values)
    with pytest.raises(InvalidArgument, match="row 7 stands twice"):
        table.scatter([7, *range(200), 7], exp_avg=np.zeros((202, 4)))


def test_a_row_that_stands_twice_is_refused_by_scatter(table):
    with pytest.raises(InvalidArgument):
        table.scatter([1, 1], exp_avg=np.zeros((2, 4)))


@pytest.mark.parametrize(
    "call",
    [
        lambda t: t.update([1], np.ones((1, 5))),
        lambda t: t.update([1, 2], np.ones((1, 4))),
        lambda t: t.update([1], np.ones((1, 4)), mask=np.ones((2, 4))),
        lambda t: t.update([1], np.ones((1, 4)), lr=float("nan")),
        lambda t: t.update([1.5], np.ones((1, 4))),
        lambda t: t.gather([1], "weight"),
        lambda t: t.scatter([1], weight=np.ones((1, 4))),
        lambda t: t.scatter([1]),
        lambda t: t.scatter([1], exp_avg=np.ones((1, 3))),
        lambda t: t.gather(range(2000)),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_before_it_is_sent(table, call):
    with pytest.raises(InvalidArgument):
        call(table)
    assert table.refresh().update_number == 0


def test_an_unknown_hyper_parameter_is_a_type_error(table):
    with pytest.raises(TypeError, match="momentum"):
        table.update([1], np.ones((1, 4)), momentum=0.9)


def test_float64_state_takes_and_gives_float64(client):
    table = client.open_table(None, rows=10, dim=2, dtype="float64")
    result = table.update([1], np.ones((1, 2)), lr=0.1)
    assert result.values.dtype == np.float64
    assert table.dtype == np.float64


def test_named_tables_are_opened_created_and_refused(client):
    made = client.open_table("n", rows=10, dim=2, mode="create", label="entity")
    assert client.open_table("n", rows=10, dim=2).id == made.id
    assert client.open_table("n", rows=10, dim=2, mode="open").label == "entity"
    with pytest.raises(TableInUse):
        client.open_table("n", rows=10, dim=2, mode="create")
    with pytest.raises(SchemaMismatch):
        client.open_table("n", rows=11, dim=2)
    with pytest.raises(TableNotFound):
        client.open_table("m", rows=10, dim=2, mode="open")
    with pytest.raises(InvalidArgument, match="open_or_create"):
        client.open_table("n", rows=10, dim=2, mode="append")


def test_tables_are_found_listed_and_dropped(client):
    named = client.open_table("n", rows=10, dim=2)
    plain = client.open_table(None, rows=10, dim=2)
    assert client.get_table("n").id == named.id == client.get_table(id=named.id).id
    assert {t.id for t in client.list_tables("test")} == {named.id, plain.id}
    assert client.list_tables("other") == []
    assert client.drop([named, plain]) == 2
    with pytest.raises(TableNotFound):
        named.refresh()
    with pytest.raises(TableNotFound):
        named.gather([1])


def test_a_clone_goes_its_own_way(table):
    table.update([1], np.ones((1, 4)), lr=0.1)
    clone = table.clone(label="copy")
    clone.update([1], np.ones((1, 4)), lr=0.1)
    np.testing.assert_allclose(table.gather([1], "exp_avg"), 0.1, rtol=1e-6)
    np.testing.assert_allclose(clone.gather([1], "exp_avg"), 0.19, rtol=1e-6)
    assert (table.step, clone.step) == (1, 2)


def test_stats_know_the_tables_and_this_session(client, table):
    table.update([1, 2], np.ones((2, 4)))
    stats = client.stats()
    assert table.id in [t.table.table.id for t in stats.tables]
    assert stats.totals.requests > 0
    looks = list(itertools.islice(client.watch_stats(0.01), 2))
    assert len(looks) == 2


def test_closing_a_client_drops_its_unnamed_tables(daemon, address):
    with momentd.connect(address) as client:
        client.open_table(None, rows=10, dim=2)
        client.open_table("kept", rows=10, dim=2)
    with momentd.connect(address) as other:
        wait_for(lambda: [t.name for t in other.list_tables()] == ["kept"])


def test_a_client_can_be_used_again_after_closing(client):
    client.open_table(None, rows=10, dim=2)
    client.close()
    assert client.open_table(None, rows=10, dim=2).update([1], np.ones((1, 2))).step == 1


def test_handles_can_be_pickled(client, table):
    table.update([1], np.ones((1, 4)), lr=0.1)
    other = pickle.loads(pickle.dumps(table))
    assert (other.id, other.name, other.fields) == (table.id, table.name, table.fields)
    np.testing.assert_array_equal(other.gather([1], "exp_avg"), table.gather([1], "exp_avg"))
    copy = pickle.loads(pickle.dumps(client))
    assert copy.get_table(table.name).id == table.id
    copy.close()
    other._session.close()


def test_one_request_updates_several_tables_or_none(session):
    tables = [session.open_table(rules.SparseAdam().schema(10, width)) for width in (2, 3)]
    stream = session.stream()

    def attempt(rows):
        specs = [
            UpdateSpec(t, len(r), F4, rules.SparseAdam.hyper(lr=0.1))
            for t, r in zip(tables, rows, strict=True)
        ]
        update = stream.new_update(specs)
        for item, ids in zip(update.inputs, rows, strict=True):
            item.rows[:] = ids
            item.grads[:] = 1
        update.send()
        return update

    update = attempt([[1, 2], [9]])
    ranges = list(update.progress())
    assert sorted(ranges) == [(0, 0, 2), (1, 0, 1)]
    results = update.results()
    assert [r.rows.tolist() for r in results] == [[1, 2], [9]]
    assert [r.values.shape for r in results] == [(2, 2), (1, 3)]
    update.close()

    update = attempt([[1], [10]])
    with pytest.raises(RowOutOfRange):
        update.results()
    assert update.done
    with pytest.raises(RowOutOfRange):
        list(update.progress())
    update.close()
    assert [t.refresh().update_number for t in tables] == [1, 1]

    update = attempt([[], []])
    assert [len(r.rows) for r in update.results()] == [0, 0]
    update.close()


def test_a_stream_holds_one_update_at_a_time(session):
    table = session.open_table(rules.SparseAdam().schema(10, 2))
    stream = session.stream()
    spec = UpdateSpec(table, 1, F4, rules.SparseAdam.hyper())
    unsent = stream.new_update([spec])
    assert stream.pending is None
    update = stream.new_update([spec])
    update.inputs[0].rows[:] = 1
    update.inputs[0].grads[:] = 1
    with pytest.raises(InvalidArgument, match="newer"):
        unsent.send()
    with pytest.raises(InvalidArgument, match="not sent"):
        update.results()
    update.send()
    assert stream.pending is update
    with pytest.raises(InvalidArgument, match="not closed"):
        stream.new_update([spec])
    update.results()
    update.close()
    update.close()
    assert stream.pending is None
    with pytest.raises(InvalidArgument, match="closed"):
        update.send()


def test_an_update_expected_at_another_number_is_refused(session):
    table = session.open_table(rules.SparseAdam().schema(10, 2))
    stream = session.stream()
    spec = UpdateSpec(table, 0, F4, rules.SparseAdam.hyper(), expected_update_number=5)
    update = stream.new_update([spec])
    update.send()
    with pytest.raises(momentd.errors.StateRolledBack):
        update.results()
    update.close()
    assert stream.pending is None


def test_result_none_sends_nothing_back(session):
    table = session.open_table(rules.SparseAdam().schema(10, 2))
    update = session.stream().new_update(
        [UpdateSpec(table, 1, F4, rules.SparseAdam.hyper(), result=pb.RESULT_KIND_NONE)]
    )
    update.inputs[0].rows[:] = 4
    update.inputs[0].grads[:] = 1
    update.send()
    assert update.results()[0].values.shape == (1, 0)
    assert update.results()[0].rows.tolist() == [4]
    update.close()


def test_the_arena_grows_with_the_batch_and_older_ones_are_given_back(daemon):
    session = Session(daemon.local)
    table = session.open_table(rules.SparseAdam().schema(100_000, 64))
    mapped, unmapped = [], []
    session.on_arena(lambda *a: mapped.append(a), lambda *a: unmapped.append(a))
    for count in (10, 1000, 20_000, 100_000):
        result = table.update(np.arange(count), np.ones((count, 64), np.float32))
        assert len(result.rows) == count
    transport = session._transport
    assert len(transport._arenas) == 1
    server = next(s for s in daemon.engine.sessions.all())
    assert server.arena_bytes == transport._arenas[0].nbytes
    assert len(mapped) > len(unmapped) == len(mapped) - 1
    late = []
    session.on_arena(lambda *a: late.append(a))
    assert late == mapped[-1:]
    session.close()


def test_a_batch_larger_than_the_arena_may_be_is_refused(tmp_path):
    from tests.support.momentd_daemon import RestartableDaemon

    daemon = RestartableDaemon(tmp_path, arena_bytes=8 << 20)
    daemon.start()
    session = Session(daemon.local)
    table = session.open_table(rules.SparseAdam().schema(100_000, 64))
    with pytest.raises(LimitExceeded, match="--arena"):
        table.update(np.arange(50_000), np.ones((50_000, 64), np.float32))
    # Up to the limit it works, whatever lay there before.
    assert table.update(np.arange(5_000), np.ones((5_000, 64), np.float32)).step == 1
    assert table.update(np.arange(15_000), np.ones((15_000, 64), np.float32)).step == 2
    session.close()
    daemon.stop()


def test_long_lists_go_through_the_arena_and_come_in_fragments(session):
    schema = rules.SparseAdam().schema(10, 2)
    tables = [session.open_table(schema, label="x" * 200) for _ in range(400)]
    assert len(session.list_tables()) == 400
    ids = [t.id for t in tables]
    # As if the list of ids were longer than a packet.
    if session._transport.plane == "local":
        session._transport._packet_bytes = 100
    assert session.drop_tables(ids) == 400
    assert session.list_tables() == []


def test_repr_tells_where_and_what(client, table):
    assert "exp_avg" in repr(table)
    assert client.session.where in repr(table)
    assert "open" in repr(client)


def wait_for(condition, seconds=5.0):
    import time

    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.01)
