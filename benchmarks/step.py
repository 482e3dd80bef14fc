"""Time whole training steps (forward, backward, AdamW) of Llama-style models: Deepwell beside torch.compile.

PYTHONPATH=src python3 benchmarks/step.py --model 8b-4l --variants torch,fp8 --json out.json
"""

import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))
from llama import Llama, LlamaConfig

MODELS = {
    "8b-4l": (LlamaConfig(width=4096, num_heads=32, num_kv_heads=8, hidden=14336, num_layers=4, vocab=128256), 2, 8192),
    "1b-16l": (
        LlamaConfig(width=2048, num_heads=32, num_kv_heads=8, hidden=8192, num_layers=16, vocab=128256),
        2,
        8192,
    ),
    "768-12l": (
        LlamaConfig(width=768, num_heads=12, num_kv_heads=12, hidden=3072, num_layers=12, vocab=50304),
        32,
        1024,
    ),
    "tiny": (LlamaConfig(width=256, num_heads=4, num_kv_heads=2, hidden=768, num_layers=2, vocab=1024), 2, 512),
}


def build(name):
    config, batch, seq_len = MODELS[name.removeprefix("hf-")]
    with torch.device("cuda"):
        model = huggingface(config) if name.startswith("hf-") else Llama(config).bfloat16().init_weights()
    data = torch.randint(0, config.vocab, (batch, seq_len + 1), device="cuda")
    return model, data[:, :-1].contiguous(), data[:, 1:].contiguous()


def huggingface(config):
    """The same shape as transformers builds it."""
    import transformers

    return transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(
            hidden_size=config.width,
            intermediate_size=config.hidden,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            vocab_size=config.vocab,
            max_position_embeddings=config.max_positions,
            rope_theta=config.rope_theta,
            tie_word_embeddings=False,
            use_cache=False,
        ),
        dtype=torch.bfloat16,
    )


def compiled(model, variant):
    if variant == "eager":
        return model, None
    if variant == "torch":
        return torch.compile(model), None
    from deepwell.engine.backend import BackendOptions, compile_graph

    fp8 = {"fp8": "fp8_row|fp8_row|fp8_row", "fp8_wbf16": "fp8_row|fp8_row|bf16", "bf16": None}[
        variant.removesuffix("_nolce").removesuffix("_head").removesuffix("_re").removesuffix("_cg")
    ]
    head_too = variant.endswith("_head")
    linears = [
        n
        for n, m in model.named_modules()
        if isinstance(m, torch.nn.Linear) and (head_too or n not in ("head", "lm_head"))
    ]
    options = BackendOptions(
        schemes=dict.fromkeys(linears, fp8) if fp8 else {},
        use_inductor=True,
        fuse_head=not variant.endswith("_nolce"),
        recompute="_re" in variant,
        cuda_graphs="_cg" in variant,
    )
    return torch.compile(model, backend=lambda gm, ex: compile_graph(gm, ex, options)), options


def optimizer_for(model, variant, which):
    if which == "torch" or variant == "torch":
        return torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    from deepwell.train.optim import AdamWDW

    return AdamWDW(model.parameters(), lr=1e-5, moments="bf16", stochastic_rounding=which != "nearest")


def measure(name, variant, steps, which_optimizer, profile):
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    model, x, y = build(name)
    step_fn, options = compiled(model, variant)
    optimizer = optimizer_for(model, variant, which_optimizer)

    def step():
        loss = step_fn(input_ids=x, labels=x).loss if name.startswith("hf-") else step_fn(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    start = time.perf_counter()
    losses = [step().item() for _ in range(3)]
    cold = time.perf_counter() - start
    times = []
    for _ in range(steps):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        step()
        b.record()
        torch.cuda.synchronize()
        times.append(a.elapsed_time(b))
    row = {
        "model": name,
        "variant": variant,
        "ms": statistics.median(times),
        "min_ms": min(times),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "cold_s": cold,
        "losses": losses,
        "passes": dict(options.counts) if options else {},
    }
    if profile:
        from torch.profiler import ProfilerActivity
        from torch.profiler import profile as profiler

        with profiler(activities=[ProfilerActivity.CUDA]) as prof:
            step()
            torch.cuda.synchronize()
        rows = sorted(prof.key_averages(), key=lambda e: -e.self_device_time_total)[:profile]
        row["kernels"] = [(e.key[:90], e.count, round(e.self_device_time_total / 1e3, 3)) for e in rows]
    return row


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="8b-4l")
    parser.add_argument("--variants", default="torch,fp8")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--optimizer", default="torch")
    parser.add_argument("--profile", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for variant in args.variants.split(","):
        row = measure(args.model, variant, args.steps, args.optimizer, args.profile)
        rows.append(row)
        kernels = row.pop("kernels", [])
        print(json.dumps(row), flush=True)
        for name, count, ms in kernels:
            print(f"   {ms:9.3f} ms {count:5d}  {name}", flush=True)
        row["kernels"] = kernels
    base = rows[0]["ms"]
    for row in rows:
        facts = f"x{base / row['ms']:.3f}  {row['peak_gb']:.2f} GB  cold {row['cold_s']:.0f} s"
        print(f"{row['model']:8s} {row['variant']:12s} {row['ms']:8.2f} ms  {facts}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
