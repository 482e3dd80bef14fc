"""Routing and its losses: Hugging Face's routers and closed formulas are the oracles."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from deepwell import ConfigError, DeepwellMoE
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.kernels.experts.reference import ExpertActivation
from deepwell.kernels.experts.torch_ops import ops
from deepwell.moe.losses import balance_loss, count_choices, z_loss
from deepwell.moe.router import router_logits, sinkhorn
from deepwell.moe.statistics import Routers, end_step

transformers = pytest.importorskip("transformers")
H, FFN, E, K, T = 32, 24, 8, 2, 20


def block(seed=0, **options):
    torch.manual_seed(seed)
    router = options.pop("router", {})
    return DeepwellMoE(H, FFN, options.pop("experts", E), options.pop("top_k", K), router=router, **options)


def hugging_face(name, config, **fields):
    module = __import__(f"transformers.models.{name.split('.')[0]}.modeling_{name.split('.')[0]}", fromlist=["x"])
    made = getattr(transformers, config)(hidden_size=H, intermediate_size=FFN, moe_intermediate_size=FFN, **fields)
    made._experts_implementation = "eager"
    torch.manual_seed(1)
    theirs = getattr(module, name.split(".")[1])(made)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.3)
    return theirs


SIZES = {"num_experts": E, "num_local_experts": E, "num_experts_per_tok": K}
DEEPSEEK = {
    "scoring": "sigmoid", "groups": 4, "top_groups": 2, "scale": 2.5, "bias_rate": 0.001,
}  # fmt: skip
GATES = {
    "mixtral": ("mixtral.MixtralSparseMoeBlock", "MixtralConfig", SIZES, {}, {}),
    "qwen3": ("qwen3_moe.Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig", {**SIZES, "norm_topk_prob": True}, {}, {}),
    "olmoe": (
        "olmoe.OlmoeSparseMoeBlock", "OlmoeConfig", {**SIZES, "norm_topk_prob": False}, {"normalize": False}, {},
    ),
    "qwen2": (
        "qwen2_moe.Qwen2MoeSparseMoeBlock", "Qwen2MoeConfig", {**SIZES, "shared_expert_intermediate_size": 40},
        {"normalize": False}, {"shared_ffn": 40, "shared_gate": True},
    ),
    "deepseek_v3": (
        "deepseek_v3.DeepseekV3MoE", "DeepseekV3Config",
        {**SIZES, "n_routed_experts": E, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}, DEEPSEEK,
        {"shared_ffn": FFN},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GATES)
def test_the_block_is_hugging_faces_with_its_weights(name):
    path, config, fields, router, options = GATES[name]
    theirs = hugging_face(path, config, **fields)
    ours = block(router=router, **options)
    state = {key.replace("shared_expert.", "shared_experts."): value for key, value in theirs.state_dict().items()}
    if name == "deepseek_v3":
        state["gate.e_score_correction_bias"] = theirs.gate.e_score_correction_bias.uniform_(-0.3, 0.3)
    ours.load_state_dict(state)
    x = torch.randn(2, T // 2, H)
    runs = []
    for module in (theirs, ours):
        given = x.clone().requires_grad_()
        y = module(given)
        y.square().sum().backward()
        parameters = dict(module.named_parameters())
        grads = [parameters[key].grad for key in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")]
        runs.append((y, given.grad, *grads))
    for wanted, got in zip(*runs, strict=True):
        assert sqnr_db(wanted, got) > 110


def test_the_block_is_gpt_oss_with_its_weights():
    theirs = hugging_face("gpt_oss.GptOssMLP", "GptOssConfig", **SIZES)
    theirs.router.weight.data.mul_(0.05)  # undecided: gradients of a softmax near 1 are nothing but rounding
    how = ExpertActivation(interleaved=True, limit=theirs.experts.limit, alpha=theirs.experts.alpha, up_shift=1.0)
    ours = block(activation=how, bias=True, transposed=True, router={"top_k_first": True, "logit_bias": True})
    ours.load_state_dict({key.replace("router.", "gate."): value for key, value in theirs.state_dict().items()})
    x = 10 * torch.randn(2, T // 2, H)  # large enough for the clamps
    grads = []
    for module, gate in ((theirs, theirs.router), (ours, ours.gate)):
        y = module(x)
        y = y[0] if isinstance(y, tuple) else y
        y.square().mean().backward()
        grads.append((y, gate.weight.grad, gate.bias.grad, module.experts.gate_up_proj.grad))
    for wanted, got in zip(*grads, strict=True):
        assert sqnr_db(wanted, got) > 110


# ---- the choice ----


def test_groups_by_their_best_and_top_k_after_or_before_the_scores():
    x = torch.randn(T, H)
    ours = block(router={"groups": 4, "top_groups": 1, "group_score": "max", "normalize": False})
    routing = ours.gate(x)
    best = routing.scores_TE.view(T, 4, 2).max(-1).values.argmax(-1)
    assert (routing.index_TK // 2 == best[:, None]).all()
    sigmoid = block(router={"scoring": "sigmoid", "top_k_first": True, "normalize": False, "scale": 3.0}).gate(x)
    wanted = 3 * sigmoid.logits_TE.topk(K).values.sigmoid()
    torch.testing.assert_close(sigmoid.weight_TK, wanted)


def test_sigmoid_weights_stay_normalized_however_small_the_scores_are():
    ours = block(router={"scoring": "sigmoid"})
    with torch.no_grad():
        ours.gate.weight.fill_(-60 / H)
    routing = ours.gate(torch.ones(3, H))  # scores of 1e-26: an epsilon of 1e-20 would take their place
    torch.testing.assert_close(routing.weight_TK.sum(-1), torch.ones(3))


def test_sinkhorn_evens_out_the_choice_in_training_alone():
    torch.manual_seed(0)
    logits = torch.randn(400, E) + torch.linspace(0, 3, E)
    even = count_choices(sinkhorn(logits, 20).topk(1).indices, E)[0]
    uneven = count_choices(logits.topk(1).indices, E)[0]
    assert even.max() < 2.2 * even.mean() < uneven.max()
    p = sinkhorn(logits, 50).exp()
    torch.testing.assert_close(p.sum(0), torch.full((E,), 400 / E), rtol=1e-3, atol=0)
    mask = torch.arange(400) < 300
    torch.testing.assert_close(sinkhorn(logits, 5, mask)[mask], sinkhorn(logits[mask], 5))
    ours, x = block(router={"sinkhorn": 8}), torch.randn(T, H)
    plain = block()
    assert not torch.equal(ours.gate(x).index_TK, plain.gate(x).index_TK)
    assert_bitwise_equal(ours.eval().gate(x).index_TK, plain.eval().gate(x).index_TK)


def test_jitter_moves_the_router_in_training_alone():
    ours, x = block(router={"jitter": 0.3}), torch.randn(T, H)
    assert not torch.equal(ours.gate(x).logits_TE, ours.gate(x).logits_TE)
    ours.eval()
    assert_bitwise_equal(ours.gate(x).logits_TE, ours.gate(x).logits_TE)


def test_logits_of_bf16_are_exact_products_added_up_in_fp32():
    x, w = torch.randn(T, H).bfloat16(), torch.randn(E, H).bfloat16()
    logits = router_logits(x, w)
    assert logits.dtype == torch.float32
    assert sqnr_db(x.double() @ w.double().T, logits) > 130


def test_under_autocast_logits_stay_fp32_and_experts_take_its_dtype(monkeypatch):
    seen = []
    product = torch._grouped_mm
    monkeypatch.setattr(torch, "_grouped_mm", lambda a, b, **kwargs: seen.append(a.dtype) or product(a, b, **kwargs))
    x, ours = torch.randn(T, H), block(shared_ffn=16, shared_gate=True, bias=True)
    wanted, logits = ours(x), ours.gate(x).logits_TE
    for given in (x, x.bfloat16()):  # after a norm, and after a linear
        seen.clear()
        with torch.autocast("cpu", torch.bfloat16):
            got = ours(given)
            routed = ours.gate(x)
        assert_bitwise_equal(routed.logits_TE, logits)
        assert seen == [torch.bfloat16] * 2 and got.dtype == given.dtype
        assert sqnr_db(wanted, got.float()) > 35
        got.float().sum().backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in ours.parameters())


# ---- losses ----


def test_losses_are_the_closed_formulas():
    torch.manual_seed(0)
    logits = torch.randn(T, E)
    scores = logits.softmax(-1)
    top1 = scores.topk(1).indices
    share = torch.bincount(top1[:, 0], minlength=E) / T
    torch.testing.assert_close(balance_loss(scores, top1), E * (share * scores.mean(0)).sum())  # Switch, eq. 4
    even = torch.arange(T * K).view(T, K) % 5
    torch.testing.assert_close(balance_loss(torch.full((T, 5), 0.2), even), torch.tensor(1.0))
    torch.testing.assert_close(z_loss(logits), logits.exp().sum(-1).log().square().mean())  # ST-MoE, eq. 5
    # Hugging Face's does not divide by top_k, and takes the tokens of all layers together.
    theirs = transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func((logits,), E, K)
    torch.testing.assert_close(K * balance_loss(scores, scores.topk(K).indices), theirs)
    layers = [logits.clone().requires_grad_() for _ in range(3)]
    transformers.models.mixtral.modeling_mixtral.load_balancing_loss_func(tuple(layers), E, K).backward()
    own = logits.clone().requires_grad_()
    (K / 3 * balance_loss(own.softmax(-1), own.topk(K).indices)).backward()
    torch.testing.assert_close(layers[0].grad, own.grad)
    by_sequence = [balance_loss(s, s.topk(K).indices) for s in scores.view(4, -1, E)]
    torch.testing.assert_close(
        balance_loss(scores, scores.topk(K).indices, sequences=4), torch.stack(by_sequence).mean()
    )


def test_padding_is_in_no_loss_count_or_expert():
    x, mask = torch.randn(2, 10, H), torch.ones(2, 10, dtype=torch.bool)
    mask[0, 6:] = False
    coefficients = {"balance_loss": {"batch": 0.1, "sequence": 0.2}, "z_loss": 0.01}
    ours = block(router=coefficients)
    y = ours(x, mask)
    assert not y[~mask].any() and y[mask].all(-1).all()
    y.sum().backward()
    load = end_step(ours).read()["gate"]
    assert sum(load.tokens_per_expert) == 16 * K and load.tokens == 16
    alone = block(router={"balance_loss": {"batch": 0.1}, "z_loss": 0.01})
    rows = alone.gate(x[mask])
    torch.testing.assert_close(z_loss(rows.logits_TE), z_loss(ours.gate(x.view(-1, H)).logits_TE, mask))
    routing = ours.gate(x.view(-1, H), mask.view(-1))
    torch.testing.assert_close(
        balance_loss(routing.scores_TE, routing.index_TK, mask), balance_loss(rows.scores_TE, rows.index_TK)
    )
    per_sequence = [alone.gate(x[b][mask[b]]) for b in range(2)]
    wanted = torch.stack([balance_loss(r.scores_TE, r.index_TK) for r in per_sequence]).mean()
    torch.testing.assert_close(balance_loss(routing.scores_TE, routing.index_TK, mask, sequences=2), wanted)


def test_injected_gradients_are_those_of_the_losses_themselves():
    x = torch.randn(2, 10, H)
    ours = block(router={"balance_loss": 0.3, "z_loss": 0.05})
    plain = block()
    Routers(ours).set_loss_scale(0.25)
    (0.25 * ours(x).square().sum()).backward()
    routing = plain.gate(x.view(-1, H))
    loss = 0.3 * balance_loss(routing.scores_TE, routing.index_TK) + 0.05 * z_loss(routing.logits_TE)
    (0.25 * (plain(x).square().sum() + loss)).backward()
    torch.testing.assert_close(ours.gate.weight.grad, plain.gate.weight.grad)
    load = end_step(ours).read()["gate"]
    assert load.balance_loss == pytest.approx(balance_loss(routing.scores_TE, routing.index_TK).item(), rel=1e-5)
    assert load.z_loss == pytest.approx(z_loss(routing.logits_TE).item(), rel=1e-5)
    assert 0 < load.entropy < 1 and load.imbalance >= 1


def run_steps(module, batches, how):
    """Gradients and loads after micro-batches, each run as `how` says."""
    for x in batches:
        y = checkpoint(module, x, use_reentrant=how == "reentrant") if how in ("reentrant", "saved") else module(x)
        y.square().sum().backward()
        Routers(module).end_micro_batch()
    return module


@pytest.mark.parametrize("how", ["reentrant", "saved", "compiled"])
def test_counts_and_losses_come_once_however_often_the_forward_runs(how):
    router = {"balance_loss": {"batch": 0.3, "global": 0.1}, "bias_rate": 0.01, "z_loss": 0.1, "scoring": "sigmoid"}
    batches = [torch.randn(2, 10, H, requires_grad=True) for _ in range(3)]
    plain = run_steps(block(router=router), batches, "plain")
    ours = block(router=router)
    if how == "compiled":
        ours.compile(backend="aot_eager", fullgraph=True)
    run_steps(ours, batches, how)
    torch.testing.assert_close(ours.gate.weight.grad, plain.gate.weight.grad)
    wanted, got = end_step(plain).read()["gate"], end_step(ours).read()["gate"]
    assert got.tokens_per_expert == wanted.tokens_per_expert and sum(got.tokens_per_expert) == 60 * K
    assert got.tokens == 60 and got.balance_loss == pytest.approx(wanted.balance_loss, rel=1e-5)
    assert_bitwise_equal(ours.gate.e_score_correction_bias, plain.gate.e_score_correction_bias)
    assert ours.gate.e_score_correction_bias.any() and ours.gate.load.grad is None


def test_the_global_loss_over_micro_batches_is_that_of_all_their_tokens():
    x = torch.randn(40, H)
    ours = block(router={"balance_loss": {"global": 1.0}})
    values = []
    for part in x.split(10):
        ours(part).sum().backward()
        Routers(ours).end_micro_batch()
    scores = ours.gate(x)
    share = count_choices(scores.index_TK, E)[0] / (K * 40)
    wanted = E * (share * scores.scores_TE[-10:].mean(0)).sum()  # of the last micro-batch: load over all so far
    routing = ours.gate(x[-10:])
    with torch.no_grad():
        earlier = count_choices(ours.gate(x[:-10]).index_TK, E)[0], torch.tensor(30.0)
        values.append(balance_loss(routing.scores_TE, routing.index_TK, elsewhere=earlier))
    torch.testing.assert_close(values[0], wanted)
    assert float(ours.gate.seen[:E].sum()) == 40 * K


def test_biases_move_towards_balance_and_choose_without_weighing():
    torch.manual_seed(0)
    ours = block(router={"scoring": "sigmoid", "bias_rate": 0.02}).train()
    x = torch.randn(256, H) + 0.4
    first = last = 0.0
    for _ in range(60):
        ours(x).sum().backward()
        last = end_step(ours).read()["gate"].imbalance
        first = first or last
    assert last < 1.3 < first
    routing = ours.gate(x)
    scores = routing.logits_TE.sigmoid().gather(1, routing.index_TK)
    torch.testing.assert_close(routing.weight_TK, scores / scores.sum(-1, keepdim=True))


def test_evaluation_and_what_has_no_gradient_count_nothing_and_have_no_losses():
    router = {"bias_rate": 0.01, "balance_loss": 1.0, "z_loss": 1.0, "scoring": "sigmoid"}
    ours, plain, x = block(router=router), block(router={"scoring": "sigmoid"}), torch.randn(T, H)
    for module in (ours.eval(), plain):
        module(x).square().sum().backward()
    assert_bitwise_equal(ours.gate.weight.grad, plain.gate.weight.grad)
    assert not end_step(ours).read() and not ours.gate.e_score_correction_bias.any()
    assert not ours.train().requires_grad_(False)(x).requires_grad  # nothing below is kept for a backward


def test_buffers_that_come_from_the_meta_device_begin_anew():
    with torch.device("meta"):
        ours = block(router={"bias_rate": 0.01, "balance_loss": {"global": 1.0}})
    torch.utils.deterministic.fill_uninitialized_memory, before = True, torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # empty memory is NaN
    try:
        ours.to_empty(device="cpu")
    finally:
        torch.use_deterministic_algorithms(before)
    assert ours.gate.loss_scale == 1 and not ours.gate.seen.any() and not ours.gate.e_score_correction_bias.any()
    assert ours.gate.load.is_leaf and ours.gate.load.requires_grad


def test_counts_and_biases_stay_fp32_and_leaves_under_casts_and_copies():
    import copy

    ours = copy.deepcopy(block(router={"bias_rate": 0.001}).bfloat16())
    assert ours.gate.e_score_correction_bias.dtype == ours.gate.load.dtype == torch.float32
    assert ours.gate.load.is_leaf and ours.gate.load.requires_grad
    ours(torch.randn(700, H).bfloat16()).float().sum().backward()
    assert sum(end_step(ours).read()["gate"].tokens_per_expert) == 700 * K
    assert "gate.load" not in ours.state_dict() and "gate.e_score_correction_bias" in ours.state_dict()
    moved = block().to("meta")
    assert moved.gate.load.is_meta and moved.gate.load.is_leaf


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"router": {"scoring": "tanh"}}, "scoring"), ({"router": {"balance_loss": {"layer": 1.0}}}, "scope"),
        ({"router": {"top_groups": 2}}, "top_groups"), ({"router": {"groups": 3}}, "groups must divide"),
        ({"top_k": 9}, "top_k"), ({"capacity_factor": 0.0}, "capacity_factor"), ({"pad_to_capacity": True}, "needs"),
        ({"capacity_factor": 1.0, "round_to": 8}, "round_to"), ({"shared_gate": True}, "shared_ffn"),
        ({"drop": "last"}, "drop"), ({"router": {"jitter": 1.5}}, "jitter"), ({"colour": 1}, "colour"),
        ({"router": {"colour": 1}}, "colour"), ({"router": {"z_loss": -1.0}}, "z_loss"),
        ({"router": "softmax"}, "mapping"), ({"router": {"balance_loss": -0.1}}, "balance_loss"),
        ({"router": {"balance_loss": None}}, "balance_loss"),
        ({"router": {"groups": 2.0}}, "groups"), ({"router": {"sinkhorn": 2, "bias_rate": 0.1}}, "sinkhorn and bias"),
        ({"router": {"scale": 0}}, "scale"), ({"top_k": 2.5}, "top_k"), ({"shared_ffn": -8}, "shared_ffn"),
        ({"round_to": -8}, "round_to"), ({"capacity_factor": "1"}, "capacity_factor"), ({"precision": "int4"}, "int4"),
        ({"gated": False, "activation": ExpertActivation()}, "gated"),
    ],
    ids=str,
)  # fmt: skip
def test_wrong_settings_are_named(options, message):
    with pytest.raises(ConfigError, match=message):
        block(**options)


def test_tokens_of_another_width_and_masks_of_other_tokens_are_named():
    ours = block()
    with pytest.raises(ConfigError, match=r"hidden_states is \(4, 64\)"):
        ours(torch.randn(4, 2 * H))  # would be 8 tokens
    with pytest.raises(ConfigError, match=r"token_mask is \(6, 2\)"):
        ours(torch.randn(2, 6, H), torch.ones(6, 2))


def test_choices_on_a_gpu_are_found_by_the_kernel():
    with FakeTensorMode(), torch.no_grad(), torch.device("cuda"):
        gate = block().gate
        made = make_fx(lambda x: gate(x).index_TK)(torch.empty(T, H))
    found = [node.target for node in made.graph.nodes]
    assert ops.top_k.default in found and torch.ops.aten.topk.default not in found
