"""Weights that FSDP2 gathers as MXFP8: FP8 values and a scale for 32 of them travel, a little over one byte a weight.

Which: weights [N, K] of a layer's linears whose forward and dgrad round them to MXFP8, where a rank's shard has whole
rows and K is whole blocks of 32. All others travel as they are.

What is exact: scales are powers of two, and blocks lie along K as the forward's do. Rounding such numbers again changes
none of them, so the forward multiplies what it would multiply anyway, bit for bit. The dgrad's blocks lie along N and
are made of rounded weights: equal again, but for numbers below 2^-6 of a scale, where E4M3 has fewer bits. Those may be
one step (2^-9 of a scale) apart. The wgrad reads no weights. Optimizer, checkpoints and exports have the weights
themselves: FSDP2 asks a shard for its own way of travelling (`fsdp_pre_all_gather`), and that is an attribute of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from deepwell.engine.engine import Engine
from deepwell.engine.regions import has_module
from deepwell.formats.elements import decode_e8m0
from deepwell.graph.ops import Linear
from deepwell.kernels.gemm.schemes import parse_scheme
from deepwell.kernels.quantize.microscaled import MX_BLOCK, quantize_mxfp8

_E4M3 = torch.float8_e4m3fn
_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")


class Fp8Gather:
    """The weights of a sharded engine that may travel in FP8. Their schemes change with steps and with the guard's
    fallbacks: `follow` is called before every step and says of each weight how it travels from then on."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._found = dict(_candidates(engine))

    @property
    def weights(self) -> tuple[str, ...]:
        """The paths of the linears whose weights travel in FP8."""
        return tuple(
            path for path, (_, param) in self._found.items() if hasattr(param._sharded_local_tensor, _HOOKS[0])
        )

    def note(self) -> str:
        """What of the layers' linears travels in FP8 now."""
        linears = sum(
            isinstance(site.op, Linear) and site.layer is not None for site in self._engine.deepwell.ir.sites()
        )
        return (
            f"fp8_all_gather: the weights of {len(self.weights)} of {linears} linears in layers are gathered in MXFP8, "
            "the others as they are"
        )

    def follow(self) -> None:
        """Have each weight travel as its linear's scheme of now allows."""
        schemes = self._engine.deepwell.bound.schemes
        for path, (group, param) in self._found.items():
            wanted = allows_fp8(schemes.get(path, ""))
            if wanted != hasattr(param._sharded_local_tensor, _HOOKS[0]):
                group.reshard()
                _switch(param, wanted)


def allows_fp8(scheme: str) -> bool:
    """Whether both products with the weights round them to MXFP8."""
    if not scheme:
        return False
    found = parse_scheme(scheme)
    return all(g.format is not None and g.format.rhs.format == "mxfp8" for g in (found.fwd, found.dgrad))


def _candidates(engine: Engine) -> Iterator[tuple[str, tuple[FSDPModule, Any]]]:
    """(path, (FSDP2's group, its parameter)) of linears of layers whose shards are whole blocks."""
    model, ir = engine.deepwell.model, engine.deepwell.ir
    for layer in ir.layers:
        if not has_module(model, layer.path):
            continue
        group = model.get_submodule(layer.path)
        assert isinstance(group, FSDPModule), "layers are sharded by now"
        found: Any = group._get_fsdp_state()._fsdp_param_group
        params = {(id(p._module_info.module), p._module_info.param_name): p for p in found.fsdp_params} if found else {}
        for op in ir.blocks[layer.block].ops:
            path = f"{layer.path}.{op.name}"
            if not isinstance(op, Linear) or not has_module(model, path):
                continue
            param = params.get((id(model.get_submodule(path)), "weight"))
            if param is not None and _is_whole(param):
                yield path, (group, param)


def _is_whole(param: Any) -> bool:
    """Whether shards have rows of whole blocks, as many on every rank, in a dtype that holds them.

    Of sizes that all ranks know: they must agree.
    """
    size, ranks = param._orig_size, param.mesh_info.shard_mesh_size
    if len(size) != 2 or ranks == 1 or size[0] % ranks or size[1] % MX_BLOCK or param._module_info.shared_modules:
        return False
    return param._sharded_local_tensor.dtype in (torch.float32, torch.bfloat16)


def _switch(param: Any, is_on: bool) -> None:
    """Have FSDP2 gather one parameter in FP8, or again as it is; its buffers are of other sizes then."""
    shard: Tensor = param._sharded_local_tensor
    for name, hook in zip(_HOOKS, (_pack(shard), _unpack), strict=True):
        setattr(shard, name, hook) if is_on else delattr(shard, name)
    param.all_gather_outputs = []
    param.__dict__.pop("_unsharded_param", None)
    param._init_extensions()


def _pack(shard: Tensor) -> Any:
    """FSDP2's `fsdp_pre_all_gather` of a shard: what travels, and what the receiver is handed besides."""

    def pre_all_gather(mesh: Any, size: Any, stride: Any, module: nn.Module, mp_policy: Any) -> tuple[Any, Any]:
        copies = quantize_mxfp8(shard, columns=False, swizzled=False)
        assert copies.q_TK is not None and copies.scale is not None
        return (copies.q_TK.view(torch.uint8), copies.scale.view(torch.uint8)), None

    return pre_all_gather


def _unpack(outputs: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
    """FSDP2's `fsdp_post_all_gather`: the weight as a plain tensor, of all ranks' values and scales."""
    values, scales = outputs
    n, k = values.shape
    blocks = values.view(_E4M3).to(dtype).view(n, k // MX_BLOCK, MX_BLOCK)
    weight = (blocks * decode_e8m0(scales).to(dtype)[:, :, None]).view(n, k)
    if out is None:
        return weight, (weight,)
    target = out.to_local() if hasattr(out, "to_local") else out
    # The same parameter as in the last step, whose storage was freed in between: no change that autograd should see.
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(target):
        target.copy_(weight)
    return None
