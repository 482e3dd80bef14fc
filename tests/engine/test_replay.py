"""CUDA graphs that the engine switches on by itself: when it does, and that nothing is lost by it."""

import threading

import numpy as np
import pytest
import torch
from torch import nn

import deepwell as dw
from deepwell.bench.llama import TINY, Llama
from deepwell.engine.calls import replay as module
from deepwell.engine.calls.replay import Replay, copied
from deepwell.formats.metrics import assert_bitwise_equal


class Clock:
    """In the place of the module `time`: it goes on where somebody says so, however busy this machine is."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Graphs:
    """A forward and backward that stand for compiled ones. Replays write to the same memory each time."""

    def __init__(
        self, replay: Replay, clock: Clock, *, host_s: float = 0.002, gpu_s: float = 0.0, replay_s: float = 0.0
    ) -> None:
        self.clock = clock
        self.seconds = {"launch": (host_s, gpu_s), "replay": (0.0, replay_s)}
        self.memory = {name: np.zeros(4, dtype=np.float32) for name in ("out", "saved", "grad")}
        self.ran: list[str] = []
        self.wait = 0.0
        self.fails = False
        self.run_forward = replay.wrap(self._forward("launch"), self._forward("replay"), **_kind(False))
        self.run_backward = replay.wrap(self._backward("launch"), self._backward("replay"), **_kind(True))

    def synchronize(self) -> None:
        self.clock.now += self.wait
        self.wait = 0.0

    def _spend(self, how: str) -> None:
        host, gpu = self.seconds[how]
        self.clock.now += host
        self.wait += gpu

    def _put(self, how: str, name: str, value: torch.Tensor) -> torch.Tensor:
        if how == "launch":
            return value
        self.memory[name][:] = value.numpy()
        return torch.from_numpy(self.memory[name])

    def _forward(self, how: str):
        def run(inputs):
            if how == "replay" and self.fails:
                raise RuntimeError("operation not permitted when stream is capturing")
            self.ran.append(f"{how} forward")
            self._spend(how)
            x = inputs[0]
            return [self._put(how, "out", x * 2), self._put(how, "saved", x + 0)]

        return run

    def _backward(self, how: str):
        def run(inputs):
            self.ran.append(f"{how} backward")
            self._spend(how)
            return [self._put(how, "grad", inputs[0] * 3), None]

        return run

    def step(self, replay: Replay, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, saved = self.run_forward([x])
        (out,) = replay.outputs((out,))
        grad, nothing = self.run_backward([saved])
        assert nothing is None
        return out, grad


def _kind(is_backward: bool) -> dict[str, bool]:
    return {"is_backward": is_backward, "is_inference": False}


@pytest.fixture
def on_cuda(monkeypatch):
    """Have the mechanism run without a GPU."""
    made: list[Graphs] = []
    clock = Clock()

    def make(replay: Replay, **how: float) -> Graphs:
        made.append(Graphs(replay, clock, **how))
        return made[-1]

    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: [graphs.synchronize() for graphs in made])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: None)
    monkeypatch.setattr(module, "_pending", [])
    return make


# Just less than what would have launches or replays dropped: 2 ms of the host are 61% of a step, 1.9 ms 95% of 2.
@pytest.mark.parametrize("how", [{}, {"gpu_s": 0.0013}, {"replay_s": 0.0019}], ids=str)
def test_graphs_are_replayed_where_the_host_is_the_limit(on_cuda, how) -> None:
    replay = Replay("measured")
    graphs = on_cuda(replay, **how)
    kept = []
    for i in range(12):
        x = torch.full((4,), float(i))
        kept.append((i, *graphs.step(replay, x)))
    assert (replay.state, replay.is_settled) == ("replayed", True)
    assert "the host was the limit" in replay.why
    assert graphs.ran[:10] == ["launch forward", "launch backward"] * 5
    assert graphs.ran[10:] == ["replay forward", "replay backward"] * 7
    for i, out, grad in kept:  # long after later replays wrote to the same memory
        assert_bitwise_equal(out, torch.full((4,), 2.0 * i))
        assert_bitwise_equal(grad, torch.full((4,), 3.0 * i))


@pytest.mark.parametrize("gpu_s", [0.002, 0.0014])  # the host has 50 or 59% of a step
def test_launches_stay_where_the_gpu_is_the_limit(on_cuda, gpu_s) -> None:
    replay = Replay("measured")
    graphs = on_cuda(replay, gpu_s=gpu_s)
    for _ in range(8):
        graphs.step(replay, torch.ones(4))
    assert (replay.state, replay.is_settled) == ("never", True)
    assert "the GPU is the limit" in replay.why and set(graphs.ran) == {"launch forward", "launch backward"}


@pytest.mark.parametrize("replay_s", [0.003, 0.00196])
def test_graphs_that_are_no_faster_are_dropped(on_cuda, replay_s) -> None:
    replay = Replay("measured")
    graphs = on_cuda(replay, replay_s=replay_s)
    for _ in range(10):
        graphs.step(replay, torch.ones(4))
    assert replay.state == "never" and "a replay takes" in replay.why
    assert graphs.ran[-1] == "launch backward" and not replay._recorded


def test_a_forward_before_the_last_ones_backward_is_launched(on_cuda) -> None:
    replay = Replay("always")
    graphs = on_cuda(replay)
    graphs.step(replay, torch.ones(4))
    first, saved = graphs.run_forward([torch.ones(4)])
    second, other = graphs.run_forward([torch.full((4,), 5.0)])
    assert graphs.ran[-2:] == ["replay forward", "launch forward"]
    (grad, _), (last, _) = graphs.run_backward([other]), graphs.run_backward([saved])
    assert graphs.ran[-2:] == ["launch backward", "replay backward"]
    assert_bitwise_equal(grad, torch.full((4,), 15.0))
    assert_bitwise_equal(last, torch.full((4,), 3.0))
    del first, saved, second, other
    graphs.run_forward([torch.ones(4)])
    assert graphs.ran[-1] == "replay forward"


def test_another_thread_and_somebodys_own_recording_are_launched(on_cuda, monkeypatch) -> None:
    replay = Replay("always")
    graphs = on_cuda(replay)
    for _ in range(2):
        graphs.step(replay, torch.ones(4))
    thread = threading.Thread(target=graphs.run_forward, args=([torch.ones(4)],))
    thread.start()
    thread.join()
    assert graphs.ran[-1] == "launch forward"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    graphs.run_forward([torch.ones(4)])
    assert graphs.ran[-1] == "launch forward"


def test_an_empty_output_is_no_sign_of_a_replay(on_cuda) -> None:
    replay = Replay("always")
    ran = []

    def run(name):
        return lambda inputs: ran.append(name) or [torch.empty(0), torch.from_numpy(np.ones(4, dtype=np.float32))]

    forward = replay.wrap(run("launch"), run("replay"), **_kind(False))
    backward = replay.wrap(run("launch backward"), run("replay backward"), **_kind(True))
    for _ in range(2):
        forward([torch.ones(4)])
    backward([torch.empty(0), torch.ones(4)])  # of a forward that was launched
    assert ran == ["launch", "replay", "launch backward"]


def test_open_sizes_are_never_recorded(on_cuda) -> None:
    replay = Replay("always")
    graphs = on_cuda(replay)
    for n in (3, 4, 5):
        graphs.run_forward([torch.ones(n), n])
    assert replay.state == "never" and "sizes" in replay.why and set(graphs.ran) == {"launch forward"}


def test_what_cannot_be_recorded_is_launched(on_cuda, caplog) -> None:
    replay = Replay("always")
    graphs = on_cuda(replay)
    graphs.fails = True
    for i in range(4):
        _, grad = graphs.step(replay, torch.full((4,), float(i)))
        assert_bitwise_equal(grad, torch.full((4,), 3.0 * i))
    assert replay.state == "never" and "not permitted" in replay.why and "cannot be recorded" in caplog.text


def test_large_outputs_are_not_copied_at_every_call(on_cuda, monkeypatch) -> None:
    monkeypatch.setattr(module, "_MOST_OUTPUT_BYTES", 8)
    replay = Replay("measured")
    graphs = on_cuda(replay)
    for i in range(6):
        out, _ = graphs.step(replay, torch.full((4,), float(i)))
        assert_bitwise_equal(out, torch.full((4,), 2.0 * i))
    assert replay.state == "never" and "MiB would be copied" in replay.why


@pytest.mark.parametrize("large_bytes", [0, 48, 1 << 20])
def test_gradients_are_copied_large_or_small_and_one_that_is_returned_twice_stays_one(large_bytes, monkeypatch) -> None:
    monkeypatch.setattr("deepwell.engine.calls.replay._LARGE_BYTES", large_bytes)
    grad, other = torch.randn(3, 4).T, torch.randn(5)
    first, second, third, nothing, number = copied([grad, grad, other, None, 7])
    assert first is second and first is not grad and (nothing, number) == (None, 7)
    assert first.stride() == grad.stride()
    for made, given in ((first, grad), (third, other)):
        assert made.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()
        assert_bitwise_equal(made, given)


# ---- on a GPU ----


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Llama(TINY).cuda().bfloat16()


def _tokens(step: int, length: int = 64) -> torch.Tensor:
    return torch.randint(TINY.vocab, (2, length), generator=torch.Generator().manual_seed(step)).cuda()


def _train(engine, steps: int, micro_batches: int = 1, length=lambda step: 64) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(engine.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        for micro in range(micro_batches):
            tokens = _tokens(100 * step + micro, length(step))
            loss = engine(tokens, tokens)
            loss.backward()
            losses.append(loss)  # kept, and read at the end
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return [loss.detach() for loss in losses]


@pytest.mark.gpu
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_by_default_a_small_model_is_replayed_and_trains_as_without(micro_batches) -> None:
    results = {}
    for cuda_graphs in (False, None, True):
        engine = dw.compile(_model(), cuda_graphs=cuda_graphs, measure=False)
        losses = _train(engine, 14, micro_batches)
        results[cuda_graphs] = torch.stack([*losses, *(p.detach().float().sum() for p in engine.parameters())])
        assert engine.deepwell.is_replayed == (cuda_graphs is not False)
        if cuda_graphs is None:
            assert "replayed from CUDA graphs: the host was the limit" in str(engine.report())
            engine.eval()
            with torch.no_grad():
                engine(_tokens(0), _tokens(0))
            engine.train()
    assert_bitwise_equal(results[None], results[False])
    assert_bitwise_equal(results[True], results[False])


@pytest.mark.gpu
def test_lengths_that_change_are_launched_on_a_gpu() -> None:
    results = []
    for cuda_graphs in (False, None):
        engine = dw.compile(_model(), cuda_graphs=cuda_graphs, measure=False)
        results.append(torch.stack(_train(engine, 16, length=lambda step: 64 + 16 * (step % 5))))
    assert_bitwise_equal(*results)


@pytest.mark.gpu
def test_two_forwards_may_wait_for_their_backwards_on_a_gpu() -> None:
    grads = []
    for cuda_graphs in (False, True):
        engine = dw.compile(_model(), cuda_graphs=cuda_graphs, measure=False)
        _train(engine, 4)
        losses = [engine(_tokens(i), _tokens(i)) for i in range(3)]
        for loss in losses:
            loss.backward()
        grads.append([parameter.grad.clone() for parameter in engine.parameters()])
    for a, b in zip(*grads, strict=True):
        assert_bitwise_equal(a, b)
