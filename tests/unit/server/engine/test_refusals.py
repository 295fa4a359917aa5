"""Bad input: a clear error, and nothing changed."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from momentd_server.engine.lifecycle import BASE_BYTES
from momentd_server.rules import SparseAdamHyper
from momentd_server.schema import FieldSpec, Schema
from momentd_server.storage.space import SLAB_BYTES
from momentd_wire.errors import (
    CacheTooSmall,
    InvalidArgument,
    OutOfMemory,
    RowOutOfRange,
    SchemaMismatch,
    StateRolledBack,
    TableInUse,
    TableNotFound,
    UnsupportedFeature,
)
from tests.support.local_engine import (
    adam_schema,
    batch,
    open_session,
    open_table,
    start_engine,
)


def _everything(engine, table):
    found = engine.gather(
        id=table.id, generation=table.generation, rows=None, range=(0, table.schema.rows),
        fields=[], outs=None,
    )  # fmt: skip
    return found.step, found.update_number, *(v.tobytes() for v in found.values)


@pytest.fixture
def table(engine, session):
    table = open_table(engine, session, adam_schema(10, 4))
    engine.update([batch(table, [1, 2], np.ones((2, 4), np.float32))])
    return table


@pytest.mark.parametrize(("rows", "bad"), [([2, 10, 3], "10"), ([2, -1], "-1")])
def test_a_row_out_of_range_rejects_the_whole_batch(engine, table, rows, bad):
    before = _everything(engine, table)
    with pytest.raises(RowOutOfRange, match=rf"{bad} at position 1"):
        engine.update([batch(table, rows, np.ones((len(rows), 4), np.float32))])
    assert _everything(engine, table) == before


def test_one_bad_table_of_two_rejects_both(engine, session, table):
    other = open_table(engine, session, adam_schema(10, 4))
    before = _everything(engine, table)
    good = batch(table, [5], np.ones((1, 4), np.float32))
    for bad in (
        batch(other, [11], np.ones((1, 4), np.float32)),
        batch(other, [1], np.ones((1, 4), np.float32), expected=7),
        batch(other, [1], np.ones((1, 3), np.float32)),
        batch(other, [1], np.ones((1, 4), np.float64)),
    ):
        with pytest.raises((RowOutOfRange, StateRolledBack, InvalidArgument)):
            engine.update([good, bad])
    assert _everything(engine, table) == before


@pytest.mark.parametrize("step", [0, 1 << 63, (1 << 64) - 1])
def test_a_step_that_cannot_be_changes_no_table_of_the_request(engine, session, table, step):
    other = open_table(engine, session, adam_schema(10, 4))
    before = _everything(engine, table), _everything(engine, other)
    one = np.ones((1, 4), np.float32)
    with pytest.raises(InvalidArgument, match="step"):
        engine.update([batch(table, [1], one), batch(other, [1], one, step=step)])
    if step:
        with pytest.raises(InvalidArgument, match="step"):
            engine.scatter(
                id=other.id, generation=other.generation, rows=None, range=(0, 1),
                fields=["exp_avg"], values=[one], step=step,
            )  # fmt: skip
    assert (_everything(engine, table), _everything(engine, other)) == before


def test_a_table_twice_in_a_request_is_refused(engine, table):
    one = batch(table, [5], np.ones((1, 4), np.float32))
    with pytest.raises(InvalidArgument, match="twice"):
        engine.update([one, one])


def test_another_generation_is_refused(engine, table):
    old = batch(table, [5], np.ones((1, 4), np.float32))
    old.generation += 1
    with pytest.raises(StateRolledBack, match="generation"):
        engine.update([old])


def test_nan_hyper_parameters_are_refused():
    for bad in (
        {"lr": float("nan")},
        {"lr": -1.0},
        {"lr": 1.0, "beta1": 1.0},
        {"lr": 1, "eps": -1},
    ):
        with pytest.raises(InvalidArgument):
            SparseAdamHyper(**bad)


def test_a_batch_above_a_quarter_of_the_cache_names_the_minimum(engine, session):
    table = open_table(engine, session, adam_schema(10_000, 128))
    rows = np.arange(table.request_rows + 1)
    with pytest.raises(CacheTooSmall, match=r"--cache \d+MiB"):
        engine.update([batch(table, rows, np.ones((rows.size, 128), np.float32))])
    assert engine.stats().tables[0].rows_touched == 0
    rows = rows[:-1]
    engine.update([batch(table, rows, np.ones((rows.size, 128), np.float32))])


@pytest.mark.parametrize("count", [6_000, 6_656, 7_777])
def test_the_cache_that_was_asked_for_is_enough_and_not_too_much(tmp_path, engine, session, count):
    table = open_table(engine, session, adam_schema(10_000, 128))
    rows, grads = np.arange(count), np.ones((count, 128), np.float32)
    with pytest.raises(CacheTooSmall, match=r"--cache \d+MiB") as refused:
        engine.update([batch(table, rows, grads)])
    needed_mib = int(refused.value.details["needed_bytes"]) >> 20
    assert f"--cache {needed_mib}MiB" in str(refused.value)
    for cache_mib, enough in ((needed_mib, True), (needed_mib - 1, False)):
        larger = start_engine(tmp_path / str(cache_mib), cache_mib=cache_mib)
        try:
            table = open_table(larger, open_session(larger), adam_schema(10_000, 128))
            with nullcontext() if enough else pytest.raises(CacheTooSmall):
                larger.update([batch(table, rows, grads)])
        finally:
            larger.stop(discard=True)
            larger.close()


def test_a_named_table_with_another_schema_is_refused(engine, session):
    open_table(engine, session, adam_schema(10, 4), "entities")
    for other in (adam_schema(11, 4), adam_schema(10, 5), adam_schema(10, 4, "float64")):
        with pytest.raises(SchemaMismatch, match=r"'entities' has .*`momentd runs drop test`"):
            open_table(engine, session, other, "entities")


def test_the_command_that_a_refusal_names_can_be_typed(engine, session):
    arguments = {"name": "n", "label": "", "run": "train.py @ host 1", "mode": "open_or_create"}
    engine.open_table(session, schema=adam_schema(10, 4), **arguments)
    with pytest.raises(SchemaMismatch, match=r"`momentd runs drop 'train.py @ host 1'`"):
        engine.open_table(session, schema=adam_schema(11, 4), **arguments)


def test_create_and_open_modes(engine, session):
    schema = adam_schema(10, 4)
    arguments = {"name": "n", "label": "", "schema": schema, "run": "r"}
    with pytest.raises(TableNotFound):
        engine.open_table(session, mode="open", **arguments)
    first, created = engine.open_table(session, mode="create", **arguments)
    assert created
    with pytest.raises(TableInUse):
        engine.open_table(session, mode="create", **arguments)
    again, created = engine.open_table(session, mode="open", **arguments)
    assert (again.id, created) == (first.id, False)


def test_unknown_rules_and_wrong_fields_are_refused(engine, session):
    with pytest.raises(UnsupportedFeature, match="sparse_adam"):
        open_table(engine, session, Schema(10, 4, (FieldSpec("m", "float32", 4),), "nonsense"))
    with pytest.raises(InvalidArgument):
        open_table(engine, session, Schema(10, 4, (FieldSpec("m", "float32", 4),), "sparse_adam"))


def test_a_table_whose_locations_do_not_fit_memory_is_refused(engine, session):
    with pytest.raises(OutOfMemory, match="12 bytes a row"):
        open_table(engine, session, adam_schema(10**11, 1))
    assert engine.list_tables() == []


def test_of_two_tables_made_at_once_only_one_gets_the_last_memory(engine, session, monkeypatch):
    catalog = engine.tables._catalog
    commit = catalog.commit
    refused = []

    def commit_while_another_is_made(changes):
        monkeypatch.setattr(catalog, "commit", commit)
        with pytest.raises(OutOfMemory, match="12 bytes a row"):
            open_table(engine, session, adam_schema(10**7, 1))
        refused.append(True)
        commit(changes)

    room = engine._space.slabs * SLAB_BYTES + BASE_BYTES + 13 * 10**7
    monkeypatch.setattr("momentd_server.obs.machine.memory_limit_bytes", lambda: room)
    monkeypatch.setattr(catalog, "commit", commit_while_another_is_made)
    table = open_table(engine, session, adam_schema(10**7, 1))
    assert refused
    engine.drop_tables(session, ids=[table.id], run=None, force=False)
    open_table(engine, session, adam_schema(10**7, 1))


def test_a_cache_larger_than_the_machine_is_refused(tmp_path):
    with pytest.raises(OutOfMemory, match="--cache"):
        start_engine(tmp_path, cache_mib=1 << 24)


def test_a_table_that_another_session_uses_is_not_dropped_without_force(engine, session):
    table = open_table(engine, session, adam_schema(10, 4), "shared")
    other = open_session(engine)
    with pytest.raises(TableInUse, match="--force"):
        engine.drop_tables(other, ids=[table.id], run=None, force=False)
    assert engine.drop_tables(other, ids=[table.id], run=None, force=True) == 1
    with pytest.raises(TableNotFound):
        engine.get_table(id=table.id)


def test_scatter_refuses_duplicates_and_wrong_shapes(engine, table):
    where = {"id": table.id, "generation": table.generation, "range": None, "step": None}
    before = _everything(engine, table)
    for rows, fields, values in (
        ([1, 1], ["exp_avg"], [np.ones((2, 4), np.float32)]),
        ([1, 2], ["exp_avg"], [np.ones((2, 3), np.float32)]),
        ([1, 2], ["exp_avg"], [np.ones((2, 4), np.float64)]),
        ([1, 2], ["nothing"], [np.ones((2, 4), np.float32)]),
        ([1, 2], ["exp_avg", "exp_avg_sq"], [np.ones((2, 4), np.float32)]),
        ([1, 10], ["exp_avg"], [np.ones((2, 4), np.float32)]),
    ):
        with pytest.raises(InvalidArgument):
            engine.scatter(rows=np.array(rows), fields=fields, values=values, **where)
    assert _everything(engine, table) == before


def test_an_empty_batch_advances_the_step_only(engine, table):
    before = _everything(engine, table)
    (outcome,) = engine.update([batch(table, [], np.empty((0, 4), np.float32))])
    after = _everything(engine, table)
    assert (outcome.step, outcome.rows) == (2, 0)
    assert after[2:] == before[2:]
