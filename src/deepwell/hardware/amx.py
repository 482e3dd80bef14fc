"""Checks that bf16 matrix products do not kill the process on this CPU.

Some virtual machines announce AMX tiles and then trap every tile instruction; oneDNN believes the announcement, and
torch's bf16 `mm` dies of an illegal instruction (seen 2026-11-15: torch 2.13.0 on a Xeon under KVM). No `try` can catch
that, so a child process tries it first.
"""

import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence

REMEDY = "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before Python starts"
# 64 is large enough for oneDNN to take tiles; products of 8 do not use them.
_CHILD = "import torch; a = torch.ones(64, 64, dtype=torch.bfloat16); print(float((a @ a).sum()))"


def bf16_fault(
    instruction_sets: Sequence[str],
    *,
    environ: Mapping[str, str] | None = None,
    command: Sequence[str] = (sys.executable, "-c", _CHILD),
    timeout_s: float = 120.0,
) -> str:
    """Why bf16 products cannot be run here, with the remedy; empty where they can.

    Costs a start of torch where the CPU announces AMX, nothing elsewhere.
    """
    if "amx_tile" not in instruction_sets:
        return ""
    try:
        env = None if environ is None else dict(environ)
        done = subprocess.run(list(command), capture_output=True, timeout=timeout_s, check=False, env=env)
    except subprocess.TimeoutExpired:
        return f"a 64x64 bf16 product did not end within {timeout_s:.0f} s"
    if hasattr(signal, "SIGILL") and done.returncode == -signal.SIGILL:
        return f"AMX is announced but traps, so a bf16 product kills the process: {REMEDY}"
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().splitlines()
        return (
            f"a bf16 product failed in a child process (status {done.returncode}): {last[-1] if last else 'no message'}"
        )
    return ""
