"""The wrapper of a loader: batches, errors and attributes pass through as they are."""

import gc
import threading
import weakref

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import momentd
from momentd import _lookahead as module
from momentd.errors import InvalidArgument


class Numbers(Dataset):
    def __init__(self, count, bad=None):
        self.count, self.bad = count, bad

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if index == self.bad:
            raise KeyError("no such number")
        return torch.tensor(index)


def wrap(loader, depth=2):
    return momentd.lookahead(loader, {}, depth)


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_of_a_data_loader_pass_through_and_so_do_its_attributes(workers):
    loader = DataLoader(Numbers(20), batch_size=3, num_workers=workers)
    wrapped = wrap(loader)
    assert len(wrapped) == 7
    assert wrapped.dataset is loader.dataset
    assert wrapped.batch_size == 3
    for _ in range(2):  # epochs
        assert [batch.tolist() for batch in wrapped] == [batch.tolist() for batch in loader]
    with pytest.raises(AttributeError):
        _ = wrapped.no_such_thing


def test_the_very_objects_come_out_and_nothing_keeps_them():
    class Batch:
        pass

    batches = [Batch() for _ in range(5)]
    assert [a is b for a, b in zip(wrap(batches), batches, strict=True)] == [True] * 5
    made = []

    def make():
        for _ in range(6):
            batch = Batch()
            made.append(weakref.ref(batch))
            yield batch

    for number, _batch in enumerate(wrap(make(), depth=1)):
        gc.collect()
        alive = [k for k, reference in enumerate(made) if reference() is not None]
        assert alive == [k for k in (number, number + 1) if k < 6]


@pytest.mark.parametrize("depth", [1, 2, 50])
def test_an_exception_comes_at_its_place(depth):
    loader = DataLoader(Numbers(20, bad=10), batch_size=2)
    seen = []
    with pytest.raises(KeyError, match="no such number"):
        seen.extend(wrap(loader, depth))
    assert len(seen) == 5


def test_the_loader_is_only_so_far_ahead():
    taken = []

    def make():
        for k in range(100):
            taken.append(k)
            yield k

    source = make()
    for k in wrap(source, depth=3):
        assert len(taken) == k + 4
        if k == 10:
            break
    gc.collect()
    with pytest.raises(StopIteration):  # its generator was closed
        next(source)


def test_a_depth_that_is_none_is_refused():
    for depth in (0, -1, 1.5, True):
        with pytest.raises(InvalidArgument, match="depth must be at least 1"):
            wrap([], depth)


def test_keys_without_rows_are_refused_at_once():
    for key in ("weight", 3, nn.ReLU()):
        with pytest.raises(InvalidArgument, match="has no rows"):
            momentd.lookahead([], {key: lambda batch: batch})
    with pytest.raises(InvalidArgument, match="needs a function"):
        momentd.lookahead([], {nn.Embedding(3, 2): "ids"})


def test_a_parameter_of_no_optimizer_is_an_error_once_there_should_be_one():
    known, unknown = nn.Embedding(9, 2, sparse=True), nn.Embedding(8, 2, sparse=True)
    optimizer = momentd.SparseAdam(known.parameters(), lr=0.1)
    both = {known: lambda batch: batch, unknown.weight: lambda batch: batch}
    seen = []
    with pytest.raises(InvalidArgument, match=r"\(8, 2\) is in no momentd optimizer"):
        seen.extend(momentd.lookahead([torch.tensor([1])] * 5, both))
    assert len(seen) == 1
    assert len(list(momentd.lookahead([torch.tensor([1])] * 5, {known: lambda b: b}))) == 5
    del optimizer


def test_a_function_that_fails_or_gives_no_ids_is_named_at_its_batch():
    layer = nn.Embedding(9, 2, sparse=True)
    optimizer = momentd.SparseAdam(layer.parameters(), lr=0.1)

    def fail(batch):
        return 1 // (3 - batch) and [batch]

    seen = []
    with pytest.raises(ZeroDivisionError):
        seen.extend(momentd.lookahead(range(9), {layer: fail}))
    assert seen == [0, 1, 2]
    for nonsense in (torch.ones(2), np.ones(2), [True], ["a"], object(), None):
        with pytest.raises(InvalidArgument, match=r"key Embedding.*(integers|no ids)"):
            list(momentd.lookahead([0], {layer: lambda _, n=nonsense: n}))
    del optimizer


def test_a_function_that_raises_stop_iteration_does_not_end_the_loop_silently():
    layer = nn.Embedding(9, 2, sparse=True)
    optimizer = momentd.SparseAdam(layer.parameters(), lr=0.1)
    seen = []
    with pytest.raises(RuntimeError, match="StopIteration"):
        seen.extend(momentd.lookahead([[0], [1], [], [2]], {layer: lambda b: [next(iter(b))]}))
    assert seen == [[0], [1]]
    del optimizer


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor([[1, 2], [3, 4]], dtype=torch.int32),
        np.array([1, 2, 3, 4], np.uint8),
        [1, 2, 3, 4],
        (torch.tensor([1, 2]), np.array([3]), [4]),
        ([], [1, 2], [[3, 4]]),
    ],
)
def test_ids_may_be_given_in_many_forms(value):
    parts = module._ids("key", value)
    found = np.concatenate([part.array() for part in parts])
    assert found.dtype == np.int64
    assert found.tolist() == [1, 2, 3, 4]


def test_nothing_is_started_before_the_first_wish():
    before = {thread.name for thread in threading.enumerate()}
    layer = nn.Embedding(9, 2, sparse=True)
    list(momentd.lookahead([], {layer: lambda batch: batch}))
    assert {thread.name for thread in threading.enumerate()} == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_ids_on_a_gpu_are_copied_when_they_are_ready():
    big = torch.ones(4000, 4000, device="cuda")
    ids = torch.zeros(10, dtype=torch.int64, device="cuda")
    for _ in range(20):
        big = big @ big * 1e-4
    ids += (big[0, 0] * 0).long() + 7  # only once the products are done
    (part,) = module._ids("key", ids)
    assert part.array().tolist() == [7] * 10
