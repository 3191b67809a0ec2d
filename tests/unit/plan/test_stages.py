"""Layers dealt to the stages of a pipeline."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.model import Experts, Model, find_model
from counterpoint.plan.job.parallel import Parallel, Training, check_division, deal_layers, whole_stage


@given(each=st.integers(1, 5), stages=st.integers(1, 6), parts=st.integers(1, 3), every=st.integers(1, 4))
def test_every_layer_is_dealt_once(each: int, stages: int, parts: int, every: int) -> None:
    """Layers, layers with experts, embedding and head add up to the model's."""
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
