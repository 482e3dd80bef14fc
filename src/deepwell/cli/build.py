"""`deepwell build`: compile the CUTLASS kernels of csrc/ for this machine's GPUs, or for named architectures."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated

import typer

from deepwell.cli.options import option
from deepwell.errors import UnsupportedError
from deepwell.hardware.progress import bar


def build_command(
    arch: Annotated[str | None, option("Architectures, e.g. sm_90a,sm_100a; else those of the GPUs here.")] = None,
    jobs: Annotated[int, option("Compilers at once; each takes about 6 GB of memory.")] = 1,
    as_json: Annotated[bool, option("Print JSON only.", "--json")] = False,
) -> None:
    r"""Compile the CUTLASS kernels into the cache folder. Needs nvcc and `pip install 'deepwell\[cutlass]'`.

    A minute or two per source the first time; what is up to date is not compiled again.
    """
    from deepwell.kernels.cutlass import build as cb

    archs = cb.check_archs([part.strip() for part in arch.split(",") if part.strip()] if arch else _archs_here())
    tools = cb.find_toolchain(archs)
    todo = sum(not path.is_file() for name in archs for path in cb.plan(name, tools).values())
    built = []
    with bar("building", todo, shown=None if todo else False) as advance:

        def tell(arch: str, source: str, state: str) -> None:
            advance(int(state == "done"), **({"description": f"{arch} {source}"} if state == "started" else {}))

        for name in archs:
            built.append(cb.build(name, tools, jobs=jobs, progress=partial(tell, name)))
    if as_json:
        typer.echo(json.dumps({"built": [library.to_dict() for library in built]}, indent=2))
    else:
        for library in built:
            typer.echo(str(library))


def _archs_here(environ: Mapping[str, str] = os.environ) -> Sequence[str]:
    """Those that TORCH_CUDA_ARCH_LIST names, as torch's own builds read it; else those of the GPUs of this machine.

    Raises UnsupportedError where there are none, or none known.
    """
    from deepwell.hardware.probe import probe
    from deepwell.kernels.cutlass.build import arch_of

    listed = re.findall(r"(\d+)\.(\d)[af]?(?:\+PTX)?", environ.get("TORCH_CUDA_ARCH_LIST", ""))
    found = [(int(major), int(minor)) for major, minor in listed]
    found = found or [gpu.compute_capability for gpu in probe().gpus if gpu.compute_capability]
    if not found:
        raise UnsupportedError("no GPU was found to build for; name what to build for: --arch sm_90a,sm_100a")
    return [arch_of(capability) for capability in dict.fromkeys(found)]
