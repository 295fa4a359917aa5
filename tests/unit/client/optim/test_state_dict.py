"""State dicts in torch's layout, in both directions."""

import copy
import functools
import io

import pytest
import torch
from torch import nn

import momentd
from momentd.errors import OutOfSpace, SnapshotNotFound
from tests.support.optim import embedding, moments, sparse_grad, step_rows, twin

# The other kind of state dict has tests of its own.
make = functools.partial(momentd.SparseAdam, checkpoint="full")


def trained(fake, steps=3, dtype=torch.float32, **kwargs):
    module = embedding(dtype=dtype)
    optimizer = make(module.parameters(), lr=0.1, **kwargs)
    for value in range(1, steps + 1):
        step_rows(optimizer, module.weight, [1, 7], [float(value), -2.0])
    return module, optimizer


def test_the_layout_is_torchs(fake):
    _, optimizer, other, reference = twin(embedding(), lr=0.1, checkpoint="full")
    for opt, param in (
        (optimizer, optimizer.param_groups[0]["params"][0]),
        (reference, other.weight),
    ):
        step_rows(opt, param, [1, 7], [1.0, -2.0])
    ours, theirs = optimizer.state_dict(), reference.state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    assert list(ours["state"]) == [0]
    assert list(ours["state"][0]) == ["step", "exp_avg", "exp_avg_sq"]
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(ours["state"][0][key], theirs["state"][0][key])


def test_it_loads_into_torch_and_from_torch(fake):
    module, optimizer = trained(fake)
    other = copy.deepcopy(module)
    reference = torch.optim.SparseAdam(other.parameters(), lr=0.5)
    reference.load_state_dict(optimizer.state_dict())
    third = copy.deepcopy(module)
    back = make(third.parameters())
    back.load_state_dict(reference.state_dict())
    for opt, mod in ((optimizer, module), (reference, other), (back, third)):
        step_rows(opt, mod.weight, [1, 2], [0.5, 0.5])
    torch.testing.assert_close(module.weight, other.weight, rtol=1e-6, atol=1e-6)
    assert torch.equal(module.weight, third.weight)
    assert back.param_groups[0]["lr"] == 0.1


def test_only_touched_rows_travel(fake):
    module, optimizer = trained(fake)
    other = make(copy.deepcopy(module).parameters())
    other.load_state_dict(optimizer.state_dict())
    assert fake.scattered_rows == 2


def test_loading_what_was_current_fills_new_tables_if_the_daemon_lost_its_own(fake):
    module, optimizer = trained(fake)
    saved = optimizer.state_dict()
    fake.tables.clear()
    optimizer.load_state_dict(saved)
    for ours, kept in zip(moments(optimizer), list(saved["state"][0].values())[1:], strict=True):
        assert torch.equal(ours, kept)
    step_rows(optimizer, module.weight, [1, 2], [0.5, 0.5])
    assert optimizer.state_dict()["state"][0]["step"] == 4


def test_loading_what_is_current_touches_nothing(fake):
    _, optimizer = trained(fake)
    saved = optimizer.state_dict()
    moved = {
        k: {n: v.to("cpu") if isinstance(v, torch.Tensor) else v for n, v in e.items()}
        for k, e in saved["state"].items()
    }
    tables, calls = list(fake.tables), len(fake.log)
    optimizer.load_state_dict({"state": moved, "param_groups": saved["param_groups"]})
    assert list(fake.tables) == tables
    assert len(fake.log) == calls


def test_an_edited_or_outdated_state_is_loaded_in_full(fake):
    module, optimizer = trained(fake)
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"][3] = 9.0
    optimizer.load_state_dict(saved)
    assert moments(optimizer)[0][3].tolist() == [9.0] * 4
    saved = optimizer.state_dict()
    step_rows(optimizer, module.weight, [1], [100.0])
    optimizer.load_state_dict(saved)
    assert optimizer.state[module.weight]["step"] == 3
    assert torch.equal(moments(optimizer)[0], saved["state"][0]["exp_avg"])
    assert len(fake.tables) == 1


def test_loading_gives_own_tables(fake):
    module, optimizer = trained(fake)
    saved = optimizer.state_dict()
    others = [make(copy.deepcopy(module).parameters()) for _ in range(2)]
    for other in others:
        other.load_state_dict(saved)
        step_rows(other, other.param_groups[0]["params"][0], [1], [5.0])
    assert torch.equal(moments(optimizer)[0], saved["state"][0]["exp_avg"])
    assert len(fake.tables) == 3


def test_the_argument_has_torchs_name(fake):
    module, optimizer = trained(fake)
    optimizer.load_state_dict(state_dict=optimizer.state_dict())
    assert optimizer.state[module.weight]["step"] == 3


def test_a_failed_load_leaves_the_optimizer_as_it_was(fake):
    _, optimizer = trained(fake)
    before = moments(optimizer)
    saved = optimizer.state_dict()
    saved["state"][0]["exp_avg"] = saved["state"][0]["exp_avg"] + 1
    original = fake.reach

    def full_disk(what):
        if what == "scatter":
            raise OutOfSpace("the disk is full")
        original(what)

    fake.reach = full_disk
    with pytest.raises(OutOfSpace):
        optimizer.load_state_dict(saved)
    fake.reach = original
    assert len(fake.tables) == 1
    assert torch.equal(moments(optimizer)[0], before[0])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda sd: sd["state"][0].update(exp_avg=torch.zeros(10, 3)), r"\(10, 3\).*\(10, 4\)"),
        (lambda sd: sd["state"][0].pop("exp_avg_sq"), "lacks"),
        (lambda sd: sd["state"][0].update(step=-1), "step must be >= 0"),
        (lambda sd: sd["state"].update({0: 3}), "must be a dict"),
        (lambda sd: sd["param_groups"].append(dict(sd["param_groups"][0])), "different number"),
        (lambda sd: sd["param_groups"][0]["params"].append(1), "doesn't match the size"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused_whole(fake, change, text):
    module, optimizer = trained(fake)
    saved = copy.deepcopy(optimizer.state_dict())
    change(saved)
    with pytest.raises(ValueError, match=text):
        optimizer.load_state_dict(saved)
    assert optimizer.state[module.weight]["step"] == 3
    assert len(fake.tables) == 1


def test_live_state_of_another_optimizer_is_never_a_silent_fresh_start(fake):
    module, optimizer = trained(fake)
    groups = optimizer.state_dict()["param_groups"]
    saved = {"state": {0: dict(optimizer.state[module.weight])}, "param_groups": groups}
    other = make(copy.deepcopy(module).parameters())
    with pytest.raises(SnapshotNotFound, match="step 3"):
        other.load_state_dict(saved)


def test_parameters_in_another_order_are_refused_by_name(fake):
    model = nn.ModuleDict({"a": embedding(seed=1), "b": embedding(seed=2)})
    saved = make(list(model.named_parameters())).state_dict()
    other = make(list(model.named_parameters())[::-1])
    with pytest.raises(ValueError, match=r"\['a.weight', 'b.weight'\].*\['b.weight', 'a.weight'\]"):
        other.load_state_dict(saved)


def test_other_names_of_as_many_parameters_are_taken_by_position(fake):
    saved = make([("old", embedding().weight)]).state_dict()
    optimizer = make([("new", embedding().weight)])
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["param_names"] == ["old"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_moments_keep_their_precision_through_save_and_load(fake, dtype):
    module, optimizer = trained(fake, dtype=dtype)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = make(copy.deepcopy(module).parameters())
    other.load_state_dict(saved)
    for ours, theirs in zip(moments(other), moments(optimizer), strict=True):
        assert ours.dtype == (torch.float64 if dtype is torch.float64 else torch.float32)
        assert torch.equal(ours, theirs)


def test_tensor_steps_of_other_optimizers_become_ints(fake):
    module, optimizer = trained(fake)
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = torch.tensor(3.0)
    optimizer.load_state_dict(saved)
    assert type(optimizer.state[module.weight]["step"]) is int


def test_a_step_count_without_moments_needs_no_table(fake):
    module = embedding()
    optimizer = make(module.parameters())
    zeros = torch.zeros(10, 4)
    optimizer.load_state_dict(
        {
            "state": {0: {"step": 4, "exp_avg": zeros, "exp_avg_sq": zeros}},
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )
    assert fake.log == []
    step_rows(optimizer, module.weight, [1], [1.0])
    assert optimizer.state[module.weight]["step"] == 5


def test_state_dict_completes_a_pending_step_first(fake):
    module, optimizer = trained(fake)
    fake.lose_replies = 1
    with pytest.raises(RuntimeError):
        step_rows(optimizer, module.weight, [2], [1.0])
    assert optimizer.state_dict()["state"][0]["step"] == 4


def test_hooks_see_and_may_replace_state_dicts(fake):
    _, optimizer = trained(fake)
    seen = []
    optimizer.register_state_dict_pre_hook(lambda opt: seen.append("pre"))
    optimizer.register_state_dict_post_hook(lambda opt, sd: {**sd, "extra": 1})
    assert optimizer.state_dict()["extra"] == 1
    optimizer.register_load_state_dict_pre_hook(lambda opt, sd: seen.append(sd.pop("extra")))
    optimizer.register_load_state_dict_post_hook(lambda opt: seen.append("post"))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert seen == ["pre", "pre", 1, "post"]
    assert "extra" in saved


def test_state_of_a_parameter_outside_all_groups_is_an_error_with_a_remedy(fake):
    _, optimizer = trained(fake)
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.zeros(10, 4))]
    with pytest.raises(ValueError, match="in no group"):
        optimizer.state_dict()


def test_saved_tensors_do_not_follow_later_steps(fake):
    module, optimizer = trained(fake)
    saved = optimizer.state_dict()["state"][0]
    kept = saved["exp_avg"].clone()
    step_rows(optimizer, module.weight, [1], [50.0])
    assert torch.equal(saved["exp_avg"], kept)
    assert saved["step"] == 3


def test_params_with_and_without_state_keep_their_positions(fake):
    model = nn.ModuleList([embedding(seed=seed) for seed in range(3)])
    optimizer = make(model.parameters())
    for index, value in ((0, 1.0), (2, 3.0)):
        sparse_grad(model[index].weight, [1], [value])
    optimizer.step()
    saved = optimizer.state_dict()
    assert list(saved["state"]) == [0, 2]
    other = make(copy.deepcopy(model).parameters())
    other.load_state_dict(saved)
    got = other.state_dict()["state"]
    assert {k: v["exp_avg"][1, 0].item() for k, v in got.items()} == pytest.approx({0: 0.1, 2: 0.3})
