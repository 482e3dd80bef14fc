"""The device that a benchmark runs on."""

from deepwell.errors import ConfigError, UnsupportedError


def pick_device(asked: str | None) -> str:
    """`asked`, or the GPU where there is one. Raises UnsupportedError where there is none and none was named."""
    import torch

    if asked not in (None, "cuda", "cpu"):
        raise ConfigError(f"--device is {asked!r}; it takes cuda or cpu")
    if asked == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise UnsupportedError("no CUDA GPU here: these numbers are a GPU's; --device cpu --model tiny tries it out")
    return "cuda"
