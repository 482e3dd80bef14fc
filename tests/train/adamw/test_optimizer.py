"""adamw_dw as a drop-in AdamW: parity with torch, exact resume, rounding that matters, and refusals by name."""

import copy
import math

import pytest
import torch

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.metrics import assert_bitwise_equal, assert_no_worse_than
from deepwell.train.adamw.optimizer import MOMENTS, OPTIMIZERS, AdamWDW
from kernel_fixtures import GPU

BF16 = torch.bfloat16
SHAPES = [(37, 5), (64,), (3, 4, 5), ()]


@pytest.fixture(params=["cpu", GPU])
def device(request):
    """As users have it: on a CPU the reference runs. The kernels themselves are tested in test_update.py."""
    return request.param


def parameters(dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device, dtype)) for shape in SHAPES]


def set_grads(params, step, scale=0.01):
    generator = torch.Generator().manual_seed(100 + step)
    for param in params:
        param.grad = (torch.randn(param.shape, generator=generator) * scale).to(param.device, param.dtype)


def train(optimizer, params, steps, start=0):
    for step in range(start, start + steps):
        set_grads(params, step)
        optimizer.step()
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize(
    "options",
    [{}, {"weight_decay": 0.0}, {"maximize": True}, {"betas": (0.8, 0.95), "eps": 1e-3}, {"lr": torch.tensor(3e-3)}],
    ids=str,
)
def test_follows_torch_over_many_steps_in_fp32(options, device):
    options = {"lr": 1e-2, **options}
    ours, theirs, exact = parameters(device=device), parameters(device=device), parameters(torch.float64, device)
    got = train(AdamWDW(ours, moments="fp32", **options), ours, 60)
    plain = {**options, "lr": float(options["lr"])}
    torch_same = train(torch.optim.AdamW(theirs, **plain), theirs, 60)
    for step in range(60):
        set_grads(theirs, step)
        for param, source in zip(exact, theirs, strict=True):
            param.grad = source.grad.double()
        if step == 0:
            reference = torch.optim.AdamW(exact, **plain)
        reference.step()
    for mine, same, wanted in zip(got, torch_same, exact, strict=True):
        assert_no_worse_than(mine, same, wanted.detach())


def test_follows_torch_in_bf16_rounded_to_nearest(device):
    # torch keeps bf16 moments of bf16 parameters; both are compared with fp32 moments and parameters.
    ours, theirs, exact = parameters(BF16, device), parameters(BF16, device), parameters(BF16, device)
    exact = [torch.nn.Parameter(param.detach().float()) for param in exact]
    got = train(AdamWDW(ours, lr=1e-2, moments="bf16", stochastic_rounding=False), ours, 20)
    torch_same = train(torch.optim.AdamW(theirs, lr=1e-2), theirs, 20)
    optimizer = torch.optim.AdamW(exact, lr=1e-2)
    for step in range(20):
        set_grads(theirs, step)
        for param, source in zip(exact, theirs, strict=True):
            param.grad = source.grad.float()
        optimizer.step()
    flat = [torch.cat([p.detach().float().flatten() for p in group]) for group in (got, torch_same, exact)]
    assert_no_worse_than(*flat)


def test_updates_below_half_a_step_move_bf16_weights_only_at_random(device):
    # Weights near 1 have bf16 steps of 2^-7; an update of 1e-4 is a seventieth of that. 400 of them go 0.04.
    moved = {}
    for is_random in (True, False):
        param = torch.nn.Parameter(torch.ones(4096, dtype=BF16, device=device))
        optimizer = AdamWDW([param], lr=1e-4, weight_decay=0.0, stochastic_rounding=is_random)
        for _ in range(400):
            param.grad = torch.ones_like(param)
            optimizer.step()
        moved[is_random] = float((1 - param.detach().float()).mean())
    assert moved[False] == 0.0
    assert moved[True] == pytest.approx(0.04, rel=0.05)


def test_a_bf16_regression_converges_at_random_and_stalls_to_nearest():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(256, 16, generator=generator)
    target = x @ torch.linspace(0.5, 2.0, 16)
    losses = {}
    for is_random in (True, False):
        weight = torch.nn.Parameter(torch.full((16,), 1.25, dtype=BF16))
        optimizer = AdamWDW([weight], lr=2e-3, weight_decay=0.0, moments="fp32", stochastic_rounding=is_random)
        for _ in range(500):
            optimizer.zero_grad()
            loss = (x @ weight.float() - target).square().mean()
            loss.backward()
            optimizer.step()
        losses[is_random] = float(loss.detach())
    assert losses[True] < losses[False] / 20


OPTIONS = [
    {"moments": "bf16"},
    {"moments": "fp8", "clip_norm": 0.05},
    {"moments": "fp32", "master_weights": "fp32"},
    {"moments": "fp8", "master_weights": "fp32"},
    {"moments": None},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_resumed_run_is_bit_equal(options, device, tmp_path):
    whole = parameters(BF16, device)
    want = train(AdamWDW(whole, lr=1e-2, seed=11, **options), whole, 6)
    first = parameters(BF16, device)
    optimizer = AdamWDW(first, lr=1e-2, seed=11, **options)
    train(optimizer, first, 3)
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    second = [torch.nn.Parameter(param.detach().clone()) for param in first]
    # Another seed and lr here: the saved ones count.
    resumed = AdamWDW(second, lr=1.0, seed=12, **options)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    got = train(resumed, second, 3, start=3)
    for mine, wanted in zip(got, want, strict=True):
        assert_bitwise_equal(mine, wanted, "param")
    for param, other in zip(second, whole, strict=True):
        assert int(resumed.state[param]["step"]) == 6 and param.shape == other.shape


def test_loading_keeps_the_dtype_of_every_state(device):
    params = parameters(BF16, device)
    optimizer = AdamWDW(params, moments="fp8", master_weights="fp32")
    train(optimizer, params, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    dtypes = {key: value.dtype for key, value in optimizer.state[params[0]].items()}
    assert dtypes["exp_avg"] == dtypes["exp_avg_sq"] == torch.float8_e4m3fn
    assert dtypes["master"] == dtypes["exp_avg_scales"] == torch.float32
    assert dtypes["step"] == torch.int64
    # What is loaded is a copy: training on does not write into the checkpoint.
    before = saved["state"][0]["master"].clone()
    train(optimizer, params, 1, start=1)
    assert_bitwise_equal(saved["state"][0]["master"], before, "saved master")


def test_another_seed_rounds_otherwise_and_the_same_one_alike(device):
    def run(seed):
        params = parameters(BF16, device)
        return train(AdamWDW(params, lr=1e-3, seed=seed), params, 3)[0]

    assert_bitwise_equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_groups_have_their_own_options(device):
    params = parameters(BF16, device)
    groups = [
        {"params": params[:1], "lr": 0.0, "weight_decay": 0.0},
        {"params": params[1:2], "moments": "fp32", "master_weights": "fp32"},
        {"params": params[2:]},
    ]
    optimizer = AdamWDW(groups, lr=1e-2, moments="fp8")
    before = params[0].detach().clone()
    train(optimizer, params, 2)
    assert_bitwise_equal(params[0].detach(), before, "lr 0")
    assert optimizer.state[params[1]]["exp_avg"].dtype == torch.float32
    assert optimizer.state[params[2]]["exp_avg"].dtype == torch.float8_e4m3fn


def test_mixed_dtypes_layouts_and_missing_gradients_work_together(device):
    transposed = torch.nn.Parameter(torch.randn(6, 4, device=device).T)
    params = [*parameters(BF16, device)[:1], *parameters(torch.float32, device)[1:2], transposed]
    frozen = torch.nn.Parameter(torch.ones(3, device=device))
    optimizer = AdamWDW([*params, frozen], lr=1e-2, moments="fp32")
    set_grads(params, 0)
    plain = torch.nn.Parameter(transposed.detach().clone().contiguous())
    plain.grad = transposed.grad.clone().contiguous()
    alone = AdamWDW([plain], lr=1e-2, moments="fp32")
    optimizer.step()
    alone.step()
    assert torch.equal(transposed.detach(), plain.detach())
    assert torch.equal(frozen.detach(), torch.ones(3, device=device))
    assert int(optimizer.state[frozen]["step"]) == 0


def test_a_closure_is_called_with_gradients_and_its_loss_returned(device):
    param = torch.nn.Parameter(torch.ones(8, device=device))
    optimizer = AdamWDW([param], lr=0.1, moments="fp32")

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 8.0
    assert float(optimizer.step(closure).detach()) < 8.0


def test_schedulers_and_a_tensor_lr_reach_the_update(device):
    steps = {}
    for name, lr in (("float", 0.1), ("tensor", torch.tensor(0.1, device=device))):
        param = torch.nn.Parameter(torch.ones(8, device=device))
        optimizer = AdamWDW([param], lr=lr, weight_decay=0.0, moments="fp32")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        values = []
        for _ in range(3):
            param.grad = torch.ones_like(param)
            optimizer.step()
            scheduler.step()
            values.append(float(param.detach()[0]))
        steps[name] = values
    # A constant gradient moves by lr itself: 0.1, 0.05, 0.025.
    assert steps["float"] == pytest.approx([0.9, 0.85, 0.825], rel=1e-6)
    assert steps["tensor"] == pytest.approx(steps["float"], rel=1e-6)


def test_clipping_agrees_with_torch(device):
    ours, theirs = parameters(device=device), parameters(device=device)
    optimizer = AdamWDW(ours, lr=1e-2, moments="fp32", clip_norm=0.1)
    torch_optimizer = torch.optim.AdamW(theirs, lr=1e-2)
    for step in range(10):
        set_grads(ours, step)
        set_grads(theirs, step)
        norm = torch.nn.utils.clip_grad_norm_(theirs, 0.1)
        torch_optimizer.step()
        optimizer.step()
        assert float(optimizer.grad_norm) == pytest.approx(float(norm), rel=1e-5)
    for mine, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


def test_a_step_with_a_nan_gradient_is_skipped_and_counted(device):
    params = parameters(BF16, device)
    optimizer = AdamWDW(params, lr=1e-2, clip_norm=1.0)
    before = train(optimizer, params, 1)
    set_grads(params, 1)
    params[1].grad[3] = math.nan
    optimizer.step()
    assert optimizer.num_skipped == 1
    for mine, wanted in zip(params, before, strict=True):
        assert_bitwise_equal(mine.detach(), wanted, "param")


def test_a_parameter_whose_storage_was_replaced_is_found_again(device):
    param = torch.nn.Parameter(torch.ones(32, device=device))
    optimizer = AdamWDW([param], lr=0.1, weight_decay=0.0, moments="fp32")
    param.grad = torch.ones_like(param)
    optimizer.step()
    param.data = torch.zeros(32, device=device)
    optimizer.step()
    assert float(param.detach()[0]) == pytest.approx(-0.1, rel=1e-5)


def test_is_registered_under_its_name():
    assert OPTIMIZERS["adamw_dw"] is AdamWDW


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lr": -1.0}, "lr must not be negative"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers"),
        ({"eps": -1e-8}, "eps must not be negative"),
        ({"moments": "fp16"}, f"moments must be one of {', '.join(MOMENTS)}"),
        ({"master_weights": "bf16"}, "master_weights must be 'fp32' or None"),
        ({"clip_norm": 0.0}, "clip_norm must be positive"),
    ],
    ids=str,
)
def test_refuses_a_wrong_option_by_name(options, message):
    with pytest.raises(ConfigError, match=message):
        AdamWDW(parameters(), **options)


def test_refuses_parameters_and_gradients_it_cannot_update():
    with pytest.raises(ConfigError, match=r"\['params'\]\[0\] has dtype torch.float16"):
        AdamWDW([torch.nn.Parameter(torch.zeros(4, dtype=torch.float16))])
    with pytest.raises(UnsupportedError, match="is complex"):
        AdamWDW([torch.nn.Parameter(torch.zeros(4, dtype=torch.complex64))])
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    optimizer = AdamWDW(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UnsupportedError, match="sparse=False"):
        optimizer.step()


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"exp_avg": torch.zeros(128)}, r"the state of parameter 0: exp_avg is \(128,\) on cpu, unlike"),
        ({"exp_avg_sq": torch.zeros(256).to(torch.float8_e4m3fn)}, "exp_avg_sq is float8_e4m3fn and has no scales"),
        ({"exp_avg_scales": torch.ones(2)}, "exp_avg_scales must be float32 and of float8_e4m3fn moments"),
        ({"master": torch.zeros(256, dtype=torch.bfloat16)}, "a master copy is float32"),
    ],
)
def test_refuses_a_loaded_state_that_is_not_its_parameters(changes, message):
    param = torch.nn.Parameter(torch.ones(256, dtype=torch.bfloat16))
    optimizer = AdamWDW([param], moments="fp32", master_weights="fp32")
    param.grad = torch.ones_like(param)
    optimizer.step()
    state = optimizer.state_dict()
    state["state"][0] |= changes
    optimizer.load_state_dict(state)
    with pytest.raises(ConfigError, match=message):
        optimizer.step()


def test_refuses_groups_that_disagree_on_what_is_one():
    first, second = parameters()[:2]
    with pytest.raises(ConfigError, match=r"clip_norm=2\.0 differs"):
        AdamWDW([{"params": [first]}, {"params": [second], "clip_norm": 2.0}], clip_norm=1.0)
