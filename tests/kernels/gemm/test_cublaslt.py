"""FP8 products by any of cuBLASLt's algorithms: right in every rank, in graphs, with scales that change."""

import ctypes
import threading

import pytest
import torch
from torch import Tensor

from deepwell.errors import ConfigError, UnsupportedError
from deepwell.formats.metrics import assert_bitwise_equal, sqnr_db
from deepwell.kernels.gemm import cublaslt
from deepwell.kernels.gemm.cases import codes
from deepwell.kernels.gemm.cublaslt import LtProduct, fp8_gemm_ranked, num_algorithms
from deepwell.kernels.gemm.fp8 import fp8_gemm, fp8_gemm_ref
from deepwell.kernels.registry import Problem

SHAPES = [(256, 384, 512), (197, 208, 336), (4096, 2048, 4096)]


def _given(m: int, n: int, k: int, *, one_scale: bool, seed: int = 0, device: str = "cuda") -> tuple[Tensor, ...]:
    problem = Problem(op="fp8_gemm", m=m, n=n, k=k, precision="fp8", one_scale=one_scale, device=device)
    return codes(problem, seed=seed)


def _product(m: int, n: int, k: int, *, one_scale: bool, fast: bool, is_static: bool = False) -> LtProduct:
    scales = "tensor" if one_scale else "row"
    return LtProduct(m=m, n=n, k=k, scales=scales, fast=fast, is_static=is_static, device=0)


def test_what_the_heuristic_writes_has_the_headers_size() -> None:
    # cublasLtMatmulHeuristicResult_t: eight words, a size, a status, a float, four integers. It is written by address.
    assert ctypes.sizeof(cublaslt._FoundAlgorithm) == 8 * 8 + 8 + 4 + 4 + 4 * 4
    assert cublaslt._FoundAlgorithm.workspace.offset == 64


def test_operands_under_one_scale_are_of_one_element_and_another_problem() -> None:
    problem = Problem(op="fp8_gemm", m=32, n=48, k=64, precision="fp8")
    single = Problem(op="fp8_gemm", m=32, n=48, k=64, precision="fp8", one_scale=True)
    assert problem.key != single.key
    assert [t.numel() for t in codes(problem)[1::2]] == [32, 48]
    assert [t.numel() for t in codes(single)[1::2]] == [1, 1]


def test_without_a_gpu_it_says_so() -> None:
    given = _given(32, 48, 64, one_scale=True, device="cpu")
    with pytest.raises(UnsupportedError, match="32x48x64 on cpu"):
        fp8_gemm_ranked(*given)
    with pytest.raises(ConfigError, match=r"a_MK is torch\.float32"):
        fp8_gemm_ranked(given[0].float(), *given[1:])


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("one_scale", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_algorithm_is_right(shape, one_scale, fast) -> None:
    given = _given(*shape, one_scale=one_scale)
    ref = fp8_gemm_ref(*given, out_dtype=torch.bfloat16)
    for is_static in (False, True):
        count = num_algorithms(_product(*shape, one_scale=one_scale, fast=fast, is_static=is_static))
        assert count or is_static
        for rank in range(count):
            got = fp8_gemm_ranked(*given, fast=fast, rank=rank, is_static=is_static)
            assert sqnr_db(ref, got) > (40.0 if fast else 60.0), (rank, is_static)


@pytest.mark.gpu
def test_the_first_algorithm_is_the_one_that_torch_takes() -> None:
    given = _given(512, 256, 1024, one_scale=False)
    assert_bitwise_equal(fp8_gemm_ranked(*given, fast=True, rank=0), fp8_gemm(*given, fast=True))


@pytest.mark.gpu
def test_weight_gradients_have_a_choice_and_a_rank_beyond_it_is_the_last() -> None:
    count = num_algorithms(_product(4096, 2048, 4096, one_scale=True, fast=False))
    assert count > 1
    given = _given(4096, 2048, 4096, one_scale=True)
    assert_bitwise_equal(fp8_gemm_ranked(*given, rank=count - 1), fp8_gemm_ranked(*given, rank=99))


@pytest.mark.gpu
def test_a_graph_runs_it_with_the_operands_of_the_day() -> None:
    given = _given(1024, 512, 2048, one_scale=True)
    fp8_gemm_ranked(*given, rank=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = fp8_gemm_ranked(*given, rank=1)
    for mine, other in zip(given, _given(1024, 512, 2048, one_scale=True, seed=1), strict=True):
        mine.copy_(other)
    given[1].mul_(3.0)
    graph.replay()
    assert_bitwise_equal(out, fp8_gemm_ranked(*given, rank=1))


@pytest.mark.gpu
def test_two_threads_do_not_mix_up_their_scales() -> None:
    # One description serves both, and the addresses of the scales are written into it.
    both = [_given(256, 256, 512, one_scale=True, seed=seed) for seed in (0, 1)]
    both[1][1].mul_(7.0)
    wanted = [fp8_gemm_ranked(*given) for given in both]
    torch.cuda.synchronize()
    wrong: list[int] = []

    def run(number: int) -> None:
        for _ in range(300):
            if not torch.equal(fp8_gemm_ranked(*both[number]), wanted[number]):
                wrong.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
