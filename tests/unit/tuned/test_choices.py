"""Which choices of a tuning count on a machine, and which one a call gets."""

from typing import Any

import msgspec
import pytest

from counterpoint.collectives.program.operations import measured_by
from counterpoint.errors import Misconfigured
from counterpoint.records.tuning import LEAVE, Tried, Tuned, TunedPair
from counterpoint.tuned.choices import COLLECTIVES, Choices, matmul_workload
from tests.support.example_tuned import example_tuned

HERE = example_tuned().made
GATHER, REDUCE, MATMUL = example_tuned().pair
MIB = 1 << 20


def tuned(*pairs: TunedPair) -> Tuned:
    return msgspec.structs.replace(example_tuned(), pair=pairs)


def changed(pair: TunedPair, **fields: Any) -> TunedPair:
    return msgspec.structs.replace(pair, **fields)


def find(choices: Choices, num_mib: float = 64, **fields: Any) -> TunedPair | None:
    call: dict[str, Any] = {"ranks": 2, "dtype": "bfloat16"} | fields
    return choices.find(call.pop("operation", "all_gather"), bytes_per_rank=num_mib * MIB, **call)


CTAS = changed(GATHER, mechanism="nccl+max_ctas=8")
ZERO_CTA = changed(GATHER, mechanism="nccl_zero_cta")
SMS = changed(GATHER, mechanism="zero_sm+gemm_sms=124")


@pytest.mark.parametrize(
    ("differs", "counts", "said"),
    [
        ({}, (GATHER, REDUCE, MATMUL, CTAS, ZERO_CTA, SMS), ()),
        ({"device": "cpu", "gpu": None, "nccl": None}, (),
         ("made with device cuda, here is cpu: all choices ignored",)),
        ({"gpu": "NVIDIA A100", "torch": "3"}, (),
         ("made with gpu NVIDIA H200, here is NVIDIA A100: all choices ignored",)),
        ({"torch": "2.13.0"}, (GATHER, REDUCE, CTAS, ZERO_CTA),
         ("made with torch 2.11.0+cu130, here is 2.13.0: choices of dependent matmuls and of gemm_sms ignored",)),
        ({"nccl": "2.31.2"}, (GATHER, REDUCE, MATMUL, SMS),
         ("made with nccl 2.28.9, here is 2.31.2: choices of NCCL's settings ignored",)),
        ({"counterpoint": "9"}, (GATHER, REDUCE, MATMUL, CTAS, ZERO_CTA, SMS),
         ("made with counterpoint 0.1.0, here is 9: all choices followed",)),
        ({"driver": "1", "world_size": 8}, (GATHER, REDUCE, MATMUL, CTAS, ZERO_CTA, SMS), ()),
    ],
    ids=["nothing", "device", "GPU", "torch", "NCCL", "counterpoint", "what does not matter"],
)  # fmt: skip
def test_what_differs_takes_its_choices_away(
    differs: dict[str, Any], counts: tuple[TunedPair, ...], said: tuple[str, ...]
) -> None:
    """Of another GPU all, of another torch those of matmuls, of another NCCL those of its settings."""
    choices = Choices(tuned(GATHER, REDUCE, MATMUL, CTAS, ZERO_CTA, SMS), msgspec.structs.replace(HERE, **differs))
    assert choices.pairs == counts
    assert tuple(map(str, choices.differences)) == said


@pytest.mark.parametrize(
    ("call", "found"),
    [
        # a pair stands for sizes within a factor of two
        *[({"num_mib": mib}, True) for mib in (64, 32, 128)], *[({"num_mib": mib}, False) for mib in (31.9, 128.1)],
        *[(other, False) for other in ({"operation": "reduce_scatter"}, {"ranks": 8}, {"dtype": "float32"})],
        ({"dtype": None}, True),  # a call whose dtype is not known takes any
        ({"operation": "reduce_scatter", "where": ("layers.0",)}, False),  # its name of a module does not count
    ],
)  # fmt: skip
def test_a_pair_stands_for_calls_that_are_alike(call: dict[str, Any], found: bool) -> None:
    assert find(Choices(tuned(GATHER), HERE), **call) == (GATHER if found else None)
    assert find(Choices(tuned(), HERE), **call) is None


def test_the_nearest_size_decides() -> None:
    small, large = changed(GATHER, bytes_per_rank=32 * MIB), changed(GATHER, bytes_per_rank=100 * MIB)
    choices = Choices(tuned(small, large), HERE)
    assert (find(choices, 50), find(choices, 60)) == (small, large)


@pytest.mark.parametrize(
    ("where", "found"), [(("layers.3",), True), (("norm", "layers.0"), True), (("head",), False), ((), False)]
)
def test_a_pair_that_names_the_module_comes_first(where: tuple[str, ...], found: bool) -> None:
    """Before one of exactly its size, and however far the own size is."""
    named = changed(GATHER, bytes_per_rank=MIB, mechanism=LEAVE, where=("layers.*",))
    exact = changed(GATHER, where=())
    assert (find(Choices(tuned(exact, named), HERE), where=where) == named) == found


def test_of_pairs_of_one_size_the_least_sum_of_times_decides() -> None:
    """Copies save 67 µs of each of 12 calls here, and cost 40 of each of 30 there."""
    tried = Tried(mechanism="zero_sm", us=140.0, sigma_us=1.0, runs=9)
    beside = changed(
        GATHER, compute="gemm 64x64x64", calls=30, mechanism=LEAVE, us=100.0, stock_us=100.0, tried=(tried,)
    )
    assert find(Choices(tuned(GATHER, beside), HERE)) == beside
    assert find(Choices(tuned(GATHER, changed(beside, calls=3)), HERE)) == GATHER


def test_pairs_of_one_size_that_cost_each_other_more_than_they_save_are_left() -> None:
    """Each has a mechanism that was not tried for the other."""
    one = changed(GATHER, tried=())
    other = changed(one, compute="gemm 64x64x64", mechanism="nccl+max_ctas=4")
    found = find(Choices(tuned(one, other), HERE))
    assert found is not None
    assert (found.mechanism, found.us) == (LEAVE, GATHER.stock_us)
    assert found.why == "no mechanism is faster than nccl for all 2 pairs of this size together"


def test_what_was_not_tried_everywhere_is_not_chosen() -> None:
    beside = changed(GATHER, compute="gemm 64x64x64", mechanism=LEAVE, us=100.0, stock_us=100.0, tried=())
    marked = Tried(mechanism="zero_sm", us=1.0, sigma_us=1.0, runs=9, marked="late")
    for other in (beside, changed(beside, tried=(marked,))):
        assert find(Choices(tuned(GATHER, other), HERE)) == other


@pytest.mark.parametrize(
    ("shape", "found"),
    [((8192, 7168, 8192), True), ((8192, 4096, 8192), True), ((8192, 1280, 8192), False), ((2048, 7168, 8192), False)],
)
def test_a_dependent_matmul_is_near_in_each_of_its_sizes(shape: tuple[int, int, int], found: bool) -> None:
    choices = Choices(tuned(MATMUL), HERE)
    pair = find(choices, operation="all_gather_matmul", compute=matmul_workload(*shape))
    assert (pair == MATMUL) == found


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (changed(GATHER, mechanism="cuts"), "a pair of all_gather has mechanism 'cuts': allowed are leave, nccl, "),
        (
            changed(MATMUL, mechanism="zero_sm"),
            "of all_gather_matmul has mechanism 'zero_sm': allowed are leave, torch",
        ),
        (changed(GATHER, operation="exchange"), "has mechanism 'zero_sm': allowed are leave, torch, gather, slabs,"),
        (changed(GATHER, operation="gather_all"), "operation 'gather_all': allowed are all_gather"),
        (changed(GATHER, compute_dtype="int7"), "dtype 'int7': allowed are bfloat16"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(pair: TunedPair, said: str) -> None:
    with pytest.raises(Misconfigured, match=said):
        Choices(tuned(pair), HERE)


def test_operations_are_those_that_can_be_measured() -> None:
    assert measured_by("torch") == COLLECTIVES
