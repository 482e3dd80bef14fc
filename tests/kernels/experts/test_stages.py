"""How a stage's kernel is chosen: torch's unless another is right and faster, remembered in the process and on disk."""

import time

import pytest
import torch

from deepwell.kernels.experts import stages, tiles_proof
from deepwell.kernels.experts.row_products import Rows

STAGE = stages.ExpertStage(name="up", m=64, n=8, k=8, details="", precision="bfloat16", device="cpu")
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


def test_tiles_that_fail_their_proof_never_compete(monkeypatch):
    right = tiles_proof.row_product
    monkeypatch.setattr(tiles_proof, "row_product", lambda *given, **how: 1.1 * right(*given, **how))
    ways = Ways(torch=4, tile=1)
    assert chosen(ways) == "torch" and ways.calls == {"torch": 1, "tile": 0}


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
