#!/usr/bin/env bash
# All precisions beside torch.compile(max-autotune). Arguments go to the script.
cd "$(dirname "${BASH_SOURCE[0]}")" && PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} exec "${PYTHON:-python3}" benchmarks/blackwell_cutlass_benchmark.py "$@"
