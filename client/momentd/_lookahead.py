"""Read the rows of the next batches while the current one computes."""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

import numpy as np

from momentd._registry import optimizers
from momentd.errors import InvalidArgument, MomentdError
from momentd.table import Table

if TYPE_CHECKING:
    import torch

__all__ = ["Lookahead", "lookahead"]

Batch = TypeVar("Batch")
RowsOf = Callable[[Any], Any]
# Wishes that wait for the thread; more are dropped, since the steps are faster than it.
_MOST_WAITING: Final = 64


def lookahead(
    loader: Iterable[Batch], rows_of: Mapping[Any, RowsOf], depth: int = 2
) -> Lookahead[Batch]:
    """Wrap a loader so that the rows of its next batches are read while a step computes.

        for batch in momentd.lookahead(loader, {model.entities: lambda b: b["ids"]}):
            ...

    Batches pass through unchanged: the same objects in the same order, an exception of the loader
    at its place. Results are the same with and without it; a daemon that is away, or too busy,
    is not an error here (the step will say so).

    Args:
        loader: Any iterable of batches. Attributes and `len` are the loader's.
        rows_of: What the rows of a batch are, for each parameter of a momentd optimizer, each
            `nn.Embedding` or `nn.EmbeddingBag` (its weight), or each `momentd.Table`. The function
            gets the batch and returns integer ids: a tensor on any device, an array, a list, or a
            tuple of those. Padding, duplicates and ids that do not exist are ignored here.
        depth: Batches ahead. That many are taken from the loader before they are needed, so after
            an early `break` the loader is that much further than the loop.

    Raises:
        InvalidArgument: A key that can have no rows; a function that returns no ids, or a parameter
            of no momentd optimizer, while iterating.
    """
    return Lookahead(loader, rows_of, depth)


class Lookahead(Generic[Batch]):
    """What `lookahead` returns. May be iterated any number of times."""

    def __init__(self, loader: Iterable[Batch], rows_of: Mapping[Any, RowsOf], depth: int) -> None:
        # An int: True and 1.5 are mistakes.
        if type(depth) is not int or depth < 1:
            raise InvalidArgument(f"depth must be at least 1, not {depth!r}")
        for key, rows in rows_of.items():
            _target(key)
            if not callable(rows):
                raise InvalidArgument(f"{_name(key)} needs a function of a batch, not {rows!r}")
        self._loader = loader
        self._rows_of = dict(rows_of)
        self._depth = depth

    def __getattr__(self, name: str) -> Any:
        # Not in __init__ yet, or a copy in the making: no recursion.
        if name.startswith("__") or "_loader" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __iter__(self) -> Generator[Batch]:
        batches = iter(self._loader)
        ahead: deque[_Taken] = deque()
        ended = False
        handed_out = 0
        try:
            while True:
                while not ended and len(ahead) <= self._depth:
                    taken = self._take(batches)
                    ended = taken.error is not None
                    ahead.append(taken)
                taken = ahead.popleft()
                if isinstance(taken.error, StopIteration):
                    return
                if taken.error is not None:
                    raise taken.error
                if handed_out == 1:
                    # The loop had a whole step to make its optimizer.
                    self._check_known()
                handed_out += 1
                batch = taken.batch
                del taken
                yield batch
        finally:
            if isinstance(batches, Generator):
                batches.close()

    def _take(self, batches: Iterator[Batch]) -> _Taken:
        """The next batch, whose rows are being read from now on, or what comes instead of it."""
        try:
            batch = next(batches)
        except Exception as error:  # noqa: BLE001  raised where its batch would be handed out
            return _Taken(None, error)
        try:
            wishes = [(key, _ids(key, rows(batch))) for key, rows in self._rows_of.items()]
        except StopIteration as error:
            # It is no end of the loader: the batches behind it would be lost without a word.
            return _Taken(None, RuntimeError(f"a function of lookahead raised {error!r}"))
        except Exception as error:  # noqa: BLE001  raised where its batch would be handed out
            return _Taken(None, error)
        for key, parts in wishes:
            for table in _tables(key):
                _reader().offer(table, parts)
        return _Taken(batch)

    def _check_known(self) -> None:
        for key in self._rows_of:
            target = _target(key)
            if isinstance(target, Table):
                continue
            if not any(_has(optimizer, target) for optimizer in list(optimizers)):
                raise InvalidArgument(
                    f"{_name(key)} is in no momentd optimizer, so there is nothing to read ahead: "
                    "build the optimizer before the second batch, or leave this key out"
                )


class _Taken:
    """A batch that was taken from the loader, or the exception that came instead."""

    __slots__ = ("batch", "error")

    def __init__(self, batch: Any, error: Exception | None = None) -> None:
        self.batch = batch
        self.error = error


# ---------------------------------------------------------------------------------------- keys


def _target(key: Any) -> Any:
    """The table, or the parameter, that a key stands for."""
    if isinstance(key, Table):
        return key
    torch = sys.modules.get("torch")
    if torch is not None:
        if isinstance(key, torch.nn.Module):
            key = getattr(key, "weight", key)
        if isinstance(key, torch.Tensor):
            return key
    raise InvalidArgument(
        f"{_name(key)} has no rows: name a parameter, an nn.Embedding or nn.EmbeddingBag, or a "
        "momentd.Table"
    )


def _name(key: Any) -> str:
    if isinstance(key, Table):
        return f"lookahead: {key!r}"
    shape = getattr(key, "shape", None)
    return f"lookahead: the key {type(key).__name__}" + (f" {tuple(shape)}" if shape else "")


def _has(optimizer: Any, param: Any) -> bool:
    return any(p is param for group in optimizer.param_groups for p in group["params"])


def _tables(key: Any) -> list[Table]:
    """Where the rows of a key are; nothing before the first step."""
    target = _target(key)
    if isinstance(target, Table):
        return [target]
    found = (optimizer.table_of(target) for optimizer in list(optimizers))
    return [table for table in found if table is not None]


# ---------------------------------------------------------------------------------------- ids


def _ids(key: Any, value: Any) -> list[_Ids]:
    """Row ids as they were given, copied or to be copied from the GPU later."""
    values = value if isinstance(value, tuple) else (value,)
    return [_one(key, each) for each in values]


class _Ids:
    """Ids of one array, on the CPU; or a tensor on a GPU, with what to wait for."""

    __slots__ = ("_array", "_event", "_tensor")

    def __init__(self, array: np.ndarray | None, tensor: torch.Tensor | None = None) -> None:
        self._array = array
        self._tensor = tensor
        self._event: Any = None
        if tensor is not None:
            import torch

            # The ids are there once the GPU is where it is told to be now.
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(tensor.device))

    def array(self) -> np.ndarray:
        """int64, one dimension. Waits for a GPU: only for the thread of its own."""
        if self._array is not None:
            return self._array
        import torch

        tensor = self._tensor
        assert tensor is not None
        with torch.cuda.stream(_side_stream(tensor.device)):
            self._event.wait()
            tensor.record_stream(torch.cuda.current_stream())
            return tensor.reshape(-1).to("cpu").numpy().astype(np.int64, copy=False)


def _one(key: Any, value: Any) -> _Ids:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        value = value.detach()
        if value.dtype.is_floating_point or value.dtype.is_complex or value.dtype is torch.bool:
            raise InvalidArgument(
                f"{_name(key)}: ids are integers, its function gave {value.dtype}"
            )
        if value.is_cuda:
            return _Ids(None, value)
        value = value.cpu().numpy()
    try:
        array = np.asarray(value)
    except Exception as error:
        raise InvalidArgument(f"{_name(key)}: its function gave no ids: {error}") from error
    if array.size == 0:
        return _Ids(np.empty(0, np.int64))
    if array.dtype.kind not in "iu":
        raise InvalidArgument(
            f"{_name(key)}: ids are integers, its function gave {type(value).__name__} of "
            f"{array.dtype}"
        )
    # A copy: whoever made the batch may change it while the rows are being read.
    return _Ids(array.reshape(-1).astype(np.int64))


# Not those of `_cuda`, for whose copies step() waits.
_streams: dict[Any, Any] = {}


def _side_stream(device: Any) -> Any:
    import torch

    stream = _streams.get(device)
    if stream is None:
        stream = _streams[device] = torch.cuda.Stream(device)
    return stream


# ---------------------------------------------------------------------------------------- thread


class _Reader:
    """The thread of this process that asks daemons to read ahead. It owns nothing else."""

    def __init__(self) -> None:
        self.pid = os.getpid()
        self._wishes: queue.Queue[tuple[Table, list[_Ids]]] = queue.Queue(_MOST_WAITING)
        threading.Thread(target=self._run, name="momentd-lookahead", daemon=True).start()

    def offer(self, table: Table, ids: list[_Ids]) -> None:
        """Never waits: what there is no room for is not read ahead."""
        with contextlib.suppress(queue.Full):
            self._wishes.put_nowait((table, ids))

    def _run(self) -> None:
        while True:
            table, ids = self._wishes.get()
            try:
                table.read_ahead(np.concatenate([part.array() for part in ids]))
            except MomentdError:
                pass  # the step will say so
            except Exception as error:  # noqa: BLE001  a thread of its own has nobody to tell
                sys.stderr.write(f"momentd: rows are not read ahead: {error!r}\n")
            finally:
                # Holds no table, no session and no GPU memory while it waits.
                del table, ids


_readers: dict[int, _Reader] = {}


def _reader() -> _Reader:
    pid = os.getpid()
    reader = _readers.get(pid)
    if reader is None:
        # In a forked child the parent's thread is not there.
        _readers.clear()
        reader = _readers.setdefault(pid, _Reader())
    return reader
