"""Run by test_checkpoint_ranks.py, one process per rank: save under one layout, load under others, and die."""

import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from deepwell import files
from deepwell.artifacts.checkpoint import (
    Saver,
    TrainState,
    latest,
    list_checkpoints,
    load,
    load_checkpoint,
    load_pretrained,
    save_checkpoint,
    save_pretrained,
    verify,
)
from deepwell.errors import CheckpointError
from deepwell.train.adamw.optimizer import AdamWDW

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "adamw": lambda net: torch.optim.AdamW(net.parameters(), lr=1e-2),
    "dw bf16": lambda net: AdamWDW(net.parameters(), lr=1e-2, moments="bf16"),
    "dw fp32": lambda net: AdamWDW(net.parameters(), lr=1e-2, moments="fp32", master_weights="fp32"),
    "dw fp8": lambda net: AdamWDW(net.parameters(), lr=1e-2, moments="fp8", master_weights="fp32"),
}


class Block(nn.Module):
    def __init__(self, width: int, odd: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.odd = nn.Linear(width, odd)  # rows that no number of ranks divides

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu()) + self.odd(x).sum(-1, keepdim=True)


class Net(nn.Module):
    def __init__(self, width: int = 128, odd: int = 7) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(64, width)
        self.blocks = nn.ModuleList(Block(width, odd) for _ in range(2))
        self.register_buffer("seen", torch.zeros(3))
        self.to(torch.bfloat16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


def shard(net: Net, mesh: Any) -> Net:
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def split(net: Net, mesh: Any) -> Net:
    """Tensor parallel parameters; their products are not what is tested."""
    for block in net.blocks:
        places = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}
        for name, parameter in list(block.named_parameters()):
            owner = block.get_submodule(name.rpartition(".")[0])
            value = distribute_tensor(parameter.detach(), mesh, [places.get(name, Replicate())])
            owner.register_parameter(name.rpartition(".")[2], nn.Parameter(value))
    return net


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        ids = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(step))
        net(ids).backward()
        optimizer.step()
        optimizer.zero_grad()


def pretend(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gradients from nowhere: the layout matters, not the numbers."""
    for number, parameter in enumerate(net.parameters()):
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        torch.manual_seed(number)
        whole = torch.randn(parameter.shape, dtype=torch.float32).to(local.dtype)
        grad = whole
        if isinstance(parameter, DTensor):
            grad = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
        parameter.grad = grad
    optimizer.step()
    optimizer.zero_grad()


def bits(value: Any) -> bytes | Any:
    if not isinstance(value, Tensor):
        return value
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return (
        str(value.dtype),
        tuple(value.shape),
        value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes(),
    )


def weights(net: nn.Module) -> dict[str, Any]:
    return {name: bits(value) for name, value in net.state_dict().items()}


def moments(net: nn.Module, optimizer: torch.optim.Optimizer, local: bool = False) -> dict[str, Any]:
    """The optimizer's state by name; FP8 moments as what they stand for, since their blocks are the shard's."""
    found = {}
    for name, parameter in net.named_parameters():
        state = optimizer.state[parameter]
        is_empty = isinstance(parameter, DTensor) and not parameter.to_local().numel()
        for key, value in state.items():
            if is_empty and (local or key == "step"):
                continue  # a rank without rows counts no steps
            if not local and f"{key}_scales" in state:
                found[f"{name}.{key}"] = bits(decoded(parameter, value, state[f"{key}_scales"]))
            elif local or not key.endswith("_scales"):
                found[f"{name}.{key}"] = bits(value.to_local() if local and isinstance(value, DTensor) else value)
    return found


def decoded(parameter: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    flat = codes.float().flatten()
    values = (flat * scales.repeat_interleave(128)[: flat.numel()]).view(codes.shape)
    if not isinstance(parameter, DTensor):
        return values
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        values, mesh, placements, shape=parameter.shape, stride=parameter.stride(), run_check=False
    )


def fsdp(rank: int, world: int, folder: Path) -> None:
    """All optimizers: saved by all ranks, loaded by one alone, saved by it, loaded by all again."""
    alone = [dist.new_group([r]) for r in range(world)][rank]
    mesh = init_device_mesh("cpu", (world,))
    for name, make in OPTIMIZERS.items():
        # Shards that are no multiple of 128 elements cut the blocks of FP8 moments: those have a test of their own.
        sizes = {"width": 64 * world, "odd": 128 * world} if name == "dw fp8" else {"odd": 1}  # one row
        net = shard(Net(**sizes), mesh)
        optimizer = make(net)
        train(net, optimizer, range(2))
        state = TrainState(model=net, optimizer=optimizer, meta={"step": 2}, rank_state={"me": torch.tensor(rank)})
        path = save_checkpoint(folder / name, state)
        expected = weights(net), moments(net, optimizer)
        assert load(path).world == world
        if rank == 0:
            plain = Net(**sizes)
            plain_optimizer = make(plain)
            loaded = TrainState(model=plain, optimizer=plain_optimizer)
            load_checkpoint(path, loaded, process_group=alone)
            assert (weights(plain), moments(plain, plain_optimizer)) == expected, name
            assert int(loaded.rank_state["me"]) == 0
            loaded.meta = {"step": 3}
            save_checkpoint(folder / name, loaded, process_group=alone)
        dist.barrier()
        again = shard(Net(**sizes), mesh)
        again_optimizer = make(again)
        for number in (3, 2):
            loaded = TrainState(model=again, optimizer=again_optimizer)
            assert load_checkpoint(folder / name / f"step-{number:08d}", loaded)["step"] == number
            assert (weights(again), moments(again, again_optimizer)) == expected, (name, number)
            assert moments(again, again_optimizer, local=True) == moments(net, optimizer, local=True)
        # Rank 1 has a state of its own from the checkpoint of all ranks, and none from that of one.
        assert int(loaded.rank_state["me"]) == rank
        train(net, optimizer, range(5, 7))
        train(again, again_optimizer, range(5, 7))
        assert weights(net) == weights(again)


def cut_blocks(rank: int, world: int, folder: Path) -> None:
    """FP8 moments whose blocks another layout would cut: the same layout loads them, another one says what to do."""
    alone = [dist.new_group([r]) for r in range(world)][rank]
    mesh = init_device_mesh("cpu", (world,))
    make = OPTIMIZERS["dw fp8"]
    net = shard(Net(width=72), mesh)
    optimizer = make(net)
    train(net, optimizer, range(2))
    path = save_checkpoint(folder / "cut", TrainState(model=net, optimizer=optimizer, meta={"step": 2}))
    again = shard(Net(width=72), mesh)
    again_optimizer = make(again)
    load_checkpoint(path, TrainState(model=again, optimizer=again_optimizer))
    assert moments(again, again_optimizer, local=True) == moments(net, optimizer, local=True)
    expected = {n: v.full_tensor().float() for n, v in net.named_parameters()}
    values = {
        name: optimizer.state[p]["exp_avg"].float().flatten()
        * optimizer.state[p]["exp_avg_scales"].repeat_interleave(128)[: optimizer.state[p]["exp_avg"].numel()]
        for name, p in net.named_parameters()
    }
    if rank == 0:
        plain = Net(width=72)
        plain_optimizer = make(plain)
        before = weights(plain)
        try:
            load_checkpoint(path, TrainState(model=plain, optimizer=plain_optimizer), process_group=alone)
        except CheckpointError as error:
            assert "has a scale per 128 elements of shards" in str(error) and "round_moments=True" in str(error), error
        else:
            raise AssertionError("blocks that were cut came back as if they had not been")
        assert weights(plain) == before
        state = TrainState(model=plain, optimizer=plain_optimizer)
        load_checkpoint(path, state, process_group=alone, round_moments=True)
        for name, parameter in plain.named_parameters():
            assert torch.equal(parameter.float(), expected[name])
            found = plain_optimizer.state[parameter]["exp_avg"].float().flatten()
            found = found * plain_optimizer.state[parameter]["exp_avg_scales"].repeat_interleave(128)[: found.numel()]
            mine = values[name]
            largest = float(mine.abs().max())
            assert float((found[: mine.numel()] - mine).abs().max()) <= largest / 16, name
    dist.barrier()


def meshes(rank: int, world: int, folder: Path) -> None:
    """FSDP2 x TP, HSDP, and plain copies; each saved and loaded into each."""
    alone = [dist.new_group([r]) for r in range(world)][rank]
    flat = init_device_mesh("cpu", (world,))
    grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "tp"))
    layouts: dict[str, Callable[[Net], Net]] = {
        "fsdp x tp": lambda net: shard(split(net, grid["tp"]), grid["dp"]),
        "hsdp": lambda net: shard(net, grid),
        "fsdp": lambda net: shard(net, flat),
        "tp": lambda net: split(net, grid["tp"]),
        "copies": lambda net: net,
    }
    for moment in ("bf16", "fp8"):
        expected = None
        sizes = {"width": 256, "odd": 512} if moment == "fp8" else {}  # no layout cuts a block
        for name, build in layouts.items():
            net = build(Net(**sizes))
            optimizer = AdamWDW(net.parameters(), lr=1e-2, moments=moment, stochastic_rounding=False)
            pretend(net, optimizer)
            path = save_checkpoint(
                folder / f"{name} {moment}", TrainState(model=net, optimizer=optimizer, meta={"step": 1})
            )
            size = sum(file.stat().st_size for file in path.glob("model-*"))
            whole = sum(p.numel() * 2 for p in Net(**sizes).parameters())
            assert whole <= size < whole * 1.3 + world * 3000, (name, size, whole, "written once")
            if name == "copies":
                largest = max(file.stat().st_size for file in path.glob("model-*"))
                assert largest < size * 0.6, "copies are written by several ranks"
            if expected is None or moment == "fp8":
                expected = weights(net), moments(net, optimizer)
            for other, rebuild in layouts.items():
                again = rebuild(Net(**sizes))
                again_optimizer = AdamWDW(again.parameters(), moments=moment, stochastic_rounding=False)
                load_checkpoint(path, TrainState(model=again, optimizer=again_optimizer))
                found = weights(again), moments(again, again_optimizer)
                assert found == expected, (name, other, moment)
            if rank == 0:
                plain = Net(**sizes)
                load_checkpoint(path, TrainState(model=plain), process_group=alone)
                assert weights(plain) == expected[0]
            dist.barrier()


def stages(rank: int, world: int, folder: Path) -> None:
    """Ranks that hold different names: the union is saved, by one process or by stages it is loaded."""
    alone = [dist.new_group([r]) for r in range(world)][rank]

    def stage() -> tuple[Net, torch.optim.Optimizer]:
        net = Net()
        net.blocks._modules = {str(rank): net.blocks[rank]}  # names stay those of the whole model
        if rank:
            net.embed = None  # type: ignore[assignment]
        return net, torch.optim.AdamW(net.parameters(), lr=0.5 + rank)

    net, optimizer = stage()
    pretend(net, optimizer)
    path = save_checkpoint(folder / "stages", TrainState(model=net, optimizer=optimizer, meta={"step": 1}))
    again, again_optimizer = stage()
    pretend(again, again_optimizer)
    load_checkpoint(path, TrainState(model=again, optimizer=again_optimizer))
    assert (weights(again), moments(again, again_optimizer)) == (weights(net), moments(net, optimizer))
    plain = Net()
    plain_optimizer = torch.optim.AdamW(plain.parameters())
    load_checkpoint(path, TrainState(model=plain, optimizer=plain_optimizer), process_group=alone)
    mine = {k: v for k, v in weights(plain).items() if k in net.state_dict()}
    assert mine == weights(net)
    names = dict(plain.named_parameters())
    for name, parameter in net.named_parameters():
        assert bits(plain_optimizer.state[names[name]]["exp_avg"]) == bits(optimizer.state[parameter]["exp_avg"])
    # A stage that is missing from the live model is an error on every rank.
    if rank:
        again.blocks = None  # type: ignore[assignment]
    try:
        load_checkpoint(path, TrainState(model=again))
    except CheckpointError as error:
        assert "blocks.1.up.weight" in str(error) and "no place for" in str(error)
    else:
        raise AssertionError("weights were left out in silence")


def saver(rank: int, world: int, folder: Path) -> None:
    """Asynchronous saves of all ranks; damage seen by one is an error on all; one fails, then one dies."""
    mesh = init_device_mesh("cpu", (world,))
    net = shard(Net(), mesh)
    optimizer = torch.optim.AdamW(net.parameters())
    run = folder / "saver"
    if rank == 0:
        (run / ".step-00000009.0123456789ab-3.tmp").mkdir(parents=True)  # of a run that was killed
    saves = Saver(run, keep_last=2, timeout_s=30)
    for step in range(1, 5):
        train(net, optimizer, range(step, step + 1))
        expected = weights(net)
        saves.save(TrainState(model=net, optimizer=optimizer, meta={"step": step, "loss": 1.0}))
    saves.wait()
    events = saves.poll()
    assert [e.step for e in events] == [1, 2, 3, 4] and all(e.committed and not e.error for e in events), events
    dist.barrier()
    assert [p.name for p in list_checkpoints(run)] == ["step-00000003", "step-00000004"]
    good = latest(run)
    assert good is not None and sorted(p.name for p in run.iterdir()) == ["step-00000003", "step-00000004"]
    again = shard(Net(), mesh)
    load_checkpoint(good, TrainState(model=again))
    assert weights(again) == expected

    dist.barrier()
    if rank == world - 1:
        path = good.parent / "step-00000003" / "model-00001.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    dist.barrier()
    try:
        load_checkpoint(good.parent / "step-00000003", TrainState(model=again))
    except CheckpointError as error:
        assert "model-00001.safetensors was changed" in str(error)
    else:
        raise AssertionError("a changed file was loaded")
    assert weights(again) == expected

    # One rank does not see the folder: no rank waits for it.
    try:
        load_checkpoint(good if rank == 0 else run / "elsewhere", TrainState(model=again))
    except CheckpointError as error:
        assert "elsewhere is not a folder" in str(error)
    else:
        raise AssertionError("one rank alone has loaded")

    # One rank's disk is full: every rank hears of it, soon.
    real = files.write_file
    if rank == world - 1:

        def full(path: Path, chunks: Any) -> Any:
            if path.name.startswith("optimizer"):
                raise OSError(28, "No space left on device", str(path))
            return real(path, chunks)

        from deepwell.artifacts.checkpoint import writer

        writer.write_file = full
    began = time.monotonic()
    saves.save(TrainState(model=net, optimizer=optimizer, meta={"step": 5}))
    # One rank's health is enough to refuse.
    saves.save(TrainState(model=net, optimizer=optimizer, meta={"step": 6}), healthy=rank == 0)
    saves.wait()
    failed, refused = saves.poll()
    assert not failed.committed and not refused.committed
    words = "No space left" if rank == world - 1 else f"rank {world - 1}: its files could not be written"
    assert words in failed.error or rank not in {0, world - 1}, failed.error
    assert "not healthy" in refused.error or rank not in {0, world - 1}, refused.error
    assert time.monotonic() - began < 28, "nobody waited for its time to run out"
    assert latest(run) == good
    dist.barrier()

    # A rank that missed a save is with the others again at the next.
    if rank == world - 1:
        writer.write_file = real
    saves.save(TrainState(model=net, meta={"step": 7}))
    saves.wait()
    if rank == 0:
        saves._timeout_s = 0.5
        saves.save(TrainState(model=net, meta={"step": 8}))
        saves.wait()
        saves._timeout_s = 30
    dist.barrier()
    saves.save(TrainState(model=net, meta={"step": 9}))
    saves.wait()
    assert [(e.step, e.committed) for e in saves.poll() if e.step != 8] == [(7, True), (9, True)]
    good = latest(run)
    assert good is not None and good.name == "step-00000009" and not (run / "step-00000008").exists()
    dist.barrier()

    # The last rank dies in its write; the others are not left waiting.
    saves.close()
    saves = Saver(run, timeout_s=1.5)
    began = time.monotonic()
    if rank == world - 1:
        # When the others are writing: before that they may be in the collective of a Saver's first save, which can fail
        # for a rank that is gone.
        def dies(path: Path, chunks: Any) -> Any:
            while not all((path.parent / f"model-{r:05d}.safetensors").exists() for r in range(world - 1)):
                time.sleep(0.01)
            os._exit(0)

        writer.write_file = dies
    saves.save(TrainState(model=net, optimizer=optimizer, meta={"step": 10}))
    saves.wait()
    (event,) = saves.poll()
    assert not event.committed and time.monotonic() - began < 28
    assert f"nothing from ranks [{world - 1}] within 1.5 s" in event.error or rank, event.error
    assert latest(run) == good
    verify(good)


class Config:
    """Speaks as a Hugging Face configuration does."""

    def __init__(self, folder: Path) -> None:
        self._text = (folder / "config.json").read_text()

    def to_json_string(self) -> str:
        return self._text


def pretrained(rank: int, world: int, folder: Path) -> None:
    """A Hugging Face folder into a sharded model, and out of it again; the test reads that with transformers.

    The model is a tree of modules with the names of the folder's weights: transformers takes seconds to import.
    """
    source = folder / "hf"
    net = nn.Module()
    for name, value in load_file(source / "model.safetensors").items():
        owner = net
        for part in name.split(".")[:-1]:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        owner.register_parameter(name.rpartition(".")[2], nn.Parameter(torch.zeros_like(value)))
    net.add_module("lm_head", nn.Module())
    net.lm_head.weight = net.model.embed_tokens.weight
    layers = list(net.model.layers.children())
    net.config = Config(source)  # type: ignore[assignment]
    mesh = init_device_mesh("cpu", (world,))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    assert all(float(p.to_local().abs().sum()) == 0 for p in net.parameters())
    load_pretrained(net, source)
    save_pretrained(net, folder / "sharded", max_shard_bytes=60_000)
    assert (folder / "sharded" / "model.safetensors.index.json").is_file(), "all ranks wait for the files"


def save_four(rank: int, world: int, folder: Path) -> None:
    """One half of four ranks to two: what was saved is written down by itself, for the other half to compare."""
    mesh = init_device_mesh("cpu", (world,))
    for name, make in OPTIMIZERS.items():
        net = shard(Net(width=256, odd=512), mesh)
        optimizer = make(net)
        train(net, optimizer, range(2))
        save_checkpoint(folder / name, TrainState(model=net, optimizer=optimizer, meta={"step": 2}))
        found = repr(sorted({**weights(net), **moments(net, optimizer)}.items()))
        if rank == 0:
            (folder / f"{name}.txt").write_text(found)
    dist.barrier()


def load_two(rank: int, world: int, folder: Path) -> None:
    """The other half."""
    mesh = init_device_mesh("cpu", (world,))
    for name, make in OPTIMIZERS.items():
        net = shard(Net(width=256, odd=512), mesh)
        optimizer = make(net)
        load_checkpoint(folder / name / "step-00000002", TrainState(model=net, optimizer=optimizer))
        found = repr(sorted({**weights(net), **moments(net, optimizer)}.items()))
        assert found == (folder / f"{name}.txt").read_text(), name


CASES = {f.__name__: f for f in (fsdp, cut_blocks, meshes, stages, pretrained, saver, save_four, load_two)}


def main() -> None:
    rank, world, port, folder, names = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]), sys.argv[5:]
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    seconds = {}
    for name in names:
        began = time.process_time()
        CASES[name](rank, world, folder)
        seconds[name] = round(time.process_time() - began, 1)
    print(json.dumps(seconds), flush=True)
    os._exit(0)  # a rank may be gone: nothing to take leave of


if __name__ == "__main__":
    main()
