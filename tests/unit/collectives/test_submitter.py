"""A call that comes again is looked up; whatever makes it another call is seen."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from counterpoint.collectives.memory import Location
from counterpoint.collectives.program.steps import Copy, Tuning
from counterpoint.collectives.submit import request
from counterpoint.collectives.submit.submission import NOWHERE, Programs, Submission
from counterpoint.collectives.submit.submitter import Submitter
from counterpoint.collectives.submit.tensors import CPU, TensorList, reduction_name
from counterpoint.errors import Misconfigured

WORLD_SIZE = 2
WHOLE = torch.zeros(64)


class Noted:
    """A transport that notes which submissions it is given, and which of them start with which number."""

    def __init__(self) -> None:
        self.epoch, self.early = 0, SimpleNamespace(use=lambda at: None)
        self.accepted: list[Submission] = []
        self.device, self.programs = CPU, Programs(0, self.tuning)
        self.started: list[tuple[Submission, int]] = []
        self.kept: list[tuple[Any, ...]] = []
        self.symmetric: dict[int, Location] = {}  # address: where that is
        self.refuses = False
        self.check = lambda: None

    def tuning(self, call: Any, *, early_release: bool) -> Tuning:
        return Tuning()

    def locate(self, tensor: Any) -> Location | None:
        return self.symmetric.get(tensor.data_ptr())

    def place(self, call: Any, at: Location | None, num_bytes: int) -> str:
        return f" at {at}"

    def read_at(self, input: Any) -> tuple[Location, ...]:
        return ()

    def shown_at(self, at: Location | None, num_bytes: int) -> Location:
        return NOWHERE

    def accept(self, submission: Submission) -> None:
        self.accepted.append(submission)

    def start(self, submission: Submission, number: int, keep: tuple[Any, ...]) -> None:
        if self.refuses:
            raise Misconfigured("not now")
        self.started.append((submission, number))
        self.kept.append(keep)


class Ranks:
    """Rank 0 of two, whose calls go to `Noted`."""

    def __init__(self) -> None:
        self.transport = Noted()
        transport: Any = self.transport
        self.submitter = Submitter(transport, rank=0, world_size=WORLD_SIZE, channels=2, debug=False)

    def start(self, ask: Any, output: Any, input: Any, *options: Any, channel: int = 0) -> None:
        if isinstance(ask, str):
            ask, options = request.even_blocks_of, (ask, *options)
        self.submitter.submit(ask, output, input, channel, False, *options)

    @property
    def made(self) -> int:
        return len(self.transport.accepted)


@pytest.fixture
def ranks() -> Ranks:
    return Ranks()


def test_the_same_call_is_made_once(ranks: Ranks) -> None:
    shards = torch.zeros(WORLD_SIZE, 4)
    for _ in range(3):
        ranks.start("all_gather", shards, shards[0])
    assert (ranks.made, [number for _, number in ranks.transport.started]) == (1, [1, 2, 3])


def test_each_channel_and_pair_of_ranks_counts_for_itself(ranks: Ranks) -> None:
    one = torch.zeros(4)
    ranks.start("barrier", None, None)
    ranks.start("barrier", None, None, channel=1)
    ranks.start(request.send_recv, None, one, 1)
    ranks.start("barrier", None, None)
    assert [number for _, number in ranks.transport.started] == [1, 1, 1, 2]


def test_a_call_that_was_refused_has_no_number(ranks: Ranks) -> None:
    ranks.transport.refuses = True
    with pytest.raises(Misconfigured, match="not now"):
        ranks.start("barrier", None, None)
    ranks.transport.refuses = False
    ranks.start("barrier", None, None)
    assert [number for _, number in ranks.transport.started] == [1]


OTHERS: dict[str, Callable[[Ranks], None]] = {
    "dtype": lambda ranks: ranks.start("all_reduce", *[WHOLE.view(torch.int32)] * 2, 0, "sum", 1),
    "size": lambda ranks: ranks.start("all_reduce", WHOLE[:32], WHOLE[:32], 0, "sum", 1.0),
    "shape": lambda ranks: ranks.start("all_reduce", WHOLE.view(8, 8), WHOLE.view(8, 8), 0, "sum", 1.0),
    "place": lambda ranks: ranks.start("all_reduce", WHOLE.clone(), WHOLE.clone(), 0, "sum", 1.0),
    "op": lambda ranks: ranks.start("all_reduce", WHOLE, WHOLE, 0, "max", 1.0),
    "factor": lambda ranks: ranks.start("all_reduce", WHOLE, WHOLE, 0, "premul_sum", 2.0),
    "operation": lambda ranks: ranks.start("broadcast", WHOLE, WHOLE, 0),
    "channel": lambda ranks: ranks.start("all_reduce", WHOLE, WHOLE, 0, "sum", 1.0, channel=1),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_call_is_another_job(ranks: Ranks, what: str) -> None:
    ranks.start("all_reduce", WHOLE, WHOLE, 0, "sum", 1.0)
    OTHERS[what](ranks)
    assert ranks.made == 2


REFUSED: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[Any, ...]]] = {
    "dtype": lambda output, input: (output, input.view(torch.int32)),
    "number of elements": lambda output, input: (output, input[:1]),
    "strides of the output": lambda output, input: (output.t(), input),
    "sign of the output": lambda output, input: (torch._neg_view(output), input),
    "layout": lambda output, input: (output, input.to_sparse()),
    "device": lambda output, input: (output, input.to("meta")),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_wrong_is_refused_after_what_was_right(ranks: Ranks, what: str) -> None:
    output, input = torch.zeros(WORLD_SIZE, 4), torch.zeros(4)
    ranks.start("all_gather", output, input)
    with pytest.raises(Misconfigured):
        ranks.start("all_gather", *REFUSED[what](output, input))


def test_rows_that_cannot_be_divided_are_refused_after_others_at_the_same_place(ranks: Ranks) -> None:
    output, input = torch.zeros(6), torch.zeros(6)
    ranks.start(request.all_to_all, output, input, False)
    with pytest.raises(Misconfigured, match="3 rows"):
        ranks.start(request.all_to_all, output.view(3, 2), input.view(3, 2), False)


def test_an_input_with_gaps_is_copied_each_time(ranks: Ranks) -> None:
    """What is sent is another copy at each call, so the call is not remembered."""
    output, wide = torch.zeros(WORLD_SIZE, 4), torch.zeros(4, 2)
    for _ in range(2):
        ranks.start("all_gather", output, wide[:, 0])
    assert (ranks.made, [job.input == wide.data_ptr() for job in ranks.transport.accepted]) == (2, [False] * 2)


def test_one_input_with_gaps_moves_the_places_of_all(ranks: Ranks) -> None:
    """Several tensors are sent from where the copies lie, not from where they were given."""
    outputs = TensorList([torch.zeros(2), torch.zeros(4)])
    inputs = TensorList([WHOLE[:4], WHOLE.view(8, 8)[4:, :2].t()])
    ranks.start(request.reduce_scatter_coalesced, outputs, inputs, "sum", 1.0)
    job, sent = ranks.transport.accepted[0], ranks.transport.kept[0][0].tensors
    assert job.program is not None
    spans = [step.source for step in job.program.steps if isinstance(step, Copy)]
    places = [range(one.data_ptr(), one.data_ptr() + one.nbytes) for one in sent]
    read = [dict(job.local)["input"].at(span.offset) for span in spans]
    assert all(any(address in place for place in places) for address in read)


def test_an_input_is_conjugated_each_time(ranks: Ranks) -> None:
    output, input = torch.zeros(WORLD_SIZE, 4, dtype=torch.complex64), torch.zeros(4, dtype=torch.complex64)
    ranks.start("all_gather", output, input)
    ranks.start("all_gather", output, input.conj())
    assert [job.input == input.data_ptr() for job in ranks.transport.accepted] == [True, False]


def test_a_new_region_makes_addresses_mean_something_else(ranks: Ranks) -> None:
    """Plain memory that was given back may come again as symmetric memory: the call is located anew."""
    output, input = torch.zeros(WORLD_SIZE, 4), torch.zeros(4)
    ranks.start("all_gather", output, input)
    ranks.transport.symmetric[output.data_ptr()] = Location(3, 512)
    ranks.transport.epoch += 1
    ranks.start("all_gather", output, input)
    assert [job.at for job in ranks.transport.accepted] == [None, Location(3, 512)]


def test_split_sizes_are_told_each_time(ranks: Ranks) -> None:
    """Only this rank knows its row: no such call is remembered, be the sizes a list or a tuple."""
    output, input = torch.zeros(4), torch.zeros(4)
    for sizes in ([1, 3], (1, 3), (1, 3)):
        ranks.start(request.uneven_all_to_all, output, input, False, sizes, sizes)
    assert [job.row for job in ranks.transport.accepted] == [(4, 12)] * 3


def test_the_factor_is_part_of_what_ranks_compare(ranks: Ranks) -> None:
    """Two of them are two calls."""
    for factor in (2.0, 3.0):
        ranks.start("all_reduce", WHOLE, WHOLE, 0, "premul_sum", factor)
    two, three = ranks.transport.accepted
    assert two.text != three.text


def test_a_number_is_no_reduction_although_torch_says_that_it_equals_one() -> None:
    """ReduceOp.SUM == 0, and they would be the same key: by their names they are not."""
    torchs, number = [dist.ReduceOp.SUM, 0], [reduction_name(op) for op in (dist.ReduceOp.SUM, 0)]
    assert (torchs[0] == torchs[1], number) == (True, ["sum", "0"])


def test_not_more_calls_are_remembered_than_may_be(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("counterpoint.collectives.submit.submitter._MOST_KNOWN", 3)
    for size in range(1, 10):
        ranks.start("all_reduce", WHOLE[:size], WHOLE[:size], 0, "sum", 1.0)
    assert len(ranks.submitter._known) <= 3


def test_a_call_is_in_place_if_all_ranks_can_be() -> None:
    """Not with the block of another rank, nor where only the root could be."""
    ranks = request.GroupRank(rank=0, world_size=2, device=CPU)
    given = [("all_gather", WHOLE[:32]), ("all_gather", WHOLE[32:]), ("all_to_all", WHOLE), ("gather", WHOLE[:32])]
    calls: list[Any] = [request.even_blocks_of(ranks, WHOLE, input, name).call for name, input in given]
    assert [call.own for call in calls] == ["in_place", "copy", "copy", "copy"]
