"""Weights that travel as MXFP8: what the GEMMs read of them, which ones do, and that training is the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import Case, make_batch, make_model, make_optimizer, make_runner, parts, whole
from processes import run_cases
from safetensors.torch import load_file
from torch import Tensor
from trained import TrainerCase, fit

import deepwell as dw
from deepwell.errors import UnsupportedError
from deepwell.formats.elements import decode_e8m0
from deepwell.formats.quantize import quantize
from deepwell.formats.tensor import dequantize
from deepwell.planner.layout import Layout, Offload
from deepwell.train.feed import count_items
from deepwell.train.parallel.fp8_gather import _pack, _unpack, allows_fp8
from deepwell.train.parallel.shard import check_shardable


def rounded(x: Tensor, axis: int) -> Tensor:
    return dequantize(quantize(x, "mxfp8", axis=axis), x.dtype)


def scales(x: Tensor, axis: int) -> Tensor:
    """The scale of every number's block."""
    found = quantize(x, "mxfp8", axis=axis).scales
    assert found is not None
    each = decode_e8m0(found.view(torch.uint8)).repeat_interleave(32, 1)
    return each if axis else each.T


def gathered(x: Tensor) -> Tensor:
    """What FSDP2 makes of two shards of a weight."""
    sent = [_pack(shard.contiguous())(None, None, None, None, None)[0] for shard in x.chunk(2)]
    return _unpack(tuple(torch.cat(each) for each in zip(*sent, strict=True)), None, x.dtype)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["normal", "wide", "outliers"])
def test_the_forward_reads_what_it_would_round_to_anyway(dtype: torch.dtype, kind: str) -> None:
    torch.manual_seed(0)
    x = 0.02 * torch.randn(64, 256)
    if kind == "wide":
        x *= torch.exp2(torch.randint(-20, 20, x.shape).float())
    if kind == "outliers":
        x *= 1 + 1000 * (torch.rand_like(x) < 0.02)
    x = x.to(dtype)
    x[3, 32:64] = 0.0
    weight = gathered(x)
    # Forward, blocks along K: the very numbers, and rounding them once more changes nothing.
    assert torch.equal(weight, rounded(x, 1))
    assert torch.equal(rounded(weight, 1), weight)
    # Dgrad, blocks along N: the same but for numbers below 2^-6 of a scale, which are one step apart at most.
    wanted, found = rounded(x, 0), rounded(weight, 0)
    largest = torch.maximum(scales(x, 0), scales(x, 1))
    apart = (wanted.float() - found.float()).abs()
    assert not apart[x.float().abs() >= largest * 2.0**-6].any()
    assert (apart <= largest * 2.0**-9).all()
    assert (apart > 0).any() or kind == "normal"


def test_a_parameter_of_the_step_before_is_written_in_place_and_autograd_sees_no_change() -> None:
    torch.manual_seed(0)
    x = torch.randn(32, 64)
    out = torch.nn.Parameter(torch.empty(32, 64))
    before = out._version
    assert _unpack(_pack(x)(None, None, None, None, None)[0], None, torch.float32, out=out) is None
    assert torch.equal(out, rounded(x, 1)) and out._version == before


def test_which_linears_allow_it() -> None:
    low = "emulate:mxfp8"
    assert allows_fp8(f"{low}|{low}|bf16") and allows_fp8("mxfp8_native|mxfp8_native|mxfp8_native")
    others = (
        "",
        f"{low}|bf16|{low}",
        f"bf16|{low}|{low}",
        "fp8_row|fp8_row|fp8_row",
        "emulate:nvfp4|emulate:nvfp4|bf16",
    )
    assert not any(map(allows_fp8, others))


def test_what_it_does_not_go_with_is_refused() -> None:
    model = make_model("plain")
    engine = dw.compile(model, precision="mxfp8")
    check_shardable(engine, Layout(dp=2, sharding="zero3"), fp8_all_gather=True)
    for layout, message in (
        (Layout(dp=2, sharding="ddp"), "ddp gathers no weights"),
        (Layout(dp=2, pp=2, sharding="zero2"), "stages of pp 2 gather their weights once a step"),
        (Layout(dp=2, sharding="zero2", offload=Offload(optimizer=1.0)), "weights in host memory"),
    ):
        with pytest.raises(UnsupportedError, match=f"fp8_all_gather: {message}"):
            check_shardable(engine, layout, fp8_all_gather=True)
    kept = dw.compile(model, precision="mxfp8", cache_weights=True)
    with pytest.raises(UnsupportedError, match="fp8_all_gather: cache_weights=True"):
        check_shardable(kept, Layout(dp=2, sharding="zero2"), fp8_all_gather=True)


# ---- training ----


def run(case: Case) -> dict[str, Any]:
    """Four steps. In the third one linear is in bf16, as a fallback of the guard has it; evaluated before the last."""
    engine, runner = make_runner(case)
    optimizer = make_optimizer(case.optimizer, runner.parameters())
    first = "model.layers.0.mlp.up_proj"
    losses, grads, counts = [], {}, []
    for step in range(4):
        if step == 2:
            engine.deepwell.override(dict.fromkeys([(first, "fwd"), (first, "dgrad")], "bf16"), "a test")
        if step == 3:
            losses.append(float(runner.evaluate(parts(make_batch(9, case.labels), runner, 1)[0])[0]))
            engine.deepwell.override(dict.fromkeys([(first, "fwd"), (first, "dgrad")]), "a test")
        batch = make_batch(step, case.labels)
        losses.append(float(runner.run(parts(batch, runner, case.accumulation), num_items=count_items(batch))))
        if not step:
            grads = {name: whole(p.grad) for name, p in runner.named_parameters() if p.grad is not None}
        gather = runner.fp8_gather  # type: ignore[attr-defined]
        counts.append(0 if gather is None else len(gather.weights))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"losses": losses, "grads": grads, "counts": counts, "notes": runner.notes}


@pytest.mark.slow
def test_steps_are_those_of_plain_gathers() -> None:
    usual = {"precision": "mxfp8", "labels": "all", "accumulation": 2}
    plain = [Case(name=kind, layout={"dp": 2, "sharding": kind}, **usual) for kind in ("zero2", "zero3")]
    # Of 129 columns each rank has another number, and they are no whole blocks as rows: attention's travel alone.
    plain.append(Case(name="odd", model="odd", layout={"dp": 2, "sharding": "zero3"}, **usual))
    asked = [replace(case, settings={"fp8_all_gather": True}) for case in plain]
    found = run_cases(run, [*plain, *asked], 2)
    for without, with_fp8, count in zip(found[:3], found[3:], (14, 14, 8), strict=True):
        assert without["counts"] == [0] * 4
        assert with_fp8["counts"] == ([14, 14, 13, 14] if count == 14 else [8] * 4)
        (note,) = with_fp8["notes"]
        assert note.startswith(f"fp8_all_gather: the weights of {count} of 14 linears in layers are gathered in MXFP8")
        assert with_fp8["losses"][0] == without["losses"][0]  # the forward: bit for bit
        assert with_fp8["losses"] == pytest.approx(without["losses"], rel=1e-6)
        for name, grad in without["grads"].items():
            assert float((with_fp8["grads"][name] - grad).norm()) <= 1e-6 * float(grad.norm()), name


@pytest.mark.slow
def test_checkpoints_hold_the_weights_themselves(tmp_path: Path) -> None:
    def case(name: str, **options: Any) -> TrainerCase:
        low = {"precision": "mxfp8", "layout": {"sharding": "zero3"}, "stop_at": 3}
        return TrainerCase(folder=str(tmp_path / name), options=options, **low)

    run_cases(fit, [case("plain"), case("asked", fp8_all_gather=True)], 2)
    saved = [_tensors(tmp_path / name / "checkpoints") for name in ("plain", "asked")]
    assert saved[0].keys() == saved[1].keys() and any("q_proj" in name for name in saved[0])
    for name, tensor in saved[0].items():
        torch.testing.assert_close(saved[1][name], tensor, rtol=1e-5, atol=1e-8, msg=name)
    alone = {"layout": {}, "stop_at": None}
    on = run_cases(fit, [replace(case("asked"), **alone), replace(case("plain"), **alone)], 1)
    losses = [[event["loss"] for event in each["events"] if event["kind"] == "step"] for each in on]
    assert all(each["began"] == 3 for each in on)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def _tensors(folder: Path) -> dict[str, Tensor]:
    """Weights and optimizer state, not the ranks' random numbers."""
    found: dict[str, Tensor] = {}
    for path in sorted(path for path in folder.rglob("*.safetensors") if not path.name.startswith("ranks")):
        found |= {f"{path.relative_to(folder)}:{name}": tensor for name, tensor in load_file(path).items()}
    return found
