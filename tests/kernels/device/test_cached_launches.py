"""An op's launches without its wrapper: the same kernels, numbers and memory, or the wrapper itself."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import deepwell.kernels
import launches
from deepwell.kernels.device import cached_launches
from deepwell.kernels.device.cached_launches import CachedLaunches, _Sequence
from deepwell.kernels.device.triton_support import compile_ahead, launch, tl, triton
from deepwell.kernels.norm import torch_ops as norm_ops
from deepwell.kernels.quantize import torch_ops as quantize_ops
from deepwell.kernels.rope import torch_ops as rope_ops

pytestmark = pytest.mark.skipif(not hasattr(triton, "jit"), reason="needs Triton")
FP8 = torch.float8_e4m3fn


@triton.jit
def _scale_kernel(x_ptr, y_ptr, factor, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + i, tl.load(x_ptr + i, mask=i < n, other=0.0) * factor, mask=i < n)


def scaled(x: Tensor, factor: int = 2) -> Tensor:
    y = torch.empty_like(x)
    launch(_scale_kernel, (x.numel() // 64,))(x, y, factor, x.numel(), BLOCK=64)
    return y


# Of all tests: Triton keeps the launcher of a kernel with it.
_seen: list[tuple[Any, ...]] = []


def _launched(*given: Any) -> None:
    args = (value.data_ptr() if isinstance(value, Tensor) else value for value in given[9:])
    _seen.append((given[:3], tuple(args)))


@contextmanager
def absent_gpu() -> Iterator[list[tuple[Any, ...]]]:
    """What reaches the driver: (grid, arguments) of each launch, tensors as addresses."""
    _seen.clear()
    with (
        launches.on_absent_gpu(),
        mock.patch.object(launches._AbsentGpu, "launcher_cls", lambda self, source, metadata: _launched),
        mock.patch.object(cached_launches, "is_on_current_gpu", lambda operand: True),
        mock.patch.object(cached_launches, "current_stream", lambda operand: 0),
    ):
        yield _seen


def settled(run: Callable[..., Any], args: tuple[Any, ...]) -> CachedLaunches:
    """An op after three calls of a kind."""
    op = CachedLaunches(run)
    for _ in range(3):
        op(*args)
    return op


def _alike(seen: list[tuple[Any, ...]], operands: list[Tensor]) -> list[Any]:
    """Launches with addresses by whose memory they are: an operand's, or the n-th that is none."""
    known = {tensor.data_ptr(): f"operand {i}" for i, tensor in enumerate(operands)}
    return [
        (grid, [known.setdefault(a, f"own {len(known)}") if _is_address(a) else a for a in args]) for grid, args in seen
    ]


def _is_address(value: Any) -> bool:
    return isinstance(value, int) and value > 1 << 32


def _bf16(*sizes: int) -> Tensor:
    return torch.randn(sizes).bfloat16()


def _fp8(*sizes: int) -> Tensor:
    return torch.randn(sizes).to(FP8)


T, K, N = 256, 384, 128
REAL_OPS: dict[str, tuple[Callable[[], Any], Callable[[], tuple[Any, ...]]]] = {
    "quantize_weights": (lambda: quantize_ops._quantize_weights, lambda: ([_bf16(N, K), _bf16(2 * N, K)], True)),
    "wgrad_operands": (
        lambda: quantize_ops._wgrad_operands,
        lambda: (_fp8(T, N), torch.rand(T), _fp8(T, K), torch.rand(T)),
    ),
    "norm": (
        lambda: lambda *given: norm_ops._rms_norm({"fp8": FP8}, *given),
        lambda: (_bf16(T, K), _bf16(T, K), _bf16(K), 1e-6, "llama"),
    ),
    "rope": (
        lambda: lambda x, cos, sin: rope_ops.rope.rope(x, cos, sin, convention="half"),
        lambda: (_bf16(2, T, 4, 64), torch.rand(1, T, 64).bfloat16(), torch.rand(1, T, 64).bfloat16()),
    ),
}


@pytest.mark.parametrize("name", REAL_OPS)
def test_cached_launches_are_those_of_the_wrapper(name: str) -> None:
    make, operands = REAL_OPS[name]

    def run(*args: Any) -> Any:
        made = make()(*args)
        return tuple(part for part in made if part is not None) if isinstance(made, tuple) else made

    with absent_gpu() as seen:
        op = settled(run, operands())
        assert [type(kind) for kind in op._kinds.values()] == [_Sequence], op.why
        args = operands()
        tensors = [t for arg in args for t in (arg if isinstance(arg, list) else [arg]) if isinstance(t, Tensor)]
        seen.clear()
        wanted = run(*args)
        by_wrapper = _alike(seen, tensors)
        seen.clear()
        with mock.patch.object(op, "run", side_effect=AssertionError("the wrapper ran")):
            got = op(*args)
        assert _alike(seen, tensors) == by_wrapper and by_wrapper
    assert type(got) is type(wanted)
    for left, right in zip(*(made if isinstance(made, tuple) else (made,) for made in (got, wanted)), strict=True):
        assert (left.shape, left.stride(), left.dtype) == (right.shape, right.stride(), right.dtype)
        assert left.data_ptr() != right.data_ptr()


def test_every_kind_of_call_is_cached_for_itself() -> None:
    kinds = [
        (torch.zeros(256),),
        (torch.zeros(512),),
        (torch.zeros(16, 16).T,),
        (torch.zeros(257)[1:],),
        (torch.zeros(256), 3),
        (torch.zeros(256).half(),),
    ]
    with absent_gpu() as seen:
        op = CachedLaunches(scaled)
        for args in kinds * 3:
            op(*args)
        assert len(op._kinds) == len(kinds)
        assert all(isinstance(kind, _Sequence) for kind in op._kinds.values())
        for args in kinds:
            seen.clear()
            made = op(*args)
            factor = args[1] if len(args) > 1 else 2
            assert [(grid[0], given[:4]) for grid, given in seen] == [
                (args[0].numel() // 64, (args[0].data_ptr(), made.data_ptr(), factor, args[0].numel()))
            ]


def _with_a_torch_kernel(x: Tensor) -> Tensor:
    return scaled(x + 1)


def _of_a_counter(x: Tensor) -> Tensor:
    _count.append(0)
    return scaled(x, 2 + len(_count))


_count: list[int] = []


def _gives_its_operand(x: Tensor) -> Tensor:
    scaled(x)
    return x.view(-1)


def _gives_what_no_kernel_wrote(x: Tensor) -> Tensor:
    scaled(x)
    return torch.empty_like(x)


def _gives_other_bits(x: Tensor) -> Tensor:
    return scaled(x).view(torch.int32)


def _reads_memory_of_nobody(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    launch(_scale_kernel, (4,))(_kept, y, 2, x.numel(), BLOCK=64)
    return y


_kept = torch.zeros(256)


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (_with_a_torch_kernel, "aten.add"),
        (_of_a_counter, "not alike"),
        (_gives_its_operand, "not what its kernels wrote"),
        (_gives_what_no_kernel_wrote, "not what its kernels wrote"),
        (_gives_other_bits, "not what its kernels wrote"),
        (_reads_memory_of_nobody, "memory of nobody"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_op_that_does_anything_else_runs_as_it_is_written(run: Callable[..., Any], why: str) -> None:
    with absent_gpu() as seen:
        op = settled(run, (torch.zeros(256),))
        assert list(op._kinds.values()) == [None] and why in op.why
        seen.clear()
        op(torch.zeros(256))
        assert len(seen) == 1
        for n in range(5, 5 + cached_launches._MOST_REFUSED):
            for _ in range(3):
                op(torch.zeros(64 * n))
        assert op.is_off


def test_operands_that_share_memory_are_told_apart() -> None:
    def both(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty_like(x)
        launch(_scale_kernel, (4,))(y, out, 2, 256, BLOCK=64)
        return out

    whole = torch.zeros(512)
    with absent_gpu() as seen:
        op = settled(both, (whole[:256], whole[256:]))
        assert [type(kind) for kind in op._kinds.values()] == [_Sequence]
        seen.clear()
        op(x := torch.zeros(256), y := torch.zeros(256))
        assert seen[0][1][0] == y.data_ptr() != x.data_ptr()

    def of_views(x: Tensor, y: Tensor) -> Tensor:
        return both(x, y.view(-1))  # a view: whose it is cannot be said

    with absent_gpu():
        op = settled(of_views, (whole[:256], whole[256:]))
        assert "several operands" in op.why


def test_memory_between_kernels_is_free_after_the_last_reader() -> None:
    def chain(x: Tensor) -> Tensor:
        return scaled(scaled(scaled(x)))

    with absent_gpu():
        op = settled(chain, (torch.zeros(256),))
    (sequence,) = op._kinds.values()
    assert isinstance(sequence, _Sequence)
    assert [step.frees for step in sequence.steps if hasattr(step, "frees")] == [(), (1,), (2,)]


def test_ahead_of_its_launch_a_kernel_is_compiled_by_the_wrapper() -> None:
    with absent_gpu() as seen:
        op = settled(scaled, (torch.zeros(256),))
        seen.clear()
        compile_ahead([lambda: op(torch.zeros(256)), lambda: op(torch.zeros(256))])
        assert seen == []
        op(torch.zeros(256))
        assert len(seen) == 1


def test_kinds_are_bounded() -> None:
    with absent_gpu(), mock.patch.object(cached_launches, "_MOST_KINDS", 2):
        op = CachedLaunches(scaled)
        for n in (1, 2, 3) * 3:
            op(torch.zeros(64 * n))
        assert len(op._kinds) == 2


def test_every_kernel_of_an_op_is_launched_where_a_recording_sees_it() -> None:
    # These launch for somebody who is no op; `launch` itself is the first.
    others = {"triton_support.py", "cached_launches.py", "weight_cache_launches.py"}
    files = [path for path in Path(deepwell.kernels.__file__).parent.rglob("*.py") if path.name not in others]
    direct = [path.name for path in files if re.search(r"kernel\[[^\n]*\]\(", path.read_text())]
    assert len(files) > 80 and direct == []


@pytest.mark.gpu
def test_a_step_gives_the_same_bits_with_and_without_caching() -> None:
    import deepwell as dw
    from deepwell.bench.llama import Llama, LlamaConfig

    sizes = LlamaConfig(width=512, num_heads=8, num_kv_heads=4, hidden=1536, num_layers=2, vocab=1024)
    torch.manual_seed(0)
    engine = dw.compile(Llama(sizes).bfloat16().cuda(), cuda_graphs=False, measure=False)
    tokens = torch.randint(1024, (2, 256), device="cuda")

    def step() -> list[Tensor]:
        engine.zero_grad(set_to_none=True)
        loss = engine(tokens, tokens)
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in engine.parameters())]

    with mock.patch.object(CachedLaunches, "__call__", lambda self, *args: self.run(*args)):
        plain = step()
    for _ in range(4):
        cached = step()
    with mock.patch.object(CachedLaunches, "_first_calls", side_effect=AssertionError("a kind is not settled")):
        cached = step()
    assert all(torch.equal(left, right) for left, right in zip(plain, cached, strict=True))
