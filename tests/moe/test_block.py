"""DeepwellMoE: any distribution of tokens, limits on experts, and what the state_dict holds."""

import pytest
import torch

from deepwell import DeepwellMoE
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.moe.capacity import rank_in_expert, round_rows
from deepwell.moe.losses import count_choices
from deepwell.moe.statistics import end_step

H, FFN, E, K, T = 32, 24, 4, 2, 24


def block(seed=0, **options):
    torch.manual_seed(seed)
    return DeepwellMoE(H, FFN, E, K, **options)


def grads_of(module, x, **kwargs):
    x = x.clone().requires_grad_()
    module.zero_grad()
    y = module(x, **kwargs)
    y.square().sum().backward()
    named = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad, **named}


def limited(module, x, keep):
    """What the block computes with only the choices of a mask."""
    routing = module.gate(x)
    index = torch.where(keep, routing.index_TK, -1)
    return module.experts(x, index, routing.weight_TK)


@pytest.mark.parametrize("tokens", [0, 1, T])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"capacity_factor": 1.0}, {"capacity_factor": 0.6, "drop": "position", "pad_to_capacity": True},
        {"round_to": 4}, {"gated": False, "activation": "relu2", "bias": True, "shared_ffn": 16, "shared_gate": True},
    ],
    ids=["dropless", "dropped", "padded", "rounded", "plain"],
)  # fmt: skip
def test_any_number_of_tokens_and_any_distribution(options, tokens):
    ours, x = block(router={"balance_loss": 0.1, "z_loss": 0.1}, **options), torch.randn(tokens, H)
    for weight in (0.0, 1.0):  # a router that sends all to two experts, then one that chooses
        with torch.no_grad():
            ours.gate.weight.normal_() if weight else ours.gate.weight.zero_()
        found = grads_of(ours, x)
        assert found["y"].shape == x.shape and all(value.isfinite().all() for value in found.values())
        load = end_step(ours).read()["gate"]
        assert sum(load.tokens_per_expert) == tokens * K


def test_shapes_dtypes_and_names_are_those_of_hugging_face():
    ours = block(shared_ffn=16)
    assert {name: tuple(value.shape) for name, value in ours.state_dict().items()} == {
        "gate.weight": (E, H), "experts.gate_up_proj": (E, 2 * FFN, H), "experts.down_proj": (E, H, FFN),
        "shared_experts.gate_proj.weight": (16, H), "shared_experts.up_proj.weight": (16, H),
        "shared_experts.down_proj.weight": (H, 16),
    }  # fmt: skip
    x = torch.randn(2, 3, 4, H)
    assert_bitwise_equal(ours(x).view(-1, H), ours(x.view(-1, H)))
    assert ours.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_capacity_is_what_was_asked_for_whatever_floats_make_of_it():
    assert [block(capacity_factor=factor).config.capacity(100) for factor in (1.1, 1.0, 0.999, 3.0)] == [
        55,
        50,
        50,
        100,
    ]


@pytest.mark.parametrize("policy", ["probability", "position"])
def test_each_expert_keeps_its_capacity_and_the_rest_is_counted(policy):
    x = torch.randn(T, H)
    ours = block(capacity_factor=0.5, drop=policy)
    routing, capacity = ours.gate(x), ours.config.capacity(T)
    assert capacity == T * K // E // 2
    keep = torch.zeros(T, K, dtype=torch.bool)
    for e in range(E):
        chosen = (routing.index_TK == e).nonzero()
        if policy == "probability":
            chosen = chosen[routing.weight_TK[chosen[:, 0], chosen[:, 1]].argsort(descending=True)]
        for t, j in chosen[:capacity]:
            keep[t, j] = True
    assert_bitwise_equal(ours(x), limited(ours, x, keep))
    ours(x).sum().backward()
    load = end_step(ours).read()["gate"]
    assert load.dropped == int((~keep).sum()) > 0
    assert load.tokens_per_expert == tuple(int(n) for n in count_choices(routing.index_TK, E)[0])


def test_padding_to_capacity_computes_the_same_with_all_shapes_known():
    x = torch.randn(T, H)
    for factor in (0.5, 8.0):  # dropping, and capacity for every token at every expert
        dropped = grads_of(block(capacity_factor=factor), x)
        padded = grads_of(block(capacity_factor=factor, pad_to_capacity=True), x)
        for name, wanted in dropped.items():
            assert sqnr_db(wanted, padded[name]) > 110, name
    assert sqnr_db(grads_of(block(), x)["y"], padded["y"]) > 110


def test_rounding_takes_or_leaves_the_tokens_at_the_border():
    x, ours = torch.randn(T, H), block(round_to=4)
    routing = ours.gate(x)
    counts = count_choices(routing.index_TK, E)[0]
    rows = round_rows(routing, 4)
    for e in range(E):
        taken = rows.token[rows.expert == e]
        assert len(taken) == int((counts[e] + 2) // 4 * 4) and len(taken.unique()) == len(taken)
        chosen = (routing.index_TK == e).any(1)
        order = torch.cat([t[routing.dense_TE[t, e].argsort(descending=True)]
                           for t in (chosen.nonzero()[:, 0], (~chosen).nonzero()[:, 0])])  # fmt: skip
        assert set(taken.tolist()) == set(order[: len(taken)].tolist())
    dense = torch.zeros(T, E).index_put(
        (rows.token[rows.expert >= 0], rows.expert[rows.expert >= 0]), torch.tensor(1.0)
    )
    every = torch.arange(E).expand(T, E)
    wanted = ours.experts(x, every, routing.dense_TE * dense)
    assert sqnr_db(wanted, ours(x)) > 110
    assert sqnr_db(block()(x), ours.eval()(x)) > 110  # evaluation rounds nothing
    mask = torch.arange(T) < 9
    masked = round_rows(ours.gate(x, mask), 4, mask)
    assert (masked.token[masked.expert >= 0] < 9).all()


def test_ranks_count_within_each_expert():
    index = torch.tensor([[0, 1], [0, 2], [1, 0], [-1, 0]])
    weight = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.5, 0.4]])
    assert rank_in_expert(index, weight, "position", 3).tolist() == [[0, 0], [1, 0], [1, 2], [8, 3]]
    assert rank_in_expert(index, weight, "probability", 3).tolist() == [[3, 0], [0, 0], [1, 1], [8, 2]]


@pytest.mark.parametrize("options", [{"capacity_factor": 0.5, "pad_to_capacity": True}, {"round_to": 4}], ids=str)
def test_limits_compile_without_breaks(options):
    x, plain, ours = torch.randn(T, H), block(**options), block(**options)
    ours.compile(backend="aot_eager", fullgraph=True)
    wanted, got = grads_of(plain, x), grads_of(ours, x)
    for name in wanted:
        assert sqnr_db(wanted[name], got[name]) > 110, name


def test_fp8_experts_are_near_the_plain_ones():
    x = torch.randn(64, H).bfloat16()
    wanted = grads_of(block().bfloat16(), x)
    got = grads_of(block(precision="fp8").bfloat16(), x)
    for name in ("y", "x", "experts.gate_up_proj", "experts.down_proj"):
        assert 18 < sqnr_db(wanted[name], got[name]) < 60, name
