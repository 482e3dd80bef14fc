"""Compile a kernel for a GPU that is not here, and read what came out: PTX, registers, spills, shared memory."""

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import triton
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

ARCHS = (90, 100)
# Shared memory one block may take on Hopper and Blackwell.
MAX_SHARED_BYTES = 232448

_POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.float64: "*fp64",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """What the compiler made of one kernel."""

    ptx: str
    shared_bytes: int
    registers: int
    spill_bytes: int
    stack_bytes: int
    # Columns of Blackwell's tensor memory, of 512.
    tmem_columns: int = 0
    # Whether the assembler makes products wait for each other, as it does where others touch their sums in between.
    serializes_products: bool = False

    def count(self, pattern: str) -> int:
        """How often a regular expression occurs in the PTX."""
        return len(re.findall(pattern, self.ptx))


def compile_kernel(
    kernel: triton.runtime.JITFunction,
    arguments: Mapping[str, object],
    *,
    arch: int,
    num_warps: int = 4,
    num_stages: int | None = None,
    max_registers: int | None = None,
) -> Compiled:
    """Compile for sm_`arch`; every parameter of the kernel must be named in `arguments`.

    An argument is a torch dtype (a pointer to it, 16-byte aligned), None (a pointer left out), "i32" (an integer that
    is a multiple of 16), "i32:any" (any integer), "fp32", "tensordesc<fp8e4nv[128, 128]>" (a TMA descriptor made by the
    host), or a constexpr's value.
    """
    signature, constexprs, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if kernel.params[i].is_constexpr or value is None:
            signature[name] = "constexpr"
            constexprs[(i,)] = value
            continue
        signature[name] = _POINTERS[value] if isinstance(value, torch.dtype) else str(value).split(":")[0]
        if not str(value).endswith(":any") and not signature[name].startswith(("fp", "tensordesc")):
            attributes[(i,)] = [["tt.divisibility", 16]]
    unknown = set(arguments) - set(kernel.arg_names)
    assert not unknown, f"{kernel.fn.__name__} has no parameters {sorted(unknown)}"
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = {"num_warps": num_warps} | ({} if num_stages is None else {"num_stages": num_stages})
    options |= {} if max_registers is None else {"maxnreg": max_registers}
    made = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return measured(made, arch)


def measured(made: triton.compiler.CompiledKernel, arch: int) -> Compiled:
    """What can be read off a compiled kernel; the assembler runs once more for it."""
    split = reductions_over_split_lanes(made.asm["ttgir"])
    assert not split, f"{made.name} is wrong on a GPU: Triton mixes lanes in {split}"
    ptx = made.asm["ptx"]
    report = _assemble(ptx, arch)
    stack = re.search(r"(\d+) bytes stack frame", report)
    registers = re.search(r"Used (\d+) registers", report)
    assert stack and registers, report
    return Compiled(
        ptx=ptx,
        shared_bytes=made.metadata.shared,
        registers=int(registers[1]),
        spill_bytes=sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", report)),
        stack_bytes=int(stack[1]),
        serializes_products="wgmma.mma_async instructions are serialized" in report,
        tmem_columns=getattr(made.metadata, "tmem_size", 0) or 0,
    )


def reductions_over_split_lanes(ttgir: str) -> list[str]:
    """Reductions along an axis whose lanes are no neighbouring bits: Triton 3.6 exchanges neighbouring ones instead.

    The interpreter computes these rightly, so that only a GPU would show it.
    """
    lanes = {
        name: [[int(i) for i in basis.split(",")] for basis in re.findall(r"\[([\d, ]+)\]", bases)]
        for name, bases in re.findall(r"^(#linear\d*) = #ttg\.linear<\{.*lane = \[(.*?)\], warp", ttgir, re.MULTILINE)
    }
    found = []
    for axis, layout in re.findall(
        r'"tt\.reduce"\(.*?<\{axis = (\d+).*?\}\) : \(tensor<[\dx]+\w+, (.*?)>[,)]', ttgir, re.DOTALL
    ):
        name = re.search(r"#linear\d*", layout)
        if not name:
            continue  # a blocked layout's lanes of an axis are neighbours
        # From the outermost slice in: each takes a dimension away from those of its parent.
        dims = list(range(len(lanes[name[0]][0])))
        for dim in reversed(re.findall(r"dim = (\d+)", layout)):
            del dims[int(dim)]
        bits = [bit for bit, basis in enumerate(lanes[name[0]]) if basis[dims[int(axis)]]]
        if bits and bits[-1] - bits[0] + 1 != len(bits):
            found.append(f"axis {axis} of {layout}, lanes {bits}")
    return found


def _assemble(ptx: str, arch: int) -> str:
    """What the assembler that Triton ships says of a kernel with -v."""
    tools = Path(triton.backends.nvidia.__file__).parent / "bin"
    tool = tools / ("ptxas-blackwell" if arch >= 100 else "ptxas")
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        target = re.search(r"\.target (sm_\w+)", ptx)
        assert target, "the PTX names no target"
        command = [str(tool), "-v", f"--gpu-name={target[1]}", str(source), "-o", str(Path(folder) / "kernel.cubin")]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr
