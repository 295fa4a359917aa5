"""Records exp_avg | exp_avg_sq as values of an LMDB, keyed by row: get, put, one commit a step.

Without `fsync` at the commit, so that it is not the disk's flush that is measured: momentd does not
sync in a step either.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lmdb
import numpy as np
import torch
from torch import Tensor, nn

from .base import FILL_ROWS, FILLED, Baseline

# A copy-on-write tree of values that do not divide a page: room for twice the records and more.
ROOM = 3
LEAST_BYTES = 64 << 20


class LmdbRows(Baseline):
    """Keys are big-endian, so that filling appends."""

    def __init__(self, parameter: nn.Parameter, folder: Path, lr: float = 1e-3) -> None:
        super().__init__(parameter, folder, lr)
        size = ROOM * self.rows * (2 * self.dim * 4 + 64) + LEAST_BYTES
        self._environment: Any = lmdb.open(
            str(folder), map_size=size, sync=False, metasync=False, readahead=False
        )

    def update(self, gradient: Tensor) -> None:
        gradient = gradient.coalesce()
        ids, grad = gradient.indices()[0], gradient.values()
        keys = _keys(ids.numpy())
        with self._environment.begin(write=True, buffers=True) as transaction:
            records = self._read(transaction, keys)
            exp_avg, exp_avg_sq = records[:, : self.dim], records[:, self.dim :]
            hyper = self.hyper()
            exp_avg.add_((grad - exp_avg).mul_(1 - hyper.beta1))
            exp_avg_sq.add_(grad.pow(2).sub_(exp_avg_sq).mul_(1 - hyper.beta2))
            changed = records.numpy()
            with transaction.cursor() as cursor:
                cursor.putmulti(
                    (key, memoryview(record).cast("B"))
                    for key, record in zip(keys, changed, strict=True)
                )
        delta = exp_avg / exp_avg_sq.sqrt().add_(hyper.eps)
        self.parameter.index_add_(0, ids, delta, alpha=-hyper.step_size(self.steps))

    def fill(self) -> None:
        record = np.full(2 * self.dim, FILLED, np.float32).tobytes()
        for start in range(0, self.rows, FILL_ROWS):
            ids = np.arange(start, min(start + FILL_ROWS, self.rows))
            with (
                self._environment.begin(write=True) as transaction,
                transaction.cursor() as cursor,
            ):
                cursor.putmulti(((key, record) for key in _keys(ids)), append=True)

    def close(self) -> None:
        self._environment.close()

    def _read(self, transaction: Any, keys: list[bytes]) -> Tensor:
        """Records of `keys`; of a row that was never put, zeros."""
        records = np.zeros((len(keys), 2 * self.dim), np.float32)
        get = transaction.get
        for place, key in enumerate(keys):
            value = get(key)
            if value is not None:
                records[place] = np.frombuffer(value, np.float32)
        return torch.from_numpy(records)


def _keys(ids: np.ndarray) -> list[bytes]:
    packed = ids.astype(">i8").tobytes()
    return [packed[at : at + 8] for at in range(0, len(packed), 8)]
