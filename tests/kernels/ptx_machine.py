"""Executes the PTX of a compiled kernel on a CPU: layouts, inline assembly and exchanges between threads without a GPU.

The interpreter runs a kernel's source, not what is made of it: which elements a thread has, and in which order assembly
meets them, it cannot see. Here all threads of a program advance together, an instruction at a time; a branch must be
taken by all of them. Memory is that of the process, so tensors lie on the CPU. Approximate functions are exact ones,
rounded; NaN is the GPU's. An instruction that is not known is refused by its name. What is copied to shared memory
asynchronously arrives as late as it may, and until then what was there is lost.
"""

import ctypes
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

import aot

U = np.uint64
Array = np.ndarray[Any, np.dtype[np.uint64]]
_SHARED_BYTES = 232448


@dataclass(frozen=True, slots=True)
class Instruction:
    name: str
    operands: tuple[str, ...]
    guard: tuple[str, bool] | None  # a predicate, and whether it must hold


Copy = tuple[int, int, int, int]  # where to, where from, bytes of that, bytes in all: the others are 0


@dataclass(frozen=True, slots=True)
class Code:
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]


def parse(ptx: str) -> Code:
    """The instructions of the one kernel of a module; blocks of inline assembly are a part of it."""
    body = ptx[ptx.index("{", ptx.index(")", ptx.index(".entry"))) + 1 :].partition(".section")[0]
    body = re.sub(r"//[^\n]*", "", body)
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for text in map(_without_block, re.split(r"[;\n]|(?<=:)\s", body)):
        if text.endswith(":"):
            labels[text[:-1]] = len(instructions)
        elif text and not text.startswith("."):
            guard = re.match(r"@(!?)(%?\w+)\s+", text)
            rest = text[guard.end() :] if guard else text
            name, _, given = rest.replace("\t", " ").partition(" ")
            operands = tuple(one.strip() for one in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s][^,]*", given))
            instructions.append(Instruction(name, operands, (guard[2], not guard[1]) if guard else None))
    return Code(tuple(instructions), labels)


def _without_block(text: str) -> str:
    """An instruction without the brace that opens or ends its block of assembly; those of vectors are in pairs."""
    more = text.count("{") - text.count("}")
    return text.replace("{", "", more).strip() if more > 0 else text.replace("}", "", -more).strip()


# ---- numbers ----


def _mask(bits: int) -> Any:
    return U((1 << bits) - 1)


def _signed(x: Array, bits: int) -> Any:
    return (x << U(64 - bits)).view(np.int64) >> (64 - bits)


def _float(x: Array) -> Any:
    return (x & _mask(32)).astype(np.uint32).view(np.float32)


def _word(f: Any) -> Array:
    single = np.ascontiguousarray(f, dtype=np.float32)
    return np.where(np.isnan(single), U(0x7FFFFFFF), single.view(np.uint32).astype(U))


def _exactly(f: Any) -> Any:
    return f.astype(np.float64)


def _fused(a: Any, b: Any, c: Any) -> Any:
    """a * b + c rounded once: the sum in fp64 is odd where it is not exact, so that another rounding errs no more."""
    product, other = _exactly(a) * _exactly(b), _exactly(c)
    total = product + other
    back = total - product
    error = (product - (total - back)) + (other - back)
    bits = total.view(np.int64)
    step = np.where((error > 0) == (total > 0), 1, -1)
    odd = np.where((np.abs(error) > 0) & ((bits & 1) == 0), bits + step, bits)
    return odd.view(np.float64).astype(np.float32)


def _times_toward_zero(a: Any, b: Any) -> Array:
    exact = _exactly(a) * _exactly(b)
    word = _word(exact.astype(np.float32))
    return np.where(np.abs(_exactly(_float(word))) > np.abs(exact), word - U(1), word)


def _bf16(f: Any) -> Array:
    """To nearest even, in the lower half."""
    word = np.ascontiguousarray(f, dtype=np.float32).view(np.uint32).astype(U)
    rounded = (word + U(0x7FFF) + ((word >> U(16)) & U(1))) >> U(16)
    return np.where(np.isnan(f), U(0x7FFF), rounded & _mask(16))


def _of_bf16(x: Array) -> Any:
    return _float(x << U(16))


def _e4m3(f: Any) -> Array:
    clipped = torch.from_numpy(np.clip(np.nan_to_num(f, posinf=448, neginf=-448), -448, 448).astype(np.float32))
    codes = clipped.to(torch.float8_e4m3fn).view(torch.uint8).numpy().astype(U)
    return np.where(np.isnan(f), U(0x7F), codes)


def _half_of_e4m3(x: Array) -> Array:
    codes = torch.from_numpy((x & _mask(8)).astype(np.uint8)).view(torch.float8_e4m3fn)
    return codes.half().view(torch.int16).numpy().view(np.uint16).astype(U)


def _each_half(run: Callable[..., Array]) -> Callable[..., Array]:
    """An operation of both halves of its words."""

    def both(*x: Array) -> Array:
        low, high = ([(one >> U(shift)) & _mask(16) for one in x] for shift in (0, 16))
        return run(*low) | (run(*high) << U(16))

    return both


def _larger_magnitude(a: Array, b: Array) -> Array:
    largest = np.maximum(np.abs(_of_bf16(a)), np.abs(_of_bf16(b)))
    return np.where(np.isnan(largest), U(0x7FFF), _bf16(largest) | ((a ^ b) & U(0x8000)))


def _smaller_magnitude(a: Array, b: Array) -> Array:
    smallest = np.minimum(np.abs(_float(a)), np.abs(_float(b)))
    return np.where(np.isnan(smallest), U(0x7FFFFFFF), _word(smallest) | ((a ^ b) & U(1 << 31)))


def _permuted(a: Array, b: Array, choice: Array) -> Array:
    parts = [(x >> U(8 * k)) & _mask(8) for x in (a, b) for k in range(4)]
    chosen = int(choice[0])
    picked = [parts[(chosen >> (4 * k)) & 7] << U(8 * k) for k in range(4)]
    return picked[0] | picked[1] | picked[2] | picked[3]


def _logic(a: Array, b: Array, c: Array, table: Array) -> Array:
    result = np.zeros_like(a)
    for k in range(8):
        if int(table[0]) >> k & 1:
            result |= (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
    return result


def _dot_of_halves(a: Array, b: Array, c: Array) -> Array:
    low, high = (a & _mask(16)) * (b & _mask(8)), ((a >> U(16)) & _mask(16)) * ((b >> U(8)) & _mask(8))
    return low + high + c


def _of_floats(run: Callable[..., Any]) -> Callable[..., Array]:
    return lambda *x: _word(run(*map(_float, x)))


# What has a name of its own; the rest are integers, by their type.
_NAMED: dict[str, Callable[..., Array]] = {
    "add.rn.f32": _of_floats(lambda a, b: a + b),
    "sub.rn.f32": _of_floats(lambda a, b: a - b),
    "add.f32": _of_floats(lambda a, b: a + b),
    "sub.f32": _of_floats(lambda a, b: a - b),
    "mul.rn.f32": _of_floats(lambda a, b: a * b),
    "mul.f32": _of_floats(lambda a, b: a * b),
    "div.rn.f32": _of_floats(lambda a, b: a / b),
    "fma.rn.f32": _of_floats(_fused),
    "mul.rz.f32": lambda a, b: _times_toward_zero(_float(a), _float(b)),
    "abs.f32": lambda a: a & _mask(31),
    "neg.f32": lambda a: a ^ U(1 << 31),
    "rcp.approx.ftz.f32": _of_floats(lambda a: 1 / _exactly(a)),
    "sqrt.approx.ftz.f32": _of_floats(lambda a: np.sqrt(_exactly(a))),
    "rsqrt.approx.ftz.f32": _of_floats(lambda a: 1 / np.sqrt(_exactly(a))),
    "max.NaN.f32": _of_floats(np.maximum),
    "max.f32": _of_floats(np.fmax),
    "min.f32": _of_floats(np.fmin),
    "cvt.rn.bf16.f32": lambda a: _bf16(_float(a)),
    "cvt.rn.bf16x2.f32": lambda a, b: (_bf16(_float(a)) << U(16)) | _bf16(_float(b)),
    "min.NaN.xorsign.abs.f32": _smaller_magnitude,
    "cvt.f32.bf16": lambda a: (a & _mask(16)) << U(16),
    "cvt.f32.f16": lambda a: _word(a.astype(np.uint16).view(np.float16)),
    "cvt.rn.f16x2.e4m3x2": lambda a: _half_of_e4m3(a) | (_half_of_e4m3(a >> U(8)) << U(16)),
    "cvt.rn.satfinite.e4m3x2.f32": lambda a, b: (_e4m3(_float(a)) << U(8)) | _e4m3(_float(b)),
    "abs.bf16x2": lambda a: a & U(0x7FFF7FFF),
    "add.bf16x2": _each_half(lambda a, b: _bf16(_of_bf16(a) + _of_bf16(b))),
    "mul.rn.bf16x2": _each_half(lambda a, b: _bf16(_of_bf16(a) * _of_bf16(b))),
    "fma.rn.bf16x2": _each_half(lambda a, b, c: _bf16(_fused(_of_bf16(a), _of_bf16(b), _of_bf16(c)))),
    "max.NaN.xorsign.abs.bf16x2": _each_half(_larger_magnitude),
    "set.lt.u32.bf16x2": _each_half(lambda a, b: np.where(_of_bf16(a) < _of_bf16(b), _mask(16), U(0))),
    "max.u16x2": _each_half(np.maximum),
    "dp2a.lo.u32.u32": _dot_of_halves,
    "prmt.b32": _permuted,
    "lop3.b32": _logic,
}

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "eq": lambda a, b: a == b,
    "ne": lambda a, b: a != b,
    "gtu": lambda a, b: ~(a <= b),
    "ltu": lambda a, b: ~(a >= b),
}


def _integer(name: str, x: Sequence[Array]) -> Array:
    """add, mul.wide, shr, ... of the type that a name ends with; unsigned words of 64 bits in and out."""
    *parts, kind = name.split(".")
    bits = 1 if kind == "pred" else int(kind[1:])
    given = [_signed(one, bits) if kind[0] == "s" else one & _mask(bits) for one in x]
    what = ".".join(parts)
    simple: dict[str, Callable[..., Any]] = {
        "add": lambda a, b: a + b,
        "sub": lambda a, b: a - b,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "not": lambda a: ~a,
        "neg": lambda a: -a,
        "min": np.minimum,
        "max": np.maximum,
        "div": lambda a, b: (np.abs(a) // np.abs(b)) * (np.sign(a) * np.sign(b)) if kind[0] == "s" else a // b,
        "rem": np.fmod,
        "mul.lo": lambda a, b: a * b,
        "mul.wide": lambda a, b: a * b,
        "mul.hi": lambda a, b: (a * b) >> a.dtype.type(bits),
        "mad.lo": lambda a, b, c: a * b + c,
    }
    if what == "mad.wide":
        result = (given[0] * given[1]).view(U) + x[2]
    elif what in ("shl", "shr"):
        result = given[0] << x[1].astype(given[0].dtype) if what == "shl" else given[0] >> x[1].astype(given[0].dtype)
    elif what == "bfe":
        field = (x[0] >> x[1]) & _mask(int(x[2][0]))
        result = _signed(field, int(x[2][0])) if kind[0] == "s" else field
    else:
        result = simple[what](*given)
    wide = "wide" in what
    return np.asarray(result).view(U) & _mask(64 if wide else bits)


def _converted(name: str, x: Array) -> Array:
    _, to, given = name.split(".")
    value = _signed(x, int(given[1:])).view(U) if given[0] == "s" else x & _mask(int(given[1:]))
    return value & _mask(int(to[1:]))


# ---- the machine ----


class Machine:
    """A kernel's PTX and its warps. `launch` runs a grid; pointers are addresses of tensors on the CPU."""

    def __init__(self, ptx: str, num_warps: int) -> None:
        self.code = parse(ptx)
        self.num_threads = 32 * num_warps
        self.thread = np.arange(self.num_threads, dtype=U)

    def launch(self, grid: int, parameters: Sequence[int]) -> None:
        for program in range(grid):
            self._run(program, grid, parameters)

    def _run(self, program: int, grid: int, parameters: Sequence[int]) -> None:
        self.shared = (ctypes.c_uint8 * _SHARED_BYTES)()
        self.registers: dict[str, Array] = {
            "%tid.x": self.thread,
            "%ctaid.x": self._all(program),
            "%nctaid.x": self._all(grid),
            "global_smem": self._all(0),  # shared memory has addresses of its own
        }
        self.parameters = parameters
        self.copying: list[Copy] = []
        self.groups: list[list[Copy]] = []
        place = 0
        while place < len(self.code.instructions):
            one = self.code.instructions[place]
            place += 1
            self.live = np.ones(self.num_threads, dtype=bool)
            if one.guard:
                self.live = (self.registers[one.guard[0]] != 0) == one.guard[1]
            if one.name == "ret":
                return
            if one.name in ("bra", "bra.uni"):
                if self.live.any() != self.live.all():
                    raise NotImplementedError(f"threads part at {one}")
                place = self.code.labels[one.operands[0]] if self.live.all() else place
            else:
                with np.errstate(all="ignore"):
                    self._step(one)

    def _all(self, value: int) -> Array:
        return np.full(self.num_threads, value & (2**64 - 1), dtype=U)

    def _value(self, operand: str) -> Array:
        if operand in self.registers:
            return self.registers[operand]
        if re.fullmatch(r"0f[0-9A-Fa-f]{8}", operand):
            return self._all(int(operand[2:], 16))
        return self._all(int(operand.rstrip("U"), 0))

    def _put(self, register: str, value: Array) -> None:
        if register != "_":
            before = self.registers.get(register, np.zeros(self.num_threads, dtype=U))
            self.registers[register] = np.where(self.live, value, before)

    def _step(self, one: Instruction) -> None:
        name, operands = one.name, one.operands
        head = name.partition(".")[0]
        if head in ("bar", "createpolicy"):
            return
        if name.startswith("ld.param"):
            number = int(re.findall(r"param_(\d+)", operands[1])[0])
            self._put(operands[0], self._all(self.parameters[number]))
        elif head in ("ld", "st"):
            self._access(name, operands)
        elif head == "cp":
            self._copy(name, operands)
        elif head in ("ldmatrix", "stmatrix"):
            self._access_matrices(name, operands)
        elif head == "atom":
            self._largest_in_memory(name, operands)
        elif head == "mov":
            self._move(name, operands)
        elif head in ("shfl", "redux"):
            self._put(operands[0], self._exchanged(name, operands))
        else:
            self._put(operands[0], self._computed(name, [self._value(operand) for operand in operands[1:]]))

    def _computed(self, name: str, x: list[Array]) -> Array:
        head, *rest = name.split(".")
        if name in _NAMED:
            return _NAMED[name](*x) & _mask(32)
        if head == "selp":
            return np.where(x[2] != 0, x[0], x[1])
        if head == "setp":
            kind, bits = rest[1][0], int(rest[1][1:])
            read = {"f": _float, "s": lambda word: _signed(word, bits)}.get(kind, lambda word: word & _mask(bits))
            return _COMPARISONS[rest[0]](read(x[0]), read(x[1])).astype(U)
        if head == "cvt":
            return _converted(name, x[0])
        try:
            return _integer(name, x)
        except (KeyError, ValueError) as error:
            raise NotImplementedError(f"the machine does not know {name}") from error

    def _addresses(self, operand: str) -> Array:
        register, _, offset = operand.strip("[] ").partition("+")
        return self._value(register.strip()) + self._all(int(offset or "0", 0))

    def _access(self, name: str, operands: tuple[str, ...]) -> None:
        is_load = name.startswith("ld")
        (width,) = (int(part[1:]) // 8 for part in name.split(".") if re.fullmatch(r"b\d+", part))
        registers, place = operands[:2] if is_load else operands[1::-1]  # a policy for the cache may follow
        first = self._addresses(place)
        if ".shared" in name:
            first = first + self._all(ctypes.addressof(self.shared))
        for number, register in enumerate(re.split(r",\s*", registers.strip("{} "))):
            value = np.zeros(self.num_threads, dtype=U) if is_load else self._value(register)
            for thread in np.flatnonzero(self.live):
                address = int(first[thread]) + number * width
                if is_load:
                    value[thread] = int.from_bytes(ctypes.string_at(address, width), "little")
                else:
                    ctypes.memmove(address, int(value[thread]).to_bytes(8, "little"), width)
            if is_load:
                self._put(register, value)

    def _access_matrices(self, name: str, operands: tuple[str, ...]) -> None:
        """Matrices of 8 x 8 halves of words, to or from shared memory: row i of the n-th lies where thread 8 n + i of a
        warp says, and thread 4 i + j has columns 2 j and 2 j + 1 of each."""
        is_load = name.startswith("ld")
        if ".trans" in name or ".m8n8." not in name or not name.endswith(".b16"):
            raise NotImplementedError(f"the machine does not know {name}")
        registers, place = operands[:2] if is_load else operands[1::-1]
        rows = self._addresses(place) + self._all(ctypes.addressof(self.shared))
        warp, lane = self.thread & ~U(31), self.thread & U(31)
        for number, register in enumerate(re.split(r",\s*", registers.strip("{} "))):
            first = rows[(warp + U(8 * number) + (lane >> U(2))).astype(int)] + (lane & U(3)) * U(4)
            value = np.zeros(self.num_threads, dtype=U) if is_load else self._value(register)
            for thread in np.flatnonzero(self.live):
                if is_load:
                    value[thread] = int.from_bytes(ctypes.string_at(int(first[thread]), 4), "little")
                else:
                    ctypes.memmove(int(first[thread]), int(value[thread]).to_bytes(8, "little"), 4)
            if is_load:
                self._put(register, value)

    def _copy(self, name: str, operands: tuple[str, ...]) -> None:
        """cp.async from global to shared memory, its groups, and the wait until no more than so many are under way."""
        if name == "cp.async.commit_group":
            self.groups.append(self.copying)
            self.copying = []
        elif name == "cp.async.wait_group":
            done = max(0, len(self.groups) - int(operands[0], 0))
            for to, source, given, size in (one for group in self.groups[:done] for one in group):
                ctypes.memmove(to, ctypes.string_at(source, given).ljust(size, b"\0"), size)
            self.groups = self.groups[done:]
        elif re.fullmatch(r"cp\.async\.c[ag]\.shared\.global", name):
            to = self._addresses(operands[0]) + self._all(ctypes.addressof(self.shared))
            source, size, given = self._addresses(operands[1]), int(operands[2], 0), self._value(operands[3])
            for thread in np.flatnonzero(self.live):
                self.copying.append((int(to[thread]), int(source[thread]), int(given[thread]), size))
                ctypes.memset(int(to[thread]), 0xFF, size)
        else:
            raise NotImplementedError(f"the machine does not know {name}")

    def _largest_in_memory(self, name: str, operands: tuple[str, ...]) -> None:
        if not name.endswith("max.s32"):
            raise NotImplementedError(f"the machine does not know {name}")
        addresses, value = self._addresses(operands[1]), _signed(self._value(operands[2]), 32)
        for thread in np.flatnonzero(self.live):
            there = ctypes.c_int32.from_address(int(addresses[thread]))
            there.value = max(there.value, int(value[thread]))

    def _move(self, name: str, operands: tuple[str, ...]) -> None:
        to, given = operands
        halves = [one.strip() for one in (given if given.startswith("{") else to).strip("{} ").split(",")]
        if given.startswith("{"):
            low, high = (self._value(one) & _mask(16) for one in halves)
            self._put(to, low | (high << U(16)))
        elif to.startswith("{"):
            value = self._value(given)
            self._put(halves[0], value & _mask(16))
            self._put(halves[1], (value >> U(16)) & _mask(16))
        else:
            self._put(to, self._value(given))

    def _exchanged(self, name: str, operands: tuple[str, ...]) -> Array:
        value = self._value(operands[1])
        if name in ("redux.sync.max.u32", "redux.sync.max.s32"):
            given = _signed(value, 32) if name.endswith("s32") else value & _mask(32)
            return np.repeat(given.reshape(-1, 32).max(1), 32).view(U) & _mask(32)
        lane, warp = self.thread & U(31), self.thread & ~U(31)
        other = self._value(operands[2])
        if name == "shfl.sync.bfly.b32":
            return value[(warp + (lane ^ other)).astype(int)]
        if name == "shfl.sync.idx.b32" and int(operands[3], 0) == 0x101F:  # within sixteen threads
            return value[(warp + (lane & U(16)) + other).astype(int)]
        raise NotImplementedError(f"the machine does not know {name}")


# ---- in a kernel's place ----


class Executed:
    """Takes the kernel's place: compiles what is launched for sm_90 and executes it on tensors of the CPU."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        return partial(self.launch, grid[0])

    def launch(self, grid, *given, num_warps, maxnreg=None, **constants):
        arguments = dict(zip(self.kernel.arg_names, map(_type, given), strict=False)) | constants
        made = aot.compile_kernel(self.kernel, arguments, arch=90, num_warps=num_warps, max_registers=maxnreg)
        passed = [_bits(value) for value in given if value is not None]
        _Machine(made.ptx, num_warps).launch(grid, [*passed, 0, 0])


class _Machine(Machine):
    """One that takes what nobody wrote for 0: the compiler puts such beside a number that is converted alone."""

    def _value(self, operand: str) -> Array:
        is_unwritten = operand.startswith("%") and operand not in self.registers
        return self._all(0) if is_unwritten and operand[1:2] in "rfp" else super()._value(operand)


def _bits(value):
    if isinstance(value, float):
        return int(np.float32(value).view(np.uint32))
    return value.data_ptr() if isinstance(value, torch.Tensor) else value


def _type(value):
    if isinstance(value, float):
        return "fp32"
    if isinstance(value, int):
        return "i32:any" if value % 16 else "i32"
    return None if value is None else value.dtype
