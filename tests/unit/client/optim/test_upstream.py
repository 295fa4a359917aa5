"""What torch's own optimizer tests ask of SparseAdam, asked of ours.

Written anew after the list of tests that apply to it; each optimizes 1-D, 2-D, contiguous and
strided parameters with sparse gradients that torch's tests use.
"""

import copy
import io

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import momentd

CONFIGS = [{}, {"lr": 0.01}, {"lr": torch.tensor(0.001)}, {"maximize": True}]
IDS = ["default", "lr", "tensor-lr", "maximize"]
NAMED = pytest.mark.parametrize("named", [False, True], ids=["unnamed", "named"])


def problem(strided=False, seed=0):
    """A linear map whose gradients are made sparse by hand; returns parameters and a closure."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(10, 5, 2, generator=generator)
    weight = nn.Parameter(base[..., 0] if strided else base[..., 0].contiguous())
    bias_base = torch.randn(10, 2, generator=generator)
    bias = nn.Parameter(bias_base[..., 0] if strided else bias_base[..., 0].contiguous())
    data = torch.randn(5, generator=generator)
    params = [weight, bias]

    def closure():
        for param in params:
            param.grad = None
        loss = (weight.mv(data) + bias).pow(2).sum()
        loss.backward()
        for param in params:
            param.grad = param.grad.to_sparse()
        return loss

    return params, closure


@pytest.mark.parametrize("kwargs", CONFIGS, ids=IDS)
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize(
    "schedulers",
    [
        (),
        (
            lambda o: lr_scheduler.StepLR(o, gamma=0.9, step_size=10),
            lr_scheduler.ReduceLROnPlateau,
        ),
    ],
    ids=["plain", "scheduled"],
)
def test_it_goes_in_the_right_direction(fake, kwargs, strided, schedulers):
    params, closure = problem(strided)
    optimizer = momentd.SparseAdam(params, **kwargs)
    made = [make(optimizer) for make in schedulers]
    first = closure().item()
    for _ in range(20):
        loss = optimizer.step(closure)
        for scheduler in made:
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(loss.detach())
            else:
                scheduler.step()
    last = closure().item()
    assert last > first if kwargs.get("maximize") else last < first


def test_groups_with_schedulers_go_in_the_right_direction(fake):
    params, closure = problem()
    optimizer = momentd.SparseAdam([{"params": [params[0]]}, {"params": [params[1]], "lr": 0.01}])
    made = [
        lr_scheduler.StepLR(optimizer, gamma=0.9, step_size=10),
        lr_scheduler.ReduceLROnPlateau(optimizer),
    ]
    first = closure().item()
    for _ in range(20):
        loss = optimizer.step(closure)
        made[0].step()
        made[1].step(loss.detach())
    assert closure().item() < first


def test_a_tensor_lr_follows_the_same_path_as_a_float(fake):
    runs = []
    for lr in (1e-3, torch.tensor(1e-3), torch.tensor([1e-3])):
        params, closure = problem()
        optimizer = momentd.SparseAdam(params, lr=lr)
        for _ in range(5):
            optimizer.step(closure)
        runs.append([param.detach() for param in params])
    for run in runs[1:]:
        for ours, first in zip(run, runs[0], strict=True):
            torch.testing.assert_close(ours, first, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("maximize", [False, True])
def test_rosenbrock_in_float64_with_uncoalesced_gradients(fake, maximize):
    """The sequence of torch's own, over 400 steps that touch one or both coordinates."""
    start = torch.tensor([1.5, 1.5], dtype=torch.float64)
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    kwargs = {"lr": 4e-2, "maximize": maximize}
    optimizers = [
        momentd.SparseAdam([params[0]], **kwargs),
        torch.optim.SparseAdam([params[1]], **kwargs),
    ]
    for number in range(400):
        for param, optimizer in zip(params, optimizers, strict=True):
            x, y = param.detach()
            grad = torch.stack([-400 * x * (y - x * x) - 2 * (1 - x), 200 * (y - x * x)])
            grad = -grad if maximize else grad
            where = torch.tensor([[0, 0, 1], [0, 1, 1], [0, 1, 0]][number % 3])
            split = torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)
            param.grad = torch.sparse_coo_tensor(where[None], grad[where] * split, (2,))
            optimizer.step()
    torch.testing.assert_close(params[0], params[1], rtol=1e-12, atol=1e-12)
    assert (params[0] - 1).norm() < (start - 1).norm()


def test_a_group_with_a_tiny_lr_does_not_move(fake):
    params, closure = problem()
    optimizer = momentd.SparseAdam([{"params": [params[0]]}, {"params": [params[1]], "lr": 1e-28}])
    before = [param.detach().clone() for param in params]
    for _ in range(5):
        optimizer.step(closure)
    assert not torch.equal(params[0], before[0])
    assert torch.equal(params[1], before[1])


def test_a_group_may_carry_weight_decay_as_torchs_may(fake):
    params, closure = problem()
    optimizer = momentd.SparseAdam([{"params": params, "weight_decay": 0.1}])
    optimizer.step(closure)
    assert optimizer.param_groups[0]["weight_decay"] == 0.1


def test_a_step_without_gradients_does_nothing_but_call_the_closure(fake):
    params, _ = problem()
    before = [param.detach().clone() for param in params]
    optimizer = momentd.SparseAdam(params)
    assert optimizer.step(lambda: torch.tensor([1.0])) == torch.tensor([1.0])
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))


def test_a_step_on_empty_gradients_changes_no_weight(fake):
    param = nn.Parameter(torch.randn(5, 1))
    before = param.detach().clone()
    optimizer = momentd.SparseAdam([param], lr=1e-5)
    param.grad = torch.sparse_coo_tensor(torch.empty(1, 0), torch.empty(0, 1), (5, 1))
    optimizer.step()
    assert torch.equal(param, before)
    assert optimizer.state[param]["step"] == 1


def test_it_can_be_printed(fake):
    params, _ = problem()
    text = repr(momentd.SparseAdam(params))
    assert "SparseAdam" in text
    assert "Parameter Group 0" in text


def given(params, named):
    return [(f"param{i}", param) for i, param in enumerate(params)] if named else params


@NAMED
@pytest.mark.parametrize("checkpoint", ["snapshot", "full"])
@pytest.mark.parametrize("kwargs", CONFIGS, ids=IDS)
def test_a_loaded_optimizer_goes_on_identically(fake, named, kwargs, checkpoint):
    kwargs = {**kwargs, "checkpoint": checkpoint}
    params, closure = problem()
    optimizer = momentd.SparseAdam(given(params, named), **kwargs)
    for _ in range(3):
        optimizer.step(closure)
    saved = copy.deepcopy(optimizer.state_dict())
    others, other_closure = problem()
    with torch.no_grad():
        for theirs, mine in zip(others, params, strict=True):
            theirs.copy_(mine)
    other = momentd.SparseAdam(given(others, named), **kwargs)
    other.load_state_dict(saved)
    for _ in range(10):
        optimizer.step(closure)
        other.step(other_closure)
        assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))
    equal_states(optimizer.state_dict(), other.state_dict())
    equal_states(optimizer.full_state_dict(), other.full_state_dict())
    # And with every group repeated.
    extra, _ = problem(seed=1)
    optimizer.add_param_group(
        {"params": [(f"x{i}", p) for i, p in enumerate(extra)] if named else extra}
    )
    assert len(optimizer.state_dict()["param_groups"]) == 2


def bits(value):
    """A tensor, or the digits of a number: ids have 128 bits."""
    return value if torch.is_tensor(value) else torch.tensor(list(str(value).encode()))


def equal_states(ours, theirs):
    assert ours["param_groups"] == theirs["param_groups"]
    assert ours["state"].keys() == theirs["state"].keys()
    for key, entry in ours["state"].items():
        assert entry.keys() == theirs["state"][key].keys()
        for name, value in entry.items():
            assert torch.equal(bits(value), bits(theirs["state"][key][name]))


@NAMED
@pytest.mark.parametrize("checkpoint", ["snapshot", "full"])
@pytest.mark.parametrize("kwargs", CONFIGS, ids=IDS)
def test_a_saved_file_loads_with_weights_only(fake, named, kwargs, checkpoint):
    kwargs = {**kwargs, "checkpoint": checkpoint}
    params, closure = problem()
    optimizer = momentd.SparseAdam(given(params, named), **kwargs)
    for _ in range(3):
        optimizer.step(closure)
    saved = optimizer.state_dict()
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    equal_states(torch.load(file, weights_only=True), saved)


def test_a_state_dict_with_plain_number_steps_loads(fake):
    params, closure = problem()
    optimizer = momentd.SparseAdam(params)
    optimizer.step(closure)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    optimizer.step(closure)
    assert {entry["step"] for entry in optimizer.state.values()} == {2}


def test_state_dict_hooks_may_put_other_things_into_state(fake):
    params, closure = problem()
    optimizer = momentd.SparseAdam(params)
    optimizer.step(closure)

    def before(opt):
        opt.state["ramen"] = "udon"

    handle = optimizer.register_state_dict_pre_hook(before)
    saved = optimizer.state_dict()
    assert saved["state"]["ramen"] == "udon"
    handle.remove()
    optimizer.load_state_dict(saved)
    assert optimizer.state["ramen"] == "udon"
    optimizer.step(closure)
    assert optimizer.state["ramen"] == "udon"


def test_load_hooks_run_in_their_order(fake):
    params, _ = problem()
    optimizer = momentd.SparseAdam(params, lr=0.5)
    seen = []

    def set_lr(lr):
        def hook(opt, state_dict):
            seen.append(lr)
            groups = [{**group, "lr": lr} for group in state_dict["param_groups"]]
            return {**state_dict, "param_groups": groups}

        return hook

    optimizer.register_load_state_dict_pre_hook(set_lr(0.2))
    optimizer.register_load_state_dict_pre_hook(set_lr(0.1), prepend=True)
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert seen == [0.1, 0.2]
    assert optimizer.param_groups[0]["lr"] == 0.2
    assert saved["param_groups"][0]["lr"] == 0.5


def test_global_step_hooks(fake):
    from torch.optim.optimizer import (
        register_optimizer_step_post_hook,
        register_optimizer_step_pre_hook,
    )

    params, closure = problem()
    optimizer = momentd.SparseAdam(params)
    seen = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("global pre")),
        register_optimizer_step_post_hook(lambda *_: seen.append("global post")),
        optimizer.register_step_pre_hook(lambda *_: seen.append("pre")),
        optimizer.register_step_post_hook(lambda *_: seen.append("post")),
    ]
    optimizer.step(closure)
    assert seen == ["global pre", "pre", "post", "global post"]
    for handle in handles:
        handle.remove()


def test_state_is_not_empty_after_a_step(fake):
    params, closure = problem()
    optimizer = momentd.SparseAdam(params)
    optimizer.step(closure)
    assert len(optimizer.state) == 2
    assert all(entry for entry in optimizer.state.values())
