"""Train the same model, data, order and initialisation in bf16 and in FP8, and compare the held-out loss.

    PYTHONPATH=src python3 benchmarks/parity.py --steps 1000 --variants bf16,fp8,fp8_head --json parity.json

Text: Python sources that every machine has (the standard library and installed packages), without duplicates, 2 % of
the files held out, a BPE trained on the rest. Needs a GPU.
"""

import argparse
import hashlib
import json
import math
import sys
import sysconfig
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "recipes"))
import deepwell as dw
from deepwell.precision import PrecisionPolicy
from llama import Llama, LlamaConfig

CONFIG = LlamaConfig(width=768, num_heads=12, num_kv_heads=12, hidden=2048, num_layers=12, vocab=32768)
BATCH, SEQ_LEN = 16, 1024


def sources(limit_bytes):
    """(training files, held-out files) as text, each content once, in an order that depends on content alone."""
    paths = sysconfig.get_paths()
    found = {}
    for root in dict.fromkeys((paths["stdlib"], paths["purelib"])):
        for path in sorted(Path(root).rglob("*.py")):
            data = path.read_bytes()
            if 200 < len(data) < 1_000_000:
                found.setdefault(hashlib.sha256(data).hexdigest(), data)
    train, held, size = [], [], 0
    for digest in sorted(found):
        text = found[digest].decode("utf-8", errors="ignore")
        size += len(text)
        (held if int(digest[:4], 16) % 50 == 0 else train).append(text)
        if size > limit_bytes:
            break
    return train, held


def tokenize(train, held, vocab):
    import tokenizers

    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        train, tokenizers.trainers.BpeTrainer(vocab_size=vocab, initial_alphabet=alphabet, show_progress=False)
    )

    def ids(texts):
        encoded = bpe.encode_batch(texts)
        return torch.tensor([i for one in encoded for i in one.ids], dtype=torch.int64)

    return ids(train), ids(held)


def batch_of(tokens, generator):
    starts = torch.randint(0, len(tokens) - SEQ_LEN - 1, (BATCH,), generator=generator)
    rows = torch.stack([tokens[s : s + SEQ_LEN + 1] for s in starts.tolist()]).cuda()
    return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def policy_of(variant):
    if variant == "bf16":
        return PrecisionPolicy.recipe("bf16")
    policy = PrecisionPolicy.recipe("fp8", scaling="row")
    if variant == "fp8_head":
        policy.set_layer_precision("head", "fp8_row")
    return policy


def run(variant, train, held, steps, seed):
    torch.manual_seed(seed)
    torch._dynamo.reset()
    with torch.device("cuda"):
        model = Llama(CONFIG).bfloat16().init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    first = batch_of(train, torch.Generator().manual_seed(0))
    engine = dw.compile(dw.capture(model, first), precision_policy=policy_of(variant))
    master = [p.detach().float().clone() for p in model.parameters()]  # fp32 masters: the format is what is compared
    optimizer = torch.optim.AdamW(master, lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    losses, start = [], time.perf_counter()
    for step in range(steps):
        warm = min(1.0, (step + 1) / 100)
        optimizer.param_groups[0]["lr"] = 6e-4 * warm * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        loss = engine(*batch_of(train, generator))
        loss.backward()
        for p, m in zip(model.parameters(), master, strict=True):
            m.grad = p.grad.float()
        torch.nn.utils.clip_grad_norm_(master, 1.0)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(list(model.parameters()), master)
        model.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    seconds = time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1234)
        held_out = torch.stack([model(*batch_of(held, generator)) for _ in range(20)]).mean().item()
    curve = torch.stack(losses).tolist()
    return {
        "variant": variant,
        "seed": seed,
        "held_out": held_out,
        "seconds": seconds,
        "losses": curve[:: max(1, steps // 50)],
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--variants", default="bf16,fp8,fp8_head")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--megabytes", type=float, default=60)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    start = time.perf_counter()
    train, held = tokenize(*sources(args.megabytes * 1e6), CONFIG.vocab)
    seconds = time.perf_counter() - start
    print(f"{len(train) / 1e6:.1f} M training tokens, {len(held) / 1e6:.2f} M held out, {seconds:.0f} s")
    rows = []
    for seed in map(int, args.seeds.split(",")):
        for variant in args.variants.split(","):
            rows.append(run(variant, train, held, args.steps, seed))
            base = next(row["held_out"] for row in rows if row["seed"] == seed and row["variant"] == "bf16")
            row = rows[-1]
            gap = row["held_out"] / base - 1
            print(
                f"seed {seed} {variant:9s} held-out {row['held_out']:.4f} ({gap:+.3%})  {row['seconds']:.0f} s",
                flush=True,
            )
    if args.json:
        tokens = args.steps * BATCH * SEQ_LEN
        args.json.write_text(json.dumps({"torch": torch.__version__, "tokens": tokens, "runs": rows}, indent=1))


if __name__ == "__main__":
    main()
