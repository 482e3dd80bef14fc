"""A Llama-style decoder in plain PyTorch, the model that the demo captures; it lives in `deepwell.bench.llama`."""

from deepwell.bench.llama import TINY, Llama, LlamaConfig

__all__ = ["TINY", "Llama", "LlamaConfig"]
