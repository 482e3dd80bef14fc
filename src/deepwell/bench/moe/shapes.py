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


def _qwen3(name: str, tokens: int) -> MoEShape:
    return MoEShape(name=name, family="qwen3_moe", tokens=tokens, width=2048, experts=128, top_k=8, ffn=768)


SHAPES = {
    shape.name: shape
    for shape in (
        _qwen3("qwen3-32k", 32768),
        _qwen3("qwen3-8k", 8192),
        MoEShape(name="olmoe-32k", family="olmoe", tokens=32768, width=2048, experts=64, top_k=8, ffn=1024),
        MoEShape(name="mixtral-16k", family="mixtral", tokens=16384, width=4096, experts=8, top_k=2, ffn=14336),
        MoEShape(name="gpt-oss-16k", family="gpt_oss", tokens=16384, width=2880, experts=32, top_k=4, ffn=2880),
    )
}
# What a CPU has the time for.
TINY = {
    shape.name: shape
    for shape in (
        MoEShape(name="tiny", family="qwen3_moe", tokens=64, width=64, experts=4, top_k=2, ffn=32),
        MoEShape(name="tiny-gpt-oss", family="gpt_oss", tokens=64, width=64, experts=4, top_k=2, ffn=32),
    )
}

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
