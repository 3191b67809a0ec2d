"""Calls over several hosts: proved for whole grids, wrong ones are caught, and the clock knows its bounds."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counterpoint.collectives.cuda.lower import Addresses, lower
from counterpoint.collectives.multihost.phases import Grid, best_slice_bytes, phases, scratch_bytes
from counterpoint.collectives.program.clock import HostNetwork, simulate
from counterpoint.collectives.program.operations import (
    all_gather,
    all_reduce,
    all_to_all,
    barrier,
    broadcast,
    gather,
    plan_all,
    reduce_scatter,
)
from counterpoint.collectives.program.steps import Copy, LocalCopy
from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import default_profile
from tests.support.flatten import GRIDS, LEVELS, NAMES, SLICE, cases, flatten, phases_all, whole

MIB = 1 << 20
H200 = default_profile().rates
FREE = msgspec.structs.replace(H200, copy_us=0, kernel_us=0, batch_us=0, signal_us=0, event_us=0, launch_us=0)


def test_a_phase_that_a_rank_leaves_out_is_refused() -> None:
    call, grid = all_gather(4, 3), Grid(hosts=2, local=2)
    made = list(phases_all(call, grid))
    with pytest.raises(Misconfigured, match="ranks 0 and 2 make different calls between hosts"):
        flatten(call, grid, [*made[:2], made[2][1:], made[3]])


@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_groups_make_the_same_calls_in_the_same_order(name: str, grid: Grid) -> None:
    made = phases_all(cases(grid.world_size)[name], grid, slice_bytes=SLICE)
    for rank in range(grid.world_size):
        for level in LEVELS:
            first = grid.members(level, rank)[0]
            assert [p.call for p in made[rank] if p.level == level] == [p.call for p in made[first] if p.level == level]


@pytest.mark.parametrize("name", NAMES)
def test_every_byte_leaves_its_host_once(name: str) -> None:
    grid, block = Grid(hosts=3, local=2), 16 * 6
    call = {
        "all_gather": all_gather(6, block),
        "all_reduce": all_reduce(6, 6 * block),
        "reduce_scatter": reduce_scatter(6, block),
        "all_to_all": all_to_all([[block] * 6] * 6),
        "broadcast": broadcast(6, 6 * block),
    }.get(name.split(",")[0], barrier(6))
    sent = [
        sum(step.source.num_bytes for step in program.cycle() if isinstance(step, Copy) and step.peer // 2 != rank // 2)
        for rank, program in enumerate(whole(call, grid, slice_bytes=None))
    ]
    each = {"all_reduce": 4 * block, "reduce_scatter": 2 * block, "all_gather": 2 * block, "all_to_all": 4 * block}
    if call.operation == "broadcast":
        assert sent == [2 * 3 * block, 2 * 3 * block, 0, 0, 0, 0]
    else:
        assert sent == [each.get(call.operation, 0)] * 6


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier"])
def test_nothing_is_copied_within_a_rank(name: str) -> None:
    steps = [step for program in whole(cases(6)[name], Grid(hosts=3, local=2)) for step in program.cycle()]
    assert not any(isinstance(step, LocalCopy) for step in steps)


def test_only_reduce_scatter_and_all_to_all_keep_something_between_phases() -> None:
    grid = Grid(hosts=3, local=2)
    kept = {call.operation: scratch_bytes(phases(call, grid, 0)) for call in cases(6).values()}
    assert {name: size for name, size in kept.items() if size} == {"reduce_scatter": 2 * 2 * 5, "all_to_all": 2 * 2 * 3}


@pytest.mark.parametrize("name", NAMES)
def test_one_host_needs_no_network(name: str) -> None:
    found = phases(cases(4)[name], Grid(hosts=1, local=4), 1, slice_bytes=SLICE)
    assert {phase.level for phase in found} == {"inside"}


@settings(max_examples=40, deadline=None)
@given(
    name=st.sampled_from(["all_gather", "all_to_all", "reduce_scatter", "all_reduce"]),
    hosts=st.integers(1, 4),
    local=st.integers(1, 4),
    block=st.integers(1, 1 << 20).map(lambda units: 16 * units),
    slices=st.sampled_from([None, 1 << 20]),
    nic=st.floats(1, 400),
)
def test_no_call_beats_its_links(name: str, hosts: int, local: int, block: int, slices: int | None, nic: float) -> None:
    """The clock is never below the time of the bytes over the network card, nor over the links inside."""
    grid = Grid(hosts=hosts, local=local)
    n = grid.world_size
    call = {
        "all_gather": all_gather(n, block),
        "all_to_all": all_to_all([[block] * n] * n),
        "reduce_scatter": reduce_scatter(n, block),
        "all_reduce": all_reduce(n, n * block),
    }[name]
    twice, many = (2 if name == "all_reduce" else 1), (local if name == "all_to_all" else 1)
    slices = None if slices is None else max(slices, n * block // 4)
    us = simulate(whole(call, grid, slice_bytes=slices), FREE, network=HostNetwork(local=local, nic_gb_per_s=nic)).us
    network_us = twice * many * (hosts - 1) * block / nic / 1000
    inside_us = twice * hosts * (local - 1) * block / H200.push_gb_per_s / 1000
    assert us >= 0.999 * max(network_us, inside_us)


def test_slices_let_the_levels_run_at_the_same_time() -> None:
    """All_reduce of 1 GiB on 2 hosts of 8: in slices it takes less than three quarters of what it takes as a whole."""
    call, grid, network = all_reduce(16, 1024 * MIB), Grid(hosts=2, local=8), HostNetwork(local=8)
    plain = simulate(whole(call, grid, slice_bytes=None), network=network).us
    best = best_slice_bytes(1024 * MIB)
    assert simulate(whole(call, grid, slice_bytes=best), network=network).us < 0.75 * plain


def test_a_reduce_scatter_sends_the_sums_for_one_host_while_it_makes_the_next() -> None:
    """On 2 hosts of 8: less than the sums inside and the bytes over the card one after the other."""
    block = 64 * MIB
    network = HostNetwork(local=8)
    us = simulate(whole(reduce_scatter(16, block), Grid(hosts=2, local=8)), network=network).us
    inside_us = 2 * 7 * block / H200.push_gb_per_s / 1000
    between_us = block / network.nic_gb_per_s / 1000
    assert max(inside_us, between_us) < us < 0.85 * (inside_us + between_us)


def test_a_resident_gemm_holds_up_what_goes_between_hosts_and_not_what_is_pushed_inside() -> None:
    """The own host's blocks of an all_gather come; those of others when the GEMM has ended."""
    programs = whole(all_gather(4, MIB), Grid(hosts=2, local=2))
    steps = simulate(programs, network=HostNetwork(local=2), sms_free_us=5000).steps
    inside = [t.end_us for t in steps if isinstance(t.step, Copy) and t.step.peer // 2 == t.rank // 2]
    between = [t.end_us for t in steps if isinstance(t.step, Copy) and t.step.peer // 2 != t.rank // 2]
    assert sorted(inside)[3] < 5000 < min(between)


def test_ranks_have_to_make_whole_hosts() -> None:
    with pytest.raises(Misconfigured, match="give a divisor"):
        simulate(plan_all(barrier(3)), network=HostNetwork(local=2))


def test_a_model_of_several_hosts_is_not_run() -> None:
    """It is for the checker and the clock: lowering it would take NCCL's part for copies."""
    with pytest.raises(Misconfigured, match="run the phases one by one"):
        lower(whole(barrier(4), Grid(hosts=2, local=2))[0], Addresses(output_flags=(16, 16, 16, 16)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Grid(hosts=0, local=2), "at least one of each"),
        (lambda: phases(barrier(4), Grid(hosts=2, local=3), 0), "do not fit"),
        (lambda: phases(barrier(4), Grid(hosts=2, local=2), 4), "do not fit"),
        (lambda: phases(gather(4, 1), Grid(hosts=2, local=2), 0), "gather over several hosts: allowed are all_gather"),
        (lambda: phases(all_gather(4, [1, 2, 3, 4]), Grid(hosts=2, local=2), 0), "blocks of one size"),
        (lambda: phases(barrier(4), Grid(hosts=2, local=2), 0, slice_bytes=0), "slice_bytes=0"),
    ],
)
def test_a_call_that_cannot_be_is_refused(make: object, message: str) -> None:
    assert callable(make)
    with pytest.raises(Misconfigured, match=message):
        make()
