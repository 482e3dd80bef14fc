"""Meshes of layouts, also of worlds larger than this machine: a process group that only counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from cases import make_model
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

import deepwell as dw
from deepwell.errors import ConfigError, UnsupportedError
from deepwell.planner.layout import Layout, Offload
from deepwell.train.feed import Feed
from deepwell.train.parallel import make_meshes, parallelize
from deepwell.train.parallel.runner import Runner, part_of, predictable
from deepwell.train.parallel.shard import check_shardable, fsdp_options


@contextmanager
def world(rank: int, size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _ranks(mesh: object) -> list[int]:
    return mesh.mesh.flatten().tolist()  # type: ignore[attr-defined]


def test_an_8_by_8_plan() -> None:
    layout = Layout(dp=8, tp=4, pp=2, dp_replicate=2, ep=8, sharding="zero3", sequence_parallel=True)
    with world(37, 64):  # stage 1, then rank 5 of a stage: data rank 1, tp rank 1
        meshes = make_meshes(layout, "cpu")
        assert meshes.ranks.shape == (2, 2, 4, 1, 4)
        assert meshes.dp_rank == 1
        assert _ranks(meshes.tp) == [36, 37, 38, 39]
        assert meshes.layers.mesh.tolist() == [[33, 37, 41, 45], [49, 53, 57, 61]]
        assert meshes.rest.mesh.tolist() == [list(range(32, 48)), list(range(48, 64))]
        assert meshes.experts.shape == (2, 4, 8, 1)
        assert _ranks(meshes.experts["ep"]) == list(range(32, 40))
        assert _ranks(meshes.experts["edp"]) == [37, 45, 53, 61]


def test_copies_and_contexts() -> None:
    with world(5, 8):
        ddp = make_meshes(Layout(dp=4, tp=2, sharding="ddp"), "cpu")
        assert ddp.layers.mesh.tolist() == [[1], [3], [5], [7]]  # four copies of one shard
        assert ddp.rest.mesh.tolist() == [[rank] for rank in range(8)]
        context = make_meshes(Layout(dp=2, cp=4, sharding="zero2"), "cpu")
        assert _ranks(context.layers) == list(range(8))
        assert context.rest is not None and _ranks(context.rest) == list(range(8))
        assert context.dp_rank == 1


def test_a_layout_of_another_world_is_refused() -> None:
    engine = dw.compile(make_model("plain"), precision="bf16")
    feed, cpu = Feed(engine.deepwell.model), torch.device("cpu")
    assert type(parallelize(engine, Layout(dp=1), feed=feed, device=cpu)) is Runner
    with pytest.raises(ConfigError, match=r"is of 16 processes \(dp 1 x tp 2 x pp 1 x cp 8\) and 1 are running"):
        parallelize(engine, Layout(dp=1, tp=2, cp=8), feed=feed, device=cpu)
    with world(0, 4), pytest.raises(ConfigError, match=r"is of 2 processes .* and 4 are running"):
        parallelize(engine, Layout(dp=2), feed=feed, device=cpu)


def test_what_cannot_be_executed_is_refused() -> None:
    model = make_model("plain")
    kept = dw.compile(model, precision="mxfp8", cache_weights=True)
    with pytest.raises(UnsupportedError, match="cache_weights=True keeps FP8 copies of whole weights"):
        check_shardable(kept, Layout(dp=2, sharding="zero3"))
    check_shardable(kept, Layout(dp=2, sharding="zero2"))
    engine = dw.compile(model, precision="bf16")
    with pytest.raises(UnsupportedError, match="etp 2 is not executed"):
        check_shardable(engine, Layout(dp=2, etp=2))
    feed, cpu = Feed(model), torch.device("cpu")
    with pytest.raises(UnsupportedError, match="offload optimizer: only where states are sharded"):
        parallelize(engine, Layout(dp=1, offload=Offload(optimizer=1.0)), feed=feed, device=cpu)
    with pytest.raises(UnsupportedError, match=r"offload optimizer 0\.5: all of them or none"), world(0, 2):
        parallelize(engine, Layout(dp=2, sharding="zero2", offload=Offload(optimizer=0.5)), feed=feed, device=cpu)
    with world(0, 2):
        for share, kind in ((1.0, CPUOffloadPolicy), (0.0, OffloadPolicy)):
            meshes = make_meshes(Layout(dp=2, sharding="zero2", offload=Offload(optimizer=share)), "cpu")
            assert type(fsdp_options(meshes)["offload_policy"]) is kind


def test_ranks_of_tp_read_all_tokens_of_their_context_and_predict_a_part() -> None:
    ids = torch.arange(16).view(2, 8)
    batch, model = {"input_ids": ids, "labels": ids}, make_model("moe")
    with world(3, 4):  # the second half of the sequence, and of that the second half
        mine = part_of(batch, make_meshes(Layout(dp=1, tp=2, cp=2), "cpu"), model)
    assert torch.equal(mine["input_ids"], ids[:, 4:])
    assert mine["shift_labels"].tolist() == [[7, -100], [15, -100]]
    masked = {**batch, "attention_mask": torch.ones_like(ids)}
    with world(0, 2):
        meshes = make_meshes(Layout(dp=1, tp=2), "cpu")
        assert part_of(masked, meshes, model)["attention_mask"] is masked["attention_mask"]
        model.config.output_router_logits = True
        with pytest.raises(UnsupportedError, match="output_router_logits=True adds a loss of routers"):
            part_of(masked, meshes, model)
        assert "attention_mask" not in part_of(batch, meshes, model)


def test_a_batch_without_labels_still_runs_and_counts_nothing() -> None:
    ids = torch.arange(8).reshape(2, 4)
    nothing = torch.full((2, 4), -100)
    for key in ("labels", "shift_labels"):
        batch, items = predictable({"input_ids": ids, key: nothing})
        assert items == 0
        assert (batch[key] != -100).sum() == 2
        assert (nothing == -100).all()  # the loader's tensor is left alone
    assert predictable({"input_ids": ids, "labels": ids})[1] == 6
