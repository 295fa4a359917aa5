"""Element types of bulk data, between the wire's enum and numpy.

All bulk data is little-endian and row-major. bfloat16 has no numpy type here: it travels as
uint16 where it travels at all.
"""

from typing import Final

import numpy as np
from numpy.typing import DTypeLike

from momentd_wire.v1 import momentd_pb2 as pb

_NUMPY: Final[dict["pb.DType", np.dtype]] = {
    pb.D_TYPE_FLOAT32: np.dtype("<f4"),
    pb.D_TYPE_FLOAT64: np.dtype("<f8"),
    pb.D_TYPE_FLOAT16: np.dtype("<f2"),
    pb.D_TYPE_UINT8: np.dtype("u1"),
    pb.D_TYPE_INT64: np.dtype("<i8"),
}
_WIRE: Final[dict[np.dtype, "pb.DType"]] = {dtype: code for code, dtype in _NUMPY.items()}


def to_numpy(dtype: "pb.DType") -> np.dtype:
    """The numpy dtype of a wire dtype. Raises KeyError for what numpy cannot hold."""
    return _NUMPY[dtype]


def to_wire(dtype: DTypeLike) -> "pb.DType":
    """The wire dtype of a numpy dtype. Raises KeyError for what the wire cannot carry."""
    return _WIRE[np.dtype(dtype).newbyteorder("<")]
