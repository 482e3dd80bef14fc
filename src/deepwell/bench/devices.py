"""The device that a benchmark runs on."""

from deepwell.errors import ConfigError, UnsupportedError


def pick_device(asked: str | None, trial: str = "--device cpu --model tiny") -> str:
    """`asked`, or the GPU where there is one. Raises UnsupportedError where there is none and none was named.

    `trial` are the options that try the command out without one.
    """
    import torch

    if asked not in (None, "cuda", "cpu"):
        raise ConfigError(f"--device is {asked!r}; it takes cuda or cpu")
    if asked == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        raise UnsupportedError(f"no CUDA GPU here: these numbers are a GPU's; {trial} tries it out")
    return "cuda"
