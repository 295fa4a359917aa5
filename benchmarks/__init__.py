"""Measurements; see README.md. Run them by `make bench` or `python -m benchmarks`."""
