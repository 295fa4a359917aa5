# pyright: basic
"""Kernels that sort row ids."""

DIGIT_BITS = 12
