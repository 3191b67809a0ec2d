"""A collective that is one row of `OPERATIONS` and one program runs between processes, and the others run by name."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.program.operations import OPERATIONS
from counterpoint.measurement.pairs import Calibration
from counterpoint.measurement.session import Session
from counterpoint.measurement.worker import measure_part
from counterpoint.records.measurement import Block, Outcome, Plan
from tests.support.ranks import Ranks
from tests.support.shift import SHIFT


@contextmanager
def registered() -> Iterator[None]:
    OPERATIONS["shift"] = SHIFT
    try:
        yield
    finally:
        del OPERATIONS["shift"]


def shifted(session: Session, in_symmetric_memory: bool) -> list[float]:
    """Return what this rank has received from two shifts."""
    with registered(), Communicator() as communicator:
        output = communicator.empty(1000) if in_symmetric_memory else torch.empty(1000)
        found = []
        for number in (0, 10):
            communicator.call("shift", output, torch.full((1000,), float(number + session.rank)))
            found.append(float(output.unique()))
        session.gather(0)
        return found


def measured(session: Session) -> Outcome:
    """Return what `measure` finds about the toy collective, by torch and by its program; its data is checked."""
    with registered():
        block = Block(name="toy", what="shift", mechanisms=("gloo", "zero_sm"), sizes_bytes=(1 << 16,))
        plan = Plan(suite="toy", device="cpu", world_size=3, parts=(), rounds=5, results="", errors="")
        return measure_part(session, block, plan, Calibration())


def by_name(session: Session, name: str) -> bool:
    """Return whether a collective called by its name gives what its method gives."""
    torch.manual_seed(session.rank)
    with Communicator() as communicator:
        n, mine = communicator.world_size, torch.randn(96)
        outputs = [communicator.empty(96 * n if name == "all_gather" else 96) for _ in range(2)]
        match name:
            case "all_gather" | "all_to_all":
                getattr(communicator, name)(outputs[0], mine)
                communicator.call(name, outputs[1], mine)
            case "reduce_scatter":
                outputs = [output[: 96 // n] for output in outputs]
                communicator.reduce_scatter(outputs[0], mine, "max")
                communicator.call(name, outputs[1], mine, op="max")
            case "all_reduce" | "broadcast":
                for output in outputs:
                    output.copy_(mine)
                getattr(communicator, name)(outputs[0])
                communicator.call(name, outputs[1])
        session.gather(0)
        return torch.equal(outputs[0], outputs[1])


@pytest.mark.parametrize("in_symmetric_memory", [True, False], ids=["empty", "plain"])
def test_a_toy_collective_runs_on_cpu_processes(three_ranks: Ranks, in_symmetric_memory: bool) -> None:
    """Every rank has what the one before it gave, twice in a row, in symmetric and in plain memory."""
    found = three_ranks.run(shifted, in_symmetric_memory)
    assert found == [[2.0, 12.0], [0.0, 10.0], [1.0, 11.0]]


def test_a_toy_collective_is_measured(three_ranks: Ranks) -> None:
    outcome = three_ranks.run(measured)[0]
    assert [(row.mechanism, row.time.us > 0, row.gb_per_s > 0) for row in outcome.blocks] == [
        ("gloo", True, True),
        ("zero_sm", True, True),
    ]


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"])
def test_a_collective_by_its_name_is_the_same_as_its_method(three_ranks: Ranks, name: str) -> None:
    assert three_ranks.run(by_name, name) == [True] * 3
