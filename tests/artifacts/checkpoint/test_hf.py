"""Hugging Face folders: transformers reads what is written here, and here what transformers writes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import deepwell as dw
from deepwell.artifacts.checkpoint import (
    TrainState,
    consolidate,
    load,
    load_pretrained,
    save,
    save_checkpoint,
    save_pretrained,
)
from deepwell.errors import CheckpointError, ConfigError

transformers = pytest.importorskip("transformers")


def llama(**options: Any) -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=128, num_key_value_heads=2, **sizes, **options)
    return transformers.LlamaForCausalLM(config)


def assert_equal(a: nn.Module, b: nn.Module) -> None:
    assert a.state_dict().keys() == b.state_dict().keys()
    for name, value in a.state_dict().items():
        assert value.dtype == b.state_dict()[name].dtype
        assert torch.equal(value, b.state_dict()[name]), name


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_reads_what_is_saved_and_the_other_way_round(tied: bool, tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=tied).to(torch.bfloat16)
    save_pretrained(model, tmp_path / "one")
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]
    assert ("lm_head.weight" in load_file(tmp_path / "one" / "model.safetensors")) != tied
    save_pretrained(TrainState(model=model), tmp_path / "many", max_shard_bytes=50_000)
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    files = sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 2 and sorted(set(index["weight_map"].values())) == files
    for name in ("one", "many"):
        read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert type(read) is type(model) and (read.lm_head.weight is read.model.embed_tokens.weight) == tied
        assert_equal(read, model)
        other = llama(tie_word_embeddings=tied).to(torch.bfloat16)
        assert load_pretrained(other, tmp_path / name) is other
        assert_equal(other, model)
    model.save_pretrained(tmp_path / "theirs")
    other = llama(tie_word_embeddings=tied)  # fp32: converted
    load_pretrained(other, tmp_path / "theirs")
    assert_equal(other.to(torch.bfloat16), model)
    with pytest.raises(ConfigError, match=r"holds model\.safetensors already"):
        save_pretrained(model, tmp_path / "one")


def test_experts_that_files_name_one_by_one(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2}
    config = transformers.Qwen3MoeConfig(
        vocab_size=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, **sizes
    )
    model = transformers.Qwen3MoeForCausalLM(config)
    model.save_pretrained(tmp_path / "theirs")
    assert any("experts.3." in name for name in load_file(tmp_path / "theirs" / "model.safetensors"))
    other = transformers.Qwen3MoeForCausalLM(config)
    load_pretrained(other, tmp_path / "theirs")
    assert_equal(other, model)
    save_pretrained(model, tmp_path / "ours")
    assert_equal(transformers.Qwen3MoeForCausalLM.from_pretrained(tmp_path / "ours"), model)


def test_a_checkpoint_becomes_a_folder_one_tensor_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    engine = dw.compile(model, precision="mxfp8")
    path = save(engine, tmp_path / "run")
    found = load(path)
    assert (found.step, found.plan, found.policy) == (0, None, engine.policy)
    config = json.loads((path / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["dtype"] == "float32"
    consolidate(tmp_path / "run", tmp_path / "hf", max_shard_bytes=70_000)
    assert_equal(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    found.restore(engine)
    assert float(model.model.norm.weight.detach().sum()) == 64

    # A file that was changed is not passed on.
    data = bytearray((path / "model-00000.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "model-00000.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model-00000\.safetensors was changed"):
        consolidate(path, tmp_path / "bad")
    assert not list((tmp_path / "bad").iterdir())


def test_folders_that_do_not_fit_are_named(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(CheckpointError, match="holds no safetensors files"):
        load_pretrained(model, tmp_path / "nothing")
    save_pretrained(model, tmp_path / "plain")
    assert [p.name for p in (tmp_path / "plain").iterdir()] == ["model.safetensors"]
    with pytest.raises(CheckpointError, match=r"has no 1\.weight and 1 more, which the model needs"):
        load_pretrained(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), tmp_path / "plain")
    with pytest.raises(CheckpointError, match=r"0\.weight has shape \[4, 4\], the model's is \[5, 4\]"):
        load_pretrained(nn.Sequential(nn.Linear(4, 5)), tmp_path / "plain")
    (tmp_path / "plain" / "model.safetensors").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load_pretrained(model, tmp_path / "plain")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "pytorch_model.bin").write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(CheckpointError, match="holds no safetensors files"):
        load_pretrained(model, tmp_path / "bin")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/hf was not written: Not a directory"):
        consolidate(save_checkpoint(tmp_path / "run", TrainState(model=model, meta={"step": 1})), tmp_path / "file/hf")
    with pytest.raises(ConfigError, match="max_shard_bytes is 0"):
        consolidate(
            save_checkpoint(tmp_path, TrainState(model=model, meta={"step": 1})), tmp_path / "x", max_shard_bytes=0
        )
