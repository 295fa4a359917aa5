"""Fixtures of optimizer tests."""

from tests.support.optim import backend, fake

__all__ = ["backend", "fake"]
