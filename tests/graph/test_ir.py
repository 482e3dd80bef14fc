"""The IR: extents, costs as functions of batch and length, JSON, and the table that print shows."""

import copy
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepwell.errors import ConfigError
from deepwell.graph.configs import published_config, published_models
from deepwell.graph.ir import IR, Block, Layer
from deepwell.graph.op_json import op_from_dict, op_to_dict
from deepwell.graph.ops import (
    BATCH,
    SEQ,
    TOKENS,
    Attention,
    Extent,
    GroupedLinear,
    InputSizes,
    Linear,
    Matmul,
    Norm,
)
from deepwell.graph.table import layer_ranges, short_count

EXTENTS = st.builds(Extent, st.integers(1, 10**6), st.integers(0, 3), st.integers(0, 3))
WORKLOADS = st.builds(InputSizes, batch=st.integers(1, 64), seq_len=st.integers(1, 4096))


def published(name: str, **changes: Any) -> IR:
    return IR.from_config({**published_config(name), **changes})


# ---- extents ----


def test_an_extent_is_its_factor_times_powers_of_batch_and_length() -> None:
    work = InputSizes(batch=3, seq_len=5)
    assert [e.at(work) for e in (Extent(7), BATCH, SEQ, TOKENS, Extent(2, 1, 2))] == [7, 3, 5, 15, 2 * 3 * 25]


@given(EXTENTS, st.integers(1, 1000), WORKLOADS)
def test_multiplying_an_extent_multiplies_its_value(extent: Extent, factor: int, work: InputSizes) -> None:
    assert extent.times(factor).at(work) == factor * extent.at(work)


@given(EXTENTS)
def test_an_extent_reads_back_what_it_writes(extent: Extent) -> None:
    assert Extent.parse(str(extent)) == extent


# A letter that is none of ours, nothing, a blank part, a sign and a fraction, which no count has.
@pytest.mark.parametrize("text", ["B*T", "", "B**S", "-3", "B*2.5"])
def test_a_text_that_is_no_extent_is_named(text: str) -> None:
    with pytest.raises(ConfigError, match="extent"):
        Extent.parse(text)


@pytest.mark.parametrize(
    "sizes",
    [{"seq_len": 0}, {"seq_len": 1, "batch": -1}, {"seq_len": 2.5}, {"seq_len": 4, "tokens_per_expert": (3, -1)}],
)
def test_a_workload_refuses_sizes_that_are_no_counts(sizes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"seq_len|batch|tokens_per_expert"):
        InputSizes(**sizes)


# ---- costs of ops ----


def test_a_linear_layer_has_three_gemms_of_equal_flops() -> None:
    op = Linear(name="x", role="mlp", k=16, n=48)
    gemms = op.gemms(InputSizes(batch=2, seq_len=5))
    assert [(g.step, g.m, g.n, g.k) for g in gemms] == [
        ("fwd", 10, 48, 16),
        ("dgrad", 10, 16, 48),
        ("wgrad", 48, 16, 10),
    ]
    assert {g.flops for g in gemms} == {2 * 10 * 16 * 48}


def brute_pairs(q_len: int, kv_len: int, window: int | None) -> int:
    """Count the mask's ones: query i stands at key kv_len - q_len + i and sees itself and what lies before."""
    count = 0
    for i in range(q_len):
        place = kv_len - q_len + i
        count += sum(1 for key in range(kv_len) if key <= place and (window is None or place - key < window))
    return count


@given(st.integers(1, 40), st.integers(0, 20), st.none() | st.integers(1, 70))
def test_attention_counts_the_pairs_that_the_causal_mask_leaves(q_len: int, past: int, window: int | None) -> None:
    op = Attention(
        name="a", role="attention", q_heads=1, kv_heads=1, qk_dim=1, v_dim=1, window=window,
        q_len=Extent(q_len), kv_len=Extent(q_len + past),
    )  # fmt: skip
    assert op.pairs(InputSizes(seq_len=1)) == brute_pairs(q_len, q_len + past, window)


def test_attention_without_a_mask_sees_the_full_square() -> None:
    op = Attention(name="a", role="attention", q_heads=4, kv_heads=2, qk_dim=8, v_dim=16, causal=False)
    work = InputSizes(batch=3, seq_len=10)
    assert op.pairs(work) == 100
    # Forward: scores over 8 and values over 16, for 3 sequences of 4 heads; backward is twice that.
    assert op.flops(work) == 2 * 3 * 4 * 100 * (8 + 16)
    assert op.train_flops(work) == 3 * op.flops(work)


def test_experts_follow_the_tokens_they_are_given() -> None:
    op = GroupedLinear(name="e", role="experts", experts=4, k=8, n=16, rows=TOKENS.times(2))
    even = InputSizes(batch=1, seq_len=7)
    # 14 rows over 4 experts: the remainder goes to the first ones.
    assert op.expert_rows(even) == (4, 4, 3, 3)
    assert [(g.m, g.groups) for g in op.gemms(even) if g.step == "fwd"] == [(4, 2), (3, 2)]
    given_rows = InputSizes(batch=1, seq_len=7, tokens_per_expert=(10, 0, 4, 0))
    assert op.flops(given_rows) == op.flops(even) == 2 * 14 * 8 * 16
    # An expert without tokens has no GEMM and its weights are not read.
    assert [(g.m, g.groups) for g in op.gemms(given_rows) if g.step == "wgrad"] == [(16, 1), (16, 1)]
    with pytest.raises(ConfigError, match="2 entries; e has 4 experts"):
        op.gemms(InputSizes(seq_len=7, tokens_per_expert=(7, 7)))


def test_weights_of_idle_experts_are_not_read() -> None:
    ir = published("mixtral-8x7b")
    op = next(op for op in ir.blocks[0].ops if op.name == "mlp.experts.down_proj")
    busy = op.weight_bytes(InputSizes(seq_len=8))
    assert busy == 8 * 14336 * 4096 * 2
    assert op.weight_bytes(InputSizes(seq_len=8, tokens_per_expert=(16, 0, 0, 0, 0, 0, 0, 0))) == busy // 8


def test_bytes_count_each_input_weight_and_output_once() -> None:
    work = InputSizes(batch=2, seq_len=4)
    ops = {op.name: op for op in published("llama3-8b").blocks[0].ops}
    rows, bf16 = 8, 2
    assert ops["mlp.up_proj"].bytes_moved(work) == bf16 * (rows * 4096 + rows * 14336 + 4096 * 14336)
    assert ops["input_layernorm"].bytes_moved(work) == bf16 * (2 * rows * 4096 + 4096)
    assert ops["mlp.act"].bytes_moved(work) == bf16 * 3 * rows * 14336
    assert ops["add"].bytes_moved(work) == bf16 * 3 * rows * 4096
    # Grouped heads: 32 heads of queries and outputs, 8 of keys and of values.
    assert ops["self_attn.attention"].bytes_moved(work) == bf16 * rows * 128 * (32 + 8 + 8 + 32)


def test_an_embedding_reads_only_the_rows_it_looks_up() -> None:
    embedding = published("llama3-8b").stem[0]
    assert embedding.bytes_moved(InputSizes(seq_len=4)) == 2 * (2 * 4 * 4096)


def test_a_product_of_activations_has_two_input_gradients_and_no_weight_gradient() -> None:
    op = Matmul(name="m", role="mixer", batch=BATCH, m=SEQ, n=Extent(8), k=Extent(16))
    work = InputSizes(batch=2, seq_len=5)
    assert [g.step for g in op.gemms(work)] == ["fwd", "dgrad", "dgrad"]
    assert op.train_flops(work) == 3 * op.flops(work) == 3 * 2 * 2 * 5 * 8 * 16


# ---- costs of models ----


def test_a_llama_layer_costs_what_the_hand_says() -> None:
    # Llama-3-8B at 1 x 8192. Per token and layer, in multiply-adds: q and o 4096 x 4096, k and v 4096 x 1024,
    # gate, up and down 4096 x 14336: 218,103,808. Attention: 32 heads x (8193 / 2) keys x (128 + 128).
    ir = published("llama3-8b")
    work = ir.workload(1, 8192)
    linear = sum(op.flops(work) for op in ir.blocks[0].ops if isinstance(op, Linear))
    assert linear == 2 * 218_103_808 * 8192
    attention = sum(op.flops(work) for op in ir.blocks[0].ops if isinstance(op, Attention))
    assert attention == 2 * 32 * (8192 * 8193 // 2) * 256
    head = 2 * 4096 * 128_256 * 8192
    assert ir.flops(1, 8192) == 32 * (linear + attention) + head
    assert ir.train_flops(1, 8192) == 3 * ir.flops(1, 8192)


@given(st.integers(1, 8), st.integers(1, 512))
def test_a_batch_costs_its_sequences(batch: int, seq_len: int) -> None:
    ir = published("llama3-8b")
    assert ir.flops(batch, seq_len) == batch * ir.flops(1, seq_len)


@given(st.lists(st.integers(0, 50), min_size=8, max_size=8))
def test_expert_flops_depend_on_the_sum_of_tokens_alone(tokens: list[int]) -> None:
    ir = published("mixtral-8x7b", num_hidden_layers=1)
    skewed = (sum(tokens), 0, 0, 0, 0, 0, 0, 0)
    assert ir.flops(1, 16, tuple(tokens)) == ir.flops(1, 16, skewed)


def test_one_number_of_tokens_stands_for_every_expert() -> None:
    ir = published("mixtral-8x7b")
    assert ir.workload(1, 8, 3).tokens_per_expert == (3,) * 8
    with pytest.raises(ConfigError, match="has no experts"):
        published("llama3-8b").workload(1, 8, 3)


def test_tied_weights_count_once() -> None:
    ir = published("gpt2")
    head = next(op for op in ir.tail if op.name == "lm_head")
    assert head.num_params == 0
    assert head.params[0].tied_to == "transformer.wte.weight"
    assert ir.num_params == 124_439_808
    assert ir.param_bytes == 4 * 124_439_808


def test_parameter_bytes_follow_the_dtype() -> None:
    assert published("llama3-8b").param_bytes == 2 * 8_030_261_248
    assert IR.from_config(published_config("llama3-8b"), dtype="fp32").param_bytes == 4 * 8_030_261_248


def test_sites_are_every_op_of_every_layer_with_its_full_path() -> None:
    sites = list(published("deepseek-v3").sites())
    paths = [site.path for site in sites]
    assert len(set(paths)) == len(paths)
    assert paths[0] == "model.embed_tokens" and paths[-1] == "loss"
    by_path = {site.path: site for site in sites}
    assert by_path["model.layers.2.mlp.down_proj"].block == 0
    assert by_path["model.layers.3.mlp.experts.down_proj"].layer == 3
    assert by_path["lm_head"].layer is None


# ---- JSON ----


@pytest.mark.parametrize("name", published_models())
def test_an_ir_round_trips_through_json(name: str) -> None:
    ir = published(name)
    back = IR.from_json(ir.to_json())
    assert back == ir
    # Equality leaves these out, the file does not.
    assert (back.name, back.source, back.notes) == (ir.name, ir.source, ir.notes)
    back.check()


def test_an_op_at_its_defaults_writes_only_what_it_must() -> None:
    op = Norm(name="n", role="norm", norm="rms", width=8)
    assert op_to_dict(op) == {"kind": "norm", "name": "n", "role": "norm", "norm": "rms", "width": 8}
    assert op_from_dict(op_to_dict(op)) == op


def test_the_live_module_stays_out_of_equality_and_json() -> None:
    ir = published("gpt2")
    live = ir.attach(object())
    assert live == ir
    assert IR.from_json(live.to_json()).module is None
    assert live.require_module() is live.module
    with pytest.raises(ConfigError, match=r"holds no live module.*from a config"):
        ir.require_module()


def small_dict() -> dict[str, Any]:
    return published("mixtral-8x7b", num_hidden_layers=2).to_dict()


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", "null", '"IR"'])
def test_a_text_that_is_no_json_object_is_a_config_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"JSON|IR"):
        IR.from_json(text)


@pytest.mark.parametrize("key", sorted(small_dict()))
def test_a_missing_field_is_a_config_error(key: str) -> None:
    data = small_dict()
    del data[key]
    with pytest.raises(ConfigError):
        IR.from_dict(data)


# Each entry breaks one promise of a sound IR; the message must say which.
BROKEN = {
    "another schema": (("schema",), 99, "schema 99"),
    "an unknown dtype": (("dtype",), "fp3", "fp3"),
    "a layer without a block": (("layers", 0, "block"), 5, "block 5"),
    "an unknown kind of op": (("stem", 0, "kind"), "teleport", "teleport"),
    "an op with a foreign field": (("stem", 0, "colour"), "red", "colour"),
    "an edge to nowhere": (("blocks", 0, "ops", 1, "inputs"), ["nobody"], "nobody"),
    "an extent that is none": (("blocks", 0, "ops", 0, "rows"), "B*T", "B\\*T"),
}


def put(data: Any, path: tuple[Any, ...], value: Any) -> None:
    for key in path[:-1]:
        data = data[key]
    data[path[-1]] = value


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_ir_names_what_is_wrong(case: str) -> None:
    path, value, message = BROKEN[case]
    data = small_dict()
    put(data, path, value)
    with pytest.raises(ConfigError, match=message):
        IR.from_dict(data)


def test_two_ops_of_one_name_are_refused() -> None:
    data = small_dict()
    data["blocks"][0]["ops"].append(data["blocks"][0]["ops"][0])
    with pytest.raises(ConfigError, match=r"twice.*input_layernorm"):
        IR.from_dict(data)


def leaves(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from leaves(value, (*path, key))


def test_no_wrong_kind_of_value_gets_past_reading() -> None:
    data = small_dict()
    for path in leaves(data):
        for value in (None, [], {}, 1.5):
            broken = copy.deepcopy(data)
            put(broken, path, value)
            try:
                IR.from_dict(broken).flops()
            except ConfigError:
                continue


# ---- printing ----


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1, 2], "0-2"),
        ([0, 2, 4, 6], "0-6 step 2"),
        ([0, 7], "0, 7"),  # two apart are no run
        ([0, 1, 2, 5, 9, 10], "0-2, 5, 9-10"),
        ([5, 4, 4, 3], "3-5"),  # order and repeats do not matter
    ],
)
def test_layer_numbers_fold_into_ranges(indices: list[int], text: str) -> None:
    assert layer_ranges(indices) == text


@given(st.sets(st.integers(0, 60)))
def test_folded_ranges_name_exactly_their_layers(indices: set[int]) -> None:
    named: list[int] = []
    for part in filter(None, layer_ranges(indices).split(", ")):
        ends, _, step = part.partition(" step ")
        first, _, last = ends.partition("-")
        named += range(int(first), int(last or first) + 1, int(step or 1))
    assert named == sorted(indices)


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0"), (4096, "4096"), (128_256, "128.3K"), (4_194_304, "4.19M"), (8_030_261_248, "8.03B")]
)
def test_counts_read_short(count: int, text: str) -> None:
    assert short_count(count) == text


@pytest.mark.parametrize("name", published_models())
def test_the_table_fits_the_page_and_names_every_op_of_every_block(name: str) -> None:
    ir = published(name)
    text = str(ir)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120
    assert all(line == line.rstrip() for line in lines)
    starts = [line.split()[0] for line in lines if line.strip()]
    for ops, _ in ir.parts():
        for op in ops:
            assert op.name in starts
    assert f"({ir.num_params:,})" in lines[0]


def test_the_table_shows_blocks_once_with_their_layers() -> None:
    text = str(published("deepseek-v3"))
    assert "layers 0-2 (3x): attention + mlp" in text
    assert "layers 3-60 (58x): attention + experts(256, top 8) + shared experts" in text
    assert text.count("self_attn.o_proj ") == 2


def test_the_table_holds_long_names_and_notes_within_the_page() -> None:
    deep = ".".join(["a_module_with_a_long_name"] * 6)
    op = Linear(name=deep, role="other", inputs=("@in",), k=10**6, n=10**6)
    ir = IR(
        name="M", dtype="bf16", stem=(), blocks=(Block(ops=(op,)),), layers=(Layer(path="m", block=0),), tail=(),
        notes=("a note that goes on and on " * 10,),
    )  # fmt: skip
    lines = str(ir).splitlines()
    assert max(map(len, lines)) <= 120
    assert any(line.lstrip().startswith("...") and "a_module_with_a_long_name" in line for line in lines)


def test_flops_are_shown_in_a_unit_that_fits_the_model() -> None:
    assert "forward 16.08 GFLOP/token at 4,096 tokens" in str(published("llama3-8b"))
    # 2 x 64 x 96 flops per token: a table in MFLOP would show nothing but zeros.
    op = Linear(name="fc", role="mlp", k=64, n=96)
    small = str(IR(name="M", dtype="bf16", stem=(op,), blocks=(), layers=(), tail=()))
    assert "kFLOP/token" in small and "12.3  100.0%" in small


def test_a_model_without_layers_prints() -> None:
    assert "M: 0 parameters" in str(IR(name="M", dtype="bf16", stem=(), blocks=(), layers=(), tail=()))


# ---- purity ----


def test_graph_and_policy_load_no_torch() -> None:
    code = (
        "import sys, deepwell.graph.ir, deepwell.graph.configs, deepwell.graph.fusion, deepwell.graph.table\n"
        "import deepwell.precision.policy, deepwell.precision.explain, deepwell.precision.recipes\n"
        "from deepwell.graph.ir import IR\n"
        "from deepwell.precision import PrecisionPolicy\n"
        "ir = IR.from_config(deepwell.graph.configs.published_config('llama3-8b'))\n"
        "str(ir), str(PrecisionPolicy.recipe('nvfp4').explain(ir))\n"
        "print([name for name in ('torch', 'numpy', 'triton', 'transformers') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []
