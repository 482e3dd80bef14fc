"""GEMMs and a transformer layer in the default precision, beside torch.compile(max-autotune).

PYTHONPATH=src python3 benchmarks/benchmark.py [--json FILE] [--device cpu] [--parts gemm,transformer,moe]
"""

from speedup import main

if __name__ == "__main__":
    main(("gemm", "transformer"), ("mxfp8",))
