"""What every momentd optimizer is: a torch.optim.Optimizer whose state is in a daemon's tables."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer

from momentd import _cuda, _hugepages, rules
from momentd._discovery import default_run
from momentd._grads import table_shape
from momentd._registry import optimizers
from momentd._signals import DeferredInterrupt
from momentd._stream import Stream, UpdateSpec
from momentd._threads import SingleThreaded, cores_to_spare, throttle_idle_threads
from momentd.errors import InvalidArgument, StateRolledBack, UnsupportedFeature
from momentd.optim import _checkpoint, _entries, _groups, _portable, _records
from momentd.optim._fill import fill
from momentd.optim._options import NUMPY_DTYPE, Options
from momentd.optim._pending import Part, PendingStep
from momentd.optim._plan import Work, is_state_request, places, plan, state_dtype_of
from momentd.optim._records import Record, Records, live_entry, live_handle
from momentd.table import Table

if TYPE_CHECKING:
    from momentd._session import Session


def connect(address: str | None, run: str | None) -> Session:
    """The session of this process. A test puts a second implementation in the place of this."""
    from momentd._session import Session

    return Session.shared(address, run)


# torch.compiler.disable would import the whole compiler right here.
_outside_compile = torch._disable_dynamo  # pyright: ignore[reportPrivateImportUsage]


class TableOptimizer(Optimizer):
    """Parameter groups, one table for each parameter, atomic steps, checkpoints, copies, lifetime.

    A subclass gives the rule and reads hyper-parameters out of a group.
    """

    _rule: rules.SparseAdam

    def __init__(self, params: Any, defaults: dict[str, Any], options: Options) -> None:
        self._prepare(options)
        super().__init__(params, defaults)
        self.state = _groups.ParamState()

    def _prepare(self, options: Options) -> None:
        """Everything of this instance that is not torch's. Opens nothing."""
        self._options = options
        self._records = Records()
        self._pending: PendingStep | None = None
        self._stream: Stream | None = None
        self._session: list[Session] = []
        self._given = _checkpoint.Given()
        self._snapshots: list[str] = []
        self._own()
        optimizers.add(self)

    def _own(self) -> None:
        """From here on the tables belong to this process and go with this object."""
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(
            self, _records.finalize, self._records, self._session, self._pid
        )
        # At exit the session ends, and its unnamed tables with it.
        self._finalizer.atexit = False

    # ------------------------------------------------------------------------------------ step

    def _hyper(self, group: dict[str, Any]) -> Any:
        """The wire form of a group's hyper-parameters. Raises InvalidArgument for a bad one."""
        raise NotImplementedError

    @overload
    def step(self, closure: None = None, *, wait: bool = True) -> None: ...

    @overload
    def step(self, closure: Callable[[], Any], *, wait: bool = True) -> Any: ...

    @_outside_compile
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, wait: bool = True) -> Any:
        """Perform a single optimization step: one atomic request over all tables.

        Everything is checked before anything is sent: after an error nothing has changed. If the
        call is left by an exception after sending (Ctrl-C, DaemonUnavailable), the next `step()`,
        `state_dict()` or `synchronize()` first completes it.

        Args:
            closure: Reevaluates the model and returns the loss; called with gradients enabled.
            wait: If False, return when the gradients are copied and sent. They may be changed at
                once, but the weights are the old ones until `synchronize()`, which the next
                `step()`, `state_dict()` and whatever else needs the result call by themselves.
                Call it before anything reads the weights: a forward pass, an evaluation, or the
                model's own `state_dict()`. An error of the daemon appears there, and then nothing
                of the step was applied.
        """
        _refuse_capture(type(self).__name__)
        self.synchronize()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step(wait)
        return loss

    def _step(self, wait: bool) -> None:
        if not self.state and is_state_request(self.param_groups):
            for _, _, param in places(self.param_groups):
                self._record(param)
            return
        work = plan(self.param_groups, self._options.state_dtype, type(self).__name__)
        if not work:
            return
        hypers = {id(item.group): self._hyper(item.group) for item in work}
        records = [self._record(item.param) for item in work]
        self._drop(self._records.sweep(self.state))
        self._pending = self._begin(work, records, hypers)
        if wait:
            self.synchronize()
        else:
            self._pending.send()

    def _begin(
        self, work: list[Work], records: list[Record], hypers: dict[int, Any]
    ) -> PendingStep:
        """Make room for an update of all non-empty gradients and copy them there. Sends nothing."""
        parts: list[Part] = []
        sent: list[Work] = []
        specs: list[UpdateSpec] = []
        for item, record in zip(work, records, strict=True):
            step = record.step + 1
            parts.append(Part(item.param, record, step, len(sent) if item.grad.count else None))
            if item.grad.count:
                sent.append(item)
                specs.append(self._spec(item, record, step, hypers[id(item.group)]))
        if not specs:
            return PendingStep(None, parts)
        update = self._open_stream().new_update(specs, report_progress=cores_to_spare())
        try:
            fill(update.inputs, [item.grad for item in sent])
        except BaseException:
            update.close()
            raise
        return PendingStep(update, parts)

    def _spec(self, item: Work, record: Record, step: int, hyper: Any) -> UpdateSpec:
        table = record.table
        if table is None:
            table = self._open_table(item.param, item.place.label)
            record.update_number = table.update_number
            record.table = table
        return UpdateSpec(
            table=table,
            count=item.grad.count,
            dtype=NUMPY_DTYPE[self._state_dtype(item.param)],
            hyper=hyper,
            masked=item.grad.mask is not None,
            step=step,
            expected_update_number=record.update_number,
        )

    def synchronize(self) -> None:
        """Complete a step that was not waited for, or left by an exception after sending.

        Returns at once if there is none. Raises the daemon's error, once; the step then changed
        nothing. After DaemonUnavailable the outcome is open: call again.
        """
        self._check_process()
        pending = self._pending
        if pending is None:
            return
        try:
            # Beside the daemon's threads, one of ours adds; after them, all may.
            with SingleThreaded() if cores_to_spare() else nullcontext():
                pending.complete()
        finally:
            if pending.finished:
                self._pending = None

    # ------------------------------------------------------------------------------------ tables

    def table_of(self, param: Tensor) -> Table | None:
        """The table with the state of a parameter; None before its first step in this process."""
        if param not in self.state or self._pid != os.getpid():
            return None
        record = self._records.get(self.state[param])
        return record.table if record is not None else None

    def _state_dtype(self, param: Tensor) -> torch.dtype:
        return self._options.state_dtype or state_dtype_of(param)

    def _open_session(self) -> Session:
        if not self._session:
            self._session.append(connect(self._options.address, self._options.run))
        return self._session[0]

    def _open_stream(self) -> Stream:
        if self._stream is None:
            throttle_idle_threads()
            session = self._open_session()
            if any(param.is_cuda for _, _, param in places(self.param_groups)):
                _cuda.pin_arenas(session)
            self._stream = session.stream()
        return self._stream

    def _open_table(self, param: Tensor, label: str) -> Table:
        _hugepages.collapse(param)
        rows, width = table_shape(param.shape)
        schema = self._rule.schema(rows, width, NUMPY_DTYPE[self._state_dtype(param)])
        return self._open_session().open_table(schema, label=label)

    def _record(self, param: Tensor) -> Record:
        """The record of a parameter; a new one if it has no state, or state in torch's layout."""
        entry = self.state[param]
        record = self._records.get(entry)
        if record is not None:
            return record
        saved = _entries.read(entry, param, self._rule, "state")
        record = _entries.make_record(self, param, saved)
        # In this order: what an interrupt leaves between the two is swept, and adopted again.
        self._records.add(record)
        self.state[param] = record.entry
        return record

    def _live_entry(self, param: Tensor, step: int, *, has_table: bool) -> dict[str, Any]:
        if self._options.checkpoint == "snapshot":
            return live_handle(param, step, has_table=has_table)
        fields = _entries.field_names(self._rule, param)
        return live_entry(param, fields, self._state_dtype(param), step)

    def _label(self, param: Tensor) -> str:
        return next(place.label for place, _, p in places(self.param_groups) if p is param)

    def _adopt(
        self, state: _groups.ParamState, groups: list[dict[str, Any]], records: list[Record]
    ) -> None:
        """Take over loaded state. What is dropped with it is the caller's to drop."""
        with DeferredInterrupt():
            self._records.replace(records)
            self.state, self.param_groups = state, groups

    def _drop(self, tables: list[Table]) -> None:
        _records.drop(self._session[0] if self._session else None, tables)

    def _check_process(self) -> None:
        """In a forked child: clones of the parent's tables, as they were at the fork."""
        if self._pid == os.getpid():
            return
        if self._pending is not None:
            raise StateRolledBack(
                "this process was forked in the middle of a step(): its weights lack that step. "
                "Fork between steps, or build a new optimizer and load_state_dict() here"
            )
        self._finalizer.detach()
        parent, self._session, self._stream = self._records, [], None
        self._records = self._clone_records(parent, {id(r.entry): r.entry for r in parent})
        self._own()

    def _clone_records(self, source: Records, entries: dict[int, dict[str, Any]]) -> Records:
        """Copies of records under other entries; tables become copy-on-write clones."""
        records = Records()
        for old in source:
            entry = entries.get(id(old.entry))
            if entry is None:
                continue
            table = self._clone_table(old) if old.table is not None else None
            new = Record(entry, table, old.step)
            if old.snapshot is not None:
                new.handle = (old.snapshot, new.update_number)
            records.add(new)
        return records

    def _clone_table(self, old: Record) -> Table:
        assert old.table is not None
        seen = old.table.refresh().update_number
        if seen != old.update_number:
            raise StateRolledBack(
                f"table {old.table.id} is at update {seen}, this optimizer at {old.update_number}: "
                "the process that owns it went on. Use state_dict() and load_state_dict() instead"
            )
        return self._open_session().clone_table(old.table, label=old.table.label)

    # ------------------------------------------------------------------------------------ groups

    @_outside_compile
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch; also refuses here what torch's constructor refuses."""
        _groups.add(self, param_group, super().add_param_group)

    # ------------------------------------------------------------------------------------ copies

    @_outside_compile
    def state_dict(self) -> dict[str, Any]:
        """The state of all parameters, for `load_state_dict`.

        With checkpoint="full" complete and in torch's layout: `step`, `exp_avg`, `exp_avg_sq`, the
        moments being dense CPU tensors in the state's dtype, read from the daemon. With "snapshot"
        small: `step`, `snapshot`, `device`. The moments are then durable in the daemon's data
        directory, as a snapshot that is kept until somebody deletes it; nothing is written if
        nothing has changed.

        Raises OutOfSpace, StorageFailed: no snapshot was made; training may go on.
        """
        for hook in self._optimizer_state_dict_pre_hooks.values():
            hook(self)
        self.synchronize()
        state_dict = _checkpoint.save(self, self._options.checkpoint)
        for hook in self._optimizer_state_dict_post_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        return state_dict

    def full_state_dict(self) -> dict[str, Any]:
        """`state_dict()` with `checkpoint="full"`, without hooks."""
        self.synchronize()
        return _checkpoint.save(self, "full")

    @_outside_compile
    def load_state_dict(
        self, state_dict: dict[str, Any], *, missing: _entries.Missing = "error"
    ) -> None:
        """Load state from `state_dict()` of this class or of `torch.optim.SparseAdam`.

        The optimizer gets tables of its own; moments keep their precision. Parameters are matched
        by position. After an error the optimizer is as it was.

        Args:
            state_dict: With complete moments or with handles, whatever `checkpoint` is here.
            missing: "reset": a parameter whose snapshot does not exist starts afresh, at step 0.

        Raises:
            SnapshotNotFound: The daemon does not have the moments of a handle.
            InvalidArgument: It does not fit this optimizer.
        """
        if missing not in ("error", "reset"):
            raise InvalidArgument(f"missing must be 'error' or 'reset', got {missing!r}")
        state_dict = state_dict.copy()
        for hook in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = hook(self, state_dict) or state_dict
        self.synchronize()
        _checkpoint.load(self, state_dict, missing)
        for hook in self._optimizer_load_state_dict_post_hooks.values():
            hook(self)

    @_outside_compile
    def save_state(self, path: str | os.PathLike[str]) -> None:
        """Write the moments and step counters of all parameters to one file, durably.

        For carrying them to another machine or data directory: `load_state` there. Learning rates
        and other hyper-parameters are not in it; they are in `state_dict()`, which is small. The
        file has the rows that were ever updated, with checksums; after an error there is none.

        Raises:
            StateRolledBack: Somebody else changed a table meanwhile, or the daemon lost it.
            OSError: The file cannot be written.
        """
        self.synchronize()
        _portable.save(self, path)

    @_outside_compile
    def load_state(self, path: str | os.PathLike[str]) -> None:
        """Replace all moments and step counters by those of a file of `save_state`.

        Parameters are matched by position. Hyper-parameters stay as they are. After an error, also
        one in the middle of the file, the optimizer is as it was.

        Raises:
            InvalidArgument: Not such a file, or its tables do not fit the parameters.
            CorruptRecord: The file is damaged or cut off; names the byte.
        """
        self.synchronize()
        _portable.load(self, path)

    def __getstate__(self) -> dict[str, Any]:
        """A pickle carries what a state dict does; moments go to a daemon on first use."""
        self.synchronize()
        return {
            "defaults": self.defaults,
            "state": _checkpoint.portable_state(self),
            "param_groups": self.param_groups,
            "_options": self._options,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_options" in state:
            state = dict(state)
            self._prepare(state.pop("_options"))
            state["state"] = _groups.ParamState(state["state"])
        plain = "differentiable" not in self.__dict__.get("defaults", state.get("defaults", {}))
        super().__setstate__(state)
        if plain:
            # torch adds it here; a group that got it could not be given back to __init__.
            self.defaults.pop("differentiable", None)

    def __deepcopy__(self, memo: dict[int, Any]) -> TableOptimizer:
        """A copy with tables of its own: copy-on-write clones in the daemon."""
        self.synchronize()
        other = type(self).__new__(type(self))
        memo[id(self)] = other
        other._prepare(self._options)
        groups = copy.deepcopy(self.param_groups, memo)
        entries = {id(entry): copy.deepcopy(entry, memo) for entry in self.state.values()}
        state = _groups.ParamState()
        for key, entry in self.state.items():
            state[copy.deepcopy(key, memo)] = entries[id(entry)]
        defaults = copy.deepcopy(self.defaults, memo)
        other.__setstate__({"defaults": defaults, "state": state, "param_groups": groups})
        for record in other._clone_records(self._records, entries):
            other._records.add(record)
        return other

    # ------------------------------------------------------------------------------------ lifetime

    def close(self) -> None:
        """Drop the optimizer's tables now. Its state is gone; a later step starts afresh."""
        self.synchronize()
        self._drop(self._records.tables())
        self.state.clear()
        self._records.sweep(self.state)

    def __repr__(self) -> str:
        text = super().__repr__()
        where = self._session[0].where if self._session else "(not connected)"
        run = self._options.run if self._options.run is not None else default_run()
        tables = len(self._records.tables())
        note = f"momentd: run {run!r}, {tables} table{'s' * (tables != 1)}, daemon {where}"
        return f"{text.removesuffix(')')}{note}\n)"


def _refuse_capture(name: str) -> None:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise UnsupportedFeature(
            f"{name}.step() cannot be captured into a CUDA graph: the update runs in the momentd "
            "daemon, outside CUDA, and a replay would not repeat it. Capture forward and backward, "
            "and call step() after the replay"
        )
