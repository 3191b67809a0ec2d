"""Choose which mechanisms of a pair are worth measuring: stock, and those that the model predicts to be fastest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from counterpoint.collectives.program.operations import measured_by
from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.machine.profile import Profile
from counterpoint.measurement.dependent import is_dependent
from counterpoint.pair.expert_choice import EXCHANGE_MECHANISMS
from counterpoint.pair.matmul_choice import MATMUL_MECHANISMS
from counterpoint.records.tuning import StepPair
from counterpoint.tuning.parts import depends, stock_of
from counterpoint.tuning.predictions import predicted_times

MOST = 3
# where no figure tells them apart: each is the best of its kind on results/budget-pairs-4xh200.json and pairs-4xh200
UNPREDICTED = ("nccl_zero_cta", "nccl+max_ctas=8+gemm_sms=124")


@dataclass(frozen=True, kw_only=True, slots=True)
class MechanismCandidate:
    """Represents a mechanism to measure; `predicted_us` is None where the model has no figures."""

    mechanism: str
    predicted_us: float | None = None


def shortlist(
    pair: StepPair, profile: Profile, *, device: str = "cuda", most: int = MOST
) -> tuple[MechanismCandidate, ...]:
    """Return stock and the mechanisms with the least predicted time beside it; stock comes first, then the best.

    Args:
        pair: of a step.
        profile: figures of the machine; on CPUs, which have none, all that runs there is returned.
        device: cuda or cpu.
        most: mechanisms besides stock.
    """
    stock = stock_of(pair, device)
    try:
        times: Mapping[str, float | None] = predicted_times(pair, profile) if device == "cuda" else {}
    except (Misconfigured, Unsupported):  # a profile of a GPU without a data sheet, or without this operation
        times = {}
    return best_of(times or dict.fromkeys((stock, *_offered(pair, device))), stock, most)


def best_of(times: Mapping[str, float | None], stock: str, most: int = MOST) -> tuple[MechanismCandidate, ...]:
    """Return stock and the `most` others with the least time; of equal ones those that were named first."""
    others = sorted((name for name in times if name != stock), key=lambda name: times[name] or 0.0)
    return tuple(MechanismCandidate(mechanism=name, predicted_us=times.get(name)) for name in (stock, *others[:most]))


def _offered(pair: StepPair, device: str) -> tuple[str, ...]:
    """Return the mechanisms of a pair that no model ranks, besides stock; what cannot run is found out there."""
    if depends(pair):
        known: tuple[str, ...] = MATMUL_MECHANISMS if is_dependent(pair.operation) else EXCHANGE_MECHANISMS
        return tuple(name for name in known if name != stock_of(pair, device))
    copies = ("zero_sm",) if pair.operation in measured_by("programs") else ()
    return copies if device == "cpu" else (*copies, *UNPREDICTED)
