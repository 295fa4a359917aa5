"""State dicts: whole, in torch's layout, or with handles of what the daemon keeps."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from momentd.errors import InvalidArgument, StateRolledBack, TableNotFound
from momentd.optim import _entries, _groups, _handles
from momentd.optim._records import NO_SNAPSHOT, Entry, Record
from momentd.table import Table

if TYPE_CHECKING:
    from momentd.optim.base import TableOptimizer

StateDict = dict[str, Any]


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


def save(optimizer: TableOptimizer, checkpoint: str) -> StateDict:
    """`{"state": {index: entry}, "param_groups": [...]}` as torch packs it."""
    optimizer._given.by_id.clear()
    if checkpoint == "snapshot":
        _handles.refresh(optimizer)
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
    return {"state": dict(_placed(optimizer, index_of, checkpoint)), "param_groups": groups}


def _placed(
    optimizer: TableOptimizer, index_of: dict[int, int], checkpoint: str
) -> Iterator[tuple[Any, Any]]:
    items: Iterable[tuple[Any, Any]] = optimizer.state.items()
    for key, entry in items:
        if not isinstance(key, Tensor):  # pyright: ignore[reportUnnecessaryIsInstance]
            yield key, entry
        elif id(key) in index_of:
            yield index_of[id(key)], _saved_entry(optimizer, key, entry, checkpoint)
        else:
            raise InvalidArgument(
                f"state of a parameter of shape {tuple(key.shape)} that is in no group: the groups "
                "were replaced after it was made. Put the parameter back, move the state with "
                "`optimizer.state[new] = optimizer.state.pop(old)`, or delete it from "
                "`optimizer.state`"
            )


def portable_state(optimizer: TableOptimizer) -> list[tuple[Any, Any]]:
    """`optimizer.state` with saved entries, as pairs (a parameter may not be hashable)."""
    items: Iterable[tuple[Any, Any]] = optimizer.state.items()
    checkpoint = optimizer._options.checkpoint
    if checkpoint == "snapshot":
        _handles.refresh(optimizer)
    pairs: list[tuple[Any, Any]] = []
    for key, entry in items:
        moments = isinstance(key, Tensor)  # pyright: ignore[reportUnnecessaryIsInstance]
        saved = _saved_entry(optimizer, key, entry, checkpoint) if moments else entry
        pairs.append((key, saved))
    return pairs


def _saved_entry(optimizer: TableOptimizer, param: Tensor, entry: Entry, checkpoint: str) -> Entry:
    record = optimizer._records.get(entry)
    if record is None and checkpoint == "full" and entry.get("snapshot"):
        record = optimizer._record(param)
    if record is None:
        return dict(entry)
    if checkpoint == "snapshot":
        return _handles.entry(record, param)
    full: Entry = {"step": record.step}
    for name in _entries.field_names(optimizer._rule, param):
        if record.table is not None:
            values = record.table.gather(None, fields=name)
            full[name] = torch.from_numpy(values).reshape(param.shape)
        else:
            full[name] = torch.zeros(param.shape, dtype=optimizer._state_dtype(param))
    optimizer._given.note(full, record)
    return full


# ---------------------------------------------------------------------------------------- in


def load(optimizer: TableOptimizer, state_dict: StateDict, missing: _entries.Missing) -> None:
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
    state, records = _new_state(optimizer, state_dict["state"], param_of, missing)
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
    optimizer: TableOptimizer,
    saved_state: dict[Any, Any],
    param_of: dict[Any, Tensor],
    missing: _entries.Missing,
) -> tuple[_groups.ParamState, list[Record]]:
    """State and records of a state dict: everything is checked, then new tables are filled."""
    state = _groups.ParamState()
    todo: list[tuple[Tensor, _entries.Saved]] = []
    records: list[Record] = []
    for key, entry in saved_state.items():
        if key not in param_of:
            state[key] = entry
            continue
        param = param_of[key]
        current = _current(optimizer, param, entry)
        if current is not None and _still_there(current):
            state[param] = current.entry
            records.append(current)
        else:
            todo.append((param, _entries.read(entry, param, optimizer._rule, f"state[{key}]")))
    made: list[Table] = []
    try:
        for param, saved in todo:
            record = _entries.make_record(optimizer, param, saved, missing)
            if record.table is not None:
                made.append(record.table)
            state[param] = record.entry
            records.append(record)
    except BaseException:
        optimizer._drop(made)
        raise
    return state, records


def _current(optimizer: TableOptimizer, param: Tensor, entry: Any) -> Record | None:
    """The record of a parameter, if its present state is that of a saved entry."""
    if not isinstance(entry, dict) or param not in optimizer.state:
        return None
    record = optimizer._records.get(optimizer.state[param])
    if record is None:
        return None
    if "snapshot" not in entry:
        return record if optimizer._given.current(entry) is record else None
    if entry.get("step") != record.step:
        return None
    snapshot = record.snapshot if record.table is not None else NO_SNAPSHOT
    return record if snapshot == entry["snapshot"] else None


def _still_there(record: Record) -> bool:
    """Whether the daemon still has what the record says: it may have been killed since."""
    if record.table is None:
        return True
    try:
        return record.table.refresh().update_number == record.update_number
    except (TableNotFound, StateRolledBack):
        return False
