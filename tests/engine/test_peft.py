"""PEFT around a model before dw.compile: what adapters compute and learn is eager's, and low rank keeps its dtype."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import deepwell as dw
from deepwell.formats.metrics import sqnr_db

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

TOKENS = torch.randint(0, 96, (2, 12), generator=torch.Generator().manual_seed(0))
QV = ["q_proj", "v_proj"]
WAYS: dict[str, dict[str, Any]] = {
    "lora": {"target_modules": "all-linear", "r": 4},
    "dora": {"target_modules": QV, "r": 4, "use_dora": True},
    "of the head": {"target_modules": [*QV, "lm_head"], "r": 4},
    "head in full": {"target_modules": QV, "r": 4, "modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": [*QV, "embed_tokens"], "r": 4},
    "rank by layer": {"target_modules": QV, "r": 4, "rank_pattern": {"layers.0.self_attn.q_proj": 8}},
}


def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=96))


def adapted(**how: Any) -> Any:
    model = peft.get_peft_model(llama(), peft.LoraConfig(**how))
    for name, parameter in model.named_parameters():
        if "lora_B" in name or "lora_embedding_A" in name:  # zero at first: the other factor would learn nothing
            nn.init.normal_(parameter, std=0.05)
    return model


def learnt(run: Any, model: nn.Module) -> dict[str, Tensor]:
    """The loss, and the gradients of what learns."""
    model.zero_grad()
    loss = run(input_ids=TOKENS, labels=TOKENS).loss
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == {name for name, p in model.named_parameters() if p.requires_grad}
    return {"loss": loss.detach(), **grads}


def agree(got: dict[str, Tensor], wanted: dict[str, Tensor], least_db: float) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        assert value.abs().max() > 0 and sqnr_db(value, got[name]) > least_db, name


def schemes(engine: Any) -> dict[str, str]:
    return {row.path: row.scheme for row in engine.report().bindings if row.gemm == "fwd"}


_SHORT = ("lora", "of the head", "head in full")


@pytest.mark.parametrize("way", [way if way in _SHORT else pytest.param(way, marks=pytest.mark.slow) for way in WAYS])
def test_adapters_before_compile_learn_as_in_eager(way: str) -> None:
    model = adapted(**WAYS[way])
    wanted = learnt(model, model)
    agree(learnt(dw.compile(model, precision="bf16", inductor=False), model), wanted, 90)
    engine = dw.compile(model, precision="mxfp8")
    agree(learnt(engine, model), wanted, 15)
    found = schemes(engine)
    assert {found[path] for path in found if "lora_" in path} == {"bf16"}
    # DoRA's norms of weights break the graph; the first call warns of it.
    expected = "fp32" if way == "dora" else "emulate:mxfp8"
    assert {found[path] for path in found if "q_proj.base_layer" in path} == {expected}
    # PEFT keeps the head that it copied, and calls the copy alone.
    assert {found[path] for path in found if "lm_head" in path and "original_module" not in path} == {"bf16"}
    rows = [row for row in engine.report().bindings if "q_proj.lora_A" in row.path]
    assert rows and all("low-rank (K=64, N=" in row.reason for row in rows)


def test_adapters_take_a_format_from_a_rule_that_names_them() -> None:
    model = adapted(**WAYS["lora"])
    policy = dw.PrecisionPolicy.recipe("mxfp8")
    policy.set_layer_precision("*.q_proj.lora_A.default", "mxfp8")
    engine = dw.compile(model, precision_policy=policy)
    agree(learnt(engine, model), learnt(model, model), 15)
    low = {path for path, scheme in schemes(engine).items() if "lora_" in path and scheme != "bf16"}
    assert len(low) == 1 and all("q_proj.lora_A" in path for path in low)


def test_adapters_are_switched_off_merged_and_exchanged() -> None:
    model = adapted(target_modules=QV, r=4)
    model.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"], r=8, init_lora_weights=False))
    engine = dw.compile(model, precision="bf16", inductor=False)

    def check() -> Tensor:
        wanted, got = (run(input_ids=TOKENS, labels=TOKENS) for run in (model, engine))
        torch.testing.assert_close(got.logits, wanted.logits)
        torch.testing.assert_close(got.loss, wanted.loss)
        return wanted.loss.detach()

    losses = [check()]
    with model.disable_adapter():
        losses.append(check())
    model.set_adapter("other")
    losses.append(check())
    agree(learnt(engine, model), learnt(model, model), 90)
    model.merge_adapter()
    merged = check()
    model.unmerge_adapter()
    assert len({round(loss.item(), 6) for loss in losses}) == 3
    torch.testing.assert_close(merged, losses[2])
    torch.testing.assert_close(check(), losses[2])


def test_a_model_that_was_merged_for_good_is_a_model_as_any_other() -> None:
    model = adapted(**WAYS["lora"]).merge_and_unload().requires_grad_(True)
    engine = dw.compile(model, precision="mxfp8")
    agree(learnt(engine, model), learnt(model, model), 15)
    found = schemes(engine)
    assert {found[path] for path in found if path != "lm_head"} == {"emulate:mxfp8"}


@pytest.mark.parametrize("after_a_call", [False, True])
def test_adapters_after_compile_learn_as_in_eager(after_a_call: bool) -> None:
    model = llama()
    engine = dw.compile(model, precision="mxfp8")
    if after_a_call:
        engine(input_ids=TOKENS, labels=TOKENS)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=QV, r=4, init_lora_weights=False))
    agree(learnt(engine, model), learnt(wrapped, model), 15)
    found = schemes(engine)
    assert {found[path] for path in found if path != "lm_head"} == {"emulate:mxfp8"}
    assert "weights that came after dw.compile have no format" in str(engine.report())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig", "IA3Config"])
def test_other_ways_of_tuning_learn_as_in_eager(kind: str) -> None:
    how = {} if kind == "IA3Config" else {"num_virtual_tokens": 3}
    model = peft.get_peft_model(llama(), getattr(peft, kind)(task_type="CAUSAL_LM", **how))
    wanted = learnt(model, model)
    agree(learnt(dw.compile(model, precision="bf16", inductor=False), model), wanted, 90)
    engine = dw.compile(model, precision="mxfp8")
    agree(learnt(engine, model), wanted, 15)
    assert "emulate:mxfp8" in schemes(engine).values()
