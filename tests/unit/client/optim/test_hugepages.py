"""Huge pages of weights: contents stay, nothing is populated, odd memory is left alone."""

import re
import threading
from pathlib import Path

import pytest
import torch

from momentd import _hugepages

ROWS = 40_000  # 20 MB


def wait() -> None:
    for thread in threading.enumerate():
        if thread.name == "momentd-pages":
            thread.join(20)


def mapped(weight, field) -> int:
    """KiB of a field of /proc/self/smaps, of the mapping that a weight lies in."""
    address, inside = weight.data_ptr(), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found:
            inside = int(found[1], 16) <= address < int(found[2], 16)
        elif inside and line.startswith(field + ":"):
            return int(line.split()[1])
    raise AssertionError(f"no {field}")


def test_a_weight_gets_huge_pages_and_keeps_its_contents():
    weight = torch.randn(ROWS, 128)
    before = weight.clone()
    _hugepages.collapse(weight)
    wait()
    assert torch.equal(weight, before)
    if mapped(weight, "AnonHugePages") == 0:
        pytest.skip("this kernel gives no huge pages")
    assert mapped(weight, "AnonHugePages") >= 16 << 10


def test_memory_that_was_never_written_is_not_populated():
    weight = torch.zeros(10 * ROWS, 128)
    weight[0] = 1
    before = mapped(weight, "Rss")
    _hugepages.collapse(weight)
    wait()
    assert mapped(weight, "Rss") <= before + 4096


def test_small_shared_and_vanished_weights_are_no_trouble():
    _hugepages.collapse(torch.ones(10, 10))
    _hugepages.collapse(torch.ones(ROWS, 128).share_memory_())
    _hugepages.collapse(torch.ones(ROWS, 128))
    _hugepages.collapse(torch.ones(ROWS, 128, device="meta"))
    wait()
