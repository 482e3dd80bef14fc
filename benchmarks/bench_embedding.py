"""Time an embedding's gradient in every config against torch, eager and compiled.

    PYTHONPATH=src python3 benchmarks/bench_embedding.py [--tokens 16384] [--rows 128256] [--width 4096]

Tokens: drawn evenly; by Zipf's law, as text has them; and half of them one word, as padding without `padding_idx`. Each
row says microseconds (median) and whether two runs agree bit for bit; "sort" and "zeros" are parts of every config.
Every config is compared with the reference first; a wrong one says WRONG.
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from deepwell.kernels.head.embedding import CONFIGS, default_config, embedding_backward, embedding_backward_ref
from deepwell.kernels.tune.timing import cold_median_us


def draws(tokens: int, rows: int) -> Iterator[tuple[str, Tensor]]:
    even = torch.randint(0, rows, (tokens,), device="cuda")
    yield "even", even
    zipf = 1.0 / torch.arange(1, rows + 1, device="cuda")
    yield "zipf", torch.multinomial(zipf, tokens, replacement=True)
    yield "half one word", torch.where(torch.rand(tokens, device="cuda") < 0.5, 7, even)


def variants(grad: Tensor, index: Tensor, rows: int) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    for config in CONFIGS:
        mark = " (default)" if config == default_config(grad.shape[1]) else ""
        name = f"{config.rows} x {config.columns}, {config.num_warps} warps{mark}"
        yield name, partial(embedding_backward, grad, index, rows, config=config)

    def dense() -> Tensor:
        return torch.ops.aten.embedding_dense_backward(grad, index, rows, -1, False)

    yield "torch, eager", dense
    yield "torch, compiled", torch.compile(dense)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--rows", type=int, default=128256)
    parser.add_argument("--width", type=int, default=4096)
    given = parser.parse_args()
    torch.manual_seed(0)
    grad = torch.randn(given.tokens, given.width, device="cuda").bfloat16()
    zeros = partial(torch.zeros, (given.rows, given.width), dtype=torch.bfloat16, device="cuda")
    print(f"{given.tokens} tokens, weight {given.rows} x {given.width}, bf16; zeros {cold_median_us(zeros):.1f} us")
    for name, index in draws(given.tokens, given.rows):
        words, counts = index.unique(return_counts=True)
        sorting = cold_median_us(partial(torch.sort, index.int(), stable=True))
        print(f"{name}: {words.numel()} words, the most frequent {int(counts.max())} times; sort {sorting:.1f} us")
        wanted = embedding_backward_ref(grad, index, given.rows, -1).float()
        for variant, run in variants(grad, index, given.rows):
            made = run()
            error = float((made.float() - wanted).norm() / wanted.norm())
            again = "same bits" if torch.equal(made, run()) else "other bits"
            # Roundings of bf16 and fp32 sums in another order; torch's own may add in bf16.
            wrong = f" WRONG: off by {error:.1e}" if not error < 5e-3 and "torch" not in variant else ""
            print(f"  {variant:36} {cold_median_us(run):8.1f} us  {again}  error {error:.1e}{wrong}")
        del wanted


if __name__ == "__main__":
    main()
