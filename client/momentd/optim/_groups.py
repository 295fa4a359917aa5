"""Parameter groups and per-parameter state, as torch has them, without hashing parameters.

Parameter subclasses exist whose `__hash__` raises or whose `__eq__` is elementwise; nothing here
calls either.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer

from momentd.errors import InvalidArgument

Group = dict[str, Any]

_SUPPORTED: Final = frozenset({torch.float64, torch.float32, torch.bfloat16, torch.float16})
_UNSET: Final = object()


class _ById:
    """A tensor as a dictionary key: equal only to itself."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __hash__(self) -> int:
        return id(self.tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ById) and other.tensor is self.tensor


def _wrap(key: Any) -> Any:
    return _ById(key) if isinstance(key, Tensor) else key


class ParamState(defaultdict[Any, Any]):
    """`optimizer.state`: a defaultdict(dict) whose tensor keys are compared by identity."""

    def __init__(self, items: Iterable[tuple[Any, Any]] = ()) -> None:
        defaultdict.__init__(self, dict)
        for key, value in items:
            self[key] = value

    def __getitem__(self, key: Any) -> Any:
        return defaultdict.__getitem__(self, _wrap(key))

    def __setitem__(self, key: Any, value: Any) -> None:
        defaultdict.__setitem__(self, _wrap(key), value)

    def __delitem__(self, key: Any) -> None:
        defaultdict.__delitem__(self, _wrap(key))

    def __iter__(self) -> Iterator[Any]:
        for key in defaultdict.__iter__(self):
            yield key.tensor if isinstance(key, _ById) else key

    def __contains__(self, key: object) -> bool:
        return defaultdict.__contains__(self, _wrap(key))

    def keys(self) -> KeysView[Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return KeysView(self)

    def items(self) -> ItemsView[Any, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ItemsView(self)

    def get(self, key: Any, default: Any = None) -> Any:
        return defaultdict.get(self, _wrap(key), default)

    def pop(self, key: Any, default: Any = _UNSET) -> Any:
        if key not in self:
            if default is _UNSET:
                raise KeyError(key)
            return default
        value = self[key]
        del self[key]
        return value

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def popitem(self) -> tuple[Any, Any]:
        key, value = defaultdict.popitem(self)
        return (key.tensor if isinstance(key, _ById) else key), value

    def update(self, *others: Any, **named: Any) -> None:
        for other in (*others, named):
            for key, value in other.items() if isinstance(other, Mapping) else other:
                self[key] = value

    def copy(self) -> ParamState:
        return ParamState(self.items())

    def __copy__(self) -> ParamState:
        return self.copy()

    def __reduce__(self) -> tuple[Any, ...]:
        return ParamState, (list(self.items()),)

    def __repr__(self) -> str:
        return f"ParamState({dict(enumerate(self.values()))!r})"


def add(optimizer: Optimizer, group: Group, torch_add: Callable[[Group], None]) -> None:
    """Add a group with torch's checks and the ones below; after an error it is not there.

    Raises TypeError and ValueError as torch does.
    """
    known = len(optimizer.param_groups)
    if not isinstance(group, dict):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"param_group must be a dict, but got {type(group)}")
    params = group["params"]
    if isinstance(params, Tensor):
        group["params"] = [params]
    elif not isinstance(params, set):
        # Once: a generator that a check has read is empty for whoever comes after.
        group["params"] = list(params)
    stand_ins = _stand_ins([*optimizer.param_groups, group])
    try:
        torch_add(group)
        _put_back(optimizer.param_groups, group, stand_ins)
        _check_params(known, optimizer.param_groups[known]["params"])
    except BaseException:
        _put_back(optimizer.param_groups, group, stand_ins)
        del optimizer.param_groups[known:]
        raise


def _stand_ins(groups: list[Group]) -> dict[int, Tensor]:
    """Replace parameters that cannot be hashed by plain tensors; returns id of those -> original.

    torch puts all parameters of all groups into sets to find the ones that stand in two of them.
    """
    originals: dict[int, Tensor] = {}
    replaced: dict[int, Tensor] = {}
    for group in groups:
        if not isinstance(group["params"], list):
            continue
        for index, item in enumerate(group["params"]):
            param = item[1] if isinstance(item, tuple) and len(item) == 2 else item
            if not isinstance(param, Tensor) or type(param).__hash__ is Tensor.__hash__:
                continue
            plain = replaced.get(id(param))
            if plain is None:
                plain = replaced[id(param)] = torch.empty(0, requires_grad=param.requires_grad)
                originals[id(plain)] = param
            group["params"][index] = (item[0], plain) if isinstance(item, tuple) else plain
    # The stand-ins stay alive with the originals' ids as keys, so that ids stay theirs.
    originals.update({-1 - number: plain for number, plain in enumerate(replaced.values())})
    return originals


def _put_back(groups: list[Group], group: Group, originals: dict[int, Tensor]) -> None:
    for each in [*groups, group]:
        if isinstance(each["params"], list):
            each["params"] = [originals.get(id(param), param) for param in each["params"]]


def _check_params(number: int, params: list[Tensor]) -> None:
    """What torch's SparseAdam refuses, in its words, and dtypes that have no state dtype."""
    sparse = [[number, i] for i, p in enumerate(params) if p.layout is not torch.strided]
    if sparse:
        raise InvalidArgument(
            f"Sparse params at indices {sparse}: SparseAdam requires dense parameter tensors"
        )
    complex_ = [[number, i] for i, p in enumerate(params) if p.is_complex()]
    if complex_:
        raise InvalidArgument(
            f"Complex params at indices {complex_}: SparseAdam does not support complex parameters"
        )
    other = {i: p.dtype for i, p in enumerate(params) if p.dtype not in _SUPPORTED}
    if other:
        raise InvalidArgument(
            f"params of group {number} have dtypes that momentd does not keep state for: {other} "
            "(index: dtype); use float64, float32, bfloat16 or float16"
        )
