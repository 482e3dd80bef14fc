"""How a stage's kernel is chosen: torch's unless another is right and faster, remembered in the process and on disk."""

import time

import pytest
import torch

from deepwell.kernels.experts import stages, tiles_proof
from deepwell.kernels.experts.row_products import FP8_TILES, PRODUCT_TILES, UP_TILES, Rows
from deepwell.kernels.tune.verify import Proof

STAGE = stages.ExpertStage(
    name="up", m=64, n=8, k=8, details="", precision="bfloat16", device="cpu", kernel="product", form="nk"
)
# Rows 8 to 15 hold no choice.
ROWS = Rows(torch.tensor([16], dtype=torch.int32), torch.tensor([*range(8), *[-1] * 8], dtype=torch.int32), 1)


@pytest.fixture(autouse=True)
def fresh(no_choices, monkeypatch):
    monkeypatch.setattr(stages, "LEAST_FLOPS", 0.0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)  # torch for CPUs has none
    stages.forget()
    yield
    stages.forget()


class Ways:
    """Results of two parts, each after so many milliseconds; how often each way ran."""

    def __init__(self, **ms):
        self.wide, self.dw = torch.randn(16, 8).bfloat16(), torch.randn(16)
        self.calls = dict.fromkeys(ms, 0)
        self.ways = {name: lambda name=name, ms=ms: self.run(name, ms) for name, ms in ms.items()}

    def run(self, name, ms):
        self.calls[name] += 1
        time.sleep(ms * 1e-3)
        dw = -self.dw if name == "wrong" else self.dw.clone()
        wide = self.wide.clone()
        if name != "torch":
            dw[8:], wide[8:] = 7.0, 7.0  # of rows without a choice
        return wide, dw


def test_a_tile_that_fails_its_proof_is_rejected_alone(monkeypatch):
    first, second = (tile.name for tile in PRODUCT_TILES[:2])
    right = tiles_proof.row_product

    def wrong(*given, tile):
        return right(*given, tile=tile) * (1.1 if tile.name == first else 1.0)

    monkeypatch.setattr(tiles_proof, "row_product", wrong)
    ways = Ways(**{"torch": 4, first: 0, second: 1})
    assert chosen(ways) == second and ways.calls[first] == 0
    assert list(stages.rejected()) == [f"product {first}"]
    assert "dB against the reference" in stages.rejected()[f"product {first}"]


def test_the_first_stage_of_a_model_proves_those_that_follow(monkeypatch):
    asked = []
    monkeypatch.setattr(tiles_proof, "proofs_of", lambda pairs, timeout_s: [asked.append(p) or Proof() for p in pairs])
    found = tiles_proof.proofs("up", "silu,True,False,None,None,0.0 nk", "cpu")
    assert list(found) == [tile.name for tile in UP_TILES]
    forms = {(candidate.name.split()[0], problem.details) for candidate, problem in asked}
    how = "silu,True,False,None,None,0.0"
    assert forms == {("up", f"{how} nk"), ("product", "nk"), ("product", "kn"), ("rows", "")}
    asked.clear()
    assert list(tiles_proof.proofs("codes", "nk", "cpu")) == [tile.name for tile in FP8_TILES]
    assert {(candidate.name.split()[0], problem.details) for candidate, problem in asked} == {
        ("codes", "nk"),
        ("wgrad", ""),
    }


FORMS = [
    ("up", "silu,True,False,None,None,0.0 nk"),
    ("up", "silu,True,True,7.0,1.702,1.0 kn"),
    ("up", "relu2,False,False,None,None,0.0 kn"),
    *(("product", "kn"), ("codes", "nk"), ("wgrad", "")),
]


@pytest.mark.parametrize(("stage", "form"), FORMS, ids=lambda word: word.split(",")[0])
def test_the_references_pass_every_proof(stage, form):
    assert all(proof.is_passed for proof in tiles_proof.proofs(stage, form, "cpu").values())


def chosen(ways):
    stages.by_the_fastest(STAGE, ways.ways, ROWS)
    return next(iter(stages.chosen().values()))


def test_the_fastest_right_way_runs_from_then_on():
    ways = Ways(torch=4, tile=1, wrong=0)
    assert chosen(ways) == "tile"
    before = dict(ways.calls)
    wide, _ = stages.by_the_fastest(STAGE, ways.ways, ROWS)
    assert torch.equal(wide[:8], ways.wide[:8])
    assert ways.calls == {**before, "tile": before["tile"] + 1}
    stages.forget()  # and the next process reads it from disk
    assert chosen(ways) == "tile" and ways.calls["torch"] == before["torch"]


def test_torchs_way_stays_where_nothing_is_gained():
    assert chosen(Ways(torch=2, tile=3, wrong=0)) == "torch"


def test_small_stages_and_other_dtypes_are_torchs_untimed(monkeypatch):
    ways = Ways(torch=0, tile=0)
    monkeypatch.setattr(stages, "LEAST_FLOPS", 1e11)
    stages.by_the_fastest(STAGE, ways.ways, ROWS)
    assert ways.calls == {"torch": 1, "tile": 0} and not stages.chosen()


def test_while_a_graph_is_recorded_a_new_shape_is_torchs(monkeypatch):
    ways = Ways(torch=1, tile=0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    stages.by_the_fastest(STAGE, ways.ways, ROWS)
    assert ways.calls == {"torch": 1, "tile": 0} and not stages.chosen()


def test_one_way_can_be_asked_for():
    ways = Ways(torch=0, tile=0)
    for way, ran in (("own", "tile"), ("torch", "torch"), ("tile", "tile")):
        before = ways.calls[ran]
        with stages.only(way):
            stages.by_the_fastest(STAGE, ways.ways, ROWS)
        assert ways.calls[ran] == before + 1
