"""What every implementation of the engine's port promises: the store, and the numpy model."""

import numpy as np
import pytest

from momentd_server.config import MIB
from momentd_server.engine.api import TableBatch
from momentd_server.engine.engine import LocalEngine
from momentd_server.rules import SparseAdamHyper
from momentd_server.schema import FieldSpec, Schema
from momentd_wire import errors
from tests.support.numpy_engine import NumpyEngine
from tests.support.planes import make_config

HYPER = SparseAdamHyper(0.1)
ROWS, WIDTH = 5_000, 8


def make_schema(rows=ROWS, width=WIDTH, dtype="float32", rule="sparse_adam"):
    fields = tuple(FieldSpec(name, dtype, width) for name in ("exp_avg", "exp_avg_sq"))
    return Schema(rows, width, fields, rule)


@pytest.fixture(params=["store", "numpy"])
def engine(request, tmp_path):
    if request.param == "numpy":
        engine = NumpyEngine(cache_bytes=16 * MIB)
    else:
        config = make_config(tmp_path, cache_bytes=16 * MIB, threads=1, read_threads=4)
        engine = LocalEngine.start(config)
    yield engine
    engine.stop(discard=True)
    engine.close()


@pytest.fixture
def session(engine):
    return open_session(engine)


def open_session(engine):
    return engine.sessions.open(plane="local", pid=0, uid=0, run="run", program="test")


def open_table(engine, session, **changes):
    told = {
        "name": None, "label": "w", "schema": make_schema(), "run": "run",
        "mode": "open_or_create", **changes,
    }  # fmt: skip
    return engine.open_table(session, **told)


def batch(view, rows, grads=None, **changes):
    rows = np.asarray(rows, np.int64)
    if grads is None:
        grads = np.ones((len(rows), view.schema.width), view.schema.state_dtype)
    told = {
        "id": view.id, "generation": view.generation, "step": None,
        "expected_update_number": None, "hyper": HYPER, "result": "delta", "rows": rows,
        "grads": grads, **changes,
    }  # fmt: skip
    return TableBatch(**told)


def contents(engine, view, rows=None):
    rows = np.arange(view.schema.rows) if rows is None else np.asarray(rows)
    outcome = engine.gather(
        id=view.id, generation=view.generation, rows=rows, range=None, fields=[], outs=None
    )
    return [values.tobytes() for values in outcome.values]


# ------------------------------------------------------------------------------------ tables


def test_a_table_without_a_name_is_the_sessions(engine, session):
    view, created = open_table(engine, session)
    assert created
    assert view.owner == session.id
    assert session.tables == {view.id}
    engine.sessions.end(session.id)
    engine.end_session(session.id)
    engine.end_session(session.id)  # may be repeated
    with pytest.raises(errors.TableNotFound):
        engine.get_table(id=view.id)


def test_a_named_table_is_opened_again_and_outlives_its_session(engine, session):
    view, _ = open_table(engine, session, name="shared")
    assert view.owner is None
    engine.sessions.end(session.id)
    engine.end_session(session.id)
    again, created = open_table(engine, open_session(engine), name="shared")
    assert not created
    assert again.id == view.id == engine.get_table(name="shared").id


@pytest.mark.parametrize(
    "other", [make_schema(rows=6), make_schema(width=4), make_schema(dtype="float64")]
)
def test_a_named_table_of_another_schema_is_refused(engine, session, other):
    open_table(engine, session, name="shared")
    with pytest.raises(errors.SchemaMismatch):
        open_table(engine, session, name="shared", schema=other)


def test_modes_say_whether_a_name_must_exist(engine, session):
    with pytest.raises(errors.TableNotFound):
        open_table(engine, session, name="x", mode="open")
    assert open_table(engine, session, name="x", mode="create")[1]
    with pytest.raises(errors.TableInUse):
        open_table(engine, session, name="x", mode="create")
    assert not open_table(engine, session, name="x", mode="open")[1]


def test_an_unknown_rule_is_refused(engine, session):
    with pytest.raises(errors.UnsupportedFeature):
        open_table(engine, session, schema=make_schema(rule="quantum_adam"))


def test_tables_are_listed_by_run_and_ids_are_never_reused(engine, session):
    first, _ = open_table(engine, session)
    second, _ = open_table(engine, session, run="other")
    assert [v.id for v in engine.list_tables()] == [first.id, second.id]
    assert [v.id for v in engine.list_tables("other")] == [second.id]
    assert engine.drop_tables(session, ids=[second.id], run=None, force=False) == 1
    assert open_table(engine, session)[0].id > second.id
    assert engine.drop_tables(session, ids=[], run="run", force=False) == 2


def test_all_tables_are_dropped_or_none(engine, session):
    mine, _ = open_table(engine, session)
    theirs, _ = open_table(engine, open_session(engine))
    with pytest.raises(errors.TableInUse):
        engine.drop_tables(session, ids=[mine.id, theirs.id], run=None, force=False)
    with pytest.raises(errors.TableNotFound):
        engine.drop_tables(session, ids=[mine.id, 10**9], run=None, force=False)
    assert engine.get_table(id=mine.id).id == mine.id
    assert engine.drop_tables(session, ids=[mine.id, theirs.id], run=None, force=True) == 2


def test_a_clone_has_the_state_of_one_instant_and_its_own_life(engine, session):
    view, _ = open_table(engine, session)
    engine.update([batch(view, [1, 2, 3])])
    clone = engine.clone_table(
        session, id=view.id, generation=view.generation, name=None, label="copy", run="run"
    )
    before = contents(engine, view)
    assert contents(engine, clone) == before
    assert clone.step == 1
    engine.update([batch(clone, [2, 4])])
    assert contents(engine, view) == before
    assert contents(engine, clone) != before


# ------------------------------------------------------------------------------------ updates


def test_an_update_sums_duplicates_once_and_answers_by_ascending_row(engine, session):
    view, _ = open_table(engine, session)
    grads = np.arange(4 * WIDTH, dtype=np.float32).reshape(4, WIDTH)
    [outcome] = engine.update([batch(view, [7, 3, 7, 9], grads)])
    assert outcome.out_rows.tolist() == [3, 7, 9]
    assert (outcome.rows, outcome.step, outcome.update_number) == (3, 1, 1)
    [exp_avg] = engine.gather(
        id=view.id, generation=view.generation, rows=np.array([7, 9]), range=None,
        fields=["exp_avg"], outs=None,
    ).values  # fmt: skip
    expected = np.stack([grads[0] + grads[2], grads[3]]) * np.float32(1 - 0.9)
    assert np.array_equal(exp_avg, expected)


def test_results_go_into_the_given_arrays(engine, session):
    view, _ = open_table(engine, session)
    out_rows, out_values = np.full(4, -1), np.full((4, WIDTH), 9, np.float32)
    [outcome] = engine.update([batch(view, [5, 5, 2, 2], out_rows=out_rows, out_values=out_values)])
    assert out_rows[:2].tolist() == [2, 5]
    assert np.array_equal(out_values[:2], outcome.out_values)
    assert (out_values[2:] == 9).all()


def test_progress_is_a_growing_prefix_that_ends_with_all_rows(engine, session):
    view, _ = open_table(engine, session, schema=make_schema(rows=20_000, width=4))
    seen = []
    grads = np.ones((12_000, 4), np.float32)
    engine.update([batch(view, np.arange(12_000), grads)], lambda *report: seen.append(report))
    assert seen[-1] == (0, 12_000, 12_000)
    done = [rows_done for _, rows_done, _ in seen]
    assert done == sorted(done)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"rows": [1, ROWS]}, errors.RowOutOfRange),
        ({"rows": [1, -1]}, errors.RowOutOfRange),
        ({"generation": 999}, errors.StateRolledBack),
        ({"expected_update_number": 5}, errors.StateRolledBack),
        ({"id": 10**9}, errors.TableNotFound),
        ({"result": "value"}, errors.InvalidArgument),
    ],
    ids=["beyond", "negative", "generation", "number", "table", "weights"],
)
def test_one_bad_table_leaves_all_tables_as_they_were(engine, session, change, error):
    good, _ = open_table(engine, session)
    bad, _ = open_table(engine, session)
    engine.update([batch(good, [1, 2]), batch(bad, [1, 2])])
    before = contents(engine, good), contents(engine, bad)
    change = dict(change)
    rows = change.pop("rows", [1, 2])
    with pytest.raises(error):
        engine.update([batch(good, [1, 3]), batch(bad, rows, step=9, **change)])
    assert (contents(engine, good), contents(engine, bad)) == before
    assert engine.get_table(id=good.id).step == 1


def test_a_bad_row_is_named_with_its_position(engine, session):
    view, _ = open_table(engine, session)
    with pytest.raises(errors.RowOutOfRange) as caught:
        engine.update([batch(view, [4, 5, ROWS + 3, -2])])
    details = caught.value.details
    assert (details["row"], details["position"]) == (str(ROWS + 3), "2")


def test_a_batch_beyond_a_quarter_of_the_cache_is_refused_with_nothing_changed(engine, session):
    wide = make_schema(rows=100_000, width=64)
    view, _ = open_table(engine, session, schema=wide)
    rows = np.arange(view.request_rows + 1)
    with pytest.raises(errors.CacheTooSmall):
        engine.update([batch(view, rows)])
    assert engine.get_table(id=view.id).update_number == 0
    engine.update([batch(view, rows[:-1])])


def test_an_empty_batch_is_a_step(engine, session):
    view, _ = open_table(engine, session)
    [outcome] = engine.update([batch(view, [])])
    assert (outcome.rows, outcome.step, outcome.update_number) == (0, 1, 1)
    assert engine.update([batch(view, [1], step=7)])[0].step == 7


# ------------------------------------------------------------------------------------ rows


def test_gather_keeps_order_and_duplicates_and_takes_ranges(engine, session):
    view, _ = open_table(engine, session)
    engine.update([batch(view, [3, 4])])
    several = contents(engine, view, [4, 0, 4])
    part = len(several[0]) // 3
    assert several[0][:part] == several[0][2 * part :] != several[0][part : 2 * part]
    ranged = engine.gather(
        id=view.id, generation=view.generation, rows=None, range=(2, 3), fields=["exp_avg_sq"],
        outs=None,
    )  # fmt: skip
    assert ranged.values[0].shape == (3, WIDTH)
    assert ranged.values[0].tobytes() == contents(engine, view, [2, 3, 4])[1]


def test_scatter_writes_fields_and_keeps_the_others(engine, session):
    view, _ = open_table(engine, session)
    engine.update([batch(view, [3])])
    values = np.full((2, WIDTH), 5, np.float32)
    step, number = engine.scatter(
        id=view.id, generation=view.generation, rows=np.array([9, 3]), range=None,
        fields=["exp_avg"], values=[values], step=41,
    )  # fmt: skip
    assert (step, number) == (41, 2)
    exp_avg, exp_avg_sq = contents(engine, view, [3])
    assert exp_avg == values[0].tobytes()
    assert np.frombuffer(exp_avg_sq, np.float32).any()


def test_scatter_refuses_a_row_twice(engine, session):
    view, _ = open_table(engine, session)
    before = contents(engine, view)
    with pytest.raises(errors.InvalidArgument):
        engine.scatter(
            id=view.id, generation=view.generation, rows=np.array([3, 3]), range=None,
            fields=["exp_avg"], values=[np.ones((2, WIDTH), np.float32)], step=None,
        )  # fmt: skip
    assert contents(engine, view) == before


def test_reads_check_rows_and_generation_too(engine, session):
    view, _ = open_table(engine, session)
    for call in (engine.prefetch, lambda **k: engine.gather(range=None, fields=[], outs=None, **k)):
        with pytest.raises(errors.RowOutOfRange):
            call(id=view.id, generation=view.generation, rows=np.array([ROWS]))
        with pytest.raises(errors.StateRolledBack):
            call(id=view.id, generation=view.generation + 1, rows=np.array([0]))


# ------------------------------------------------------------------------------------ life


def test_stats_count_what_happened(engine, session):
    view, _ = open_table(engine, session)
    engine.update([batch(view, [1, 2, 2])])
    stats = engine.stats()
    [table] = stats.tables
    assert (table.table.id, table.updates, table.rows_touched) == (view.id, 1, 2)
    assert stats.totals.state == "serving"
    assert engine.stats("nobody").tables == []


def test_after_a_stop_nothing_runs_and_a_second_stop_is_nothing(engine, session):
    view, _ = open_table(engine, session)
    engine.stop(discard=True)
    engine.stop()
    with pytest.raises(errors.DaemonUnavailable):
        engine.update([batch(view, [1])])


def test_both_implementations_give_nearly_the_same_numbers(tmp_path):
    store = LocalEngine.start(make_config(tmp_path, cache_bytes=16 * MIB, threads=2))
    model = NumpyEngine(cache_bytes=16 * MIB)
    rng = np.random.default_rng(0)
    views = [open_table(engine, open_session(engine))[0] for engine in (store, model)]
    for _ in range(20):
        rows = rng.integers(0, ROWS, 700)
        grads = rng.standard_normal((700, WIDTH)).astype(np.float32)
        mask = (rng.random(grads.shape) < 0.7).astype(np.uint8)
        [mine], [theirs] = (
            engine.update([batch(view, rows, grads, mask=mask)])
            for engine, view in zip((store, model), views, strict=True)
        )
        assert mine.out_rows.tobytes() == theirs.out_rows.tobytes()
        assert np.allclose(mine.out_values, theirs.out_values, rtol=1e-5, atol=1e-7)
    store.stop(discard=True)
    store.close()


def everything(engine, table):
    return engine.gather(
        id=table.id, generation=table.generation, rows=None, range=(0, ROWS), fields=(), outs=None
    ).values


def change(engine, table, number):
    fields = {name: np.full((1, WIDTH), number, np.float32) for name in ("exp_avg", "exp_avg_sq")}
    engine.scatter(
        id=table.id, generation=table.generation, rows=np.array([number]), range=None,
        fields=tuple(fields), values=list(fields.values()), step=number,
    )  # fmt: skip


def test_a_snapshot_is_of_one_instant_and_is_restored_as_a_table_of_its_own(engine, session):
    table, _ = open_table(engine, session)
    change(engine, table, 3)
    then = everything(engine, table)
    taken = [(table.id, table.generation)]
    view, created, _ = engine.create_snapshot(taken, run=None, name="one", pinned=True)
    assert created
    again, created, written = engine.create_snapshot(taken, run=None, name=None, pinned=True)
    assert (again.record.name, created, written) == ("one", False, 0)
    change(engine, table, 4)
    (entry,) = view.record.tables
    assert engine.get_snapshot(id=entry.id).record.name == "one"
    restored = engine.restore_table(
        session, id=entry.id, name=None, label=None, run="r", replace=False
    )
    assert restored.step == 3
    for ours, theirs in zip(everything(engine, restored), then, strict=True):
        assert np.array_equal(ours, theirs)
    change(engine, restored, 4)
    second, _, _ = engine.create_snapshot(
        [(restored.id, restored.generation)], run=None, name="two", pinned=True
    )
    other, _, _ = engine.create_snapshot(taken, run=None, name="three", pinned=True)
    assert second.record.tables[0].id == other.record.tables[0].id != entry.id


def test_a_deleted_snapshot_is_gone_and_names_are_taken_once(engine, session):
    table, _ = open_table(engine, session)
    change(engine, table, 3)
    taken = [(table.id, table.generation)]
    view, _, _ = engine.create_snapshot(taken, run=None, name="one", pinned=True)
    change(engine, table, 4)
    with pytest.raises(errors.TableInUse):
        engine.create_snapshot(taken, run=None, name="one", pinned=True)
    with pytest.raises(errors.SnapshotNotFound):
        engine.delete_snapshots(["one", "none"])
    assert [each.record.name for each in engine.list_snapshots()] == ["one"]
    engine.delete_snapshots(["one"])
    assert engine.list_snapshots() == []
    with pytest.raises(errors.SnapshotNotFound):
        engine.restore_table(
            session, id=view.record.tables[0].id, name=None, label=None, run="r", replace=False
        )
    with pytest.raises(errors.TableNotFound):
        engine.create_snapshot([], run="nobody's", name=None, pinned=True)
