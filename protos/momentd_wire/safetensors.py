"""Writes the file format `safetensors`: a JSON header, then tensors one after the other.

    length of the header (u64), header, data

The header names dtype, shape and range of each tensor. Written in order, in pieces, in memory of a
piece; read by https://github.com/huggingface/safetensors and whatever uses it.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

import numpy as np

from momentd_wire.errors import InvalidArgument
from momentd_wire.state_file import Draft

_DTYPES: Final = {"<f4": "F32", "<f8": "F64", "<f2": "F16", "|u1": "U8", "<i8": "I64"}
# So that data begins at a multiple of it, as readers that map the file like it.
_ALIGN: Final = 8


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file that is to be written: numpy's name of the dtype, (rows, width)."""

    name: str
    dtype: str
    rows: int
    width: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.width * np.dtype(self.dtype).itemsize


class TensorWriter:
    """Writes tensors in the order of the entries, beside the file's place, like `StateWriter`."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        entries: Sequence[TensorEntry],
        metadata: Mapping[str, str],
    ) -> None:
        self._draft = Draft(path)
        self._expected = sum(entry.nbytes for entry in entries)
        self._written = 0
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        at = 0
        for entry in entries:
            header[entry.name] = {
                "dtype": _DTYPES[np.dtype(entry.dtype).newbyteorder("<").str],
                "shape": [entry.rows, entry.width],
                "data_offsets": [at, at + entry.nbytes],
            }
            at += entry.nbytes
        if len(header) != len(entries) + 1:
            raise InvalidArgument("two tensors have the same name in a safetensors file")
        text = json.dumps(header).encode()
        self._header = text + b" " * (-len(text) % _ALIGN)

    def __enter__(self) -> Self:
        file = self._draft.open()
        file.write(struct.pack("<Q", len(self._header)) + self._header)
        return self

    def write(self, values: np.ndarray) -> None:
        """The next rows of the tensor in work."""
        data = np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
        self._draft.file.write(data)
        self._written += len(data)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        whole = error is None and self._written == self._expected
        self._draft.close(keep=whole)
        if error is None and not whole:
            raise InvalidArgument(
                f"{self._written} bytes of tensors were written, {self._expected} were announced"
            )
