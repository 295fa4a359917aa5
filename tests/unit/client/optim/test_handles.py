"""State dicts with handles: the moments stay with the daemon, as a snapshot."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

import momentd
from momentd.errors import InvalidArgument, SnapshotNotFound
from momentd.optim import _handles
from tests.support.optim import embedding, sparse_grad, step_rows


def trained(steps=3, checkpoint="snapshot", dtype=torch.float32, **kwargs):
    module = embedding(dtype=dtype)
    optimizer = momentd.SparseAdam(module.parameters(), lr=0.1, checkpoint=checkpoint, **kwargs)
    for value in range(1, steps + 1):
        step_rows(optimizer, module.weight, [1, 7], [float(value), -2.0])
    return module, optimizer


def another(module, checkpoint="snapshot", **kwargs):
    copied = copy.deepcopy(module)
    return copied, momentd.SparseAdam(copied.parameters(), checkpoint=checkpoint, **kwargs)


def full(optimizer, index=0):
    entry = optimizer.full_state_dict()["state"][index]
    return entry["step"], entry["exp_avg"], entry["exp_avg_sq"]


def check_equal(one, other, index=0):
    for ours, theirs in zip(full(one, index), full(other, index), strict=True):
        assert torch.equal(torch.as_tensor(ours), torch.as_tensor(theirs))


def test_an_entry_is_a_handle_of_plain_types(fake):
    _, optimizer = trained()
    entry = optimizer.state_dict()["state"][0]
    assert {key: type(value) for key, value in entry.items()} == {
        "step": int,
        "snapshot": int,
        "device": torch.Tensor,
    }
    assert entry["step"] == 3
    assert 0 < entry["snapshot"] < 1 << 128
    assert entry["device"].shape == (0,)
    assert fake.gathered_rows == 0


def test_live_and_saved_entries_have_the_same_keys(fake):
    for checkpoint in ("snapshot", "full"):
        module, optimizer = trained(checkpoint=checkpoint)
        assert list(optimizer.state[module.weight]) == list(optimizer.state_dict()["state"][0])


@pytest.mark.parametrize("saves", ["snapshot", "full"])
@pytest.mark.parametrize("loads", ["snapshot", "full"])
def test_either_kind_loads_into_either(fake, saves, loads):
    module, optimizer = trained(checkpoint=saves)
    other_module, other = another(module, loads)
    other.load_state_dict(optimizer.state_dict())
    check_equal(optimizer, other)
    for mod, opt in ((module, optimizer), (other_module, other)):
        step_rows(opt, mod.weight, [1, 2], [0.5, 0.5])
    assert torch.equal(module.weight, other_module.weight)
    check_equal(optimizer, other)


def test_torchs_own_state_dicts_load_and_full_ones_go_back(fake):
    module, optimizer = trained()
    copied = copy.deepcopy(module)
    reference = torch.optim.SparseAdam(copied.parameters())
    reference.load_state_dict(optimizer.full_state_dict())
    _, back = another(module)
    back.load_state_dict(reference.state_dict())
    check_equal(optimizer, back)


def test_it_loads_with_weights_only(fake):
    module, optimizer = trained()
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    _, other = another(module)
    other.load_state_dict(torch.load(file, weights_only=True))
    check_equal(optimizer, other)


def test_nothing_of_the_machine_is_in_it(fake):
    _, optimizer = trained(address="unix:/somewhere/momentd.sock", run="my-run")
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    for secret in (b"somewhere", b"my-run", b"/fake"):
        assert secret not in file.getvalue()


def test_equal_states_have_equal_handles(fake):
    _, one = trained()
    _, other = trained()
    assert one.state_dict()["state"][0]["snapshot"] == other.state_dict()["state"][0]["snapshot"]
    _, third = trained(steps=4)
    assert third.state_dict()["state"][0]["snapshot"] != one.state_dict()["state"][0]["snapshot"]


def test_without_a_change_there_is_no_second_snapshot(fake):
    module, optimizer = trained()
    saved = optimizer.state_dict()
    assert optimizer.state_dict()["state"][0]["snapshot"] == saved["state"][0]["snapshot"]
    _, other = another(module)
    other.load_state_dict(saved)
    assert other.state_dict()["state"][0]["snapshot"] == saved["state"][0]["snapshot"]
    assert fake.log.count("create_snapshot") == 1
    step_rows(optimizer, module.weight, [1], [1.0])
    assert optimizer.state_dict()["state"][0]["snapshot"] != saved["state"][0]["snapshot"]


def test_a_deleted_snapshot_is_made_again(fake):
    _, optimizer = trained()
    saved = optimizer.state_dict()
    fake.snapshots.clear()
    assert optimizer.state_dict()["state"][0]["snapshot"] == saved["state"][0]["snapshot"]
    assert len(fake.snapshots) == 1


def test_loading_what_is_current_is_a_no_op(fake):
    """Accelerate's prepare: save, move all tensors, load."""
    module, optimizer = trained()
    saved = optimizer.state_dict()
    moved = {
        key: {k: v.to("cpu") if torch.is_tensor(v) else v for k, v in entry.items()}
        for key, entry in saved["state"].items()
    }
    tables, calls = list(fake.tables), len(fake.log)
    optimizer.load_state_dict({**saved, "state": moved})
    assert (list(fake.tables), len(fake.log)) == (tables, calls)
    step_rows(optimizer, module.weight, [1], [1.0])
    optimizer.load_state_dict(saved)
    assert full(optimizer)[0] == 3
    assert len(fake.tables) == 1


def test_tables_never_updated_need_no_daemon(fake):
    module = embedding()
    optimizer = momentd.SparseAdam(module.parameters(), checkpoint="snapshot")
    optimizer.load_state_dict(optimizer.state_dict())
    sparse_grad(module.weight, [], [])
    optimizer.step()
    saved = optimizer.state_dict()
    assert saved["state"][0]["snapshot"] == 0
    _, other = another(module)
    other.load_state_dict(saved)
    assert other.state_dict()["state"][0]["step"] == 1
    assert fake.log == []


def test_two_optimizers_load_one_checkpoint_and_train_on_their_own(fake):
    module, optimizer = trained()
    saved = optimizer.state_dict()
    pairs = [another(module) for _ in range(2)]
    for _, opt in pairs:
        opt.load_state_dict(saved)
    for number, (mod, opt) in enumerate(pairs):
        step_rows(opt, mod.weight, [1], [5.0 + number])
    assert full(optimizer)[0] == 3
    for number, (mod, opt) in enumerate(pairs):
        alone, solo = another(module)
        solo.load_state_dict(saved)
        step_rows(solo, alone.weight, [1], [5.0 + number])
        assert torch.equal(mod.weight, alone.weight)
        check_equal(opt, solo)


@pytest.mark.parametrize("copied", [copy.copy, lambda o: pickle.loads(pickle.dumps(o))])
def test_pickles_carry_handles(fake, copied):
    _, optimizer = trained()
    other = copied(optimizer)
    assert len(fake.tables) == 1
    param = other.param_groups[0]["params"][0]
    step_rows(other, param, [1], [3.0])
    assert len(fake.tables) == 2
    assert fake.scattered_rows == 0
    assert full(other)[0] == 4
    assert full(optimizer)[0] == 3


def test_a_pickle_that_was_never_used_has_its_moments(fake):
    _, optimizer = trained()
    check_equal(pickle.loads(pickle.dumps(optimizer)), optimizer)


def test_deepcopies_fork_and_know_their_handle(fake):
    _, optimizer = trained()
    saved = optimizer.state_dict()
    other = copy.deepcopy(optimizer)
    assert other.state_dict()["state"][0]["snapshot"] == saved["state"][0]["snapshot"]
    assert len(fake.snapshots) == 1
    step_rows(other, other.param_groups[0]["params"][0], [1], [9.0])
    assert full(optimizer)[0] == 3


def test_a_handle_that_does_not_resolve_is_an_error_with_the_remedy(fake):
    module, optimizer = trained()
    saved = optimizer.state_dict()
    fake.snapshots.clear()
    _, other = another(module)
    with pytest.raises(SnapshotNotFound, match=r"'0\.0' \(10 rows of 4, step 3\).*momentd import"):
        other.load_state_dict(saved)
    assert len(other.state) == 0
    assert len(fake.tables) == 1


def test_missing_reset_starts_afresh_and_says_so(fake, capsys):
    module, optimizer = trained()
    saved = optimizer.state_dict()
    fake.snapshots.clear()
    other_module, other = another(module)
    other.load_state_dict(saved, missing="reset")
    assert other.state[other_module.weight]["step"] == 0
    assert other.param_groups[0]["lr"] == 0.1
    assert "0.0 starts with fresh moments" in capsys.readouterr().err
    with pytest.raises(InvalidArgument, match="missing must be"):
        other.load_state_dict(saved, missing="ignore")


def test_live_entries_are_never_a_silent_fresh_start(fake):
    module, optimizer = trained()
    saved = optimizer.state_dict()
    step_rows(optimizer, module.weight, [1], [1.0])
    live = {**saved, "state": {0: dict(optimizer.state[module.weight])}}
    _, other = another(module)
    with pytest.raises(SnapshotNotFound, match="live state"):
        other.load_state_dict(live)


@pytest.mark.parametrize(("make", "text"), [
    (lambda: embedding(rows=9), "of 10 rows of 4 .* has 9 rows of 4"),
    (lambda: embedding(dim=3), "of 10 rows of 4 .* has 10 rows of 3"),
])  # fmt: skip
def test_another_shape_is_refused_with_both(fake, make, text):
    _, optimizer = trained()
    other = momentd.SparseAdam(make().parameters())
    with pytest.raises(InvalidArgument, match=text):
        other.load_state_dict(optimizer.state_dict())
    assert len(fake.tables) == 1


def test_another_state_dtype_is_converted(fake):
    module, optimizer = trained()
    _, other = another(module, state_dtype=torch.float64)
    other.load_state_dict(optimizer.state_dict())
    assert full(other)[1].dtype == torch.float64
    assert torch.equal(full(other)[1].float(), full(optimizer)[1])
    assert len(fake.tables) == 2


def test_a_load_that_fails_in_the_middle_leaves_no_tables(fake):
    model = nn.ModuleList([embedding(seed=seed) for seed in range(2)])
    optimizer = momentd.SparseAdam(model.parameters(), checkpoint="snapshot")
    for module in model:
        sparse_grad(module.weight, [1], [2.0])
    optimizer.step()
    saved = optimizer.state_dict()
    saved["state"][1]["snapshot"] ^= 1
    tables = list(fake.tables)
    other = momentd.SparseAdam(copy.deepcopy(model).parameters())
    with pytest.raises(SnapshotNotFound):
        other.load_state_dict(saved)
    assert list(fake.tables) == tables


def test_only_the_newest_are_kept_if_asked_for(fake):
    module, optimizer = trained(keep_snapshots=2)
    states = [optimizer.state_dict()]
    for value in (1.0, 2.0, 3.0):
        step_rows(optimizer, module.weight, [2], [value])
        states.append(optimizer.state_dict())
    assert len(fake.snapshots) == 2
    _, other = another(module)
    for state in states[-2:]:
        other.load_state_dict(state)
    with pytest.raises(SnapshotNotFound):
        other.load_state_dict(states[0])
    with pytest.raises(InvalidArgument, match="keep_snapshots=0"):
        trained(keep_snapshots=0)


def test_an_older_snapshot_may_go_although_a_table_has_not_changed_since(fake):
    model = nn.ModuleList([embedding(seed=seed) for seed in range(2)])
    optimizer = momentd.SparseAdam(model.parameters(), checkpoint="snapshot", keep_snapshots=1)
    for module in model:
        sparse_grad(module.weight, [1], [2.0])
    optimizer.step()
    optimizer.state_dict()
    optimizer.zero_grad()
    step_rows(optimizer, model[0].weight, [1], [1.0])
    saved = optimizer.state_dict()
    other = momentd.SparseAdam(copy.deepcopy(model).parameters())
    other.load_state_dict(saved)
    check_equal(optimizer, other, 1)


def test_the_first_state_dict_says_what_stays_behind(fake, capsys, monkeypatch):
    monkeypatch.setattr(_handles, "_told", set())
    module, optimizer = trained()
    optimizer.state_dict()
    text = capsys.readouterr().err
    assert "in /fake" in text
    assert "save_state" in text
    step_rows(optimizer, module.weight, [1], [1.0])
    optimizer.state_dict()
    assert capsys.readouterr().err == ""


def test_snapshots_outlive_the_optimizer(fake):
    module, optimizer = trained()
    saved = optimizer.state_dict()
    expected = full(optimizer)
    optimizer.close()
    assert not fake.tables
    _, other = another(module)
    other.load_state_dict(saved)
    assert torch.equal(full(other)[1], expected[1])


def test_what_is_written_into_a_returned_entry_does_not_reach_the_optimizer(fake):
    """torch.distributed.checkpoint writes into the dicts that it gets."""
    _, optimizer = trained()
    saved = optimizer.state_dict()
    saved["state"][0]["snapshot"] = 5
    saved["state"][0]["step"] = 99
    again = optimizer.state_dict()["state"][0]
    assert again["step"] == 3
    assert again["snapshot"] != 5


@pytest.mark.parametrize("snapshot", [-2, 1 << 128])
def test_what_is_no_id_is_refused(fake, snapshot):
    module, optimizer = trained()
    saved = optimizer.state_dict()
    saved["state"][0]["snapshot"] = snapshot
    with pytest.raises(InvalidArgument, match="not the id of a snapshot"):
        another(module)[1].load_state_dict(saved)
