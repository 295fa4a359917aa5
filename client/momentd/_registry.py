"""The momentd optimizers of this process, as long as somebody else holds them."""

from __future__ import annotations

import weakref
from typing import Any

optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
