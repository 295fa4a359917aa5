"""Copies between CUDA devices and the memory that is shared with the daemon.

The arenas are registered with CUDA, so that copies run at the bus's speed and beside the compute
stream: one side stream for each device. Where registering fails the same copies work, more slowly.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from momentd._session import Session

_streams: dict[torch.device, torch.cuda.Stream] = {}
_registered: set[int] = set()


def pin_arenas(session: Session) -> None:
    """Register the session's arenas with CUDA, those that exist and those to come."""
    session.on_arena(_register, _unregister)


def _register(address: int, nbytes: int) -> None:
    if address in _registered:
        return
    # Flags 0: with unified addressing a registration holds for all devices. Anything but success
    # (no more memory may be locked, say) leaves the arena pageable.
    if int(_cudart().cudaHostRegister(address, nbytes, 0)) == 0:
        _registered.add(address)


def _unregister(address: int, nbytes: int) -> None:
    del nbytes
    if address in _registered:
        drain()
        _registered.discard(address)
        _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    return torch.cuda.cudart()


def _side(device: torch.device) -> torch.cuda.Stream:
    """The side stream of a device, ordered after what was queued on the current one."""
    stream = _streams.get(device)
    if stream is None:
        stream = _streams[device] = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return stream


def download(source: Tensor, target: Tensor) -> None:
    """Queue a copy from a CUDA tensor to host memory. The bytes are there after `drain`."""
    with torch.cuda.stream(_side(source.device)):
        target.copy_(source, non_blocking=True)


def upload(source: np.ndarray, device: torch.device) -> Tensor:
    """A copy of host memory on a device, ordered before what the current stream does next.

    The host memory must stay as it is until `drain`.
    """
    side = _side(device)
    with torch.cuda.stream(side):
        copied = torch.from_numpy(source).to(device, non_blocking=True)
    current = torch.cuda.current_stream(device)
    current.wait_stream(side)
    # It was allocated on the side stream and is used on the other one.
    copied.record_stream(current)
    return copied


def drain() -> None:
    """Wait for all copies that were queued here. Cheap if there are none."""
    for stream in _streams.values():
        stream.synchronize()
