"""Fixtures of optimizer tests."""

from tests.support.optim import fake

__all__ = ["fake"]
