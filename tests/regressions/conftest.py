"""Fixtures of the field's stories."""

from tests.support.disks import small_disk
from tests.support.optim import backend, fake

__all__ = ["backend", "fake", "small_disk"]
