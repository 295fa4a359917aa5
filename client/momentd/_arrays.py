"""What users pass as rows and values, as numpy arrays; and back, as what they passed."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from momentd._rows import INT64, Selection
from momentd_wire.errors import InvalidArgument


def is_tensor(value: object) -> bool:
    """Whether it is a torch tensor. Does not import torch: then it cannot be one."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def to_array(value: Any, dtype: np.dtype) -> np.ndarray:
    """A C-contiguous numpy array of `dtype`; a tensor is brought to the CPU first."""
    if is_tensor(value):
        torch = sys.modules["torch"]
        value = value.detach()
        if value.is_floating_point():
            # numpy has no bfloat16.
            value = value.to(torch.float64 if dtype.itemsize == 8 else torch.float32)
        value = value.cpu().numpy()
    return np.ascontiguousarray(value, dtype)


def like(template: object, array: np.ndarray) -> Any:
    """The array as a tensor if the template is one, else itself."""
    if not is_tensor(template):
        return array
    device = template.device  # pyright: ignore[reportAttributeAccessIssue]
    return sys.modules["torch"].from_numpy(array).to(device)


def select(rows: Any, table_rows: int) -> Selection:
    """Ids (a list, array or tensor of integers), a range or slice of step 1, or None for all.

    The daemon checks ids against the table. Raises InvalidArgument for anything else.
    """
    if rows is None:
        return Selection(None, 0, table_rows)
    if isinstance(rows, slice):
        rows = range(*rows.indices(table_rows))
    if isinstance(rows, range):
        if rows.step != 1:
            raise InvalidArgument(f"rows is {rows}: a range must have step 1, or pass its ids")
        start, stop = rows.start, max(rows.start, rows.stop)
        if not 0 <= start <= stop <= table_rows:
            raise InvalidArgument(f"rows {rows} are not all in [0, {table_rows})")
        return Selection(None, start, stop - start)
    return Selection(ids := row_ids(rows), 0, ids.shape[0])


def row_ids(rows: Any) -> np.ndarray:
    """Ids as int64 (n,). Raises InvalidArgument for a wrong shape or for what is no integer."""
    given: Any = rows if is_tensor(rows) else np.asarray(rows)
    name = str(given.dtype).removeprefix("torch.")
    # An empty list is float64 to numpy.
    whole = name.startswith(("int", "uint")) or not len(given)
    if given.ndim != 1 or not whole:
        raise InvalidArgument(
            f"rows must be a 1-D array of integers, got {name} of shape {tuple(given.shape)}"
        )
    return to_array(given, INT64)


def values(name: str, value: Any, shape: tuple[int, int], dtype: np.dtype) -> np.ndarray:
    """A field's values, (n, width); one of width 1 may be given as (n,).

    Raises InvalidArgument for another shape, and for numbers that are not real.
    """
    array = to_array(value, dtype) if is_tensor(value) else np.asarray(value)
    if array.dtype.kind not in "fiub":
        raise InvalidArgument(f"{name} must hold real numbers, got {array.dtype}")
    if array.shape == shape[:1] and shape[1] == 1:
        array = array.reshape(shape)
    if array.shape != shape:
        raise InvalidArgument(f"{name} has shape {array.shape}, wanted {shape}")
    return np.ascontiguousarray(array, dtype)
