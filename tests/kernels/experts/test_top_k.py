"""The largest numbers of rows: bit for bit the reference, with ties, NaN, infinities and zeros of both signs."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import aot
from deepwell.errors import ConfigError
from deepwell.formats.metrics import assert_bitwise_equal
from deepwell.kernels.experts import top_k as K
from deepwell.kernels.experts.spelled_out import spelled_out
from deepwell.kernels.experts.torch_ops import ops, places_of_largest


@pytest.fixture
def device(everywhere):
    """Interpreted, by the reference, and on a GPU where there is one."""
    return everywhere


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns", "k"), [(37, 128, 8), (5, 8, 8), (3, 1000, 16), (130, 6, 1), (0, 8, 2)])
def test_values_and_places_are_the_references(device, dtype, rows, columns, k):
    torch.manual_seed(columns)
    x = torch.randn(rows, columns).to(dtype)
    made = K.top_k(x.to(device), k)
    for name, got, ref in zip(("value", "index"), made, K.top_k_ref(x, k), strict=True):
        assert_bitwise_equal(got, ref.to(device), name)
    if dtype is torch.float32:  # no ties: torch's own order is the same
        assert_bitwise_equal(made[1], x.topk(k).indices.to(device), "torch's")


def test_ties_nan_infinities_and_zeros(device):
    nan, inf = float("nan"), float("inf")
    x = torch.tensor(
        [
            [0.0, -0.0, 0.0, -0.0, -1.0, -2.0],
            [1.0, nan, inf, -nan, -inf, 1.0],
            [-inf, -inf, -inf, -inf, -inf, -inf],
            [-1.0, -1.0, -3.0, -1.0, -2.0, -3.0],
        ]
    )
    value, index = (part.cpu() for part in K.top_k(x.to(device), 5))
    assert index.tolist() == [[0, 1, 2, 3, 4], [1, 3, 2, 0, 5], [0, 1, 2, 3, 4], [0, 1, 3, 4, 2]]
    # Values are what lies at their places: of both zeros the one that was there.
    assert_bitwise_equal(value, x.gather(1, index), "value")


def test_rows_may_lie_apart(device):
    x = torch.randn(9, 32).to(device)[:, :16]
    for got, ref in zip(K.top_k(x, 3), K.top_k_ref(x.cpu(), 3), strict=True):
        assert_bitwise_equal(got, ref.to(device))


def test_what_the_kernel_does_not_take_is_named():
    for columns, k in ((8, 9), (8, 0), (1025, 4), (64, 17)):
        with pytest.raises(ConfigError, match=f"k is {k} of {columns} columns"):
            K.top_k(torch.zeros(2, columns), k)


def test_choices_on_a_cpu_are_torchs_own():
    x = torch.randn(64, 16).bfloat16().float()  # with ties
    assert_bitwise_equal(places_of_largest(x, 4), x.topk(4).indices)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
def test_choices_on_a_gpu_are_torchs_where_there_are_no_ties():
    x = torch.randn(4096, 128, device="cuda")
    assert_bitwise_equal(torch.compile(places_of_largest, fullgraph=True)(x, 8), x.topk(8).indices)


@pytest.mark.parametrize(("columns", "k", "spells", "is_ours"), [
    (128, 8, False, True), (128, 17, False, False), (1025, 8, False, False), (128, 8, True, False),
])  # fmt: skip
def test_which_choices_on_a_gpu_are_the_kernels(columns, k, spells, is_ours):
    with FakeTensorMode(), spelled_out() if spells else nullcontext():
        x = torch.empty(64, columns, device="cuda")
        made = make_fx(lambda x: places_of_largest(x, k))(x)
    found = [node.target for node in made.graph.nodes]
    assert (ops.top_k.default in found) == is_ours and (torch.ops.aten.topk.default in found) != is_ours


def test_choices_are_one_graph():
    """Dynamo reads what a GPU would run, of a fake one."""
    seen = []

    def backend(graph, _inputs):
        seen.extend(node.target for node in graph.graph.nodes)
        return graph

    with FakeTensorMode():
        x = torch.empty(64, 128, device="cuda")
        index = torch.compile(places_of_largest, backend=backend, fullgraph=True)(x, 8)
    assert index.shape == (64, 8) and index.dtype == torch.int64 and ops.top_k in seen


@pytest.mark.parametrize("arch", aot.ARCHS)
@pytest.mark.parametrize("columns", [8, 128, 1024])
def test_the_kernel_compiles_without_spills(arch, columns):
    pointers = {"x_ptr": torch.float32, "value_ptr": torch.float32, "index_ptr": torch.int64}
    sizes = {"T": "i32", "N": "i32", "stride_x": "i32"}
    tile = {"K": 8, "ROWS": max(1, K._TILE // max(16, columns)), "BLOCK": max(16, columns)}
    made = aot.compile_kernel(K._top_k_kernel, pointers | sizes | tile, arch=arch, num_warps=K._WARPS)
    assert made.spill_bytes == made.stack_bytes == 0
