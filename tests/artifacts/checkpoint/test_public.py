"""A checkpoint of one process: every bit comes back, nothing else is loaded, and what is wrong is named."""

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import deepwell.artifacts.checkpoint as package
from deepwell.artifacts.checkpoint import (
    Saver,
    TrainState,
    latest,
    list_checkpoints,
    load,
    load_checkpoint,
    read_meta,
    save,
    save_checkpoint,
    verify,
)
from deepwell.artifacts.checkpoint import manifest as manifests
from deepwell.errors import CheckpointError, ConfigError, NumericsError, UnsupportedError
from deepwell.precision.policy import PrecisionPolicy
from deepwell.train.adamw.optimizer import AdamWDW

Make = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Two tied weights, a buffer that a forward changes, a transposed weight, an empty and a 0-d parameter."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 24)
        self.up = nn.Linear(24, 51)
        self.norm = nn.BatchNorm1d(51)
        self.down = nn.Linear(51, 24)
        self.head = nn.Linear(24, 40, bias=False)
        self.down.weight = nn.Parameter(torch.randn(51, 24).t())
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.none = nn.Parameter(torch.empty(0, 3))
        self.to(dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.down(self.norm(self.up(self.embed(ids))).relu()) * self.gain).float().logsumexp(-1).mean()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        ids = torch.randint(40, (16,), generator=torch.Generator().manual_seed(step))
        net(ids).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_same(a: Any, b: Any) -> None:
    """Equal bit for bit, dtypes and NaNs included."""
    if isinstance(a, Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert torch.equal(a.contiguous().reshape(-1).view(torch.uint8), b.contiguous().reshape(-1).view(torch.uint8))
    else:
        assert a == b


def assert_same_state(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    for group, other in zip(a.param_groups, b.param_groups, strict=True):
        for p, q in zip(group["params"], other["params"], strict=True):
            assert a.state[p].keys() == b.state[q].keys()
            for key in a.state[p]:
                assert_same(a.state[p][key], b.state[q][key])
        assert all(other[key] == value for key, value in group.items() if key != "params")


OPTIMIZERS: dict[str, tuple[torch.dtype, Make]] = {
    "sgd": (torch.float32, lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)),
    "adamw": (torch.float32, lambda net: torch.optim.AdamW(net.parameters(), lr=torch.tensor(3e-3))),
    "adamw bf16": (torch.bfloat16, lambda net: torch.optim.AdamW(net.parameters(), lr=3e-3)),
    "groups": (
        torch.float32,
        lambda net: torch.optim.Adam(
            [{"params": list(net.parameters())[:2], "lr": 1e-2}, {"params": list(net.parameters())[2:]}], lr=1e-3
        ),
    ),
    "dw bf16": (torch.bfloat16, lambda net: AdamWDW(net.parameters(), lr=torch.tensor(3e-3), moments="bf16")),
    "dw fp32": (
        torch.bfloat16,
        lambda net: AdamWDW(net.parameters(), lr=3e-3, moments="fp32", master_weights="fp32", clip_norm=1.0),
    ),
    "dw fp8": (
        torch.bfloat16,
        # Blocks of FP8 moments follow memory: they are for contiguous weights.
        lambda net: AdamWDW([p for p in net.parameters() if p.is_contiguous()], moments="fp8", master_weights="fp32"),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_bit_comes_back_and_training_goes_on_the_same(name: str, tmp_path: Path) -> None:
    dtype, make = OPTIMIZERS[name]
    net = Net(dtype)
    optimizer = make(net)
    train(net, optimizer, range(3))
    with torch.no_grad():
        net.up.bias[:3] = torch.tensor([float("nan"), float("-inf"), -0.0])
    meta = {"step": 3, "loss": 1.25, "cursor": 48, "seeds": [1, 2], "guard": {"best": float("inf")}}
    state = TrainState(model=net, optimizer=optimizer, meta=meta, rank_state={"rng": torch.get_rng_state()})
    path = save_checkpoint(tmp_path, state)
    assert path == tmp_path / "step-00000003"

    torch.manual_seed(5)
    other = Net(dtype)
    live = make(other)
    if name != "sgd":
        train(other, live, range(7, 9))
    live.param_groups[0]["weight_decay"] = 0.5
    rate = live.param_groups[0]["lr"]
    loaded = TrainState(model=other, optimizer=live)
    assert load_checkpoint(path, loaded) == meta == read_meta(path)
    assert live.param_groups[0]["lr"] is rate or not isinstance(rate, Tensor)
    assert_same(loaded.rank_state["rng"], state.rank_state["rng"])
    for step in range(2):
        assert_same_state(optimizer, live)
        for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True):
            assert_same(a, b)
        assert other.head.weight is other.embed.weight
        train(net, optimizer, range(10 + step, 11 + step))
        train(other, live, range(10 + step, 11 + step))


def test_a_checkpoint_is_a_value(tmp_path: Path) -> None:
    net, policy = Net(), PrecisionPolicy("mxfp8")
    optimizer = AdamWDW(net.parameters(), moments="fp32")
    train(net, optimizer, range(1))

    class Trainer:
        def train_state(self) -> TrainState:
            return TrainState(model=net, optimizer=optimizer, meta={"step": 7, "policy": policy.to_dict()})

        def load(self, path: Path) -> None:
            self.step = load_checkpoint(path, self.train_state())["step"]

    trainer = Trainer()
    path = save(trainer, tmp_path / "run")
    for where in (path, str(tmp_path / "run")):
        found = load(where)
        assert (found.path, found.step, found.plan, found.policy) == (path, 7, None, policy)
        assert "step 7" in str(found) and "1 rank " in str(found)
    weights, expected = found.weights(), net.state_dict()
    assert set(weights) == set(expected)
    for name, value in expected.items():
        assert_same(weights[name], value)
    state = found.optimizer_state()["state"]
    assert_same(state["up.weight"]["exp_avg"], optimizer.state[net.up.weight]["exp_avg"])
    assert found.verify() == sum(file.stat().st_size for file in path.iterdir()) - sum(
        (path / name).stat().st_size for name in ("manifest.json", "COMMITTED")
    )
    before = {k: v.clone() for k, v in expected.items()}
    with torch.no_grad():
        net.up.weight.zero_()
    found.restore(trainer)
    assert trainer.step == 7
    other = Net()
    found.restore(other)
    for name, value in before.items():
        assert_same(net.state_dict()[name], value)
        assert_same(other.state_dict()[name], value)

    # torch's own reader takes these files; a second name of a tensor is not in them.
    tensors = {n: torch.zeros_like(value) for n, value in before.items() if value.numel() and n != "head.weight"}
    dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    for name, value in tensors.items():
        assert_same(value, before[name])

    with pytest.raises(ConfigError, match="cannot save a dict"):
        save({}, tmp_path)
    with pytest.raises(CheckpointError, match="holds none"):
        load(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="path is None; give a folder"):
        save(net, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="path is 3; give a folder"):
        load(3)  # type: ignore[arg-type]


def test_no_file_is_unpickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, range(1))
    path = save_checkpoint(tmp_path, TrainState(model=net, optimizer=optimizer, meta={"step": 1}))

    class Evil:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    for name in (".metadata", "evil.pkl", "state.pt", "pytorch_model.bin", "optimizer-00001.distcp"):
        (path / name).write_bytes(pickle.dumps(Evil()))
        (tmp_path / name).write_bytes(pickle.dumps(Evil()))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    for where, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(where, name, refuse)
    other = Net()
    load_checkpoint(path, TrainState(model=other, optimizer=torch.optim.AdamW(other.parameters())))
    assert_same(load(tmp_path).weights()["up.weight"], net.up.weight.detach())
    load(path).optimizer_state()
    verify(path)
    assert not (tmp_path / "ran").exists()


def test_the_modules_name_no_way_to_run_code() -> None:
    for file in Path(package.__file__).parent.glob("*.py"):
        found = re.search(r"pickle|torch\.load|weights_only|\beval\(|\bexec\(", file.read_text(encoding="utf-8"))
        assert not found, f"{file.name}: {found}"


def damage_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def damage_flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [damage_truncate, damage_flip, Path.unlink])
def test_a_damaged_file_is_named_and_nothing_is_loaded(damage: Callable[[Path], None], tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, range(1))
    rank_state = {"rng": torch.get_rng_state()}
    state = TrainState(model=net, optimizer=optimizer, meta={"step": 1}, rank_state=rank_state)
    names = [file.name for file in save_checkpoint(tmp_path / "a", state).iterdir()]
    assert len(names) == 7
    for name in names:
        folder = tmp_path / name
        good = save_checkpoint(folder, state)
        path = save_checkpoint(
            folder, TrainState(model=net, optimizer=optimizer, meta={"step": 2}, rank_state=rank_state)
        )
        damage(path / name)
        other = Net()
        before = {k: v.clone() for k, v in other.state_dict().items()}
        with pytest.raises(
            CheckpointError, match=re.escape(name if name != "COMMITTED" else "manifest.json") + "|COMMITTED"
        ):
            load_checkpoint(path, TrainState(model=other))
        with pytest.raises(CheckpointError):
            verify(path)
        for key, value in other.state_dict().items():
            assert_same(value, before[key])
        # Sizes and the marker are looked at always, hashes of large files when they are read.
        if damage is not damage_flip or name in {"COMMITTED", "manifest.json"}:
            assert latest(folder) == good
            assert list_checkpoints(folder) == [good]


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    net = Net()
    path = save_checkpoint(tmp_path, TrainState(model=net, meta={"step": 1}))

    def refuses(words: str, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        with pytest.raises(CheckpointError, match=words):
            load_checkpoint(path, TrainState(model=model, optimizer=optimizer))

    other = Net()
    other.extra = nn.Linear(2, 2)
    refuses("has no extra.weight, extra.bias;", other)
    other = Net()
    del other.up
    refuses("holds up.weight, up.bias, which the model has no place for", other)
    other = Net()
    other.up = nn.Linear(24, 50)
    refuses(r"up.weight has shape \(51, 24\), the model's is \(50, 24\)", other)
    refuses("gain is torch.float32, the model's is torch.bfloat16", Net(torch.bfloat16))
    other = Net()
    refuses("saved without an optimizer", other, torch.optim.AdamW(other.parameters()))
    with pytest.raises(ConfigError, match=r"param_groups\[0\]\['params'\]\[0\] .* not a parameter of the model"):
        load_checkpoint(path, TrainState(model=other, optimizer=torch.optim.AdamW([nn.Parameter(torch.ones(2))])))
    for step in (None, -1, 2.0, True, "3"):
        with pytest.raises(ConfigError, match="step"):
            save_checkpoint(tmp_path, TrainState(model=net, meta={"step": step}))
    with pytest.raises(ConfigError, match="meta must be JSON"):
        save_checkpoint(tmp_path, TrainState(model=net, meta={"step": 2, "x": object()}))
    net.odd = nn.Parameter(torch.ones(2, dtype=torch.complex128))
    with pytest.raises(UnsupportedError, match=r"odd has dtype torch\.complex128"):
        save_checkpoint(tmp_path, TrainState(model=net, meta={"step": 2}))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]


def test_a_poisoned_state_is_never_written(tmp_path: Path) -> None:
    net = Net()
    good = save_checkpoint(tmp_path, TrainState(model=net, meta={"step": 1, "loss": 2.0}))
    for loss, healthy in ((float("nan"), True), (float("inf"), True), (2.0, False)):
        state = TrainState(model=net, meta={"step": 2, "loss": loss})
        with pytest.raises(NumericsError, match="not saved"):
            save_checkpoint(tmp_path, state, healthy=healthy)
        with Saver(tmp_path, keep_last=1) as saver:
            saver.save(state, healthy=healthy)
        (event,) = saver.poll()
        assert not event.committed and "last good checkpoint stays" in event.error
    assert [p.name for p in tmp_path.iterdir()] == [good.name]


def rewrite(path: Path, change: Callable[[dict[str, Any]], None], file: str = "manifest.json") -> None:
    """Change a document and make the hashes fit again, as another version would have written it."""
    import hashlib

    data = json.loads((path / file).read_bytes())
    change(data)
    (path / file).write_text(json.dumps(data))
    if file != "manifest.json":
        digest, size = hashlib.sha256((path / file).read_bytes()).hexdigest(), (path / file).stat().st_size

        def update(manifest: dict[str, Any]) -> None:
            for record in manifest["files"]:
                if record["name"] == file:
                    record.update(size=size, sha256=digest)

        rewrite(path, update)
        return
    (path / "COMMITTED").write_text(hashlib.sha256((path / file).read_bytes()).hexdigest())


def test_schemas_migrate_forward_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    path = save_checkpoint(tmp_path, TrainState(model=net, meta={"step": 1, "cursor": 5}))
    rewrite(path, lambda data: data.update(schema=manifests.SCHEMA + 1))
    with pytest.raises(
        CheckpointError, match=r"manifest.json has schema 2; this Deepwell reads up to 1: install a newer"
    ):
        load(path)
    rewrite(path, lambda data: data.update(schema=0))
    with pytest.raises(CheckpointError, match="has schema 0, and nothing leads from it"):
        load(path)
    rewrite(path, lambda data: data.update(position=data.pop("cursor")), "state.json")

    def rename(documents: manifests.Documents) -> manifests.Documents:
        state = dict(documents["state"])
        state["cursor"] = state.pop("position")
        return {**documents, "state": state}

    monkeypatch.setitem(manifests.MIGRATIONS, 0, rename)
    assert load(path).meta == {"step": 1, "cursor": 5}
    other = Net()
    load_checkpoint(path, TrainState(model=other))
    assert_same(other.up.weight.detach(), net.up.weight.detach())


def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    net = Net()
    path = save_checkpoint(tmp_path / "a", TrainState(model=net, meta={"step": 1}))
    elsewhere = tmp_path / "model-00000.safetensors"
    elsewhere.write_bytes((path / elsewhere.name).read_bytes())

    def lead(data: dict[str, Any]) -> None:
        data["model"]["up.weight"]["parts"][0][0] = "../../model-00000.safetensors"

    rewrite(path, lead, "index.json")
    with pytest.raises(CheckpointError, match=r"a part of up\.weight is in no file of the manifest"):
        load_checkpoint(path, TrainState(model=Net()))
    rewrite(path, lambda data: data["files"].append({"name": "../../model-00000.safetensors", "size": 1, "sha256": ""}))
    with pytest.raises(CheckpointError, match="which is no file of a checkpoint"):
        load_checkpoint(path, TrainState(model=Net()))


FORGED: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "no step": ("manifest.json", lambda data: data.pop("step")),
    "world": ("manifest.json", lambda data: data.update(world="2")),
    "files": ("manifest.json", lambda data: data.update(files=[{"name": 3}])),
    "groups": ("index.json", lambda data: data.update(groups=[3])),
    "place": ("index.json", lambda data: data["model"]["up.bias"]["parts"][0].__setitem__(1, "x")),
    "shape": ("index.json", lambda data: data["model"]["up.bias"].update(shape=["51"])),
    "no end": ("index.json", lambda data: data["optimizer"]["up.bias"]["exp_avg"].update(shape=[1 << 38])),
    "absent": ("index.json", lambda data: data["optimizer"]["up.bias"]["exp_avg"].update(parts=[])),
    "scales": ("index.json", lambda data: data["optimizer"]["up.bias"]["exp_avg"].update(block=7)),
}


@pytest.mark.parametrize("name", FORGED)
def test_documents_that_say_what_cannot_be_are_refused_before_anything_is_loaded(name: str, tmp_path: Path) -> None:
    """Their hashes fit: somebody made them on purpose, or another program did."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters())
    train(net, optimizer, range(1))
    path = save_checkpoint(tmp_path, TrainState(model=net, optimizer=optimizer, meta={"step": 1}))
    rewrite(path, FORGED[name][1], FORGED[name][0])
    other = Net()
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(CheckpointError):
        load_checkpoint(path, TrainState(model=other, optimizer=torch.optim.AdamW(other.parameters())))
    for key, value in other.state_dict().items():
        assert_same(value, before[key])
    with pytest.raises(CheckpointError):
        load(path).optimizer_state()
