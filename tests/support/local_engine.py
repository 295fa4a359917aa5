"""A real engine over a temporary directory, in this process, and a numpy model of its tables."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from momentd_server.config import MIB, ServeConfig
from momentd_server.engine.api import TableBatch, TableView
from momentd_server.engine.engine import LocalEngine
from momentd_server.engine.sessions import Session
from momentd_server.rules import SparseAdamHyper, get
from momentd_server.schema import Schema
from momentd_wire import addresses


def start_engine(path: Path, *, cache_mib: int = 16, threads: int = 2, **config) -> LocalEngine:
    address = addresses.parse(f"unix:{path}/s.sock")
    return LocalEngine.start(
        ServeConfig(
            data_dir=path / "data", cache_bytes=cache_mib * MIB, address=address, threads=threads,
            read_threads=8, **config,
        )
    )  # fmt: skip


def open_session(engine: LocalEngine) -> Session:
    session = engine.sessions.open(plane="local", pid=0, uid=0, run="test", program="pytest")
    session.attach()
    return session


def adam_schema(rows: int, width: int, dtype: str = "float32") -> Schema:
    return Schema(rows, width, get("sparse_adam").field_specs(width, dtype), "sparse_adam")


def open_table(
    engine: LocalEngine, session: Session, schema: Schema, name: str | None = None
) -> TableView:
    view, _ = engine.open_table(
        session, name=name, label="t", schema=schema, run="test", mode="open_or_create"
    )
    return view


def batch(table: TableView, rows, grads, *, hyper=None, **more) -> TableBatch:
    return TableBatch(
        id=table.id, generation=table.generation, step=more.pop("step", None),
        expected_update_number=more.pop("expected", None),
        hyper=hyper or SparseAdamHyper(0.01), result="delta",
        rows=np.ascontiguousarray(rows, np.int64), grads=np.ascontiguousarray(grads), **more,
    )  # fmt: skip


@dataclass
class AdamModel:
    """The moments of one table as dense arrays, updated in float32 in torch's order."""

    rows: int
    width: int
    step: int = 0
    exp_avg: np.ndarray = field(init=False)
    exp_avg_sq: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.exp_avg = np.zeros((self.rows, self.width), np.float32)
        self.exp_avg_sq = np.zeros((self.rows, self.width), np.float32)

    def update(self, rows, grads, beta1=0.9, beta2=0.999) -> None:
        self.step += 1
        unique, inverse = np.unique(rows, return_inverse=True)
        total = np.zeros((unique.size, self.width), np.float32)
        # In the order in which they stand, as the contract says.
        for position, target in enumerate(inverse):
            first = not total[target].any()
            total[target] = grads[position] if first else total[target] + grads[position]
        m, v = self.exp_avg[unique], self.exp_avg_sq[unique]
        self.exp_avg[unique] = m + (total - m) * np.float32(1 - beta1)
        self.exp_avg_sq[unique] = v + (total * total - v) * np.float32(1 - beta2)

    def copy(self) -> AdamModel:
        twin = replace(self)
        twin.exp_avg, twin.exp_avg_sq = self.exp_avg.copy(), self.exp_avg_sq.copy()
        return twin
