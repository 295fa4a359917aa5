"""Training that is resumed from a checkpoint is the training that was not interrupted."""

from __future__ import annotations

import copy
import io
import pickle
import signal

import pytest
import torch

import momentd
from tests.support.real_daemon import RealDaemon

ROWS, WIDTH, STEPS = 3000, 16, 150


def model() -> torch.nn.ModuleList:
    random = torch.Generator().manual_seed(0)
    return torch.nn.ModuleList(
        torch.nn.Embedding(
            rows, WIDTH, sparse=True, _weight=torch.randn(rows, WIDTH, generator=random)
        )
        for rows in (ROWS, ROWS // 3)
    )


def train(tables, optimizer, first: int, last: int) -> None:
    """Steps [first, last): the batch is a function of the step."""
    for step in range(first, last):
        random = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        loss = torch.zeros(())
        for table in tables:
            ids = torch.randint(0, table.num_embeddings, (100,), generator=random)
            loss = loss + (table(ids) * torch.randn(100, WIDTH, generator=random)).sum()
        loss.backward()
        optimizer.step()


def make(tables, address: str, **kwargs):
    return momentd.SparseAdam(tables.parameters(), lr=0.01, address=address, **kwargs)


def through_a_file(document):
    file = io.BytesIO()
    torch.save(document, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def check_same(one, other) -> None:
    (tables, optimizer), (others, twin) = one, other
    for ours, theirs in zip(tables.parameters(), others.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    states = [each.full_state_dict()["state"] for each in (optimizer, twin)]
    for index, entry in states[0].items():
        for name, value in entry.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(states[1][index][name]))


@pytest.fixture(scope="module")
def daemons(tmp_path_factory):
    """Two daemons with data directories of their own."""
    paths = [tmp_path_factory.mktemp(name) for name in ("one", "other")]
    with RealDaemon(paths[0]) as one, RealDaemon(paths[1]) as other:
        yield one, other


@pytest.mark.parametrize("checkpoint", ["snapshot", "full"])
def test_resumed_training_has_the_bits_of_uninterrupted_training(daemons, checkpoint):
    daemon, other = daemons
    straight = model()
    uninterrupted = make(straight, other.address)
    train(straight, uninterrupted, 0, 2 * STEPS)

    tables = model()
    optimizer = make(tables, daemon.address, checkpoint=checkpoint)
    train(tables, optimizer, 0, STEPS)
    saved = through_a_file({"model": tables.state_dict(), "optimizer": optimizer.state_dict()})
    train(tables, optimizer, STEPS, STEPS + 20)  # lost with what follows
    daemon.end(signal.SIGKILL)
    daemon.start()
    resumed = model()
    resumed.load_state_dict(saved["model"])
    again = make(resumed, daemon.address, checkpoint=checkpoint)
    again.load_state_dict(saved["optimizer"])
    train(resumed, again, STEPS, 2 * STEPS)
    check_same((straight, uninterrupted), (resumed, again))


def test_a_state_file_carries_it_to_another_data_directory(daemons, tmp_path):
    daemon, other = daemons
    tables = model()
    optimizer = make(tables, daemon.address, checkpoint="snapshot")
    train(tables, optimizer, 0, 30)
    handle = optimizer.state_dict()
    optimizer.save_state(tmp_path / "moments")

    moved = copy.deepcopy(tables)
    elsewhere = make(moved, other.address, checkpoint="snapshot")
    with pytest.raises(momentd.errors.SnapshotNotFound):
        elsewhere.load_state_dict(handle)
    elsewhere.load_state(tmp_path / "moments")
    # From now on the handle resolves there too, whoever loads it.
    third = make(copy.deepcopy(tables), other.address)
    third.load_state_dict(handle)
    check_same((tables, optimizer), (moved, third))
    for each, tab in ((optimizer, tables), (elsewhere, moved)):
        train(tab, each, 30, 60)
    check_same((tables, optimizer), (moved, elsewhere))


def test_equal_states_have_equal_handles_wherever_they_are(daemons):
    handles = []
    for daemon in daemons:
        tables = model()
        optimizer = make(tables, daemon.address, checkpoint="snapshot")
        train(tables, optimizer, 0, 20)
        handles.append([each["snapshot"] for each in optimizer.state_dict()["state"].values()])
    assert handles[0] == handles[1]
    assert len(set(handles[0])) == 2


@pytest.mark.parametrize("fork", ["load", "deepcopy", "pickle"])
def test_copies_of_one_state_train_like_solo_runs(daemons, fork):
    daemon, other = daemons
    tables = model()
    optimizer = make(tables, daemon.address, checkpoint="snapshot")
    train(tables, optimizer, 0, 30)

    def copied():
        if fork == "deepcopy":
            return copy.deepcopy((tables, optimizer))
        if fork == "pickle":
            return pickle.loads(pickle.dumps((tables, optimizer)))
        others = copy.deepcopy(tables)
        twin = make(others, daemon.address, checkpoint="snapshot")
        twin.load_state_dict(optimizer.state_dict())
        return others, twin

    pairs = [copied(), copied()]
    for first, (others, twin) in zip((100, 200), pairs, strict=True):
        train(others, twin, first, first + 20)
    for first, pair in zip((100, 200), pairs, strict=True):
        alone = model()
        solo = make(alone, other.address)
        train(alone, solo, 0, 30)
        train(alone, solo, first, first + 20)
        check_same(pair, (alone, solo))


def test_snapshots_of_state_dicts_outlive_their_session(daemons):
    daemon, _ = daemons
    tables = model()
    optimizer = make(tables, daemon.address, checkpoint="snapshot")
    train(tables, optimizer, 0, 10)
    saved, expected = optimizer.state_dict(), optimizer.full_state_dict()
    optimizer._session[0].close()
    twin = make(copy.deepcopy(tables), daemon.address, checkpoint="snapshot")
    twin.load_state_dict(saved)
    for index, entry in twin.full_state_dict()["state"].items():
        assert torch.equal(entry["exp_avg_sq"], expected["state"][index]["exp_avg_sq"])
