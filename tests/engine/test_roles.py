"""Roles of linears come from the graphs that really run: heads and routers keep high precision however read."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import deepwell as dw
from deepwell.precision import PrecisionPolicy


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.first, self.second = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.mix(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.second(F.gelu(self.first(x)))


class Decoder(nn.Module):
    """A plain decoder whose forward nobody can call without knowing what `targets` are."""

    def __init__(self, vocab: int = 96, dim: int = 32) -> None:
        super().__init__()
        self.table = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(2))
        self.to_words = nn.Linear(dim, vocab, bias=False)

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.to_words(self.hidden(ids)).flatten(0, 1), targets.flatten())


class BrokenDecoder(Decoder):
    """Breaks before and behind the head: its piece holds neither an embedding nor a loss."""

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.hidden(ids)
        torch._dynamo.graph_break()
        logits = self.to_words(x)
        torch._dynamo.graph_break()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Classifier(Decoder):
    """Returns scores of seven classes and no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.to_words = nn.Linear(32, 7)

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        return self.to_words((self.hidden(ids) * weights[..., None]).mean(1))


class BrokenClassifier(Classifier):
    """The last linear of its first piece is a block's, not a head."""

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        x = self.blocks[0].first(self.table(ids))
        torch._dynamo.graph_break()
        return self.to_words((x[..., :32] * weights[..., None]).mean(1))


IDS = torch.arange(32).view(2, 16) % 96


def formats(engine: Any) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in engine.report().bindings:
        found.setdefault(row.path, set()).add("bf16" if row.scheme in ("bf16", "fp32") else row.format)
    return found


@pytest.mark.parametrize("recipe", ["fp8", "mxfp8", "nvfp4"])
def test_a_head_that_the_module_tree_does_not_show_stays_high_precision(recipe: str) -> None:
    torch._dynamo.reset()
    model = Decoder()
    assert dw.capture(model).source == "static"
    engine = dw.compile(model, precision=recipe)
    assert "names in the module tree" in str(engine.report()).replace("\n  ", " ")
    engine(IDS, IDS).backward()
    assert formats(engine)["to_words"] == {"bf16"}
    assert engine.report().passes["cross_entropy"] == 1  # a head in a format of its own would not be fused
    assert "graphs of the calls" in str(engine.report()).replace("\n  ", " ")


def test_attention_and_mlp_have_their_roles_from_the_first_call() -> None:
    torch._dynamo.reset()
    policy = PrecisionPolicy.recipe("mxfp8")
    policy.set_layer_precision("attention", "bf16")
    engine = dw.compile(Decoder(), precision_policy=policy)
    engine(IDS, IDS)
    found = formats(engine)
    assert found["blocks.0.mix"] == found["blocks.1.out"] == {"bf16"}
    assert found["blocks.0.first"] == found["blocks.1.second"] == {"mxfp8"}


def test_what_a_policy_says_of_the_head_by_name_stands() -> None:
    torch._dynamo.reset()
    policy = PrecisionPolicy.recipe("mxfp8")
    policy.set_layer_precision("to_words", "mxfp8")
    engine = dw.compile(Decoder(), precision_policy=policy)
    engine(IDS, IDS)
    assert formats(engine)["to_words"] == {"mxfp8"}


def test_a_head_alone_between_graph_breaks_is_known_by_its_vocabulary() -> None:
    torch._dynamo.reset()
    engine = dw.compile(BrokenDecoder())
    engine(IDS, IDS)
    assert engine.report().graphs > 1
    assert formats(engine)["to_words"] == {"bf16"}
    assert formats(engine)["blocks.1.second"] == {"mxfp8"}


def test_the_last_linear_before_the_output_is_a_head_and_that_of_a_middle_piece_is_none() -> None:
    torch._dynamo.reset()
    engine = dw.compile(Classifier())
    engine(IDS, torch.ones(2, 16))
    assert formats(engine)["to_words"] == {"bf16"} and formats(engine)["blocks.1.second"] == {"mxfp8"}
    torch._dynamo.reset()
    engine = dw.compile(BrokenClassifier())
    engine(IDS, torch.ones(2, 16))
    assert formats(engine)["blocks.0.first"] == {"mxfp8"}
    traced = dw.capture(Classifier(), (IDS, torch.ones(2, 16)))
    assert {site.path for site in traced.sites() if site.op.role == "head"} == {"to_words"}


def test_a_part_of_a_model_has_no_head() -> None:
    torch._dynamo.reset()
    for part in (nn.Linear(32, 32), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), Block(32)):
        roles = {site.op.role for site in dw.capture(part, torch.randn(2, 5, 32)).sites() if site.op.kind == "linear"}
        assert "head" not in roles


class Routed(Decoder):
    """Chooses one of four experts a token: by a linear that no name gives away."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"which": nn.Linear(32, 4), "one": nn.Linear(32, 32)}) for _ in range(2)
        )

    def hidden(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            weight, _ = torch.topk(torch.softmax(block["which"](x), -1), 1)
            x = x + weight * block["one"](x)
        return x


def test_a_router_is_known_by_the_top_k_behind_it() -> None:
    torch._dynamo.reset()
    engine = dw.compile(Routed())
    engine(IDS, IDS)
    found = formats(engine)
    assert found["blocks.0.which"] == found["blocks.1.which"] == {"bf16"} and found["blocks.0.one"] == {"mxfp8"}


def test_a_weight_that_is_the_embeddings_belongs_to_a_head() -> None:
    torch._dynamo.reset()
    model = BrokenDecoder()
    model.to_words.weight = model.table.weight
    engine = dw.compile(model)
    engine(IDS, IDS)
    assert formats(engine)["to_words"] == {"bf16"}


def test_a_role_that_a_later_graph_shows_is_compiled_for_at_the_next_call() -> None:
    """Evaluation returns the head's input sums first; the loss comes in a later call, in another graph."""
    torch._dynamo.reset()

    class Late(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.to_words = nn.Linear(32, 7)

        def forward(self, ids: Tensor, targets: Tensor | None) -> Tensor:
            scores = self.to_words(self.hidden(ids))
            if targets is None:
                return torch.matmul(scores, self.to_words.weight) @ self.blocks[0].out.weight
            return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    engine = dw.compile(Late())
    engine(IDS, None)
    assert formats(engine)["to_words"] == {"mxfp8"}
    engine(IDS, IDS % 7)
    engine(IDS, IDS % 7)
    engine(IDS, None)
    assert formats(engine)["to_words"] == {"bf16"}
    assert formats(engine)["blocks.1.second"] == {"mxfp8"}
