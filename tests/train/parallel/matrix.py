"""The matrix of data and tensor parallelism against one process.

python tests/train/parallel/matrix.py        prints the table that docs/training.md has, pipelines and the rest included
"""

from __future__ import annotations

from cases import Case

from deepwell.planner.layout import Offload

_ZERO = [
    Case(
        name=f"{sharding} 2", layout={"dp": 2, "sharding": sharding}, accumulation=accumulation, steps=20,
        settings={"bucket_mib": 0.05} if sharding == "ddp" else {},
    )
    for sharding, accumulation in (("ddp", 2), ("zero1", 2), ("zero2", 2), ("zero3", 1))
]  # fmt: skip
_LOW = {"precision": "mxfp8", "labels": "all", "steps": 20}
_HSDP = {"dp": 4, "dp_replicate": 2}
_ADAMW = {"optimizer": "adamw_dw", "clip": 0.5}
_BOTH = {"dp": 2, "tp": 2, "sharding": "zero3"}
_TP = {"dp": 1, "tp": 2}
_HOST = {"offload": Offload(optimizer=1.0, activations=1.0)}

MATRIX: tuple[Case, ...] = (
    *_ZERO,
    Case(name="ddp 2 mxfp8", layout={"dp": 2, "sharding": "ddp"}, settings={"bucket_mib": 0.05}, **_LOW),
    Case(name="zero3 2 mxfp8", layout={"dp": 2, "sharding": "zero3"}, recompute=True, **_LOW),
    Case(name="zero3 2 tied", layout={"dp": 2, "sharding": "zero3"}, model="tied", accumulation=2, **_ADAMW),
    Case(name="zero3 2 plain", layout={"dp": 2, "sharding": "zero3"}, model="plain", recompute=True),
    Case(name="zero3 2, host memory", layout={"dp": 2, "sharding": "zero3", **_HOST}, accumulation=2, **_ADAMW),
    Case(name="zero2 2 mxfp8, host memory", layout={"dp": 2, "sharding": "zero2", **_HOST}, **{**_LOW, "steps": 3}),
    Case(
        name="zero3 2 mxfp8, gathered in fp8",
        layout={"dp": 2, "sharding": "zero3"},
        settings={"fp8_all_gather": True},
        recompute=True,
        **_LOW,
    ),
    Case(name="zero3 4", layout={"dp": 4, "sharding": "zero3"}, **_ADAMW),
    Case(name="hsdp 2x2 zero3", layout={**_HSDP, "sharding": "zero3"}, steps=20),
    Case(name="hsdp 2x2 zero2", layout={**_HSDP, "sharding": "zero2"}, accumulation=2),
    Case(name="hsdp 2x2 mxfp8", layout={**_HSDP, "sharding": "zero3"}, **_LOW),
    Case(name="tp 2", layout=_TP, steps=20),
    Case(name="tp 2 mxfp8", layout=_TP, **_LOW),
    Case(name="tp 2 qwen2", layout=_TP, model="qwen2"),
    Case(name="tp 2 qwen3", layout=_TP, model="qwen3", **_ADAMW),
    Case(name="tp 2 biased", layout=_TP, model="biased", accumulation=2),
    Case(name="tp 2 gemma2", layout=_TP, model="gemma2"),
    Case(name="tp 2 plain", layout=_TP, model="plain"),
    Case(name="tp 4", layout={"dp": 1, "tp": 4}),
    Case(name="fsdp 2 x tp 2", layout=_BOTH, steps=20),
    Case(name="fsdp 2 x tp 2 adamw", layout={**_BOTH, "sharding": "zero2"}, model="tied", accumulation=2, **_ADAMW),
    Case(name="fsdp 2 x tp 2 mxfp8", layout=_BOTH, recompute=True, **_LOW),
    Case(name="fsdp 2 x tp 2 mxfp8, gathered in fp8", layout=_BOTH, settings={"fp8_all_gather": True}, **_LOW),
    Case(name="ddp 2 x tp 2", layout={**_BOTH, "sharding": "ddp"}, accumulation=2),
    Case(name="fsdp 2 x tp 2, host memory", layout={**_BOTH, **_HOST}, accumulation=2),
    Case(name="hsdp x tp", layout={"dp": 2, "tp": 2, "dp_replicate": 2, "sharding": "zero3"}),
)


if __name__ == "__main__":
    import os
    import sys
    from pathlib import Path

    here = Path(__file__).resolve().parent
    sys.path[:0] = [str(here), str(here.parents[1]), str(here.parents[2] / "src")]
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path[:3])
    import spread
    from compare import outcomes, table
    from test_model_parallel import MATRIX as SPREAD

    print(table(MATRIX, outcomes(MATRIX)), flush=True)
    print("\n".join(table(SPREAD, outcomes(SPREAD, spread.run)).splitlines()[2:]))
