"""Layers dealt to the stages of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.model import Experts, Model, find_model
from counterpoint.plan.job.parallel import Parallel, Training, check_division, deal_layers, whole_stage


@given(each=st.integers(1, 5), stages=st.integers(1, 6), parts=st.integers(1, 3), every=st.integers(1, 4))
def test_every_layer_is_dealt_once(each: int, stages: int, parts: int, every: int) -> None:
    layers = each * stages * parts
    every = min(every, layers)  # a model without any layer that has them is refused
    trained = Model(
        layers=layers, hidden=64, heads=4, vocab=64, experts=Experts(count=4, per_token=1, width=64, every=every)
    )
    dealt = deal_layers(trained, Parallel(pp=stages, virtual=parts, schedule="interleaved"))
    whole = whole_stage(tuple(part for stage in dealt for part in stage))
    ends = sum(part.embedding + part.head for stage in dealt for part in stage)
    assert (whole.layers, whole.routed, ends) == (layers, layers // every, 2)


def test_the_ends_take_the_place_of_a_layer() -> None:
    """126 layers of Llama 3 405B on 16 stages of 8 parts: one each, but none beside embedding and head."""
    dealt = deal_layers(find_model("llama3-405b"), Parallel(pp=16, virtual=8, schedule="interleaved", ends_count=True))
    first, last = dealt[0][0], dealt[-1][-1]
    assert ((first.layers, first.embedding), (last.layers, last.head), dealt[1][0].layers) == ((0, True), (0, True), 1)


def test_layers_that_cannot_be_dealt_are_refused() -> None:
    """126 is no multiple of 16, and the text says what was counted."""
    with pytest.raises(
        Misconfigured, match=r"parallel\.pp · parallel\.virtual = 16 does not divide model\.layers = 126"
    ):
        check_division(find_model("llama3-405b"), Parallel(pp=16), Training(sequence=8192, global_batch=16))


def test_layers_can_be_dealt_by_hand() -> None:
    """61 layers on 4 stages, which 61 cannot be divided by; parts go round robin."""
    uneven = replace(find_model("llama3-8b"), layers=61)
    dealt = deal_layers(uneven, Parallel(pp=4, stage_layers=(14, 16, 16, 15)))
    assert [part.layers for stage in dealt for part in stage] == [14, 16, 16, 15]
    twice = Parallel(pp=2, virtual=2, schedule="interleaved", stage_layers=(14, 16, 16, 15))
    assert [[part.layers for part in stage] for stage in deal_layers(uneven, twice)] == [[14, 16], [16, 15]]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stage_layers": (30, 2)}, "61"),
        ({"stage_layers": (61,)}, r"give pp · virtual = 2 numbers"),
        ({"stage_layers": (62, -1)}, "each 0 or more"),
        ({"stage_layers": (30, 31), "ends_count": True}, "give one"),
    ],
)
def test_stages_that_do_not_add_up_are_refused(given: dict[str, Any], said: str) -> None:
    uneven = replace(find_model("llama3-8b"), layers=61)
    with pytest.raises(Misconfigured, match=said):
        check_division(uneven, Parallel(pp=2, **given), Training(sequence=8192, global_batch=16))
