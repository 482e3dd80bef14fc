"""The watch on real engines: faults put in at chosen layers, GEMMs, ranks and steps, and exactly what came of them."""

import copy
import json
import math
import os
import socket
import time

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import deepwell as dw
from deepwell.engine import sampling
from deepwell.engine.overrides import Overrides
from deepwell.errors import ConfigError
from deepwell.precision.guard import GuardSettings, GuardStop
from deepwell.train.adamw.optimizer import AdamWDW
from deepwell.train.watch import Watch, guarded_step, part_of

UP, DOWN = "layers.1.up", "layers.1.down"
SETTINGS = {"sample_every": 1, "sample_cost": 100.0, "confirm": 2, "window": 8, "cool_down": 3, "spike_warmup": 8}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64, bias=False), nn.Linear(64, 32, bias=False)
        self.register_buffer("gain", torch.ones(32))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if not torch.compiler.is_compiling():
            self.calls += 1  # only where it runs eagerly, as a sample does
        return x + self.down(torch.relu(self.up(x * self.gain)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return (x - y).square().mean()


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _batch(step):
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(64, 32, generator=generator) for name in ("x", "y")}


def _engine(policy="mxfp8"):
    batch = _batch(0)
    policy = policy if isinstance(policy, dw.PrecisionPolicy) else dw.PrecisionPolicy(policy)
    return dw.compile(dw.capture(Net(), (batch["x"], batch["y"])), precision_policy=policy)


def _spoil_model(model):
    """One channel of layer 1 is 2^30 times the others, and its `up` does not read it: one scale leaves nothing."""
    with torch.no_grad():
        model.layers[1].gain[5] = 2.0**30
        model.layers[1].up.weight[:, 5] = 0


def _spoil(engine):
    _spoil_model(engine.deepwell.model)


def _train(engine, watch, steps, *, optimizer=None, before=None, after=None):
    """The loop of a trainer. `before(step)` and `after(step)` put faults in; returns ((step, event) ..., losses)."""
    events, losses = [], []
    optimizer = optimizer or torch.optim.SGD(engine.parameters(), lr=0.0)
    for step in steps:
        engine.at_step(step)
        if before is not None:
            before(step)
        batch = _batch(step)
        watch.begin_step(step, [batch], lambda part: engine(**part))
        loss = engine(**batch)
        loss.backward()
        if after is not None:
            after(step)
        watch.before_clip()
        norm = torch.nn.utils.clip_grad_norm_(engine.parameters(), 1e9)
        ok = watch.after_backward(loss, norm)
        guarded_step(optimizer, ok)
        engine.deepwell.model.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
        events += [(step, event) for event in watch.end_step(step)]
    return events, losses


def _brief(events, *whats):
    return [(s, e.what, e.path, e.gemm, e.before, e.after) for s, e in events if not whats or e.what in whats]


# ---- what docs/guard.md says, computed apart from the watch ----


def _lost(rows, fmt):
    """The share of an operand's nonzero elements that round to zero, from the formats' definitions."""
    blocks = rows.double().abs().reshape(-1, 16 if fmt == "nvfp4" else 32)
    top = blocks.amax(1, keepdim=True)
    if fmt == "nvfp4":  # a scale in E4M3 for each block, under one of the tensor; half of the smallest code is 0.25
        tensor = top.max() / (6 * 448)
        scale, least = (top / 6 / tensor).float().to(torch.float8_e4m3fn).double() * tensor, 0.25
    else:  # a power of two, rounded up; half of E4M3's smallest code
        scale, least = torch.exp2(torch.ceil(torch.log2(top / 448))), 2.0**-10
    is_lost = (blocks <= scale * least) | (scale == 0)
    return float(is_lost[blocks > 0].double().mean())


def _spoilt_gemms(spoil, fmt):
    """The GEMMs of a model in fp32 of whose operands one loses more than half in this format."""
    model, seen = Net(), {}
    if spoil:
        _spoil_model(model)
    for path, linear in model.named_modules():
        if isinstance(linear, nn.Linear):

            def hook(module, inputs, output, path=path):
                seen[path] = [inputs[0].detach(), module.weight.detach()]
                output.register_hook(seen[path].append)

            linear.register_forward_hook(hook)
    model(**_batch(0)).backward()
    found = set()
    for path, (x, w, dy) in seen.items():
        for gemm, operands in (("fwd", (x, w)), ("dgrad", (dy, w.T)), ("wgrad", (dy.T, x.T))):
            if fmt != "bf16" and max(_lost(t.contiguous(), fmt) for t in operands) > 0.5:
                found.add((path, gemm))
    return found


def _documented(fmt, steps, spoilt_from):
    """The fallbacks of a run that is sampled at every step, one layer in turn, those with a finding again."""
    ladder, layers = {"nvfp4": "mxfp8", "mxfp8": "bf16"}, [("layers.0.up", "layers.0.down"), (UP, DOWN)]
    spoilt = {(spoil, f): _spoilt_gemms(spoil, f) for spoil in (False, True) for f in ("nvfp4", "mxfp8", "bf16")}
    now = {(path, gemm): fmt for paths in layers for path in paths for gemm in ("fwd", "dgrad", "wgrad")}
    waiting, rests_until, events = {}, {}, []
    for step in steps:
        looked = set(layers[0] + layers[1]) if not step else set(layers[(step - 1) % 2])
        looked |= {path for paths in layers for path in paths if any(p in paths for p, _ in waiting)}
        for key in sorted(now):
            if key[0] not in looked or step < rests_until.get(key, 0):
                continue
            if key not in spoilt[step >= spoilt_from, now[key]]:
                continue
            waiting[key] = waiting.get(key, 0) + 1
            if waiting[key] == SETTINGS["confirm"]:
                events.append((step, "fallback", *key, now[key], ladder[now[key]]))
                now[key], rests_until[key] = ladder[now[key]], step + SETTINGS["cool_down"]
                del waiting[key]
    return events


# ---- formats ----


def test_an_outlier_takes_one_gemm_of_one_layer_down_the_ladder_and_nothing_else():
    engine = _engine("nvfp4")
    watch = Watch(engine, GuardSettings(**SETTINGS))
    before = watch.formats()
    events, losses = _train(engine, watch, range(12), before=lambda step: _spoil(engine) if step == 4 else None)
    # Two findings, one rung; three steps of rest, two findings, the next rung. One scale above all blocks leaves
    # nothing of the other channels' gradients either, and blocks of 32 tokens do.
    expected = [
        (5, "fallback", UP, "fwd", "nvfp4", "mxfp8"),
        (5, "fallback", UP, "wgrad", "nvfp4", "mxfp8"),
        (9, "fallback", UP, "fwd", "mxfp8", "bf16"),
    ]
    assert _brief(events, "fallback", "recover", "skip", "budget") == expected == _documented("nvfp4", range(12), 4)
    assert {(e.path, e.gemm) for _, e in events} == {(UP, "fwd"), (UP, "wgrad")}
    assert {s for s, _ in events} <= set(range(4, 10))
    assert watch.formats() == {**before, UP: "bf16|nvfp4|mxfp8"}
    fallen = next(e for _, e in events if e.what == "fallback")
    assert "dB in emulate:nvfp4, below 8 dB" in fallen.reason and "of an operand become zero" in fallen.reason
    assert fallen.reason.endswith("2 times within 8 steps")
    row = next(r for r in engine.report().bindings if (r.path, r.gemm) == (UP, "fwd"))
    assert row.scheme == "bf16" and row.reason.startswith("override: guard, step 9: ")
    assert "formats of 2 GEMMs were changed at run time" in str(engine.report())
    # It computes as if the policy had said so.
    policy = dw.PrecisionPolicy("nvfp4")
    policy.set_layer_precision(f"path:{UP}", "bf16", gemms="fwd")
    policy.set_layer_precision(f"path:{UP}", "mxfp8", gemms="wgrad")
    torch._dynamo.reset()
    told = dw.compile(engine.ir, precision_policy=policy)
    assert told.bound.schemes == engine.bound.schemes
    with torch.no_grad():
        assert torch.equal(told(**_batch(11)), torch.tensor(losses[-1]))


def test_samples_change_nothing_that_is_trained():
    plain, watched = _engine(), _engine()
    _, losses = _train(plain, Watch(plain, GuardSettings.off()), range(6), optimizer=_adam(plain))
    torch.manual_seed(7)
    state = torch.get_rng_state()
    watch = Watch(watched, GuardSettings(**SETTINGS))
    events, again = _train(watched, watch, range(6), optimizer=_adam(watched))
    assert again == losses and events == [] and watch.num_samples == 6
    assert torch.equal(torch.get_rng_state(), state)
    for one, other in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(one, other)
    assert watched.options.graphs == 1 and float(watched.model.layers[0].calls) == 0


def _adam(engine):
    return torch.optim.AdamW(engine.parameters(), lr=1e-2)


def test_nan_of_a_kernel_falls_back_at_once(monkeypatch, eager):
    engine = _engine()
    real, target = sampling.low_precision_linear, engine.deepwell.model.layers[0].down.weight

    def broken(x, weights, bias, scheme):
        y = real(x, weights, bias, scheme)
        is_target = weights[0].data_ptr() == target.data_ptr() and broken.on
        return y - y.detach() + math.nan if is_target else y  # the forward alone

    broken.on = False
    monkeypatch.setattr(sampling, "low_precision_linear", broken)
    watch = Watch(engine, GuardSettings(**SETTINGS), rank=3)

    def before(step):
        broken.on = step >= 3

    events, _ = _train(engine, watch, range(6), before=before)
    assert _brief(events) == [
        (3, "nonfinite", "layers.0.down", "fwd", "", ""),
        (3, "fallback", "layers.0.down", "fwd", "mxfp8", "bf16"),
    ]
    assert events[0][1].reason == "emulate:mxfp8 gives NaN or infinity out of finite numbers" and events[0][1].rank == 3
    assert watch.formats() == {
        "layers.0.up": "mxfp8|mxfp8|mxfp8",
        "layers.0.down": "bf16|mxfp8|mxfp8",
        UP: "mxfp8|mxfp8|mxfp8",
        DOWN: "mxfp8|mxfp8|mxfp8",
    }


def test_a_dead_layer_is_reported_once_and_keeps_its_formats(eager):
    engine = _engine()
    with torch.no_grad():
        engine.deepwell.model.layers[0].down.weight.zero_()
    watch = Watch(engine, GuardSettings(**SETTINGS))
    formats = watch.formats()
    events, _ = _train(engine, watch, range(9))
    dead = {("layers.0.down", "fwd"), ("layers.0.down", "dgrad"), ("layers.0.up", "dgrad"), ("layers.0.up", "wgrad")}
    assert {(e.path, e.gemm) for _, e in events} == dead and len(events) == 4
    assert {e.what for _, e in events} == {"underflow"} and all("a dead layer" in e.reason for _, e in events)
    assert watch.formats() == formats


def test_overflow_of_the_models_own_dtype_is_no_matter_of_formats(eager):
    engine = _engine()
    watch = Watch(engine, GuardSettings(**{**SETTINGS, "max_skipped": 3}))
    formats = watch.formats()

    def before(step):
        if step == 2:
            with torch.no_grad():
                engine.deepwell.model.layers[1].up.weight.fill_(3e38)

    with pytest.raises(GuardStop, match="3 steps in a row were not finite, the last one at step 4") as stop:
        _train(engine, watch, range(9), before=before)
    told = {(e.what, e.path) for e in stop.value.events}
    assert ("nonfinite", UP) in told and ("skip", "") in told and watch.formats() == formats
    assert any(e.reason == "not finite in the model's own dtype" for e in stop.value.events)


def test_step_ranges_of_the_policy_switch_under_overrides_without_restart():
    policy = dw.PrecisionPolicy("nvfp4")
    policy.set_default("bf16", steps="6:8")
    policy.set_default("mxfp8", steps="8:")
    engine, x = _engine(policy), _batch(1)
    engine.override({(UP, "fwd"): "mxfp8", (DOWN, "wgrad"): "bf16"}, "a test")
    seen = {}
    for step in (0, 5, 6, 7, 8, 9, 0):
        with torch.no_grad():
            engine.at_step(step)(**x)
        seen[step] = {p: f for p, f in Watch(engine).formats().items() if p in (UP, DOWN)}
    low = {UP: "mxfp8|nvfp4|nvfp4", DOWN: "nvfp4|nvfp4|bf16"}
    high = dict.fromkeys((UP, DOWN), "bf16|bf16|bf16")  # the policy asks for more bits than the override
    eight = {UP: "mxfp8|mxfp8|mxfp8", DOWN: "mxfp8|mxfp8|bf16"}
    assert seen == {0: low, 5: low, 6: high, 7: high, 8: eight, 9: eight}
    assert len(engine.deepwell._phases) == 4 and all(o.graphs <= 1 for o, _ in engine.deepwell._phases.values())
    # A check of fragile GEMMs keeps them, and a copy has them.
    engine.at_step(0).check_fragile(x, floor_db=0.0)
    assert Watch(engine).formats()[UP] == low[UP]
    assert copy.deepcopy(engine).overrides == engine.overrides
    again = Overrides.from_dict(json.loads(json.dumps(engine.overrides.to_dict())))
    engine.override({(UP, "fwd"): None, (DOWN, "wgrad"): None}, "over")
    assert not engine.overrides and Watch(engine).formats()[UP] == "nvfp4|nvfp4|nvfp4"
    assert engine.set_overrides(again).overrides.rows[0].reason == "a test"


def test_wrong_overrides_are_named_and_change_nothing():
    engine = _engine()
    cases = {
        "no linear layer of the model; nearest: layers.1.up": ({("layers.1.upp", "fwd"): "bf16"}, "r"),
        "a linear layer has fwd, dgrad, wgrad": ({(UP, "forward"): "bf16"}, "r"),
        "reason is empty": ({(UP, "fwd"): "bf16"}, " "),
        "format 'bf61' is not known": ({(UP, "fwd"): "bf61"}, "r"),
        r"a key is \(module path, gemm\)": ({UP: "bf16"}, "r"),
        "changes is a list": ([], "r"),
    }
    for message, arguments in cases.items():
        with pytest.raises(ConfigError, match=message):
            engine.override(*arguments)
    for state in ({}, {"schema": 1, "overrides": [{"path": UP}]}, {"schema": 9}):
        with pytest.raises(ConfigError, match="override"):
            Overrides.from_dict(state)
    foreign = {"path": "other", "gemm": "fwd", "format": "bf16", "reason": "r"}
    with pytest.raises(ConfigError, match="overrides name other"):
        engine.set_overrides(Overrides.from_dict({"schema": 1, "overrides": [foreign]}))
    assert not engine.overrides and len(engine.deepwell._phases) == 1


# ---- bad steps ----


def _optimizers(engine):
    named = list(engine.parameters())
    yield torch.optim.AdamW(named, lr=1e-2)
    yield torch.optim.AdamW(named, lr=1e-2, fused=True)
    yield AdamWDW(named, lr=1e-2, moments="fp32", skip_nonfinite=True)
    yield AdamWDW(named, lr=1e-2, moments="fp32")


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_bad_step_leaves_weights_and_optimizer_as_they_were(poison, eager):
    engine = _engine("bf16")
    for optimizer in _optimizers(engine):
        watch = Watch(engine, GuardSettings(**SETTINGS))
        state = {}

        def snapshot(engine=engine, optimizer=optimizer):
            weights = [p.detach().clone() for p in engine.parameters()]
            return weights, copy.deepcopy(optimizer.state_dict()["state"])

        def after(step, engine=engine, state=state, snapshot=snapshot):
            state[step] = snapshot()  # as they are before the update
            if step == 3:
                engine.deepwell.model.layers[0].up.weight.grad[1, 2] = poison

        events, _ = _train(engine, watch, range(5), optimizer=optimizer, after=after)
        assert [(s, e.what, e.path) for s, e in events] == [(3, "skip", "")]
        assert (
            "gradient norm is not finite: weights and optimizer stay as they were (1 in a row)" in events[0][1].reason
        )
        assert watch.guard.num_skipped == 1 and watch.guard.skipped_in_row == 0 and watch.healthy
        before, untouched, moved = state[3], state[4], snapshot()
        for one, other in zip(before[0], untouched[0], strict=True):
            assert torch.equal(one, other)
        torch.testing.assert_close(before[1], untouched[1], rtol=0, atol=0)
        assert not any(torch.equal(a, b) for a, b in zip(untouched[0], moved[0], strict=True))


def test_loss_alone_may_be_bad_and_no_checkpoint_is_healthy_until_a_good_step():
    engine = _engine("bf16")
    watch, optimizer = Watch(engine, GuardSettings(**SETTINGS)), AdamWDW(engine.parameters(), skip_nonfinite=True)
    one, bad = torch.ones(()), torch.tensor(math.nan)
    for p in engine.parameters():
        p.grad = torch.ones_like(p)
    before = [p.detach().clone() for p in engine.parameters()]
    ok = watch.after_backward(bad, one)
    guarded_step(optimizer, ok)
    assert not ok and all(torch.equal(a, b) for a, b in zip(before, engine.parameters(), strict=True))
    assert not watch.healthy  # known before end_step
    assert [e.what for e in watch.end_step(1)] == ["skip"] and not watch.healthy
    assert watch.after_backward(one, one) and watch.end_step(2) == [] and watch.healthy
    # A spike is told, and what it does to the weights is not saved.
    for step in range(3, 20):
        watch.after_backward(one, one)
        watch.end_step(step)
    watch.after_backward(one * 9, one)
    assert [e.what for e in watch.end_step(20)] == ["spike"] and not watch.healthy
    watch.after_backward(one, one)
    assert watch.end_step(21) == [] and watch.healthy


def test_gradients_that_are_not_finite_again_are_traced_to_their_gemm(eager):
    # One weight alone: its own product. All behind one linear: the gradient that this linear sends back.
    for paths, blamed in (
        ([UP], [(UP, "wgrad")]),
        (["layers.0.up", "layers.0.down"], [(UP, "dgrad")]),
        (["layers.0.up", "layers.0.down", UP], [(DOWN, "dgrad")]),
        (["layers.0.up", "layers.0.down", UP, DOWN], []),  # from the loss on: no linear's fault
    ):
        engine = _engine()
        watch = Watch(engine, GuardSettings(**{**SETTINGS, "sample_every": 0}))

        def after(step, engine=engine, paths=paths):
            for path in paths if step in (2, 4, 6) else ():
                engine.deepwell.model.get_submodule(path).weight.grad[0] = math.nan

        events, _ = _train(engine, watch, range(8), after=after)
        fallen = [(s, "fallback", *key, "mxfp8", "bf16") for key in blamed for s in (6,)]
        assert _brief(events, "fallback") == fallen  # the first is skipped, the second is looked at, the third confirms
        assert [s for s, e in events if e.what == "skip"] == [2, 4, 6]


def test_a_run_that_is_off_watches_nothing():
    engine = _engine()
    watch = Watch(engine, GuardSettings.off())
    assert watch.after_backward(torch.tensor(math.nan), torch.ones(())) and watch.end_step(1) == []
    assert watch.healthy and watch.lr_scale == 1.0 and watch.num_samples == 0


def test_gradients_below_their_noise_fall_back_the_loudest_first(eager):
    engine = _engine("nvfp4")
    # Nothing of the gradient is left in the mean: a norm that is a hundredth of what its noise is.
    watch = Watch(engine, GuardSettings(**SETTINGS))
    formats, told = watch.formats(), []
    for step in range(2):
        batch = _batch(step)
        watch.begin_step(step, [batch], lambda part: engine(**part))
        watch.after_backward(torch.ones(()), torch.tensor(1e-4))
        told += [(step, event) for event in watch.end_step(step)]
    fallen = _brief(told, "fallback")
    assert {(s, gemm, before, after) for s, _, _, gemm, before, after in fallen} == {(1, "wgrad", "nvfp4", "mxfp8")}
    assert {path for _, _, path, *_ in fallen} == set(formats) and {e.what for _, e in told} >= {"noise", "budget"}
    assert "times its quantization noise, below 1.73" in next(e.reason for _, e in told if e.what == "noise")


# ---- state ----


def test_a_resumed_run_has_the_formats_and_decides_as_the_other_would_have(eager):
    def play(cut):
        torch._dynamo.reset()
        engine = _engine("nvfp4")
        _spoil(engine)
        watch = Watch(engine, GuardSettings(**SETTINGS))
        events, losses = _train(engine, watch, range(cut))
        if cut < 8:
            state = json.loads(json.dumps(watch.state_dict()))
            torch._dynamo.reset()
            engine = _engine("nvfp4")
            _spoil(engine)
            watch = Watch(engine, GuardSettings(**SETTINGS))
            watch.load_state_dict(state)
            more = _train(engine, watch, range(cut, 8))
            events, losses = events + more[0], losses + more[1]
        return events, losses, watch.formats(), watch.state_dict()

    whole = play(8)
    assert _brief(whole[0], "fallback") == _documented("nvfp4", range(8), 0)
    assert all(play(cut) == whole for cut in (1, 4))
    engine = _engine()
    watch = Watch(engine)
    watch.load_state_dict({})
    for state in ({"schema": 7}, {"schema": 1}, {**watch.state_dict(), "noise": [1]}):
        with pytest.raises(ConfigError, match="watch's state"):
            watch.load_state_dict(state)


# ---- cost ----


def test_samples_come_so_rarely_that_they_cost_their_share():
    engine = _engine()
    watch = Watch(engine, GuardSettings())
    assert [watch.interval(share) for share in (1.0, 0.25, 0.125, 1e-3)] == [400, 100, 50, 50]
    ids = torch.arange(8 * 1024).reshape(8, 1024)
    batch = {"input_ids": ids, "labels": torch.full_like(ids, -100), "position_ids": ids}
    part, share = part_of([batch] * 4, 256)
    assert {tuple(t.shape) for t in part.values()} == {(1, 256)} and share == 256 / (4 * 8 * 1024)
    assert torch.equal(part["labels"], part["input_ids"])  # nothing was predicted there
    short = {"input_ids": ids[:, :32], "labels": ids[:, :32]}
    assert part_of([short], 100)[0]["labels"].shape == (3, 32)
    whole = {**batch, "mask": torch.ones(8, 1, 1024, 1024)}
    assert {tuple(t.shape[:2]) for t in part_of([whole], 256)[0].values()} == {(1, 1024), (1, 1)}


def test_a_sample_that_is_slow_to_launch_comes_more_rarely(eager):
    """Of what was measured the shortest counts; a CPU keeps to sizes, so that equal runs are equal."""
    engine = _engine()
    watch = Watch(engine, GuardSettings(sample_every=2, sample_cost=0.1))
    found = []

    def measured(step):  # as a GPU's host would have
        assert watch._last_cost == 0.0
        watch._next, watch._last_cost = step, costs[step]

    costs = (0.0, 7.0, 3.0, 9.0)
    for step in range(4):
        _train(engine, watch, [step], after=measured)
        found.append((watch._next - step, watch.interval(0.0)))
        watch._next = step + 1
    assert found == [(0, 2), (70, 70), (30, 30), (30, 30)]
    again = Watch(engine, GuardSettings(sample_every=2, sample_cost=0.1))
    again.load_state_dict(watch.state_dict())
    assert again.interval(0.0) == 30


def test_the_turn_goes_over_the_layers_and_a_suspect_is_looked_at_again(eager):
    engine, looked = _engine("nvfp4"), []
    real = sampling.take_sample

    def spy(model, schemes, paths, forward, **options):
        looked.append((watch._step, tuple(paths)))
        return real(model, schemes, paths, forward, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deepwell.train.watch.take_sample", spy)
        watch = Watch(engine, GuardSettings(**{**SETTINGS, "sample_every": 4, "confirm": 3}))
        _train(engine, watch, range(15), before=lambda step: _spoil(engine) if step == 8 else None)
    zero, one = ("layers.0.up", "layers.0.down"), (UP, DOWN)
    # All at first; in turn; found at 8, looked at again until the third finding.
    assert looked[:6] == [(0, (*zero, *one)), (4, zero), (8, one), (9, one), (10, one), (14, zero)]


# ---- models as they are ----


def _look(engine, batch, run):
    """Every GEMM of the engine in one sample; nothing was compiled or changed."""
    watch = Watch(engine, GuardSettings(**SETTINGS))
    watch.begin_step(0, [batch], run)
    sample, _ = watch._sample
    assert sample.rows == sampling.rows_of(engine.bound.schemes, list(engine.bound.schemes))
    assert len(sample.rows) == 3 * len(engine.bound.schemes) > 0
    seen, noise = (sample.figures[:, sampling.FIGURES.index(name)] for name in ("seen", "noise"))
    assert bool(seen.all()) and bool((noise > 0).all()) and float(noise.max()) < 10**-2.6
    assert all(p.grad is None for p in engine.parameters()) and engine.options.graphs == 0
    return watch


@pytest.mark.parametrize("how", ["recompute", "regions"])
def test_layers_that_are_computed_again_or_compiled_alone_are_seen_and_change_their_formats(how):
    batch = _batch(0)
    ir = dw.capture(Net(), (batch["x"], batch["y"]))
    engine = dw.compile(ir, precision="mxfp8", recompute=how == "recompute")
    if how == "regions":
        engine.use_regions()
    watch = _look(engine, batch, lambda part: engine(**part))

    @torch.no_grad()
    def loss(engine):
        return float(engine(**batch))

    before, told = loss(engine), dw.PrecisionPolicy("mxfp8")
    engine.override({(UP, "fwd"): "bf16"}, "a test")
    changed = loss(engine)
    assert watch.formats()[UP] == "bf16|mxfp8|mxfp8" and engine.options.graphs > 0 and changed != before
    told.set_layer_precision(f"path:{UP}", "bf16", gemms="fwd")
    torch._dynamo.reset()
    assert loss(dw.compile(Net(), precision_policy=told)) == changed
    assert loss(engine.override({(UP, "fwd"): None}, "back")) == before


@pytest.mark.slow
def test_experts_are_seen():
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": 64, "num_local_experts": 2, "num_experts_per_tok": 1}
    torch.manual_seed(0)
    engine = dw.compile(dw.capture(MixtralForCausalLM(MixtralConfig(**sizes)).train()), precision="mxfp8")
    ids = torch.randint(0, 64, (2, 64), generator=torch.Generator().manual_seed(1))
    _look(engine, {"input_ids": ids, "labels": ids}, lambda part: engine(**part).loss)


@pytest.mark.parametrize("precision", ["mxfp8", "bf16"])
def test_the_load_of_experts_is_counted_whatever_their_format(precision, eager):
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**sizes)).train()
    engine = dw.compile(dw.capture(model), precision=precision)
    ids = torch.randint(0, 64, (2, 32), generator=torch.Generator().manual_seed(1))
    batch, one = {"input_ids": ids, "labels": ids}, torch.ones(())
    watch = Watch(engine, GuardSettings(sample_every=3, sample_cost=100.0))
    chosen = {}

    def noting(number):
        def hook(module, args):
            chosen.setdefault(number, args[1].flatten())

        return hook

    layers = enumerate(model.model.layers)
    handles = [layer.mlp.experts.register_forward_pre_hook(noting(i)) for i, layer in layers]
    found = []
    for step in range(4):
        watch.begin_step(step, [batch], lambda part: engine(**part).loss)
        watch.after_backward(one, one)
        watch.end_step(step)
        found.append(watch.expert_loads)
    for handle in handles:
        handle.remove()
    assert [bool(load) for load in found] == [True, False, False, True]
    # By the router's own choices.
    assert found[0] == {
        f"model.layers.{i}.mlp.experts": torch.bincount(picked, minlength=4).tolist() for i, picked in chosen.items()
    }


# ---- ranks ----


def _rank(rank, port, queue):
    os.environ |= {"GLOO_SOCKET_IFNAME": "lo", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    from datetime import timedelta

    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=60))

    def reduce(tensor, op="sum"):
        assert op == "max"
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor

    torch.compiler.set_stance("force_eager")
    engine = _engine()
    watch = Watch(engine, GuardSettings(**SETTINGS), reduce, dp=2)
    weights = {}

    def before(step):
        if step == 3 and rank == 1:
            _spoil(engine)

    def after(step):
        weights[step] = [p.detach().clone() for p in engine.parameters()]
        if step == 7 and rank == 1:
            engine.deepwell.model.layers[0].up.weight.grad[0, 0] = math.nan

    sgd = torch.optim.SGD([p for n, p in engine.named_parameters() if "1.up" not in n], lr=1e-3)
    events, _ = _train(engine, watch, range(9), before=before, after=after, optimizer=sgd)
    kept = all(torch.equal(a, b) for a, b in zip(weights[7], weights[8], strict=True))
    state = json.dumps(watch.state_dict(), sort_keys=True)
    queue.put((rank, [(s, e.to_dict()) for s, e in events], watch.formats(), kept, state))
    dist.barrier()
    dist.destroy_process_group()


def test_what_one_rank_finds_both_ranks_act_on():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # Forked, nothing is imported again; CUDA does not survive a fork.
    context = mp.get_context("spawn" if torch.cuda.is_initialized() else "fork")
    queue = context.Queue()
    workers = [context.Process(target=_rank, args=(rank, port, queue)) for rank in (0, 1)]
    for worker in workers:
        worker.start()
    found = sorted(queue.get(timeout=90) for _ in workers)
    for worker in workers:
        worker.join(30)
        assert worker.exitcode == 0
    (_, events, formats, kept, state), (_, *other) = found
    assert [events, formats, kept, state] == other and kept
    brief = [(s, e["what"], e["path"], e["gemm"], e["from"], e["to"]) for s, e in events]
    # The gradient of `up` is not blamed for noise: its sample has no zeros from the forward that the step had.
    assert [e for e in brief if e[1] == "fallback"] == _documented("mxfp8", range(9), 3)
    assert [(s, e["rank"]) for s, e in events if e["what"] == "skip"] == [(7, 1)]
    assert formats[UP] == "bf16|mxfp8|mxfp8" and set(formats.values()) == {formats[UP], "mxfp8|mxfp8|mxfp8"}


def test_a_watched_step_costs_little():
    """Figures for docs/guard.md; the bound is generous: the machine is shared."""
    engine = _engine("bf16")
    watch = Watch(engine, GuardSettings(sample_every=0))
    one = torch.ones(())
    began = time.perf_counter()
    for step in range(200):
        watch.begin_step(step)
        watch.after_backward(one, one)
        watch.end_step(step)
    assert (time.perf_counter() - began) / 200 < 5e-3
