"""How often does low precision send a token to other experts, and what does that cost the gradients?

    PYTHONPATH=src python3 benchmarks/routing_flips.py [--model moe-384-6l] [--tokens 2e7] [--json FILE]

A small MoE is trained in bf16 (`deepwell validate parity`'s model, text and schedule). Then the same weights and tokens
run once in fp32, which is the reference, and in each way below. A flip is a token whose set of experts in a layer is
not fp32's. Gradients are compared with fp32's, in dB of all tensors of a kind together.

    bf16, fp8                as the engine runs them; the router reads bf16
    ..., router reads fp32   the norm before the router is not rounded to bf16
    ..., router reads fp8    the router reads what the experts' FP8 GEMM reads: E4M3 with a scale for each token
    ..., fp32's routes       every token goes where fp32 sends it: what is left is rounding alone
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepwell.bench.corpus import make_corpus
from deepwell.bench.devices import pick_device
from deepwell.bench.environment import environment
from deepwell.bench.llama import Llama
from deepwell.bench.parity.run import MODELS, Pace, PairSetup, ParityRun
from deepwell.bench.variants import Variant
from deepwell.formats.metrics import sqnr_db
from deepwell.graph.capture import capture
from deepwell.kernels.quantize.fp8 import quantize_rows

WAYS = {
    "bf16": ("bf16", "bf16", False),
    "bf16, router reads fp32": ("bf16", "fp32", False),
    "bf16, fp32's routes": ("bf16", "bf16", True),
    "fp8": ("fp8", "bf16", False),
    "fp8, router reads fp32": ("fp8", "fp32", False),
    "fp8, router reads fp8": ("fp8", "fp8", False),
    "fp8, fp32's routes": ("fp8", "bf16", True),
}
KINDS = {"router": "mlp.gate.", "experts": "mlp.experts.", "attention": "attention.", "embedding": "embed."}


class Routed(nn.Module):
    """A Llama with experts that also returns every token's choices, [layers, tokens, top k]; `routes` replace them."""

    def __init__(self, model: Llama, router_reads: str) -> None:
        super().__init__()
        self.model, self.router_reads = model, router_reads

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor, routes: Tensor | None = None) -> tuple[Tensor, Tensor]:
        model, S = self.model, tokens_BS.shape[1]
        x_BSD = model.embed(tokens_BS)
        cos_SC, sin_SC = model.cos_SC[:S].to(x_BSD.dtype), model.sin_SC[:S].to(x_BSD.dtype)
        chosen = []
        for number, layer in enumerate(model.layers):
            x_BSD = x_BSD + layer.attention(layer.attention_norm(x_BSD), cos_SC, sin_SC)
            h_TD = layer.mlp_norm(x_BSD).flatten(0, 1)
            routing = layer.mlp.gate(self._read(layer.mlp_norm, x_BSD.flatten(0, 1), h_TD))
            if routes is not None:
                dense = layer.mlp.gate._weights(routing.logits_TE, routing.scores_TE, routes[number])
                routing = routing._replace(index_TK=routes[number], weight_TK=dense.gather(1, routes[number]))
            chosen.append(routing.index_TK)
            x_BSD = x_BSD + layer.mlp._routed(h_TD, routing, None, len(tokens_BS)).view(x_BSD.shape)
        logits_BSV = model.head(model.norm(x_BSD))
        return F.cross_entropy(logits_BSV.float().flatten(0, 1), targets_BS.flatten()), torch.stack(chosen)

    def _read(self, norm: Any, x_TD: Tensor, h_TD: Tensor) -> Tensor:
        if self.router_reads == "fp32":
            return F.rms_norm(x_TD.float(), norm.weight.shape, norm.weight.float(), norm.eps)
        if self.router_reads == "fp8":
            values, scale = quantize_rows(h_TD.detach())
            rounded = (values.float() * scale[:, None]).to(h_TD.dtype)
            return h_TD + (rounded - h_TD).detach()  # the gradient is that of h
        return h_TD


def trained(setup: PairSetup, corpus: Any, device: str) -> ParityRun:
    run = ParityRun(Variant.parse("bf16"), 0, setup, corpus, device)
    if not run.train(Pace(), lambda _run: None):
        sys.exit("the training did not end")
    return run


def measured(
    run: ParityRun, name: str, batch: tuple[Tensor, Tensor], reference: dict[str, Any] | None
) -> dict[str, Any]:
    """Loss, choices and gradients of one way; the reference is fp32 in plain PyTorch."""
    arm, router_reads, is_forced = WAYS.get(name, ("fp32", "bf16", False))
    model = Llama(run.model.config).to(run.device, torch.float32 if reference is None else torch.bfloat16)
    model.load_state_dict(run.model.state_dict())
    call: Any = Routed(model, router_reads)
    given = (*batch, reference["routes"]) if is_forced and reference else batch
    torch._dynamo.reset()
    if reference is not None:
        call = Variant.parse(arm).engine_of(capture(call, given))
        call.deepwell.options.measure = None  # accuracy is the policy's: none stays in bf16 because that was faster
    loss, routes = call(*given)
    loss.backward()
    grads = {key: p.grad.float() for key, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.item(), "routes": routes, "grads": grads}


def compared(reference: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """Shares of flipped tokens by layer, and dB of the gradients by kind."""
    wanted, got = (x["routes"].sort(-1).values for x in (reference, made))
    flips = (wanted != got).any(-1).float().mean(-1)
    row: dict[str, Any] = {"loss": made["loss"], "flips": [round(x, 5) for x in flips.tolist()]}
    for kind, part in KINDS.items():
        keys = [key for key in reference["grads"] if part in key]
        flat = [torch.cat([x["grads"][key].flatten() for key in keys]) for x in (reference, made)]
        row[f"{kind} dB"] = round(sqnr_db(*flat), 2)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="moe-384-6l", choices=[name for name, one in MODELS.items() if one.experts])
    parser.add_argument("--tokens", type=float, default=2e7, help="that it is trained on")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--text", type=Path, action="append", help="a folder of text instead of the installed sources")
    parser.add_argument("--megabytes", type=float, default=120.0)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--device", default=None)
    parser.add_argument("--json", type=Path, default=None)
    args = parser.parse_args()
    device = pick_device(args.device)
    setup = PairSetup(
        model=args.model, tokens=int(args.tokens), batch=args.batch, seq_len=args.seq_len, lr=args.lr, evals=0
    )
    corpus = make_corpus(args.text, megabytes=args.megabytes, vocab=args.vocab)
    run = trained(setup, corpus, device)
    print(f"trained on {setup.tokens:,} tokens: held-out loss {run.record.final['bf16']:.3f}", flush=True)
    starts = torch.arange(setup.batch, device=run.device) * setup.seq_len
    rows = run.held[starts[:, None] + torch.arange(setup.seq_len + 1, device=run.device)].long() & 0xFFFF
    batch = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
    reference = measured(run, "fp32", batch, None)
    found = []
    print(f"{'':26s}{'loss':>8s}{'flips':>8s}{'last':>8s}" + "".join(f"{kind:>11s}" for kind in KINDS))
    for name in WAYS:
        row = {"way": name, **compared(reference, measured(run, name, batch, reference))}
        found.append(row)
        mean = sum(row["flips"]) / len(row["flips"])
        kinds = "".join(f"{row[f'{kind} dB']:8.1f} dB" for kind in KINDS)
        print(f"{name:26s}{row['loss']:8.4f}{mean:8.2%}{row['flips'][-1]:8.2%}{kinds}", flush=True)
    if args.json:
        result = {
            "bench": "routing_flips", "environment": environment(), "setup": {**vars(args), "json": None, "text": None},
            "held_out": run.record.final["bf16"], "fp32 loss": reference["loss"], "rows": found,
        }  # fmt: skip
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
