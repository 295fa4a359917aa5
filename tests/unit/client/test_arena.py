"""Blocks of an arena: aligned, disjoint while they live, free as soon as nobody refers to them."""

import itertools
import os
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from momentd._arena import Arena, HeapBlock, round_up
from momentd_wire.v1 import momentd_pb2 as pb

UINT8 = np.dtype(np.uint8)


@pytest.fixture
def arena():
    return make_arena(1 << 20)


def make_arena(nbytes):
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, nbytes)
    try:
        return Arena(7, nbytes, descriptor)
    finally:
        os.close(descriptor)


def test_living_blocks_are_aligned_and_do_not_overlap(arena):
    blocks = [arena.place(nbytes) for nbytes in (1, 64, 65, 1000, 4096)]
    for block in blocks:
        assert block.offset % 64 == 0
    ends = sorted((block.offset, block.offset + block.nbytes) for block in blocks)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends))


def test_a_dropped_block_is_given_out_again(arena):
    block = arena.place(arena.nbytes)
    assert arena.place(64) is None
    del block
    assert arena.place(arena.nbytes) is not None


def test_a_block_that_is_referenced_is_never_given_out(arena):
    kept = arena.place(512 << 10)
    assert arena.place(600 << 10) is None
    other = arena.place(512 << 10)
    assert other.offset != kept.offset


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 400_000), st.integers(0, 9)), max_size=40))
def test_any_order_of_placing_and_dropping_keeps_blocks_apart(script):
    arena = make_arena(1 << 20)
    living = {}
    for step, (nbytes, victim) in enumerate(script):
        block = arena.place(nbytes)
        if block is not None:
            block.array(0, (nbytes,), UINT8)[:] = step % 251
            living[step] = (block, nbytes)
        if living and victim < 5:
            living.pop(sorted(living)[victim % len(living)])
        block = None
        for mark, (other, size) in living.items():
            assert (other.array(0, (size,), UINT8) == mark % 251).all()


def test_an_arena_is_given_back_once_and_takes_no_block_afterwards(arena):
    block = arena.place(64)
    assert not arena.retire()
    del block
    # Only one of those who look at the same time gives it back.
    assert [arena.retire() for _ in range(3)] == [True, False, False]
    assert arena.place(64) is None


def test_no_block_is_ever_in_an_arena_that_is_given_back():
    for _ in range(200):
        arena, start = make_arena(1 << 16), threading.Barrier(3)
        placed, retired = [], []

        def place(arena=arena, start=start, placed=placed):
            start.wait()
            placed.append(arena.place(64))

        def retire(arena=arena, start=start, retired=retired):
            start.wait()
            retired.append(arena.retire())

        threads = [threading.Thread(target=target) for target in (place, retire, retire)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(retired) + (placed[0] is not None) == 1


def test_a_block_names_its_range_on_the_wire(arena):
    keep = arena.place(128)
    block = arena.place(4096)
    bulk, region = pb.Bulk(), pb.Region()
    block.refer(bulk, 64, 100)
    block.target(region, 192, 200)
    assert (bulk.arena.arena, bulk.arena.offset, bulk.arena.length) == (7, keep.nbytes + 64, 100)
    assert (region.arena, region.offset, region.length) == (7, keep.nbytes + 192, 200)


def test_views_stay_valid_after_arena_and_block_are_gone():
    arena = make_arena(1 << 20)
    view = arena.place(4096).array(0, (512,), np.dtype(np.int64))
    view[:] = 5
    del arena
    assert view.sum() == 5 * 512


def test_hooks_hear_of_a_mapping_and_of_its_end(arena):
    heard = []
    arena.announce(
        lambda address, nbytes: heard.append(("mapped", address, nbytes)),
        lambda address, nbytes: heard.append(("unmapped", address, nbytes)),
    )
    address = np.frombuffer(arena.memory, np.uint8).ctypes.data
    assert heard == [("mapped", address, 1 << 20)]


def test_the_end_of_a_mapping_is_told_before_it_goes():
    heard = []
    arena = make_arena(1 << 20)
    arena.announce(lambda *_: None, lambda *place: heard.append(place))
    block = arena.place(64)
    del arena
    assert not heard
    del block
    assert len(heard) == 1


def test_a_heap_block_streams_its_bytes():
    block = HeapBlock(256)
    bulk, region = pb.Bulk(), pb.Region()
    block.refer(bulk, 0, 100)
    block.target(region, 0, 100)
    assert bulk.WhichOneof("place") == "streamed"
    assert bulk.streamed == 100
    assert not region.ListFields()
    block.array(64, (4,), np.dtype(np.int64))[:] = 3
    assert block.array(64, (4,), np.dtype(np.int64)).sum() == 12


@pytest.mark.parametrize(("nbytes", "rounded"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_sizes_are_rounded_to_cache_lines(nbytes, rounded):
    assert round_up(nbytes) == rounded
