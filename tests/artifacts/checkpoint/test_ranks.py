"""Checkpoints of several processes: any layout into any other, bit for bit, and no rank waits for a dead one."""

import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from warm import Done, run_python

SCRIPT = Path(__file__).parent / "checkpoint_ranks.py"


def launch(world: int, folder: Path, *cases: str, timeout_s: float = 400) -> None:
    """Run cases of checkpoint_ranks.py in `world` processes; any that fails is shown."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def run(rank: int) -> Done:
        return run_python(SCRIPT, str(rank), str(world), str(port), str(folder), *cases, timeout=timeout_s)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(world) as pool:
        patch.setenv("OMP_NUM_THREADS", "1")
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        done = list(pool.map(run, range(world)))
    print(done[0].stdout)  # seconds of each case
    failed = [f"rank {rank}: {one.stderr[-2500:]}" for rank, one in enumerate(done) if one.returncode]
    assert not failed, "\n".join(failed)


def test_two_ranks_one_rank_two_ranks_and_a_rank_that_dies(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "hf")
    launch(2, tmp_path, "fsdp", "cut_blocks", "stages", "pretrained", "saver")
    read = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "sharded")
    assert read.dtype == torch.bfloat16 and read.lm_head.weight is read.model.embed_tokens.weight
    for name, value in model.state_dict().items():
        assert torch.equal(read.state_dict()[name], value)


@pytest.mark.slow
def test_four_ranks_on_every_mesh(tmp_path: Path) -> None:
    launch(4, tmp_path, "fsdp", "meshes", "saver", timeout_s=550)


@pytest.mark.slow
def test_four_ranks_to_two(tmp_path: Path) -> None:
    launch(4, tmp_path, "save_four", timeout_s=550)
    launch(2, tmp_path, "load_two", timeout_s=550)
