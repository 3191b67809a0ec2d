"""A checker that lets wrong programs pass proves nothing: every step is removed, changed, and swapped with the next."""

import pytest

from counterpoint.collectives.program.operations import plan_all, reduce_scatter
from counterpoint.collectives.program.steps import Batch, Program, Reduce
from tests.support.cases import NAMES, case
from tests.support.check import check
from tests.support.explore import explore
from tests.support.mutants import Mutant, mutants


def harmless(mutant: Mutant) -> bool:
    """The mutants that are as right as the original.

    An all_reduce that gives staging back before it is read: a peer pushes there again only after this all_reduce, which
    for it ends when the combined chunks of all ranks have come, after every rank's last sum. And swaps in sums that are
    pushed in turns: the next in turn has waited for the copy, too.
    """
    if mutant.kind == "swap" and mutant.program.world_size > 2 and mutant.program.tuning.turn_bytes is not None:
        return mutant.program.call.reduces
    swapped = mutant.kind == "swap" and isinstance(mutant.steps[0], Reduce) and isinstance(mutant.steps[1], Batch)
    return swapped and mutant.program.call.operation == "all_reduce"


def rounds_with(mutant: Mutant, programs: tuple[Program, ...]) -> list[tuple[Program, ...]]:
    return [tuple(mutant.program if program.rank == mutant.program.rank else program for program in programs)] * 3


MOVES = [name for name in NAMES if not case(name, 2)[0].reduces]
REDUCES = [name for name in NAMES if case(name, 2)[0].reduces]


@pytest.mark.parametrize("early_release", [False, True], ids=["handshake", "early"])
@pytest.mark.parametrize(
    ("name", "world_size"), [*((name, size) for name in MOVES for size in (2, 3)), ("broadcast, relayed", 4)]
)
def test_every_mutant_of_a_movement_is_caught(name: str, world_size: int, early_release: bool) -> None:
    programs = plan_all(*case(name, world_size))
    tried = [mutant for program in programs for mutant in mutants(program)]
    passed = [mutant for mutant in tried if check(rounds_with(mutant, programs), early_release=early_release).ok]
    assert tried
    assert passed == []


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", REDUCES)
def test_every_mutant_of_a_reduction_is_caught(name: str, world_size: int) -> None:
    programs = plan_all(*case(name, world_size))
    before, after = (plan_all(reduce_scatter(world_size, size)) for size in (16 * world_size + 16, 16))
    tried = [mutant for program in programs for mutant in mutants(program) if not harmless(mutant)]
    passed = [mutant for mutant in tried if check([before, *rounds_with(mutant, programs), after]).ok]
    assert tried
    assert passed == []


@pytest.mark.parametrize("name", [name for name in REDUCES if "all_reduce" in name])
def test_the_harmless_mutants_are_harmless(name: str) -> None:
    """They exist, and every interleaving of them is right, whatever reduction comes next."""
    programs, after = plan_all(*case(name, 2)), plan_all(reduce_scatter(2, 4))
    found = [mutant for program in programs for mutant in mutants(program) if harmless(mutant)]
    wrong = [mutant for mutant in found if not check([*rounds_with(mutant, programs), after]).ok]
    assert found
    assert wrong == []


@pytest.mark.parametrize("early_release", [False, True], ids=["handshake", "early"])
@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("all_reduce, chunks", "reduce_scatter, chunks")]
)
def test_one_run_says_what_all_runs_say(name: str, early_release: bool) -> None:
    """On every mutant the vector clocks of one run and the walk through all interleavings agree."""
    programs = plan_all(*case(name, 2))
    for program in programs:
        for mutant in mutants(program):
            rounds = rounds_with(mutant, programs)[:2]
            one, every = check(rounds, early_release=early_release), explore(rounds, early_release=early_release)
            assert one.ok == every.ok, (mutant, one.violations, every.violations)
