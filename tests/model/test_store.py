"""The engine against a plain numpy model: random batches, a cache far too small, restarts."""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from momentd_server.engine import compaction
from momentd_server.storage import frames
from tests.support.local_engine import (
    AdamModel,
    adam_schema,
    batch,
    open_session,
    open_table,
    start_engine,
)

# The cache holds about 15,000 records of 1 KiB: the three tables together do not fit.
WIDTHS = (128, 40, 5)
ROWS = 12_000

seeds = st.integers(0, 2**32 - 1)
which = st.integers(0, len(WIDTHS) - 1)


class StoreMachine(RuleBasedStateMachine):
    @initialize()
    def start(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="momentd-model-"))
        self.engine = start_engine(self.path)
        self.session = open_session(self.engine)
        self.tables = []
        self.models = []
        self.flushed = []
        for k, width in enumerate(WIDTHS):
            schema = adam_schema(ROWS * (1 if width > 5 else 10), width)
            self.tables.append(open_table(self.engine, self.session, schema, f"table-{k}"))
            self.models.append(AdamModel(schema.rows, width))
            self.flushed.append(self.models[-1].copy())

    @rule(k=which, seed=seeds, count=st.integers(0, 2500))
    def update(self, k: int, seed: int, count: int) -> None:
        rng = np.random.default_rng(seed)
        model = self.models[k]
        rows = rng.integers(0, model.rows, count)
        grads = rng.standard_normal((count, model.width), np.float32)
        (outcome,) = self.engine.update([batch(self.tables[k], rows, grads)])
        model.update(rows, grads)
        assert outcome.step == model.step
        assert np.array_equal(outcome.out_rows, np.unique(rows))

    @rule(seed=seeds)
    def update_all_tables_at_once(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        batches = []
        for table, model in zip(self.tables, self.models, strict=True):
            rows = rng.integers(0, model.rows, 700)
            grads = rng.standard_normal((700, model.width), np.float32)
            batches.append(batch(table, rows, grads))
            model.update(rows, grads)
        self.engine.update(batches)

    @rule(k=which, seed=seeds)
    def scatter(self, k: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        model, table = self.models[k], self.tables[k]
        rows = rng.permutation(model.rows)[:300]
        values = rng.standard_normal((300, model.width), np.float32)
        self.engine.scatter(
            id=table.id, generation=table.generation, rows=rows, range=None,
            fields=["exp_avg_sq"], values=[values], step=model.step,
        )  # fmt: skip
        model.exp_avg_sq[rows] = values

    @rule(k=which, seed=seeds)
    def prefetch(self, k: int, seed: int) -> None:
        table = self.tables[k]
        rows = np.random.default_rng(seed).integers(0, self.models[k].rows, 500)
        self.engine.prefetch(id=table.id, generation=table.generation, rows=rows)

    @rule(k=which, seed=seeds)
    def update_at_once_with_others(self, k: int, seed: int) -> None:
        """Two updates and a read-ahead share rows; their gradients are such that no order shows."""
        rng = np.random.default_rng(seed)
        model, table = self.models[k], self.tables[k]
        row_grads = rng.standard_normal((model.rows, model.width), np.float32)
        common = rng.integers(0, model.rows, 800)
        parts = [np.append(common, rng.integers(0, model.rows, 400)) for _ in range(2)]
        parts = [np.unique(part) for part in parts]
        self.engine.prefetch(id=table.id, generation=table.generation, rows=common)
        with ThreadPoolExecutor(2) as threads:
            calls = [
                threads.submit(self.engine.update, [batch(table, rows, row_grads[rows])])
                for rows in parts
            ]
            steps = sorted(call.result()[0].step for call in calls)
        assert steps == [model.step + 1, model.step + 2]
        for rows in parts:
            model.update(rows, row_grads[rows])

    @rule(share=st.sampled_from([0.1, 0.5, 0.9]))
    def compact(self, share: float) -> None:
        """Whatever the ratio: some ended segment is written again."""
        compactor = self.engine.compactor
        compactor._ratio, slack = share, compaction._SLACK_BYTES
        try:
            compaction._SLACK_BYTES = 0
            compactor.run_once()
        finally:
            compactor._ratio, compaction._SLACK_BYTES = 2.0, slack

    @rule(k=which)
    def clone_and_compare(self, k: int) -> None:
        source = self.tables[k]
        clone = self.engine.clone_table(
            self.session, id=source.id, generation=source.generation, name=None, label="", run="r"
        )
        self._compare(clone, self.models[k])
        model = self.models[k].copy()
        rows = np.arange(500)
        grads = np.ones((500, model.width), np.float32)
        self.engine.update([batch(clone, rows, grads)])
        model.update(rows, grads)
        self._compare(clone, model)
        self._compare(source, self.models[k])
        self.engine.drop_tables(self.session, ids=[clone.id], run=None, force=False)

    @rule()
    def flush(self) -> None:
        self.engine.flush([])
        self.flushed = [model.copy() for model in self.models]

    @rule()
    def restart(self) -> None:
        self._restart(discard=False)

    @rule()
    def lose_power(self) -> None:
        self._restart(discard=True)
        self.models = [model.copy() for model in self.flushed]

    def _restart(self, *, discard: bool) -> None:
        self.engine.stop(discard=discard)
        self.engine.close()
        self.engine = start_engine(self.path)
        self.session = open_session(self.engine)
        self.tables = [
            open_table(self.engine, self.session, table.schema, table.name) for table in self.tables
        ]
        if not discard:
            self.flushed = [model.copy() for model in self.models]

    @rule(k=which, seed=seeds)
    def gather(self, k: int, seed: int) -> None:
        rows = np.random.default_rng(seed).integers(0, self.models[k].rows, 1000)
        table = self.tables[k]
        found = self.engine.gather(
            id=table.id, generation=table.generation, rows=rows, range=None, fields=["exp_avg"],
            outs=None,
        )  # fmt: skip
        assert np.array_equal(found.values[0], self.models[k].exp_avg[rows])

    @invariant()
    @precondition(lambda self: hasattr(self, "engine"))
    def books_are_right(self) -> None:
        for table in self.engine.tables.all():
            with self.engine._lane:
                free, clean, dirty, fresh, queued = frames.count_states(
                    table.slabs, self.engine._words, table.geo
                )
                assert dirty == table.dirty
                assert free + clean + dirty == table.frames
                assert fresh == table.fresh
                assert queued == table.queued

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for table, model in zip(self.tables, self.models, strict=True):
            self._compare(table, model)
        self.engine.stop(discard=True)
        self.engine.close()
        shutil.rmtree(self.path)

    def _compare(self, table, model: AdamModel) -> None:
        for start in range(0, model.rows, 4000):
            count = min(4000, model.rows - start)
            found = self.engine.gather(
                id=table.id, generation=table.generation, rows=None, range=(start, count),
                fields=[], outs=None,
            )  # fmt: skip
            part = slice(start, start + count)
            assert found.step == model.step
            assert np.array_equal(found.values[0], model.exp_avg[part])
            assert np.array_equal(found.values[1], model.exp_avg_sq[part])


TestStore = StoreMachine.TestCase
TestStore.settings = settings(
    max_examples=15,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
