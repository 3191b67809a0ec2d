"""The models that have a name."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from counterpoint.errors import Misconfigured
from counterpoint.plan.job import model
from counterpoint.plan.job.model import find_model, known_models


def parameters(name: str) -> float:
    """Matrices and embeddings, in 10^9: what the model's name counts."""
    m = find_model(name)
    attention = m.hidden * m.head_width * (2 * m.heads + 2 * m.key_heads)
    block = (3 if m.gated else 2) * m.hidden
    ffn = block * (m.experts.count * m.experts.width if m.experts else m.ffn_width)
    return (m.layers * (attention + ffn) + (1 if m.tied else 2) * m.vocab * m.hidden) / 1e9


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt3-175b", 174.6),
        ("llama3-8b", 8.03),
        ("llama3-70b", 70.6),
        ("llama3-405b", 405.9),
        ("mixtral-8x7b", 46.7),
        ("qwen3-30b-a3b", 30.5),
    ],
)
def test_a_model_has_as_many_parameters_as_was_published(name: str, billions: float) -> None:
    """Within half a per cent: norms and routers are left out."""
    assert parameters(name) == pytest.approx(billions, rel=0.005)


def test_every_model_says_where_its_widths_are_from() -> None:
    """A table that can be looked up."""
    tables = tomllib.loads(Path(model.__file__).with_name("models.toml").read_text("utf-8"))
    assert {name: "arXiv" in table["source"] for name, table in tables.items()} == dict.fromkeys(known_models(), True)


def test_an_unknown_model_is_answered_with_the_known_ones() -> None:
    """And with what else can be given."""
    with pytest.raises(Misconfigured, match=r'"gpt5" is not known: give one of gpt3-175b.*or its widths'):
        find_model("gpt5")
