"""The time of a pair by its three models: what they agree on, what each knows, and that the one chosen misses least."""

import json
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import default_profile
from counterpoint.pair.sm_split import SmLayout
from counterpoint.pair.together import Model, Pair, disturbance, kept_us, model_for, side_by_side_us, together_us

H200 = default_profile()
CALM = msgspec.structs.replace(
    H200, contention=msgspec.structs.replace(H200.contention, compute_loss=0.05, comm_loss=0.03, comm_cluster=1)
)
PAIR = Pair(
    products=((8192, 8192, 8192),), compute_us=1400.0, collective="all_gather", size_bytes=1 << 28, comm_us=700.0,
    mechanism="nccl", num_ctas=24, world_size=4, layout=SmLayout.even(132),
)  # fmt: skip
times = st.floats(1.0, 1e5)


@given(compute_us=times, comm_us=times)
def test_a_collective_that_fits_runs_side_by_side(compute_us: float, comm_us: float) -> None:
    """Beside one tile on one SM nothing waits: waves say what the rule of both speeds says."""
    small = replace(PAIR, products=((128, 256, 64),), compute_us=compute_us, comm_us=comm_us)
    expected = side_by_side_us(compute_us, comm_us, 1.0 - 0.05, 1.0 - 0.03)
    assert together_us(small, CALM, "waves") == pytest.approx(expected)


def test_kept_is_the_mean_over_orders() -> None:
    """Launched together, it is what the mechanism's figures say."""
    kept = kept_us(1400.0, (("all_gather", 700.0),), disturbance("nccl", H200), persistent=True)
    assert together_us(PAIR, H200, "kept") == kept


@pytest.mark.parametrize("model", ["kept", "sums"])
@given(compute_us=st.floats(1.0, 5000.0), comm_us=st.floats(1.0, 5000.0))
def test_a_head_start_counts_for_the_side_that_has_it(model: Model, compute_us: float, comm_us: float) -> None:
    """Nothing ends before the side that went first and the one that came 100 µs later have ended alone."""
    pair = replace(PAIR, collective="reduce_scatter", mechanism="zero_sm", compute_us=compute_us, comm_us=comm_us)
    comm_first = together_us(replace(pair, order="comm_first"), H200, model)
    compute_first = together_us(replace(pair, order="compute_first"), H200, model)
    assert comm_first >= max(comm_us, 100.0 + compute_us) * (1 - 1e-9)
    assert compute_first >= max(compute_us, 100.0 + comm_us) * (1 - 1e-9)


@pytest.mark.parametrize(
    ("pair", "model"),
    [
        (PAIR, "waves"),
        (replace(PAIR, mechanism="nccl_zero_cta", num_ctas=0), "waves"),
        (replace(PAIR, products=()), "kept"),
        (replace(PAIR, mechanism="zero_sm", num_ctas=0), "kept"),
        (replace(PAIR, mechanism="zero_sm", collective="all_reduce"), "sums"),
    ],
)
def test_the_model_follows_from_the_pair(pair: Pair, model: Model) -> None:
    """NCCL beside GEMMs by waves, sums of zero-SM reductions by theirs, everything else by kept speeds."""
    assert (model_for(pair), together_us(pair, H200)) == (model, together_us(pair, H200, model))


@pytest.mark.parametrize(
    ("pair", "model", "said"),
    [
        (replace(PAIR, products=()), "waves", "nccl beside 0 GEMMs"),
        (replace(PAIR, mechanism="zero_sm"), "waves", "it is about nccl and nccl_zero_cta beside GEMMs"),
        (PAIR, "sums", "all_gather adds up nothing; allowed are all_reduce, reduce_scatter"),
        (replace(PAIR, mechanism="mpi"), "kept", "mechanism = 'mpi': known are nccl, "),
    ],
)
def test_a_model_refuses_what_it_does_not_know(pair: Pair, model: Model, said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        together_us(pair, H200, model)


def test_the_chosen_model_misses_least() -> None:
    """On every kind of measured pair, those of other runs too (results/pair-models.json)."""
    rows = json.loads((Path(__file__).parents[3] / "results" / "pair-models.json").read_text())["rows"]
    for kind, group in groupby(rows, key=lambda row: row[:3]):
        models = [(float(row[5].rstrip("%")), row[-1] == "yes") for row in group]
        assert min(models)[1], kind
