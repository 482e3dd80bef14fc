"""A block of experts by Deepwell's kernels: values, all gradients, and what is kept for the backward."""

import pytest
import torch

from deepwell.formats.metrics import sqnr_db
from deepwell.kernels.experts import stages
from deepwell.kernels.experts.activation import ExpertActivation
from deepwell.kernels.experts.chain import experts_chain
from deepwell.kernels.experts.reference import experts_mlp_ref

D, F, E, K = 32, 24, 4, 2
GPT_OSS = ExpertActivation(interleaved=True, limit=0.9, alpha=1.702, up_shift=1.0)
PLAIN = ExpertActivation(function="relu2", gated=False)
HOW = {"swiglu": ExpertActivation(), "gpt_oss": GPT_OSS, "plain": PLAIN}


def operands(tokens, how, *, kn=False, bias=False, device="cpu", dtype=torch.bfloat16, sizes=(D, F, E, K)):
    """Leaves at unit scale: x, both weights as stored, biases, the router's weights; and its choices."""
    d, f, e, k = sizes
    torch.manual_seed(0)
    g = f * (1 + how.gated)
    shapes = [(e, d, g), (e, f, d)] if kn else [(e, g, d), (e, d, f)]
    made = [torch.randn(tokens, d), torch.randn(shapes[0]) * d**-0.5, torch.randn(shapes[1]) * f**-0.5]
    made += [torch.randn(e, g), torch.randn(e, d)] if bias else []
    made += [torch.rand(tokens, k)]
    index = torch.stack([torch.randperm(e)[:k] for _ in range(tokens)]) if tokens else torch.zeros(0, k).long()
    return [leaf.to(device, dtype).requires_grad_() for leaf in made], index.to(device)


def run(leaves, index, how, *, kn=False, reference=False):
    x, w1, w2, *biases, weight = leaves
    w1, w2 = (w.transpose(1, 2) if kn else w for w in (w1, w2))
    biases = tuple(biases) or (None, None)
    if reference:
        return experts_mlp_ref(x, w1, w2, index, weight, biases=biases, activation=how)
    groups = torch.ops.deepwell.choice_layout(index.flatten(), w1.shape[0])
    return experts_chain(x, (w1, w2), weight.flatten(), groups, index.shape[1], how, biases)


def _kept(rows):
    """What the backward reads: rounded to bf16, which may cross the limit of a clamped gate; its gradient as it is."""
    return rows + (rows.bfloat16().double() - rows).detach()


def check(leaves, index, how, *, kn=False, floor=40, adds_bias_apart=False):
    """Output and gradients against fp64's, group by group where a tensor has groups.

    `adds_bias_apart`: rows are rounded before the bias is added, and again, as torch's product and Hugging Face's are.
    """
    y = run(leaves, index, how, kn=kn)
    wide = [leaf.detach().cpu().double().requires_grad_() for leaf in leaves]
    x, w1, w2, *biases, weight = wide
    w1, w2 = (w.mT if kn else w for w in (w1, w2))
    rows = []
    for t, chosen in enumerate(index.cpu().tolist()):
        total = x.new_zeros(x.shape[1])
        for j, e in enumerate(chosen):
            if e >= 0:
                rows_of_t = w1[e] @ x[t]
                rows_of_t = _kept(rows_of_t) if adds_bias_apart else rows_of_t
                h = how.of_rows(_kept(rows_of_t + (biases[0][e] if biases else 0)))
                total = total + weight[t, j] * (w2[e] @ h + (biases[1][e] if biases else 0))
        rows.append(total)
    wanted = torch.stack(rows)
    dy = torch.randn(wanted.shape).bfloat16()
    got = torch.autograd.grad(y, leaves, dy.to(y))
    refs = torch.autograd.grad(wanted, wide, dy.double())
    assert sqnr_db(wanted, y.cpu()) > floor
    for ref, made, leaf in zip(refs, got, leaves, strict=True):
        assert made.dtype == leaf.dtype and sqnr_db(ref, made.cpu()) > floor
    return got


@pytest.mark.parametrize(("name", "kn"), [("swiglu", False), ("gpt_oss", True), ("plain", False)])
def test_values_and_all_gradients(everywhere, name, kn, monkeypatch):
    device = everywhere
    small_tiles(monkeypatch, device)
    leaves, index = operands(11, HOW[name], kn=kn, bias=name != "swiglu", device=device)
    index[3] = -1  # a token that nobody takes
    index[5, 1] = -1
    index[index == 2] = 1  # an expert that nobody chose
    grads = check(leaves, index, HOW[name], kn=kn, adds_bias_apart=device == "cuda")
    assert not grads[1][2].any() and not grads[0][3].any()


def small_tiles(monkeypatch, device):
    """Where kernels are interpreted, tiles that a CPU has the time for."""
    if device == "cuda":
        return
    from deepwell.kernels.experts import row_products as R

    tile = R.RowTile(block_m=16, block_n=64, block_k=32, num_stages=2, num_warps=4)
    for name in ("PRODUCT_TILES", "UP_TILES"):
        monkeypatch.setattr(R, name, (tile,))


@pytest.mark.parametrize("spread", ["no tokens", "one token", "all to one", "nobody"])
def test_any_distribution(spread):
    how = HOW["swiglu"]
    leaves, index = operands({"no tokens": 0, "one token": 1}.get(spread, 9), how)
    if spread in ("all to one", "nobody"):
        index = torch.full_like(index, 3 if spread == "all to one" else -1)
    if spread in ("no tokens", "nobody"):
        y = run(leaves, index, how)
        assert y.shape == leaves[0].shape and not y.any()
        assert not any(grad.any() for grad in torch.autograd.grad(y.float().sum(), leaves))
    else:
        check(leaves, index, how)


def test_only_the_rows_of_gate_and_up_are_kept():
    leaves, index = operands(16, HOW["swiglu"])
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(leaves, index, HOW["swiglu"])
    padded = 32 + 16 * E
    own = [size for pointer, size in kept.items() if pointer not in {leaf.data_ptr() for leaf in leaves}]
    # Rows of gate and up; ends, slots and places.
    assert sorted(own) == sorted([padded * 2 * F, E, padded, 32])


def test_compiled_without_breaks_it_is_the_same():
    leaves, index = operands(12, GPT_OSS, bias=True)
    index[0] = -1
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    dy = torch.randn(12, D).bfloat16()
    eager, made = (torch.autograd.grad(function(leaves, index, GPT_OSS), leaves, dy) for function in (run, compiled))
    for one, other in zip(eager, made, strict=True):
        assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("name", HOW)
@pytest.mark.parametrize("way", ["torch", "own"])
def test_on_a_gpu_in_graphs_and_compiled(name, way, no_choices):
    """Ragged rows at widths that tiles do not divide; recorded and compiled, results are those of an eager call."""
    how = HOW[name]
    leaves, index = operands(700, how, bias=name != "swiglu", device="cuda", sizes=(320, 144, 6, 2))
    with stages.only(way):
        check(leaves, index, how, adds_bias_apart=way == "torch")
        dy = torch.randn(700, 320, device="cuda").bfloat16()
        wanted = torch.autograd.grad(run(leaves, index, how), leaves, dy)
        compiled = torch.compile(run, fullgraph=True)
        for one, other in zip(wanted, torch.autograd.grad(compiled(leaves, index, how), leaves, dy), strict=True):
            assert sqnr_db(one, other) > 45
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = torch.autograd.grad(run(leaves, index, how), leaves, dy)
        graph.replay()
        torch.cuda.synchronize()
        for one, other in zip(wanted, recorded, strict=True):
            assert torch.equal(one, other)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_on_a_gpu_each_stage_is_chosen_by_its_time(no_choices, monkeypatch):
    monkeypatch.setattr(stages, "LEAST_FLOPS", 0.0)
    stages.forget()
    leaves, index = operands(2048, HOW["swiglu"], device="cuda", sizes=(512, 256, 8, 2))
    check_choice = torch.autograd.grad(run(leaves, index, HOW["swiglu"]).sum(), leaves)
    assert all(grad.isfinite().all() for grad in check_choice)
    assert len(stages.chosen()) == 6  # up, down and the rows of dh and dx, both weights' gradients
