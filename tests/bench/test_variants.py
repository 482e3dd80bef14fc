"""Names of variants mean what they say, and an engine is built as they say."""

from pathlib import Path

import pytest
import torch

from deepwell.bench.models import MODELS
from deepwell.bench.variants import Variant, parse_variants, runs_as
from deepwell.errors import ConfigError
from deepwell.precision import PrecisionPolicy


def test_a_name_is_a_recipe_and_words_in_any_order() -> None:
    variant = Variant.parse("fp8_cg_tensor_head")
    assert (variant.base, variant.scaling, variant.words) == ("fp8", "tensor", {"cg", "head"})
    assert [one.name for one in parse_variants("bf16, fp8_re,")] == ["bf16", "fp8_re"]


@pytest.mark.parametrize(
    "name",
    ["fp9", "fp8_quick", "fp8_cg_cg", "mxfp8_row", "missing.json", "fp8:cg", "fp8_re_keep", "fp8_e5m2", "mxfp8_e5m2"],
)
def test_a_name_that_means_nothing_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match="variant"):
        Variant.parse(name)


def test_a_policy_file_is_a_variant_and_takes_words_after_a_colon(tmp_path: Path) -> None:
    policy = PrecisionPolicy("mxfp8")
    policy.set_layer_precision("attention", "bf16")
    path = tmp_path / "mine.json"
    path.write_text(policy.to_json(), encoding="utf-8")
    variant = Variant.parse(f"{path}:nolce")
    assert variant.policy() == policy and variant.words == {"nolce"}


def engine_of(name: str):
    model = MODELS["tiny"]
    return Variant.parse(name).engine(model.build("cpu"), model.capture_inputs(model.example("cpu")))


def test_the_words_reach_the_engine() -> None:
    options = engine_of("fp8_cg_keep_nolce_rowscales").options
    assert (options.cuda_graphs, options.recompute, options.fuse_head) == (True, "nothing", False)
    assert not options.row_factors


def test_what_no_word_speaks_of_stays_as_the_engine_has_it() -> None:
    from deepwell.engine.backend import BackendOptions

    options, default = engine_of("fp8").options, BackendOptions()
    assert (options.cuda_graphs, options.recompute) == (default.cuda_graphs, default.recompute)
    assert options.row_factors


def test_the_head_stays_in_bf16_unless_the_name_says_otherwise() -> None:
    head = {
        name: {row.gemm: row.scheme for row in engine_of(name).bound.bindings if row.path == "head"}
        for name in ("fp8", "fp8_head", "fp8_headgrads")
    }
    assert set(head["fp8"].values()) == {"bf16"}
    assert "bf16" not in head["fp8_head"].values()
    assert head["fp8_headgrads"] == head["fp8_head"] | {"fwd": "bf16"}


def test_wbf16_leaves_weight_gradients_in_bf16() -> None:
    rows = [row for row in engine_of("fp8_wbf16").bound.bindings if row.layer is not None]
    assert {row.scheme == "bf16" for row in rows if row.gemm == "wgrad"} == {True}
    assert {row.scheme == "bf16" for row in rows if row.gemm != "wgrad"} == {False}


def test_emulated_rounds_exactly_on_any_device(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a GPU mxfp8 would be bound to FP8 rows: the word must win over the device.
    from deepwell.engine import compile as compile_module
    from deepwell.engine.binding import Target

    monkeypatch.setattr(compile_module, "device_of", lambda _tensors: Target(kind="cuda", capability=(9, 0)))
    assert set(runs_as(engine_of("mxfp8_emulated"))) == {"mxfp8 as emulate:mxfp8 (emulated)", "bf16"}


def test_a_scaling_that_would_not_run_is_an_error_and_not_a_label(monkeypatch: pytest.MonkeyPatch) -> None:
    # A table that says "1x128" must not show the time of another scaling.
    from deepwell.bench import variants
    from deepwell.engine.binding import Binding, Bound
    from deepwell.errors import UnsupportedError

    row = Binding(
        path="a", op="a", layer=0, gemm="fwd", format="fp8", binding="substitute", scheme="fp8_row", reason="rows only"
    )
    with pytest.raises(UnsupportedError, match="fp8_row"):
        variants._check_scaling(Variant.parse("fp8_1x128"), Bound(bindings=(row,), schemes={}))


@pytest.mark.parametrize(
    ("name", "schemes"),
    [
        ("fp8", {"fp8_row"}),
        ("fp8_tensor", {"fp8_tensor"}),  # E4M3 gradients too, so that scalings alone differ
        ("fp8_tensor_e5m2", {"fp8_tensor", "fp8_tensor,gradients=e5m2"}),
        ("fp8_1x128", {"fp8_1x128"}),
        ("fp8_1x128_wbf16", {"fp8_1x128", "bf16"}),
    ],
)
def test_each_scaling_of_fp8_is_what_its_name_says_on_hopper(name, schemes, monkeypatch: pytest.MonkeyPatch) -> None:
    from deepwell.engine import compile as compile_module
    from deepwell.engine.binding import Target

    monkeypatch.setattr(compile_module, "device_of", lambda _tensors: Target(kind="cuda", capability=(9, 0)))
    monkeypatch.setattr(compile_module, "use_inductor", lambda _asked, _device: False)
    rows = [row for row in engine_of(name).bound.bindings if row.layer is not None]
    assert {row.scheme for row in rows} == schemes and {row.binding for row in rows} == {"native"}


def test_a_scaling_that_this_gpu_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepwell.engine import compile as compile_module
    from deepwell.engine.binding import Target
    from deepwell.errors import UnsupportedError

    monkeypatch.setattr(compile_module, "device_of", lambda _tensors: Target(kind="cuda", capability=(10, 0)))
    monkeypatch.setattr(compile_module, "use_inductor", lambda _asked, _device: False)
    with pytest.raises(UnsupportedError, match=r"fp8_1x128: .* would run as fp8_row: .*no products with 1x128 scales"):
        engine_of("fp8_1x128")


def test_a_variant_trains(device: str) -> None:
    model = MODELS["tiny"]
    net, example = model.build(device), model.example(device)
    engine = Variant.parse("mxfp8_emulated").engine(net, model.capture_inputs(example))
    loss = model.loss_of(engine, example)
    loss.backward()
    assert torch.isfinite(loss) and all(p.grad is not None for p in net.parameters())


def test_exact_sums_reach_every_product_by_rows() -> None:
    from deepwell.bench.variants import _in_fp32
    from deepwell.kernels.gemm.schemes import parse_scheme

    plain, exact = parse_scheme("fp8_row|fp8_row|fp8_row"), parse_scheme(_in_fp32("fp8_row|bf16|fp8_row"))
    assert [gemm.fast for gemm in (plain.fwd, plain.dgrad, plain.wgrad)] == [True, True, False]
    assert [gemm.fast for gemm in (exact.fwd, exact.dgrad, exact.wgrad)] == [False, False, False]
    assert [gemm.method for gemm in (exact.fwd, exact.dgrad, exact.wgrad)] == ["fp8_row", "bf16", "fp8_row"]
