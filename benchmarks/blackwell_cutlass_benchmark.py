"""GEMMs, a transformer layer and an MoE layer in every precision, beside torch.compile(max-autotune).

PYTHONPATH=src python3 benchmarks/blackwell_cutlass_benchmark.py [--json FILE] [--device cpu] [--parts gemm,moe]
"""

from speedup import PARTS, PRECISIONS, main

if __name__ == "__main__":
    main(PARTS, PRECISIONS)
