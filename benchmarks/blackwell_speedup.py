"""GEMMs, a transformer layer and an MoE layer in Blackwell's formats, beside torch.compile(max-autotune).

PYTHONPATH=src python3 benchmarks/blackwell_speedup.py [--json FILE] [--device cpu] [--parts gemm,transformer,moe]
"""

from speedup import PARTS, main

if __name__ == "__main__":
    main(PARTS, ("mxfp8", "nvfp4"))
