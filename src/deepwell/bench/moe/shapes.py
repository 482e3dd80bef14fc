"""The blocks and models of the MoE race, and who runs them. Values without torch."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEShape:
    """One block: tokens, width, experts, choices of a token, hidden width of an expert; and whose experts they are."""

    name: str
    family: str  # of Hugging Face: qwen3_moe, olmoe, mixtral, gpt_oss
    tokens: int
    width: int
    experts: int
    top_k: int
    ffn: int

    @property
    def flops(self) -> int:
        """Of the experts' products in the forward; the backward has twice as many."""
        return 6 * self.tokens * self.top_k * self.ffn * self.width


_SIZES = ("name", "family", "tokens", "width", "experts", "top_k", "ffn")


def _shapes(*rows: tuple[object, ...]) -> dict[str, MoEShape]:
    return {str(row[0]): MoEShape(**dict(zip(_SIZES, row, strict=True))) for row in rows}  # type: ignore[arg-type]


SHAPES = _shapes(
    ("qwen3-32k", "qwen3_moe", 32768, 2048, 128, 8, 768),
    ("qwen3-8k", "qwen3_moe", 8192, 2048, 128, 8, 768),
    ("olmoe-32k", "olmoe", 32768, 2048, 64, 8, 1024),
    ("mixtral-16k", "mixtral", 16384, 4096, 8, 2, 14336),
    ("gpt-oss-16k", "gpt_oss", 16384, 2880, 32, 4, 2880),
)
# What a CPU has the time for.
TINY = _shapes(("tiny", "qwen3_moe", 64, 64, 4, 2, 32), ("tiny-gpt-oss", "gpt_oss", 64, 64, 4, 2, 32))

# The first one is what the others are compared with.
WAYS = {
    "hf-grouped": "Hugging Face's grouped_mm, torch.compile",
    "hf-eager": "Hugging Face's loop over experts",
    "liger": "Liger's fused_moe, where it is installed",
    "scattermoe": "ScatterMoE's two products, where it is installed",
    "deepwell-torch": "Deepwell in bf16, torch's kernels in every stage",
    "deepwell": "Deepwell in bf16, the fastest kernel of each stage",
    "deepwell-fp8": "Deepwell in FP8, the fastest kernel of each stage",
}
KERNELS = "kernels"

# Models of `deepwell bench step`: torch.compile with grouped_mm beside Deepwell without options and in bf16.
STEPS = ("hf:qwen3-30b-a3b:4", "hf:mixtral:2", "hf:olmoe:8", "hf:deepseek-v3-like:4", "hf:gpt-oss-20b:4")
