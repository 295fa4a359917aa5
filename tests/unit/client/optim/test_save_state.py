"""Moments in a file: out of one daemon, into another."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

import momentd
from momentd.errors import CorruptRecord, InvalidArgument, OutOfSpace
from momentd_wire.state_file import StateReader
from tests.support.optim import embedding, moments, sparse_grad, step_rows


def trained(steps=3, **kwargs):
    module = embedding(rows=50, **kwargs)
    optimizer = momentd.SparseAdam(module.parameters(), lr=0.1)
    for value in range(1, steps + 1):
        step_rows(optimizer, module.weight, [1, 7], [float(value), -2.0])
    return module, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_training_goes_on_as_if_nothing_had_been(backend, tmp_path, dtype):
    module, optimizer = trained(dtype=dtype)
    optimizer.save_state(tmp_path / "moments")
    other_module = copy.deepcopy(module)
    other = momentd.SparseAdam(other_module.parameters(), lr=0.1)
    other.load_state(tmp_path / "moments")
    assert other.state[other_module.weight]["step"] == 3
    for mod, opt in ((module, optimizer), (other_module, other)):
        for value in (4.0, 5.0):
            step_rows(opt, mod.weight, [1, 2], [value, 1.0])
    assert torch.equal(module.weight, other_module.weight)
    for ours, theirs in zip(moments(optimizer), moments(other), strict=True):
        assert torch.equal(ours, theirs)


def test_only_touched_rows_are_in_the_file(fake, tmp_path):
    _, optimizer = trained()
    optimizer.save_state(tmp_path / "moments")
    with StateReader(tmp_path / "moments") as reader:
        (block,) = reader.blocks()
    assert block.rows.tolist() == [1, 7]
    assert [entry.updates for entry in reader.tables] == [3]


def test_parameters_without_state_keep_their_places(fake, tmp_path):
    model = nn.ModuleList([embedding(seed=seed) for seed in range(3)])
    optimizer = momentd.SparseAdam(model.parameters())
    for index, value in ((0, 1.0), (2, 3.0)):
        sparse_grad(model[index].weight, [1], [value])
    optimizer.step()
    optimizer.save_state(tmp_path / "moments")
    other = momentd.SparseAdam(copy.deepcopy(model).parameters())
    other.load_state(tmp_path / "moments")
    got = other.full_state_dict()["state"]
    assert {k: v["exp_avg"][1, 0].item() for k, v in got.items()} == pytest.approx({0: 0.1, 2: 0.3})


def test_a_fresh_optimizer_needs_no_daemon_in_either_direction(fake, tmp_path):
    module = embedding()
    optimizer = momentd.SparseAdam(module.parameters())
    sparse_grad(module.weight, [], [])
    optimizer.step()
    optimizer.save_state(tmp_path / "moments")
    other = momentd.SparseAdam(embedding().parameters())
    other.load_state(tmp_path / "moments")
    assert other.state[other.param_groups[0]["params"][0]]["step"] == 1
    assert fake.log == []


def test_the_tables_that_were_there_go(fake, tmp_path):
    _, optimizer = trained()
    optimizer.save_state(tmp_path / "moments")
    before = list(fake.tables)
    optimizer.load_state(tmp_path / "moments")
    assert len(fake.tables) == 1
    assert list(fake.tables) != before


def everything(optimizer):
    entry = optimizer.full_state_dict()["state"][0]
    return entry["step"], entry["exp_avg"], entry["exp_avg_sq"]


def check_unchanged(optimizer, before):
    for ours, theirs in zip(everything(optimizer), before, strict=True):
        assert np.array_equal(ours, theirs)


def test_every_damaged_byte_is_found_and_changes_nothing(fake, tmp_path):
    module, optimizer = trained()
    path = tmp_path / "moments"
    optimizer.save_state(path)
    step_rows(optimizer, module.weight, [3], [1.0])
    before, whole = everything(optimizer), path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x10]) + whole[at + 1 :])
        with pytest.raises((CorruptRecord, InvalidArgument)) as caught:
            optimizer.load_state(path)
        assert str(path) in str(caught.value)
    assert len(fake.tables) == 1
    check_unchanged(optimizer, before)


def test_a_file_that_is_cut_off_is_refused_wherever(fake, tmp_path):
    _, optimizer = trained()
    path = tmp_path / "moments"
    optimizer.save_state(path)
    before, whole = everything(optimizer), path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises((CorruptRecord, InvalidArgument)):
            optimizer.load_state(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(CorruptRecord, match=f"byte {len(whole)}: something follows"):
        optimizer.load_state(path)
    check_unchanged(optimizer, before)


def test_damage_is_named_by_its_byte(fake, tmp_path):
    _, optimizer = trained()
    path = tmp_path / "moments"
    optimizer.save_state(path)
    whole = bytearray(path.read_bytes())
    at = whole.index(b"MBLK")
    whole[at + 60] ^= 1
    path.write_bytes(whole)
    with pytest.raises(CorruptRecord, match=f"damaged at byte {at}:") as caught:
        optimizer.load_state(path)
    assert caught.value.details["offset"] == str(at)


def test_a_load_that_fails_half_way_leaves_the_optimizer_as_it_was(fake, tmp_path):
    model = nn.ModuleList([embedding(seed=seed) for seed in range(2)])
    optimizer = momentd.SparseAdam(model.parameters())
    for module in model:
        sparse_grad(module.weight, [1], [2.0])
    optimizer.step()
    optimizer.save_state(tmp_path / "moments")
    before, tables, original = everything(optimizer), list(fake.tables), fake.reach

    def second_is_refused(what):
        if what == "scatter" and "scatter" in fake.log:
            raise OutOfSpace("the disk is full")
        original(what)

    fake.reach = second_is_refused
    with pytest.raises(OutOfSpace):
        optimizer.load_state(tmp_path / "moments")
    fake.reach = original
    assert list(fake.tables) == tables
    check_unchanged(optimizer, before)


def test_a_save_that_fails_leaves_the_older_file(fake, tmp_path):
    module, optimizer = trained()
    path = tmp_path / "moments"
    optimizer.save_state(path)
    whole = path.read_bytes()
    step_rows(optimizer, module.weight, [3], [1.0])
    fake.down = True
    with pytest.raises(momentd.errors.DaemonUnavailable):
        optimizer.save_state(path)
    assert path.read_bytes() == whole
    assert [found.name for found in tmp_path.iterdir()] == ["moments"]


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (lambda: embedding(rows=40).parameters(), r"\(50, 4\).*\(40, 4\)"),
        (lambda: embedding(rows=50, dim=3).parameters(), r"\(50, 4\).*\(50, 3\)"),
    ],
)
def test_another_shape_is_refused_with_both(fake, tmp_path, params, text):
    _, optimizer = trained()
    optimizer.save_state(tmp_path / "moments")
    with pytest.raises(InvalidArgument, match=text):
        momentd.SparseAdam(params()).load_state(tmp_path / "moments")


def test_more_tables_than_parameters_are_refused(fake, tmp_path):
    model = nn.ModuleDict({"a": embedding(seed=1), "b": embedding(seed=2)})
    optimizer = momentd.SparseAdam(model.named_parameters())
    for module in model.values():
        sparse_grad(module.weight, [1], [2.0])
    optimizer.step()
    optimizer.save_state(tmp_path / "moments")
    with pytest.raises(InvalidArgument, match=r"parameter 1 \(b.weight\).*has 1 parameters"):
        momentd.SparseAdam([("a.weight", model["a"].weight)]).load_state(tmp_path / "moments")
    other = momentd.SparseAdam(list(model.named_parameters())[::-1])
    with pytest.raises(InvalidArgument, match=r"\['a.weight', 'b.weight'\].*\['b.weight', 'a.wei"):
        other.load_state(tmp_path / "moments")


def test_what_is_not_such_a_file_is_refused(fake, tmp_path):
    _, optimizer = trained()
    path = tmp_path / "checkpoint.pt"
    torch.save({}, path)
    with pytest.raises(InvalidArgument, match="is not a momentd state file"):
        optimizer.load_state(path)
    with pytest.raises(FileNotFoundError):
        optimizer.load_state(tmp_path / "nothing")


def test_a_newer_version_is_refused_by_number(fake, tmp_path):
    _, optimizer = trained()
    path = tmp_path / "moments"
    optimizer.save_state(path)
    whole = bytearray(path.read_bytes())
    whole[8] = 2
    path.write_bytes(whole)
    with pytest.raises(InvalidArgument, match=r"version 2 .* reads version 1"):
        optimizer.load_state(path)
