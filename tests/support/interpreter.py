"""Runs the programs of all ranks on bytes, in an order that a seed chooses; and what torch's operations give."""

import random
from collections.abc import Sequence

from counterpoint.collectives.program.calls import Call, Span
from counterpoint.collectives.program.steps import (
    AwaitEvent,
    Batch,
    Copy,
    Flag,
    LocalCopy,
    Program,
    RecordEvent,
    Reduce,
    Signal,
    Step,
    Wait,
)


class Group:
    """Ranks with their memory, which call after call is made on."""

    def __init__(self, world_size: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.memory: dict[tuple[int, str], bytearray] = {}
        self.words = {
            (rank, Flag("staging", "ready", peer)) for rank in range(world_size) for peer in range(world_size)
        }
        self.at_rest = set(self.words)

    def call(self, programs: Sequence[Program], inputs: Sequence[bytes]) -> list[bytes]:
        for program, data in zip(programs, inputs, strict=True):
            call, rank = program.call, program.rank
            self.memory[rank, "input"] = bytearray(data)
            self.memory[rank, "output"] = bytearray(b"\xee" * call.output_bytes(rank))
            self.memory[rank, "staging"] = bytearray(program.staging_bytes)
            if call.own == "in_place":
                self.place_input(call, rank, data)
        lanes = [
            [step for step in program.cycle() if step.lane == lane] for program in programs for lane in program.lanes
        ]
        owners = [program.rank for program in programs for _ in program.lanes]
        self.run(lanes, owners)
        return [bytes(self.memory[program.rank, "output"]) for program in programs]

    def place_input(self, call: Call, rank: int, data: bytes) -> None:
        """In place, input and output are the same memory; torch's rule which part of which."""
        output = self.memory[rank, "output"]
        own = sum(row[rank] for row in call.sizes[:rank])
        if call.operation in ("all_gather", "gather") and output:
            output[own : own + len(data)] = data
        elif call.operation == "all_reduce" or (call.operation == "broadcast" and rank == call.root):
            output[:] = data
        elif call.operation == "scatter" and rank == call.root:
            before = sum(call.sizes[rank][:rank])
            output[:] = data[before : before + len(output)]

    def run(self, lanes: list[list[Step]], owners: list[int]) -> None:
        """One operation of a lane that chance picks, until all are done."""
        queues = [[part for step in lane for part in _parts(step)] for lane in lanes]
        events: set[tuple[int, int]] = set()
        while any(queues):
            ready = [at for at, queue in enumerate(queues) if queue and not self.blocked(owners[at], queue[0], events)]
            assert ready, "deadlock"
            at = self.random.choice(ready)
            self.do(owners[at], queues[at].pop(0), events)

    def blocked(self, rank: int, what: object, events: set[tuple[int, int]]) -> bool:
        if isinstance(what, AwaitEvent):
            return (rank, what.event) not in events
        return isinstance(what, Wait) and (rank, what.flag) not in self.words

    def do(self, rank: int, what: object, events: set[tuple[int, int]]) -> None:
        match what:
            case Copy(peer, source, target):
                self.write(peer, target, self.read(rank, source))
            case LocalCopy(source, target):
                self.write(rank, target, self.read(rank, source))
            case Reduce(sources, target):
                self.write(rank, target, _sum([self.read(rank, source) for source in sources]))
            case Signal(peer, flag):
                assert (peer, flag) not in self.words, "a signal was lost"
                self.words.add((peer, flag))
            case Wait(flag):
                self.words.remove((rank, flag))
            case RecordEvent(event):
                events.add((rank, event))

    def read(self, rank: int, span: Span) -> bytes:
        data = self.memory[rank, span.buffer][span.offset : span.offset + span.num_bytes]
        assert len(data) == span.num_bytes, f"{span} is outside"
        return bytes(data)

    def write(self, rank: int, span: Span, data: bytes) -> None:
        there = self.memory[rank, span.buffer]
        assert 0 <= span.offset <= len(there) - span.num_bytes, f"{span} is outside"
        there[span.offset : span.offset + span.num_bytes] = data


def _parts(step: Step) -> Sequence[object]:
    return step.operations if isinstance(step, Batch) else (step,)


def _sum(rows: Sequence[bytes]) -> bytes:
    return bytes(sum(column) % 256 for column in zip(*rows, strict=True))


def reference(call: Call, inputs: Sequence[bytes]) -> list[bytes]:
    """What each rank must have afterwards, said as torch.distributed says it."""
    ranks = range(call.world_size)
    assert [len(data) for data in inputs] == [call.input_bytes(rank) for rank in ranks]
    match call.operation:
        case "all_gather":
            return [b"".join(inputs)] * call.world_size
        case "gather":
            return [b"".join(inputs) if rank == call.root else b"" for rank in ranks]
        case "broadcast":
            return [inputs[call.root or 0]] * call.world_size
        case "all_reduce":
            return [_sum(inputs)] * call.world_size
        case "barrier":
            return [b""] * call.world_size
    pieces = [_split(data, call.sizes[rank]) for rank, data in enumerate(inputs)]
    if call.operation == "reduce_scatter":
        return [_sum([row[rank] for row in pieces]) for rank in ranks]
    return [b"".join(row[rank] for row in pieces) for rank in ranks]  # all_to_all, scatter, send_recv


def _split(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    return [data[sum(sizes[:index]) : sum(sizes[: index + 1])] for index in range(len(sizes))]
