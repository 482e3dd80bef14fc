"""adamw_dw where torch.optim.AdamW stood: groups and state edited between steps, torch's options, scalers and hooks."""

import copy
import warnings

import pytest
import torch
from torch import nn

from deepwell.errors import ConfigError
from deepwell.train.adamw.optimizer import AdamWDW

BF16 = torch.bfloat16


def ours(params, **options):
    return AdamWDW(params, **{"moments": None, "stochastic_rounding": False, **options})


def parameters(count=4, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(5, 3 + i, generator=generator).to(dtype)) for i in range(count)]


def take_steps(optimizer, count=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        for group in optimizer.param_groups:
            for param in group["params"]:
                if param.requires_grad:
                    param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


def replace_parameter(optimizer, params):
    params[0] = nn.Parameter(torch.full((5, 3), 0.5))
    optimizer.param_groups[0]["params"][0] = params[0]


def move_parameter(optimizer, params):
    groups = optimizer.param_groups
    groups[1]["params"].insert(0, groups[0]["params"].pop())


def change_options(optimizer, params):
    optimizer.param_groups[0].update(lr=0.2, betas=(0.5, 0.9), eps=1e-2, weight_decay=0.3)
    optimizer.param_groups[1]["maximize"] = True


def add_group(optimizer, params):
    params.append(nn.Parameter(torch.ones(7)))
    optimizer.add_param_group({"params": [params[-1]], "lr": 0.5})


def remove_group(optimizer, params):
    optimizer.param_groups.pop(0)


def freeze_and_thaw(optimizer, params):
    params[0].requires_grad_(False)
    params[0].grad = None
    take_steps(optimizer, 1, seed=7)
    params[0].requires_grad_(True)


def clear_state(optimizer, params):
    optimizer.state.clear()


def replace_moments(optimizer, params):
    for state in optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])


def deep_copy(optimizer, params):
    # The copy has parameters of its own, which nobody looks at: torch's and ours must both survive it.
    take_steps(copy.deepcopy(optimizer), 1)


EDITS = (
    replace_parameter,
    move_parameter,
    change_options,
    add_group,
    remove_group,
    freeze_and_thaw,
    clear_state,
    replace_moments,
    deep_copy,
)


@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
def test_follows_torch_through_an_edit_between_steps(edit):
    results = []
    for kind in (ours, torch.optim.AdamW):
        params = parameters()
        optimizer = kind([{"params": params[:2]}, {"params": params[2:], "lr": 0.05}], lr=0.1)
        take_steps(optimizer)
        edit(optimizer, params)
        take_steps(optimizer, seed=1)
        results.append(params)
    for mine, wanted in zip(*results, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


def test_clip_norm_set_after_the_first_step_clips_and_skips_stay_counted():
    (param,) = parameters(1)
    optimizer = ours([param], clip_norm=1e3)
    param.grad = torch.full_like(param, torch.inf)
    optimizer.step()
    optimizer.param_groups[0].update(clip_norm=1e-3, eps=1.0, weight_decay=0.0, lr=1.0)
    before = param.detach().clone()
    param.grad = torch.full_like(param, 100.0)
    optimizer.step()
    assert float((param - before).detach().abs().max()) < 1e-3
    assert optimizer.num_skipped == 1
    optimizer.param_groups[0]["clip_norm"] = -1.0
    with pytest.raises(ConfigError, match="clip_norm must be positive"):
        optimizer.step()


def test_moments_and_master_weights_changed_later_take_the_old_numbers_along():
    (param,) = parameters(1, BF16)
    optimizer = ours([param], moments="fp32")
    take_steps(optimizer)
    known = {key: optimizer.state[param][key].clone() for key in ("exp_avg", "exp_avg_sq")}
    options = optimizer.param_groups[0]
    for moments, tolerance in (("fp8", 2**-4), ("bf16", 2**-4), ("fp32", 2**-4)):
        options.update(
            moments=moments, master_weights="fp32" if moments == "fp8" else None, lr=0.0, betas=(1 - 2e-16,) * 2
        )
        take_steps(optimizer, 1)
        state = optimizer.state[param]
        assert ("master" in state, "exp_avg_scales" in state) == (moments == "fp8",) * 2
        if moments != "fp8":
            for key, value in known.items():
                torch.testing.assert_close(
                    state[key].float(), value, rtol=2 * tolerance, atol=0.02 * float(value.max())
                )


def test_a_frozen_parameter_has_no_state():
    frozen, trained = parameters(2)
    frozen.requires_grad_(False)
    optimizer = ours([frozen, trained])
    take_steps(optimizer)
    assert list(optimizer.state) == [trained]


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"fused": False, "capturable": True}], ids=str)
def test_takes_options_that_choose_among_torchs_implementations(options):
    optimizer = ours(parameters(), **options)
    take_steps(optimizer, 1)
    assert {**optimizer.param_groups[0], **options} == optimizer.param_groups[0]
    assert set(torch.optim.AdamW(parameters()).param_groups[0]) - set(optimizer.param_groups[0]) <= {
        "decoupled_weight_decay"
    }


@pytest.mark.parametrize(
    "options, message",
    [
        ({"amsgrad": True}, "amsgrad=True; adamw_dw keeps no maximum"),
        ({"differentiable": True}, "differentiable=True; the fused update records no gradient"),
        ({"fused": True, "foreach": True}, "fused and foreach are both True"),
    ],
    ids=str,
)
def test_refuses_what_it_cannot_follow_and_says_why(options, message):
    with pytest.raises(ConfigError, match=message):
        AdamWDW(parameters(), **options)
    optimizer = AdamWDW(parameters())
    optimizer.param_groups[0].update(options)
    with pytest.raises(ConfigError, match=message):
        optimizer.step()


def test_betas_and_lr_may_be_tensors():
    tensors = {"lr": torch.tensor(0.1), "betas": (torch.tensor(0.5), torch.tensor(0.75))}
    results = []
    for options in (tensors, {"lr": 0.1, "betas": (0.5, 0.75)}):
        params = parameters()
        take_steps(ours(params, **options))
        results.append(params)
    for mine, wanted in zip(*results, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize("source, target", [(ours, torch.optim.AdamW), (torch.optim.AdamW, ours)])
def test_state_dicts_go_over_to_torch_and_back(source, target, dtype):
    whole = parameters(dtype=dtype)
    whole_optimizer = source(whole, lr=0.01)
    take_steps(whole_optimizer, 2)
    half = [nn.Parameter(param.detach().clone()) for param in whole]
    other = target(half, lr=1.0)
    other.load_state_dict(copy.deepcopy(whole_optimizer.state_dict()))
    for optimizer in (whole_optimizer, other):
        take_steps(optimizer, 2, seed=1)
    assert float(other.state[half[0]]["step"]) == 4
    # Two roundings of bf16, once in each optimizer.
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 2**-9}
    for mine, wanted in zip(half, whole, strict=True):
        torch.testing.assert_close(mine, wanted, **tolerance)


def test_loading_torchs_state_keeps_our_options_and_rounds_moments_to_them():
    params = parameters(2, BF16)
    theirs = torch.optim.AdamW([nn.Parameter(param.detach().float()) for param in params])
    take_steps(theirs)
    optimizer = AdamWDW([{"params": params[:1], "moments": "fp8"}, {"params": params[1:]}], master_weights="fp32")
    saved = theirs.state_dict()
    group = saved["param_groups"][0]
    saved["param_groups"] = [{**group, "params": [0]}, {**group, "params": [1]}]
    optimizer.load_state_dict(saved)
    take_steps(optimizer, 1)
    assert [optimizer.state[param]["exp_avg"].dtype for param in params] == [torch.float8_e4m3fn, BF16]
    assert all(optimizer.state[param]["master"].dtype == torch.float32 for param in params)


def test_a_grad_scaler_scales_steps_and_leaves_out_those_with_infinities():
    results = []
    for kind in (ours, torch.optim.AdamW):
        params = parameters(2)
        optimizer, scaler = kind(params, lr=0.1), torch.amp.GradScaler("cpu", init_scale=8.0)
        for factor in (1.0, float("inf"), 2.0):
            optimizer.zero_grad()
            scaler.scale(sum((param * factor).square().sum() for param in params)).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append([*params, torch.tensor(scaler.get_scale())])
    for mine, wanted in zip(*results, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


def test_hooks_run_around_a_step_and_schedulers_do_not_warn():
    (param,) = parameters(1)
    optimizer, seen = ours([param]), []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4)
        take_steps(optimizer, 1)
        scheduler.step()
    assert seen == ["before", "after"]


def test_a_step_moves_the_version_of_what_it_wrote(interpreting):
    trained, untouched = parameters(2)
    optimizer = ours([trained, untouched])
    with interpreting():
        for _ in range(2):
            trained.grad = torch.ones_like(trained)
            before = trained._version, untouched._version
            optimizer.step()
            assert trained._version > before[0]
            assert untouched._version == before[1]
        loss = (trained * trained).sum()
        optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
