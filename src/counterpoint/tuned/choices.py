"""Find a tuning's choice for a call, among the choices that are valid on this machine. No torch."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import product
from math import inf, log2
from typing import Literal, get_args

import msgspec

from counterpoint.errors import Misconfigured, printable
from counterpoint.pair.arrivals import TensorOperation
from counterpoint.pair.curves import DTYPES
from counterpoint.pair.expert_choice import EXCHANGE_MECHANISMS
from counterpoint.pair.matmul_choice import MATMUL_MECHANISMS
from counterpoint.records.measurement import Environment
from counterpoint.records.tuning import LEAVE, StepPair, Tuned, TunedPair

Field = Literal["device", "gpu", "torch", "nccl", "counterpoint"]

COLLECTIVE_MECHANISMS = ("nccl", "nccl_zero_cta", "gloo", "zero_sm")
"""Lists the bases (the part before `+`) of mechanisms of pairs whose compute does not depend on the collective."""
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast", "send_recv")
"""Lists the operations of pairs whose compute does not depend on the collective."""
EXCHANGE = "exchange"
"""Names the operation that sends tokens to their experts and back."""
KNOBS: Mapping[str, str] = {
    "priority": "high|default|low|NUMBER",
    "green": "COMPUTE_SMS",
    "max_ctas": "N",
    "min_ctas": "N",
    "cga_cluster": "N",
    "cta_policy": "default|efficiency|zero",
    "windows": "",
    "gemm_sms": "N|fit",
    "blocks_per_sm": "N",
    "smem": "BYTES",
    "order": "comm_resident",
}
"""Maps each setting (knob) that may follow a mechanism's base to its allowed values; "" if it takes no value."""
FARTHEST = 2.0
"""Limits how far sizes may differ: the choice for a pair holds for calls of half to twice its size."""
_STOCK = (LEAVE, "nccl", "nccl_zero_cta", "gloo", "torch")  # bases of mechanisms that torch itself runs
_NUMBERS = {"NUMBER": "-?[0-9]{1,9}"} | dict.fromkeys(("N", "COMPUTE_SMS", "BYTES"), "[0-9]{1,9}")
_MATMUL = re.compile(r"gemm (\d{1,9})x(\d{1,9})x(\d{1,9})")


def mechanism_base(pair: TunedPair) -> str:
    """Return the chosen mechanism without its settings (knobs): `nccl` of `nccl+max_ctas=8`."""
    return pair.mechanism.partition("+")[0]


def mechanism_knobs(pair: TunedPair) -> tuple[str, ...]:
    """Return the settings (knobs) of the chosen mechanism, such as `max_ctas=8`."""
    return tuple(pair.mechanism.split("+")[1:])


def stays_with_torch(pair: TunedPair) -> bool:
    """Return whether the choice leaves this pair's collective to torch."""
    return mechanism_base(pair) in _STOCK


def matmul_workload(rows: int, columns: int, k: int) -> str:
    """Return the name of the matmul `[rows, k] @ [k, columns]`, in the form of `StepPair.compute`."""
    return f"gemm {rows}x{columns}x{k}"


@dataclass(frozen=True, kw_only=True)
class MachineDifference:
    """Names a difference between this machine and the machine that was tuned, and the choices that it voids."""

    field: Field
    made: str
    here: str
    ignored: str  # in words; empty: nothing

    def __str__(self) -> str:
        there = f"made with {self.field} {printable(self.made, 80)}, here is {printable(self.here, 80)}"
        return f"{there}: {self.ignored or 'all choices'} {'ignored' if self.ignored else 'followed'}"


class Choices:
    """Holds the choices of a tuning that are valid on this machine.

    Args:
        tuning: the content of a file.
        here: this machine; only its device, GPU and versions are compared.

    Raises:
        Misconfigured: a pair is invalid; see `check_choices`.
    """

    def __init__(self, tuning: Tuned, here: Environment) -> None:
        check_choices(tuning)
        self.differences = tuple(_differences(tuning.made, here))
        taken = [_TAKEN[one.field][1] for one in self.differences]
        self.pairs = tuple(pair for pair in tuning.pair if not any(is_taken(pair) for is_taken in taken))

    def find(
        self,
        operation: str,
        *,
        ranks: int,
        bytes_per_rank: float,
        dtype: str | None = None,
        compute: str | None = None,
        where: Sequence[str] = (),
    ) -> TunedPair | None:
        """Return the tuning's choice for a call; None if it has none, so that built-in rules decide.

        A pair that names the call's module comes before all others, whatever its size. Else the pair nearest in size
        decides, up to a factor of 2. Where several pairs are equally near, such as one for each of several matmuls,
        the mechanism with the least total time over all of these pairs is chosen.

        Args:
            operation: name of the operation, as in `StepPair.operation`.
            ranks: number of ranks of the call.
            bytes_per_rank: bytes of the full array, divided by the number of ranks.
            dtype: dtype of the communicated tensor; None: any.
            compute: `matmul_workload` of a dependent matmul, whose sizes have to be as near; None: any.
            where: names of the module; empty: not known.
        """
        of_call = [pair for pair in self.pairs if (pair.operation, pair.ranks) == (operation, ranks)]
        wanted = [pair for pair in of_call if any(fnmatchcase(*each) for each in product(where, pair.where))]
        if not wanted:
            wanted = [pair for pair in of_call if dtype in (None, pair.dtype)]
            wanted = [pair for pair in wanted if _distance(pair, bytes_per_rank, compute) <= log2(FARTHEST)]
        nearest = min((_distance(pair, bytes_per_rank, compute) for pair in wanted), default=inf)
        return _fastest([pair for pair in wanted if _distance(pair, bytes_per_rank, compute) == nearest])


def _fastest(pairs: Sequence[TunedPair]) -> TunedPair | None:
    """Return the pair whose mechanism has the least total time over all `pairs`; None if there are no pairs.

    If no mechanism saves time in total, the returned choice is `leave`.
    """

    def step_us(mechanism: str) -> float:
        return sum(pair.calls * _us(pair, mechanism) for pair in pairs)

    best = min(pairs, key=lambda pair: step_us(pair.mechanism), default=None)
    if best is None or len(pairs) == 1 or step_us(best.mechanism) <= step_us(LEAVE):
        return best
    why = f"no mechanism is faster than {best.stock} for all {len(pairs)} pairs of this size together"
    return msgspec.structs.replace(best, mechanism=LEAVE, us=best.stock_us, sigma_us=best.stock_sigma_us, why=why)


def _us(pair: TunedPair, mechanism: str) -> float:
    """Return the µs of a pair with a mechanism; infinity if the mechanism was not tried, or its time is invalid."""
    times = {each.mechanism: each.us for each in pair.tried if each.marked is None}
    times |= {pair.mechanism: pair.us, pair.stock: pair.stock_us, LEAVE: pair.stock_us}
    return times.get(mechanism, inf)


def _distance(pair: StepPair, bytes_per_rank: float, compute: str | None) -> float:
    """Return the distance between a pair and a call: the base-2 logarithm of the largest ratio of their sizes."""
    far = _powers_of_two(pair.bytes_per_rank, bytes_per_rank)
    ours, theirs = (_MATMUL.fullmatch(name or "") for name in (pair.compute, compute))
    if compute is None or (ours is None and theirs is None):
        return far
    if ours is None or theirs is None:
        return inf
    return max(far, *(_powers_of_two(int(a), int(b)) for a, b in zip(ours.groups(), theirs.groups(), strict=True)))


def _powers_of_two(one: float, other: float) -> float:
    if min(one, other) <= 0:
        return 0.0 if one == other else inf
    return abs(log2(one / other))


def _is_dependent(pair: TunedPair) -> bool:
    return pair.operation in get_args(TensorOperation)


_TAKEN: Mapping[Field, tuple[str, Callable[[TunedPair], bool]]] = {
    "device": ("all choices", lambda pair: True),
    "gpu": ("all choices", lambda pair: True),
    "torch": (
        "choices of dependent matmuls and of gemm_sms",
        lambda pair: _is_dependent(pair) or "gemm_sms" in pair.mechanism,
    ),
    "nccl": ("choices of NCCL's settings", lambda pair: pair.mechanism.startswith("nccl") and pair.mechanism != "nccl"),
    "counterpoint": ("", lambda pair: False),
}
"""Maps each field in which machines can differ to the choices that a difference voids: in words, and as a test."""


def _differences(made: Environment, here: Environment) -> Iterable[MachineDifference]:
    """Yield the differences between two machines; stop after another device or GPU, which voids all choices."""
    for field, (ignored, _) in _TAKEN.items():
        there, now = getattr(made, field), getattr(here, field)
        if there != now:
            yield MachineDifference(field=field, made=there or "none", here=now or "none", ignored=ignored)
            if ignored == _TAKEN["gpu"][0]:
                return


def check_choices(tuning: Tuned) -> None:
    """Raise Misconfigured, with the allowed values, for an unknown operation, dtype, mechanism or setting."""
    for pair in tuning.pair:
        allowed: tuple[str, ...] = COLLECTIVE_MECHANISMS
        if _is_dependent(pair):
            allowed = MATMUL_MECHANISMS
        elif pair.operation == EXCHANGE:
            allowed = EXCHANGE_MECHANISMS
        _check("operation", pair.operation, (*COLLECTIVES, *get_args(TensorOperation), EXCHANGE))
        for dtype in (pair.dtype, pair.computed_in):
            _check("dtype", dtype, tuple(DTYPES))
        what = f"a pair of {pair.operation} has mechanism {printable(pair.mechanism)!r}"
        if mechanism_base(pair) not in (LEAVE, *allowed):
            raise Misconfigured(f"{what}: allowed are {LEAVE}, {', '.join(allowed)}, with knobs as in nccl+max_ctas=8")
        for knob in mechanism_knobs(pair):
            if not _is_knob(knob):
                forms = ", ".join(f"{key}={values}".removesuffix("=") for key, values in KNOBS.items())
                raise Misconfigured(f"{what}: allowed knobs are {forms}, with numbers of up to 9 digits")


def _check(what: str, given: str, allowed: Sequence[str]) -> None:
    if given not in allowed:
        raise Misconfigured(f"a pair has {what} {printable(given)!r}: allowed are {', '.join(allowed)}")


def _is_knob(knob: str) -> bool:
    """Return whether a setting `key=value` (a knob) is known and its value is allowed."""
    key, equals, value = knob.partition("=")
    if key not in KNOBS or bool(equals) != bool(KNOBS[key]):
        return False
    words = [_NUMBERS.get(word, word) for word in KNOBS[key].split("|")]
    return any(re.fullmatch(word, value) for word in words)
