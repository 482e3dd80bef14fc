"""The words for layers: what each pattern means, and what is said about one that means nothing."""

from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepwell.errors import ConfigError
from deepwell.precision.patterns import KINDS, Position, Selector, kind_names, parse_pattern

LAST_15 = Position(end="last", percent=Fraction(15))


@pytest.mark.parametrize(
    ("pattern", "selector"),
    [
        ("attention", Selector(role="attention")),
        ("MLP", Selector(role="mlp")),
        ("attention.q", Selector(role="attention", part="q")),
        ("mlp.down", Selector(role="mlp", part="down")),
        # Two words or an underscore, one or many: people write all of these.
        ("shared experts", Selector(role="shared_experts")),
        ("shared_experts", Selector(role="shared_experts")),
        ("shared expert", Selector(role="shared_experts")),
        ("shared experts.up", Selector(role="shared_experts", part="up")),
        ("embeddings", Selector(role="embedding")),
        ("first 2 blocks", Selector(position=Position(end="first", count=2))),
        ("last 1 layer", Selector(position=Position(end="last", count=1))),
        ("  Last  4   Layers ", Selector(position=Position(end="last", count=4))),
        ("last 15%", Selector(position=LAST_15)),
        ("first 12.5 % blocks", Selector(position=Position(end="first", percent=Fraction("12.5")))),
        ("layers 0-3", Selector(position=Position(start=0, stop=3))),
        ("block 7", Selector(position=Position(start=7, stop=7))),
        ("last 15% mlp", Selector(position=LAST_15, role="mlp")),
        ("last 15% blocks mlp.down", Selector(position=LAST_15, role="mlp", part="down")),
        ("layers 0 - 3 shared experts", Selector(position=Position(start=0, stop=3), role="shared_experts")),
        # Everything else is a path, also what begins like a kind.
        ("lm_head", Selector(path="lm_head")),
        ("mlp.0", Selector(path="mlp.0")),
        ("attention.dense", Selector(path="attention.dense")),
        ("Model.Layers.0", Selector(path="Model.Layers.0")),
        ("*", Selector(path="*")),
        ("path:mlp.down", Selector(path="mlp.down")),
    ],
)
def test_a_pattern_reads_as(pattern: str, selector: Selector) -> None:
    assert parse_pattern(pattern) == selector


@pytest.mark.parametrize("name", kind_names())
def test_every_kind_is_a_word(name: str) -> None:
    role, _, part = name.partition(".")
    assert parse_pattern(name) == Selector(role=role, part=part or None)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("", "empty"),
        ("   ", "empty"),
        ("first 2 mlp", "first 2 blocks"),  # two what?
        ("frist 2 blocks", "neither"),
        ("last 15% mpl", "did you mean mlp"),
        ("last 15% mlp.dwon", "mlp.down"),
        ("last 101%", "more than all"),
        ("layers 3-1", "layers 1-3"),
        ("layers -3", "neither"),
        ("share experts", "shared experts"),
        ("model.layers.0 mlp", "neither"),
        ("path:", "path:"),
        ("path:a b", "without blanks"),
        (None, "NoneType"),
        (["mlp"], "list"),
    ],
)
def test_words_that_make_no_pattern_are_refused_with_a_hint(pattern: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "num_layers", "layers"),
    [
        ("first 2 blocks", 32, range(2)),
        ("last 4 blocks", 32, range(28, 32)),
        # Rounded up: 15% of 32 is 4.8, as the published 8B run left 5 of 32; 15% of 20 is 3 and not 4.
        ("last 15%", 32, range(27, 32)),
        ("last 15%", 20, range(17, 20)),
        ("first 0.1%", 126, range(1)),
        ("last 100%", 3, range(3)),
        ("first 0 blocks", 3, range(0)),
        ("layers 1-2", 4, range(1, 3)),
    ],
)
def test_a_position_names_layers(pattern: str, num_layers: int, layers: range) -> None:
    position = parse_pattern(pattern).position
    assert position is not None
    assert position.layers(num_layers) == (layers, None)


@pytest.mark.parametrize(
    ("pattern", "layers"), [("first 9 blocks", range(4)), ("last 9 blocks", range(4)), ("layers 2-9", range(2, 4))]
)
def test_a_position_beyond_the_model_is_cut_and_says_so(pattern: str, layers: range) -> None:
    position = parse_pattern(pattern).position
    assert position is not None
    inside, cut = position.layers(4)
    assert inside == layers
    assert cut is not None and "4 layers" in cut


def test_a_position_wholly_beyond_the_model_names_nothing() -> None:
    position = parse_pattern("layers 8-9").position
    assert position is not None
    inside, cut = position.layers(4)
    assert len(inside) == 0
    assert cut is not None and "none of these" in cut


@given(st.integers(0, 100), st.integers(0, 200), st.sampled_from(["first", "last"]))
def test_a_percentage_never_names_less_than_it_says(percent: int, num_layers: int, end: str) -> None:
    inside, cut = Position(end=end, percent=Fraction(percent)).layers(num_layers)
    assert cut is None
    assert num_layers * percent <= 100 * len(inside) < num_layers * percent + 100


@pytest.mark.parametrize(
    ("pattern", "path", "matches"),
    [
        ("model.layers.*.self_attn.q_proj", "model.layers.11.self_attn.q_proj", True),
        ("*.mlp.*", "model.layers.0.mlp.experts.down_proj", True),
        ("*.mlp.*", "model.layers.0.self_attn.q_proj", False),
        # A plain path means what lies under it, at a whole name: layer 1 is not layer 11.
        ("model.layers.1", "model.layers.1.mlp.up_proj", True),
        ("model.layers.1", "model.layers.11.mlp.up_proj", False),
        ("model.layers.*.self_attn", "model.layers.0.self_attn.o_proj", True),
        ("model.layers.[02].mlp", "model.layers.2.mlp.up_proj", True),
        ("model.layers.[02].mlp", "model.layers.1.mlp.up_proj", False),
        ("lm_head", "lm_head", True),
        ("lm_head", "xlm_head", False),
        ("LM_HEAD", "lm_head", False),  # module names know case
        # A dot is a dot, no wildcard.
        ("model.layers.0", "model_layers.0", False),
    ],
)
def test_a_path_matches_modules_and_what_lies_under_them(pattern: str, path: str, matches: bool) -> None:
    assert Selector(path=pattern).matches_path(path) is matches


@pytest.mark.parametrize(
    ("pattern", "path", "role", "names"),
    [
        ("router", "model.layers.0.mlp.gate", "router", True),
        ("last 15% router", "model.layers.0.mlp.gate", "router", True),
        ("*.mlp.gate", "model.layers.0.mlp.gate", "router", True),
        ("lm_head", "lm_head", "head", True),
        # These cover it among others.
        ("mlp", "model.layers.0.mlp.gate", "router", False),
        ("first 2 blocks", "model.layers.0.mlp.gate", "router", False),
        ("*.mlp.*", "model.layers.0.mlp.gate", "router", False),
        ("*gate", "model.layers.0.mlp.gate", "router", False),
        ("model.layers.0", "model.layers.0.mlp.gate", "router", False),
        ("*", "lm_head", "head", False),
    ],
)
def test_naming_is_more_than_covering(pattern: str, path: str, role: str, names: bool) -> None:
    assert parse_pattern(pattern).names(path, role) is names


def test_kinds_are_the_roles_of_ops_that_a_policy_speaks_of() -> None:
    assert {"attention", "mlp", "experts", "shared_experts", "head", "router", "norm", "embedding"} <= set(KINDS)
