"""The named recipes: what stays in high precision, which blocks nvfp4 leaves out, the late switch."""

from collections import Counter
from typing import Any

import pytest

from deepwell.errors import ConfigError
from deepwell.graph.configs import published_config, published_models
from deepwell.graph.ir import IR
from deepwell.precision import PrecisionPolicy
from deepwell.precision.gemm_format import GEMMS
from deepwell.precision.recipes import RECIPES

LLAMA = IR.from_config(published_config("llama3-8b"))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", published_models())
def test_head_and_router_stay_high_and_all_else_has_the_recipes_formats(recipe: str, model: str) -> None:
    ir = IR.from_config(published_config(model))
    table = PrecisionPolicy.recipe(recipe).resolve(ir)
    assert table.notes == ()
    for site in ir.sites():
        if site.path not in table:
            assert site.op.kind not in ("linear", "grouped_linear")
            continue
        used = {table[site.path][gemm].format for gemm in GEMMS}
        assert used == {"bf16"} if site.op.role in ("head", "router") else used <= {recipe, "bf16"}
    linear = [site.path for site in ir.sites() if site.op.role in ("attention", "mlp") and site.path in table]
    if recipe != "nvfp4":
        assert {table[path]["fwd"].format for path in linear} == {recipe}


def layers_in(policy: PrecisionPolicy, ir: Any, fmt: str, step: int = 0) -> list[int]:
    table = policy.resolve(ir, step)
    sites = [site for site in ir.sites() if site.path in table and site.layer is not None and site.op.role != "router"]
    return sorted({s.layer for s in sites if all(table[s.path][gemm].format == fmt for gemm in GEMMS)})


def test_nvfp4_leaves_the_first_two_and_the_last_15_percent_of_blocks_in_bf16() -> None:
    policy = PrecisionPolicy.recipe("nvfp4")
    assert layers_in(policy, LLAMA, "bf16") == [0, 1, 27, 28, 29, 30, 31]
    assert layers_in(policy, LLAMA, "nvfp4") == list(range(2, 27))
    deepseek = IR.from_config(published_config("deepseek-v3"))
    assert layers_in(policy, deepseek, "bf16") == [0, 1, *range(51, 61)]


def test_fp4_is_nvfp4() -> None:
    assert PrecisionPolicy.recipe("fp4") == PrecisionPolicy.recipe("NVFP4")


def test_the_ends_may_be_mxfp8() -> None:
    assert layers_in(PrecisionPolicy.recipe("nvfp4", ends="mxfp8"), LLAMA, "mxfp8") == [0, 1, 27, 28, 29, 30, 31]


@pytest.mark.parametrize("ends", [None, "mxfp8"])
def test_the_late_switch_moves_the_forward_alone_to_bf16_everywhere(ends: str | None) -> None:
    policy = PrecisionPolicy.recipe("nvfp4", forward_bf16_from=900, ends=ends)
    assert policy.changes(LLAMA) == (900,)
    before, after = policy.resolve(LLAMA, 899), policy.resolve(LLAMA, 900)
    for path in before:
        assert after[path]["fwd"].format == "bf16"
        for gemm in ("dgrad", "wgrad"):
            assert after[path][gemm] == before[path][gemm]
    assert Counter(row["fwd"].format for row in before.values())["nvfp4"] == 25 * 7


def test_recipes_take_the_formats_own_options() -> None:
    policy = PrecisionPolicy.recipe("fp8", scaling="1x128")
    operands = policy.resolve(LLAMA)["model.layers.5.mlp.up_proj"]["dgrad"].gemm_format
    assert (operands.lhs.format, operands.rhs.format) == ("fp8_e4m3_1x128_pow2", "fp8_e4m3_128x128_pow2")


def test_a_users_rules_win_over_a_recipe_of_the_same_class() -> None:
    policy = PrecisionPolicy.recipe("nvfp4")
    policy.set_default("mxfp8")  # takes the place of the recipe's own
    policy.set_layer_precision("last 15%", "fp8")  # a position as well, and later
    assert layers_in(policy, LLAMA, "nvfp4") == []
    assert layers_in(policy, LLAMA, "fp8") == [27, 28, 29, 30, 31]
    assert layers_in(policy, LLAMA, "bf16") == [0, 1]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mxfp9", {}, "did you mean mxfp8"),
        ("mxfp4", {}, "set_default"),  # a format, but nobody's recipe
        (None, {}, "recipes: bf16"),
        ("mxfp8", {"forward_bf16_from": 5}, "forward_bf16_from is 5.*nvfp4 has"),
        ("bf16", {"ends": "bf16"}, "ends"),
        ("nvfp4", {"ends": "fp9"}, "fp9"),
        ("nvfp4", {"forward_bf16_from": -1}, "steps"),
        ("mxfp8", {"scaling": "row"}, "no option 'scaling'"),
    ],
)
def test_wrong_recipes_are_named(name: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PrecisionPolicy.recipe(name, **options)
