"""`fit_profile` finds what was planted in a machine of known figures; what the rows do not tell it leaves out."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import Profile, default_profile, parse_profile, profile_json
from counterpoint.records.measurement import Measurement
from counterpoint.tuning.fit import alone
from counterpoint.tuning.fit.collectives import ALWAYS, crossover_bytes
from counterpoint.tuning.machine import fit_profile
from tests.support.known_machine import KnownMachine

NOISE = 0.01
SHIPPED = default_profile()
MECHANISMS = {
    name: replace(SHIPPED.mechanisms[name], compute_kept=0.6 + 0.1 * index, comm_kept=0.95 - 0.1 * index)
    for index, name in enumerate(("nccl", "nccl_zero_cta", "nccl_capped", "zero_sm"))
}
PLANTED = replace(
    SHIPPED,
    rates=replace(
        SHIPPED.rates, push_gb_per_s=180.0, link_gb_per_s=180.0, hbm_gb_per_s=1800.0, copy_us=9.0, launch_us=20.0
    ),
    nccl_rates=replace(
        SHIPPED.nccl_rates,
        latency_us=21.0,
        bus_gb_per_s={
            "all_gather": 150.0, "reduce_scatter": 140.0, "all_reduce": 130.0, "all_to_all": 120.0, "broadcast": 110.0,
        },
    ),
    sums=replace(SHIPPED.sums, sm_gb_per_s=10.0 * 1.02**110, memory_gb_per_s=1700.0, contention=0.1),
    contention=replace(SHIPPED.contention, compute_loss=0.08, comm_loss=0.03, gemm_wins=0.7, comm_cluster=2),
    mechanisms=SHIPPED.mechanisms | MECHANISMS,
    efficiency=replace(SHIPPED.efficiency, matmul=0.8, clock=0.7, memory=0.6, host_us=30.0, host_collective_us=60.0),
)  # fmt: skip


@cache
def measured(noise: float = 0.0) -> Measurement:
    return KnownMachine(profile=PLANTED, noise=noise).measurement()


@cache
def fitted(noise: float = 0.0) -> Profile:
    return fit_profile(measured(noise), known=SHIPPED)


def without(what: Any, **more: Any) -> Measurement:
    """Return the quiet measurement with the blocks for which `what` is true marked."""
    blocks = [replace(row, marked="late") if what(row) else row for row in measured().blocks]
    return replace(measured(), blocks=tuple(blocks), **more)


def test_every_group_that_the_suite_measures_is_found() -> None:
    """All but `chip`, which no time tells."""
    assert set(json_of(fitted())) == {
        "gpu", "rates", "nccl", "nccl_rates", "sums", "contention", "mechanisms", "efficiency",
    }  # fmt: skip


def test_the_rates_predict_as_the_planted_ones_do() -> None:
    """With noise, the mean error over all times is at most twice the mean of |noise|, which is 0.8 deviations."""
    machine = KnownMachine(profile=PLANTED)
    errors = []
    for name, by_size in alone(measured(NOISE), "zero_sm").items():
        for size in by_size:
            found = KnownMachine(profile=replace(PLANTED, rates=fitted(NOISE).rates))
            errors.append(abs(found.alone_us(name, size, "zero_sm") / machine.alone_us(name, size, "zero_sm") - 1))
    assert sum(errors) / len(errors) < 2 * 0.8 * NOISE


def test_the_link_and_the_ctas_for_full_speed_are_found() -> None:
    """Large arrays tell it: within three deviations of one time."""
    assert fitted(NOISE).rates.push_gb_per_s == pytest.approx(180.0, rel=3 * NOISE)
    # 16 have 0.95 of the speed, 8 have 0.55
    assert fitted(NOISE).nccl.full_speed_ctas == 16


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"])
def test_crossovers_lie_where_the_planted_times_meet(collective: str) -> None:
    """Within the two sizes of the suite around that point, a factor of 4."""
    machine, sizes = KnownMachine(profile=PLANTED), [1 << power for power in range(14, 33)]
    gains = [
        math.log(machine.alone_us(collective, size, "nccl") / machine.alone_us(collective, size, "zero_sm"))
        for size in sizes
    ]
    found = fitted(NOISE).nccl.crossover_bytes[collective]  # type: ignore[index]
    meets = [size for size, gain in zip(sizes, gains, strict=True) if gain <= 0]
    assert max(meets) / 4 <= found <= 4 * max(meets)


def test_rates_of_nccl_are_found() -> None:
    """Bandwidth within three deviations of one time; the latency within that part of the smallest time used."""
    found, planted = fitted(NOISE).nccl_rates, PLANTED.nccl_rates
    assert found.bus_gb_per_s == pytest.approx(planted.bus_gb_per_s, rel=3 * NOISE)
    smallest = min(
        us for name in planted.bus_gb_per_s for us in [KnownMachine(profile=PLANTED).alone_us(name, 1 << 24, "nccl")]
    )
    assert found.latency_us == pytest.approx(planted.latency_us, abs=3 * NOISE * smallest)


def test_contention_and_sums_are_found() -> None:
    """All its figures as planted, where nothing is noisy."""
    about = {"source": "", "date": "", "time_spread": None}
    assert replace(fitted().contention, **about) == replace(PLANTED.contention, **about)
    found = fitted().sums
    assert (found.sm_gb_per_s, found.memory_gb_per_s) == pytest.approx((PLANTED.sums.sm_gb_per_s, 1700.0), rel=1e-3)
    assert found.contention == pytest.approx(1 - MECHANISMS["zero_sm"].compute_kept, abs=1e-3)


@pytest.mark.parametrize("name", MECHANISMS)
def test_speeds_kept_are_found(name: str) -> None:
    """Of both sides, four digits; the suite's long name is the profile's short one."""
    found = fitted().mechanisms[name]
    assert (found.compute_kept, found.comm_kept) == pytest.approx(
        (MECHANISMS[name].compute_kept, MECHANISMS[name].comm_kept), rel=1e-3
    )


def test_measured_fields_of_efficiency_are_found_and_others_assumed() -> None:
    """What GEMMs reach in bursts and under load, streams, launches."""
    names = ("matmul", "clock", "memory", "host_us", "host_collective_us")
    found = [getattr(fitted().efficiency, name) for name in names]
    assert found == pytest.approx([0.8, 0.7, 0.6, 30.0, 60.0], rel=1e-3)
    # they are not in the file, and the note counts them
    assert "flash_forward" not in json_of(fitted())["efficiency"]
    assert fitted().efficiency.flash_forward == SHIPPED.efficiency.flash_forward
    assert "efficiency (15 figures) of H200 as shipped" in fitted().note()
    # who plans with one finds it
    assert fitted().mechanisms["zero_sm_copied"] == SHIPPED.mechanisms["zero_sm_copied"]
    assert "zero_sm_copied" not in json_of(fitted())["mechanisms"]


def test_a_group_says_where_it_is_from() -> None:
    """Machine, command, error, date, and how much its times spread."""
    found = fitted().rates
    assert found.source.startswith("4 x H200, NCCL 2.28.9: fitted to 40 times of zero_sm alone, ")
    assert found.source.endswith(" off in the mean; counterpoint tune --machine")
    assert found.date == "2026-11-23"
    assert found.time_spread == pytest.approx(0.02)


def test_marked_rows_teach_nothing() -> None:
    """Where all rows of a group are marked it is left out, with the reason; the others stay."""
    found = fit_profile(without(lambda row: row.mechanism == "zero_sm", rows=()), known=SHIPPED)
    assert found.left_out.keys() == {"rates", "nccl", "sums", "contention", "mechanisms"}
    assert found.left_out["rates"].startswith("0 times of zero_sm alone; at least 6")
    assert (found.rates, found.measured_on["rates"]) == (SHIPPED.rates, "H200 as shipped")


def test_a_mechanism_that_could_not_run_says_why() -> None:
    quiet = without(lambda row: row.mechanism == "zero_sm", rows=(), unavailable={"zero_sm": "no peer access"})
    found = fit_profile(quiet, known=SHIPPED)
    assert found.left_out["rates"].endswith("of several sizes and collectives; zero_sm: no peer access")


def test_a_gpu_without_data_sheet_has_no_figures_of_its_sms() -> None:
    """Contention, sums, and what GEMMs reach of a peak."""
    where = replace(measured().environment, gpu="Unheard-of 9000")
    found = fit_profile(without(lambda row: row.mechanism == "zero_sm", environment=where), known=SHIPPED)
    assert (found.gpu, set(found.left_out)) == ("Unheard-of 9000", {"rates", "nccl", "sums", "contention"})
    assert set(json_of(found)["efficiency"]) == {"host_us", "host_collective_us", "source", "date", "time_spread"}


def test_rows_that_tell_nothing_or_cannot_be_are_refused() -> None:
    with pytest.raises(Misconfigured, match=r"nothing can be fitted: rates: 0 times of zero_sm"):
        fit_profile(replace(measured(), rows=(), blocks=()), known=SHIPPED)
    damaged = replace(measured().rows[0], together=replace(measured().rows[0].together, us=0.0))
    with pytest.raises(Misconfigured, match=r"gemm 8192x8192x8192 \| all_gather \| 0.5 in 0.0 µs cannot be"):
        fit_profile(replace(measured(), rows=(damaged,)), known=SHIPPED)


def test_the_file_of_a_fit_is_read_again() -> None:
    assert parse_profile(profile_json(fitted()), "mine.json") == fitted()


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({1: 1.0, 4: 1.0, 16: 1.0}, 0),
        ({1: 9.0, 4: 9.0, 16: 9.0}, ALWAYS),
        ({1: 4.0, 4: 2.0, 16: 1.0}, 4),
        ({1: 4.0, 4: 4.0, 16: 1.0}, 8),
        ({1: 4.0, 4: 1.0, 16: 2.1}, 2),
    ],
    ids=["always ours", "never ours", "equal at a size", "between two", "a noisy size"],
)
def test_a_crossover_loses_least(own: dict[int, float], expected: int) -> None:
    """NCCL takes 2 at every size."""
    assert crossover_bytes(dict.fromkeys(own, 2.0), own) == expected


def json_of(profile: Profile) -> dict[str, Any]:
    return msgspec.json.decode(profile_json(profile), type=dict[str, Any])
