"""State dicts in torch's layout: moments out of the daemon by gather, into it by scatter."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from momentd import rules
from momentd._grads import table_shape
from momentd.errors import InvalidArgument, SnapshotNotFound, StateRolledBack, TableNotFound
from momentd.optim import _groups
from momentd.optim._records import Entry, Record, is_placeholder
from momentd.table import Table

if TYPE_CHECKING:
    from momentd.optim.base import TableOptimizer

StateDict = dict[str, Any]

# Rows that are looked through, and sent, at a time.
_BLOCK_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class Saved:
    """One parameter's entry of a state dict.

    moments: name -> (rows, width) on the CPU; empty if the state is that of a fresh parameter with
    `step` updates.
    """

    step: int
    moments: dict[str, Tensor]


@dataclass(slots=True)
class _Handout:
    tensors: tuple[tuple[weakref.ref[Tensor], int], ...]
    record: Record
    update_number: int


@dataclass(slots=True)
class Given:
    """Which tensors `state_dict()` handed out last, to know them again when they are loaded."""

    by_id: dict[int, _Handout] = field(default_factory=dict)

    def note(self, entry: Entry, record: Record) -> None:
        tensors = [value for value in entry.values() if isinstance(value, Tensor)]
        handout = _Handout(
            tuple((weakref.ref(tensor), tensor._version) for tensor in tensors),
            record,
            record.update_number,
        )
        self.by_id[id(tensors[0])] = handout

    def current(self, entry: Entry) -> Record | None:
        """The record whose present state an entry is: same tensors, written by nobody since."""
        tensors = [value for value in entry.values() if isinstance(value, Tensor)]
        handout = self.by_id.get(id(tensors[0])) if tensors else None
        if handout is None or len(tensors) != len(handout.tensors):
            return None
        for tensor, (seen, version) in zip(tensors, handout.tensors, strict=True):
            if seen() is not tensor or tensor._version != version:
                return None
        record = handout.record
        if record.update_number != handout.update_number or entry.get("step") != record.step:
            return None
        return record


# ---------------------------------------------------------------------------------------- out


def save(optimizer: TableOptimizer) -> StateDict:
    """`{"state": {index: entry}, "param_groups": [...]}` as torch packs it."""
    optimizer._given.by_id.clear()
    index_of: dict[int, int] = {}
    groups: list[dict[str, Any]] = []
    start = 0
    for group in optimizer.param_groups:
        params = group["params"]
        for index, param in enumerate(params, start):
            index_of.setdefault(id(param), index)
        packed = {key: value for key, value in group.items() if key != "params"}
        packed["params"] = [index_of[id(param)] for param in params]
        groups.append(packed)
        start += len(params)
    return {"state": dict(_placed(optimizer, index_of)), "param_groups": groups}


def _placed(optimizer: TableOptimizer, index_of: dict[int, int]) -> Iterator[tuple[Any, Any]]:
    items: Iterable[tuple[Any, Any]] = optimizer.state.items()
    for key, entry in items:
        if not isinstance(key, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            yield key, entry
        elif id(key) in index_of:
            yield index_of[id(key)], _full_entry(optimizer, key, entry)
        else:
            raise InvalidArgument(
                f"state of a parameter of shape {tuple(key.shape)} that is in no group: the groups "
                "were replaced after it was made. Put the parameter back, move the state with "
                "`optimizer.state[new] = optimizer.state.pop(old)`, or delete it from "
                "`optimizer.state`"
            )


def portable_state(optimizer: TableOptimizer) -> list[tuple[Any, Any]]:
    """`optimizer.state` with complete moments, as pairs (a parameter may not be hashable)."""
    items: Iterable[tuple[Any, Any]] = optimizer.state.items()
    pairs: list[tuple[Any, Any]] = []
    for key, entry in items:
        moments = isinstance(key, Tensor)  # pyright: ignore[reportUnnecessaryIsInstance]
        pairs.append((key, _full_entry(optimizer, key, entry) if moments else entry))
    return pairs


def _full_entry(optimizer: TableOptimizer, param: Tensor, entry: Entry) -> Entry:
    record = optimizer._records.get(entry)
    if record is None:
        return dict(entry)
    full: Entry = {"step": record.step}
    for name in field_names(optimizer._rule, param):
        if record.table is not None:
            values = record.table.gather(None, fields=name)
            full[name] = torch.from_numpy(values).reshape(param.shape)
        else:
            full[name] = torch.zeros(param.shape, dtype=optimizer._state_dtype(param))
    optimizer._given.note(full, record)
    return full


def field_names(rule: rules.SparseAdam, param: Tensor) -> list[str]:
    """Names of the moments of a parameter, in record order."""
    rows, width = table_shape(param.shape)
    return [spec.name for spec in rule.schema(rows, max(width, 1)).fields]


# ---------------------------------------------------------------------------------------- in


def load(optimizer: TableOptimizer, state_dict: StateDict) -> None:
    """Replace the optimizer's state and groups by those of a state dict, all or nothing."""
    groups = optimizer.param_groups
    saved_groups = copy.deepcopy(state_dict["param_groups"])
    _check_groups(groups, saved_groups)
    param_of = dict(
        zip(
            chain.from_iterable(group["params"] for group in saved_groups),
            chain.from_iterable(group["params"] for group in groups),
            strict=True,
        )
    )
    state, records = _new_state(optimizer, state_dict["state"], param_of)
    for group, saved in zip(groups, saved_groups, strict=True):
        saved["params"] = group["params"]
        if "param_names" in group:
            saved.setdefault("param_names", group["param_names"])
    kept = {id(record) for record in records}
    old = [r.table for r in optimizer._records if r.table is not None and id(r) not in kept]
    optimizer._adopt(state, saved_groups, records)
    optimizer._drop(old)


def _check_groups(groups: list[dict[str, Any]], saved: list[dict[str, Any]]) -> None:
    if len(groups) != len(saved):
        raise InvalidArgument("loaded state dict has a different number of parameter groups")
    if any(len(g["params"]) != len(s["params"]) for g, s in zip(groups, saved, strict=True)):
        raise InvalidArgument(
            "loaded state dict contains a parameter group "
            "that doesn't match the size of optimizer's group"
        )
    ours = list(chain.from_iterable(g.get("param_names", ()) for g in groups))
    theirs = list(chain.from_iterable(s.get("param_names", ()) for s in saved))
    if ours != theirs and sorted(ours) == sorted(theirs):
        raise InvalidArgument(
            "loaded state dict has the same parameters in another order, and parameters are "
            f"matched by position: it has {theirs}, the optimizer has {ours}. "
            "Build the optimizer with the parameters in the saved order"
        )


def _new_state(
    optimizer: TableOptimizer, saved_state: dict[Any, Any], param_of: dict[Any, Tensor]
) -> tuple[_groups.ParamState, list[Record]]:
    """State and records of a state dict: everything is checked, then new tables are filled."""
    given = optimizer._given
    state = _groups.ParamState()
    todo: list[tuple[Tensor, Saved]] = []
    records: list[Record] = []
    for key, entry in saved_state.items():
        if key not in param_of:
            state[key] = entry
            continue
        param = param_of[key]
        current = given.current(entry) if isinstance(entry, dict) else None
        if (
            current is not None
            and optimizer.state.get(param) is current.entry
            and _still_there(current)
        ):
            state[param] = current.entry
            records.append(current)
        else:
            todo.append((param, read_entry(entry, param, optimizer._rule, f"state[{key}]")))
    made: list[Table] = []
    try:
        for param, saved in todo:
            record = Record(optimizer._live_entry(param, saved.step), step=saved.step)
            if saved.moments:
                record.table = optimizer._open_table(param, optimizer._label(param))
                made.append(record.table)
                scatter(record.table, saved)
                record.update_number = record.table.update_number
            state[param] = record.entry
            records.append(record)
    except BaseException:
        optimizer._drop(made)
        raise
    return state, records


def _still_there(record: Record) -> bool:
    """Whether the daemon still has what the record says: it may have been killed since."""
    if record.table is None:
        return True
    try:
        return record.table.refresh().update_number == record.update_number
    except (TableNotFound, StateRolledBack):
        return False


def read_entry(entry: Any, param: Tensor, rule: rules.SparseAdam, where: str) -> Saved:
    """Check one entry in torch's layout. An empty one, or one without moments at step 0, is fresh.

    Raises InvalidArgument naming `where`; SnapshotNotFound if the moments are elsewhere.
    """
    if not isinstance(entry, dict):
        raise InvalidArgument(f"{where} must be a dict, got {type(entry).__name__}")
    step = int(entry.get("step", 0))
    if step < 0:
        raise InvalidArgument(f"{where}: step must be >= 0, got {step}")
    names = field_names(rule, param)
    missing = [n for n in names if n not in entry or is_placeholder(entry[n], param)]
    if len(missing) == len(names):
        if step or entry.get("snapshot", 0):
            raise SnapshotNotFound(
                f"{where} (step {step}) has no moments in it: it is the live state of another "
                "optimizer, or the handle of a snapshot, which this version cannot resolve. "
                "Save with state_dict(), load with load_state_dict()",
                step=step,
            )
        return Saved(step, {})
    if missing:
        raise InvalidArgument(f"{where} lacks {missing}")
    moments = {name: _moment(entry[name], param, f"{where}[{name!r}]") for name in names}
    if not param.numel() or not any(bool(value.any()) for value in moments.values()):
        return Saved(step, {})
    return Saved(step, moments)


def _moment(value: Any, param: Tensor, where: str) -> Tensor:
    """A saved moment as (rows, width), on whatever device it is."""
    shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    if shape != tuple(param.shape):
        raise InvalidArgument(f"{where} has shape {shape}, the parameter has {tuple(param.shape)}")
    return value.detach().reshape(table_shape(param.shape))


def scatter(table: Table, saved: Saved) -> None:
    """Write the rows of a fresh table that differ from its initial value, and its step."""
    dtype = {np.dtype(np.float32): torch.float32, np.dtype(np.float64): torch.float64}[table.dtype]
    for start in range(0, table.rows, _BLOCK_ROWS):
        block = {
            name: value[start : start + _BLOCK_ROWS].to("cpu", dtype)
            for name, value in saved.moments.items()
        }
        touched = torch.zeros(len(next(iter(block.values()))), dtype=torch.bool)
        for value in block.values():
            touched |= value.ne(0).any(dim=1)
        if not bool(touched.any()):
            continue
        rows = touched.nonzero()[:, 0]
        table.scatter(
            (rows + start).numpy(),
            step=saved.step,
            **{name: value.index_select(0, rows).numpy() for name, value in block.items()},
        )
