"""explain: folded layers, rules and shares that are true, a table that fits the page, JSON."""

import json
from pathlib import Path

import pytest

from deepwell.errors import ConfigError
from deepwell.graph.configs import published_config, published_models
from deepwell.graph.ir import IR
from deepwell.graph.ops import GEMM_KINDS
from deepwell.precision import PrecisionPolicy
from deepwell.precision.explain import Explanation
from deepwell.precision.recipes import RECIPES

LLAMA = IR.from_config(published_config("llama3-8b"))


def mixed() -> PrecisionPolicy:
    policy = PrecisionPolicy.recipe("nvfp4", forward_bf16_from=1000)
    policy.set_layer_precision("attention", "mxfp8")
    policy.set_layer_precision("model.layers.7.mlp.down_proj", "fp8", scaling="row", gemms="wgrad", steps="0:500")
    return policy


def test_equal_layers_are_folded_and_named() -> None:
    span = PrecisionPolicy.recipe("nvfp4").explain(LLAMA).spans[0]
    assert [group.where for group in span.groups] == [
        "layers 0-1 (2x)",
        "layers 2-26 (25x)",
        "layers 27-31 (5x)",
        "tail",
    ]
    assert span.groups[1].rows[0].decided_by == ("default (recipe nvfp4)",)


def test_layers_that_differ_in_blocks_but_not_in_decisions_are_folded() -> None:
    # gpt-oss alternates windowed and full attention: two blocks, one table.
    ir = IR.from_config(published_config("gpt-oss-120b"))
    span = PrecisionPolicy("mxfp8").explain(ir).spans[0]
    assert [group.where for group in span.groups] == ["layers 0-35 (36x)", "tail"]


@pytest.mark.parametrize("model", published_models())
def test_the_table_says_what_resolve_says(model: str) -> None:
    ir = IR.from_config(published_config(model))
    policy = PrecisionPolicy.recipe("nvfp4", forward_bf16_from=1000)
    for span in policy.explain(ir).spans:
        table = policy.resolve(ir, span.steps[0])
        seen = 0
        for group in span.groups:
            for row in group.rows:
                paths = [f"{ir.layers[i].path}.{row.op}" for i in group.layers] or [row.op]
                for path in paths:
                    assert [row.fwd, row.dgrad, row.wgrad] == [one.format for one in table[path].values()]
                    seen += 1
        assert seen == len(table)


def test_without_a_step_every_span_between_changes_is_shown() -> None:
    explained = mixed().explain(LLAMA)
    assert [span.steps for span in explained.spans] == [(0, 500), (500, 1000), (1000, None)]
    one = mixed().explain(LLAMA, step=700)
    assert [span.steps for span in one.spans] == [(700, 701)]
    assert one.spans[0].groups == explained.spans[1].groups


def test_split_decisions_name_a_rule_for_each_gemm() -> None:
    explained = mixed().explain(LLAMA, step=3)
    row = next(r for g in explained.spans[0].groups if g.layers == (7,) for r in g.rows if r.op == "mlp.down_proj")
    assert (row.fwd, row.dgrad, row.wgrad) == ("nvfp4", "nvfp4", "fp8")
    assert row.decided_by == (
        "fwd+dgrad: default (recipe nvfp4)",
        "wgrad: 'model.layers.7.mlp.down_proj' wgrad steps 0:500 with scaling=row",
    )


def test_shares_are_of_the_linear_layers_training_flops() -> None:
    policy = PrecisionPolicy("mxfp8")
    policy.set_layer_precision("mlp", "bf16", gemms="wgrad")
    shares = dict(policy.explain(LLAMA).spans[0].shares)
    # By hand, in multiply-adds per token: attention 41,943,040 and MLP 176,160,768 per layer, head 525,336,576.
    attention, mlp, head = 32 * 41_943_040, 32 * 176_160_768, 525_336_576
    high = mlp + 3 * head
    assert shares["bf16"] == pytest.approx(high / (3 * (attention + mlp + head)))
    assert sum(shares.values()) == pytest.approx(1)


def test_shares_count_every_expert_where_the_rows_do_not_divide() -> None:
    # 4096 tokens over 3 experts: two distinct row counts, so two groups of GEMMs, both of which must count.
    sizes = {"num_local_experts": 3, "num_experts_per_tok": 1, "num_hidden_layers": 1, "vocab_size": 4096}
    policy = PrecisionPolicy()
    policy.set_layer_precision("experts", "mxfp8")
    span = policy.explain(IR.from_config({**published_config("mixtral-8x7b"), **sizes})).spans[0]
    experts, attention = 3 * 4096 * 14336, 2 * 4096 * 4096 + 2 * 4096 * 1024
    whole = experts + attention + 4096 * 3 + 4096 * 4096
    assert dict(span.shares)["mxfp8"] == pytest.approx(experts / whole)


def test_a_rule_that_changes_nothing_makes_no_span() -> None:
    policy = PrecisionPolicy("mxfp8")
    policy.set_layer_precision("experts", "fp4", steps="10:20")  # a dense model has none
    assert [span.steps for span in policy.explain(LLAMA).spans] == [(0, None)]


def test_formats_in_use_are_spelt_out() -> None:
    text = str(mixed().explain(LLAMA))
    assert "nvfp4 wgrad: gradient nvfp4 (stochastic, hadamard) x activation nvfp4 (hadamard)" in text
    assert "fp8 (scaling=row) wgrad: gradient fp8_e4m3_row_pow2 x activation fp8_e4m3_row_pow2" in text
    assert "bf16 fwd" not in text


def test_a_rule_that_never_decides_is_noted() -> None:
    policy = PrecisionPolicy("mxfp8")
    policy.set_layer_precision("mlp", "fp4")
    policy.set_layer_precision("*.mlp", "bf16")
    notes = policy.explain(LLAMA).notes
    assert "'mlp': decides nothing, for rules that win over it cover all it names" in notes
    assert not any(note.startswith("default") for note in notes)


def test_a_rule_that_decides_only_later_is_not_called_idle() -> None:
    policy = PrecisionPolicy("mxfp8")
    policy.set_layer_precision("mlp", "mxfp8", steps="10:20")  # the same format, but this rule decides
    explained = policy.explain(LLAMA)
    assert not any("decides nothing" in note for note in explained.notes)
    assert [span.steps for span in explained.spans] == [(0, 10), (10, 20), (20, None)]


def test_a_small_model_that_nvfp4_leaves_wholly_in_bf16_says_so() -> None:
    config = {**published_config("llama3-8b"), "num_hidden_layers": 3}
    notes = PrecisionPolicy.recipe("nvfp4").explain(IR.from_config(config)).notes
    assert "no GEMM of this model is in nvfp4 at any step" in notes


def test_what_a_policy_never_touches_is_said() -> None:
    notes = PrecisionPolicy("mxfp8").explain(LLAMA).notes
    assert notes[-1].startswith("softmax attention, norms, embeddings stay bf16")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("model", published_models())
def test_the_table_fits_the_page(recipe: str, model: str) -> None:
    lines = str(PrecisionPolicy.recipe(recipe).explain(IR.from_config(published_config(model)))).splitlines()
    assert max(map(len, lines)) <= 120
    assert all(line == line.rstrip() for line in lines)


def test_long_rules_wrap_within_the_page() -> None:
    policy = mixed()
    policy.set_layer_precision(
        "model.layers.[0-9].self_attn.[qkvo]_proj", "bf16", gemms=("fwd", "wgrad"), steps=":77777777"
    )
    assert max(map(len, str(policy.explain(LLAMA)).splitlines())) <= 120


def test_an_explanation_round_trips_through_json() -> None:
    explained = mixed().explain(LLAMA)
    assert Explanation.from_dict(json.loads(json.dumps(explained.to_dict()))) == explained
    with pytest.raises(ConfigError, match="explanation"):
        Explanation.from_dict({"model": "M"})


def test_the_guide_prints_what_its_example_prints() -> None:
    policy = PrecisionPolicy("mxfp8")
    policy.set_layer_precision("attention", "bf16")
    policy.set_layer_precision("mlp", "fp4")
    page = Path(__file__).resolve().parents[2] / "docs" / "precision-policy.md"
    assert f"```\n{policy.explain(LLAMA)}\n```" in page.read_text(encoding="utf-8")


def test_a_model_without_linear_layers_is_explained_too() -> None:
    ir = IR(name="M", dtype="bf16", stem=(), blocks=(), layers=(), tail=())
    assert "none" in str(PrecisionPolicy("mxfp8").explain(ir))
    assert not any(site.op.kind in GEMM_KINDS for site in ir.sites())
