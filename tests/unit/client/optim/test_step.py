"""What one step() does, and what it leaves alone."""

import copy
import math

import pytest
import torch
from torch import nn

import momentd
from momentd.errors import DaemonUnavailable, OutOfSpace, RowOutOfRange
from tests.support.optim import embedding, moments, sparse_grad, step_rows, twin


def test_one_step_is_one_request_over_all_tables(fake):
    model = nn.ModuleList([embedding(seed=seed) for seed in range(3)])
    optimizer = momentd.SparseAdam(model.parameters())
    for param in model.parameters():
        sparse_grad(param, [1, 2], [1.0, 2.0])
    optimizer.step()
    assert fake.updates == 1
    assert [table.update_number for table in fake.tables.values()] == [1, 1, 1]


def test_hyper_parameters_are_read_from_their_group_at_every_step(fake):
    one, two = embedding(seed=1), embedding(seed=2)
    optimizer = momentd.SparseAdam([{"params": one.weight, "lr": 0.1}, {"params": two.weight}])
    optimizer.param_groups[1]["lr"] = torch.tensor(0.01)
    before = [one.weight.detach().clone(), two.weight.detach().clone()]
    sparse_grad(one.weight, [0], [1.0])
    sparse_grad(two.weight, [0], [1.0])
    optimizer.step()
    moved = [(old - e.weight)[0, 0].item() for old, e in zip(before, (one, two), strict=True)]
    assert moved == pytest.approx([0.1, 0.01], rel=1e-4)


@pytest.mark.parametrize(
    ("key", "value"), [("lr", math.nan), ("lr", -1.0), ("betas", (0.9, 2.0)), ("eps", math.inf)]
)
def test_bad_values_set_later_are_refused_before_anything_is_sent(fake, key, value):
    module = embedding()
    optimizer = momentd.SparseAdam(module.parameters())
    optimizer.param_groups[0][key] = value
    with pytest.raises(ValueError, match=key):
        step_rows(optimizer, module.weight, [1], [1.0])
    assert fake.log == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_state_dtype_follows_the_parameter_unless_said(fake, dtype):
    module = embedding(dtype=dtype)
    plain = momentd.SparseAdam(module.parameters())
    wide = momentd.SparseAdam(module.parameters(), state_dtype=torch.float64)
    for optimizer in (plain, wide):
        step_rows(optimizer, module.weight, [1], [1.0])
    own, said = (table.fields["exp_avg"].dtype.name for table in fake.tables.values())
    assert own == ("float64" if dtype is torch.float64 else "float32")
    assert said == "float64"


def test_closure_runs_with_gradients_and_its_loss_comes_back(fake):
    module = embedding()
    optimizer = momentd.SparseAdam(module.parameters())

    def closure():
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = module(torch.tensor([1])).sum()
        loss.backward()
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    assert loss.requires_grad
    assert optimizer.state[module.weight]["step"] == 1


def test_a_parameter_without_gradient_gets_no_state(fake):
    module = embedding()
    optimizer = momentd.SparseAdam(module.parameters())
    optimizer.step()
    assert len(optimizer.state) == 0
    assert fake.log == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_live_state_has_the_saved_keys_and_no_moments(fake, dtype):
    module = embedding(dtype=dtype)
    optimizer = momentd.SparseAdam(module.parameters(), checkpoint="full")
    step_rows(optimizer, module.weight, [1], [1.0])
    entry = optimizer.state[module.weight]
    assert type(entry) is dict
    assert list(entry) == list(optimizer.state_dict()["state"][0])
    assert type(entry["step"]) is int
    for name in ("exp_avg", "exp_avg_sq"):
        assert entry[name].shape == (0,)
        assert entry[name].device == module.weight.device
        assert entry[name].dtype == (torch.float64 if dtype is torch.float64 else torch.float32)


def test_a_refused_update_changes_nothing_and_the_next_one_works(fake):
    module, optimizer, other, reference = twin(embedding(), lr=0.1)
    step_rows(optimizer, module.weight, [1], [1.0])
    after = module.weight.detach().clone()
    fake.refuse = [OutOfSpace("the disk is full")]
    with pytest.raises(OutOfSpace):
        step_rows(optimizer, module.weight, [1], [1.0])
    assert torch.equal(module.weight, after)
    assert optimizer.state[module.weight]["step"] == 1
    step_rows(optimizer, module.weight, [1], [2.0])
    for value in (1.0, 2.0):
        step_rows(reference, other.weight, [1], [value])
    torch.testing.assert_close(module.weight, other.weight, rtol=1e-6, atol=1e-6)


def test_the_daemons_refusal_of_the_update_itself_is_final(fake):
    module = embedding()
    optimizer = momentd.SparseAdam(module.parameters())
    step_rows(optimizer, module.weight, [1], [1.0])
    before = module.weight.detach().clone()
    module.weight.grad = torch.sparse_coo_tensor([[1, 3]], torch.ones(2, 4), (10, 4))
    module.weight.grad._indices()[0, 1] = 10
    with pytest.raises(RowOutOfRange, match="row 10 at position 1"):
        optimizer.step()
    assert optimizer._pending is None
    assert torch.equal(module.weight, before)
    step_rows(optimizer, module.weight, [1], [1.0])
    assert optimizer.state[module.weight]["step"] == 2


def test_a_lost_reply_is_fetched_by_the_next_call_and_applied_once(fake):
    module, optimizer, other, reference = twin(embedding(), lr=0.1)
    step_rows(optimizer, module.weight, [1], [1.0])
    fake.lose_replies = 1
    with pytest.raises(DaemonUnavailable):
        step_rows(optimizer, module.weight, [1, 2], [1.0, 3.0])
    assert optimizer.state[module.weight]["step"] == 1
    optimizer.synchronize()
    assert optimizer.state[module.weight]["step"] == 2
    for ids, values in (([1], [1.0]), ([1, 2], [1.0, 3.0])):
        step_rows(reference, other.weight, ids, values)
    torch.testing.assert_close(module.weight, other.weight, rtol=1e-6, atol=1e-6)
    assert fake.updates == 2


def test_a_daemon_that_is_away_gets_the_step_when_it_is_back(fake):
    module, optimizer, other, reference = twin(embedding(), lr=0.1)
    step_rows(optimizer, module.weight, [1], [1.0])
    real_new = fake.reach

    def gone_after_room(what):
        real_new(what)
        if what == "new_update":
            fake.down = True

    fake.reach = gone_after_room
    with pytest.raises(DaemonUnavailable):
        step_rows(optimizer, module.weight, [1], [5.0])
    with pytest.raises(DaemonUnavailable):
        optimizer.step()
    fake.reach, fake.down = real_new, False
    state = optimizer.full_state_dict()["state"][0]
    for value in (1.0, 5.0):
        step_rows(reference, other.weight, [1], [value])
    assert state["step"] == 2
    torch.testing.assert_close(module.weight, other.weight, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(state["exp_avg"], reference.state[other.weight]["exp_avg"])


@pytest.mark.parametrize("rows", [1, 3, 1000])
def test_results_in_ranges_give_the_same_weights(fake, rows):
    fake.progress_rows = rows
    module, optimizer, other, reference = twin(embedding(rows=50), lr=0.1)
    for seed in range(5):
        ids = torch.randint(0, 50, (20,), generator=torch.Generator().manual_seed(seed))
        step_rows(optimizer, module.weight, ids, ids + 1.0)
        step_rows(reference, other.weight, ids, ids + 1.0)
    torch.testing.assert_close(module.weight, other.weight, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(), (1,), (5,), (5, 1), (5, 3), (5, 3, 2)])
def test_element_sparse_gradients_of_any_shape_follow_torch(fake, shape):
    start = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    optimizers = [
        momentd.SparseAdam([params[0]], lr=0.1),
        torch.optim.SparseAdam([params[1]], lr=0.1),
    ]
    for seed in range(6):
        grad = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        grad = torch.where(grad.abs() < 0.5, 0, grad).to_sparse()
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = grad.clone()
            optimizer.step()
    torch.testing.assert_close(params[0], params[1], rtol=1e-6, atol=1e-6)


def test_non_contiguous_parameters_follow_torch(fake):
    start = torch.randn(4, 6)
    params = [nn.Parameter(start.clone().t()) for _ in range(2)]
    optimizers = [
        momentd.SparseAdam([params[0]], lr=0.1),
        torch.optim.SparseAdam([params[1]], lr=0.1),
    ]
    for param, optimizer in zip(params, optimizers, strict=True):
        step_rows(optimizer, param, [5, 1, 5], [1.0, 2.0, -3.0])
    assert not params[0].is_contiguous()
    torch.testing.assert_close(params[0], params[1])


@pytest.mark.parametrize("shape", [(0, 4), (5, 0), (0,)])
def test_parameters_without_elements_count_steps_and_need_no_daemon(fake, shape):
    param = nn.Parameter(torch.zeros(shape))
    optimizer = momentd.SparseAdam([param])
    param.grad = torch.zeros(shape).to_sparse(1)
    optimizer.step()
    assert optimizer.state[param]["step"] == 1
    assert optimizer.state_dict()["state"][0]["snapshot"] == 0
    assert optimizer.full_state_dict()["state"][0]["exp_avg"].shape == shape
    assert fake.log == []


def test_moving_an_entry_moves_the_table(fake):
    module = embedding()
    optimizer = momentd.SparseAdam(module.parameters())
    step_rows(optimizer, module.weight, [1], [1.0])
    old, new = module.weight, nn.Parameter(module.weight.detach().clone())
    optimizer.param_groups[0]["params"] = [new]
    optimizer.state[new] = optimizer.state.pop(old)
    del old, module.weight
    step_rows(optimizer, new, [1], [1.0])
    assert optimizer.state[new]["step"] == 2
    assert len(fake.tables) == 1


def test_a_missing_entry_means_a_fresh_table_and_the_old_one_goes(fake):
    module = embedding()
    optimizer = momentd.SparseAdam(module.parameters())
    step_rows(optimizer, module.weight, [1], [1.0])
    (old,) = fake.tables
    del optimizer.state[module.weight]
    step_rows(optimizer, module.weight, [1], [1.0])
    assert optimizer.state[module.weight]["step"] == 1
    assert old not in fake.tables
    assert len(fake.tables) == 1


def test_state_in_torchs_layout_that_a_script_put_there_is_used(fake):
    module, optimizer, other, reference = twin(embedding(), lr=0.1)
    for opt, param in ((optimizer, module.weight), (reference, other.weight)):
        opt.state[param] = {
            "step": 5,
            "exp_avg": torch.full_like(param, 0.5),
            "exp_avg_sq": torch.full_like(param, 0.25),
        }
        step_rows(opt, param, [3], [2.0])
    torch.testing.assert_close(module.weight, other.weight)
    assert torch.equal(moments(optimizer)[1], reference.state[other.weight]["exp_avg_sq"])


def test_hooks_run_around_a_step(fake):
    module = embedding()
    optimizer = momentd.SparseAdam(module.parameters())
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))
    step_rows(optimizer, module.weight, [1], [1.0])
    assert seen == ["pre", "post"]


def test_maximize_mirrors_minimize(fake):
    up, down = embedding(), embedding()
    start = up.weight.detach().clone()
    step_rows(momentd.SparseAdam(up.parameters(), maximize=True), up.weight, [1], [2.0])
    step_rows(momentd.SparseAdam(down.parameters()), down.weight, [1], [2.0])
    torch.testing.assert_close(up.weight - start, start - down.weight)


def test_repr_shows_groups_run_tables_and_daemon(fake):
    module = embedding()
    optimizer = momentd.SparseAdam(module.parameters(), lr=0.25, run="exp-7")
    step_rows(optimizer, module.weight, [1], [1.0])
    text = repr(optimizer)
    assert text.startswith("SparseAdam (\nParameter Group 0\n")
    assert "lr: 0.25" in text
    assert "momentd: run 'exp-7', 1 table, daemon fake:" in text


def test_close_drops_tables_and_a_later_step_starts_afresh(fake):
    module = embedding()
    optimizer = momentd.SparseAdam(module.parameters())
    step_rows(optimizer, module.weight, [1], [1.0])
    optimizer.close()
    assert fake.tables == {}
    step_rows(optimizer, module.weight, [1], [1.0])
    assert optimizer.state[module.weight]["step"] == 1


def test_a_step_in_mid_backward_hook_equals_a_step_after(fake):
    module = embedding()
    plain = copy.deepcopy(module)
    in_backward = momentd.SparseAdam(module.parameters())

    def step_now(param):
        in_backward.step()
        param.grad = None

    module.weight.register_post_accumulate_grad_hook(step_now)
    after = momentd.SparseAdam(plain.parameters())
    for _ in range(3):
        module(torch.tensor([1, 2])).sum().backward()
        after.zero_grad()
        plain(torch.tensor([1, 2])).sum().backward()
        after.step()
    assert torch.equal(module.weight, plain.weight)
