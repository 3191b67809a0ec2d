"""A machine of bytes that runs lowered calls: every lane of every rank is a thread of its own, in random order.

It is finer than the checker's: a wait and its reset are two actions, and a copy or a reduction is done in pieces.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from counterpoint.collectives.cuda.lower import Addresses, CopyAsync, DriverCall, MemoryOperations, ReduceLaunch, lower
from counterpoint.collectives.program.calls import Call
from counterpoint.collectives.program.steps import AwaitEvent, Program, RecordEvent

GAP = 64  # bytes between two buffers: an address that is off by a little belongs to nobody
ROUNDS = 3
Bytes = npt.NDArray[np.uint8]


class Deadlock(AssertionError):
    """No lane can go on."""


class Machine:
    def __init__(self, programs: Sequence[Program], *, early_release: bool = False) -> None:
        self.programs, self.early_release = programs, early_release
        self.memory: dict[int, Bytes] = {}
        self.bases: dict[tuple[str, int], int] = {}
        self.next_address = 1 << 20
        for rank, program in enumerate(programs):
            sizes = {
                "input": max(1, program.call.input_bytes(rank)),
                "output": max(1, program.call.output_bytes(rank)),
                "staging": max(1, program.staging_bytes),
                "output_flags": 4 * 32 * program.world_size,
                "staging_flags": 4 * 32 * program.world_size,
            }
            for name, size in sizes.items():
                self.bases[name, rank] = self.allocate(size)
            for peer in range(program.world_size):
                self.store(self.bases["staging_flags", rank] + 4 * peer, b"\1\0\0\0")
        for rank, program in enumerate(programs if early_release else ()):
            for pusher in program.pushers:  # it finds the output of `rank` free from the start
                self.store(self.bases["output_flags", pusher] + 4 * rank, b"\1\0\0\0")
        self.at_rest = self.flags()

    def flags(self) -> bytes:
        """Return all words of flags, of all ranks."""
        return b"".join(self.memory[at].tobytes() for (name, _), at in self.bases.items() if name.endswith("_flags"))

    def allocate(self, num_bytes: int) -> int:
        address = self.next_address
        self.memory[address] = np.zeros(num_bytes, np.uint8)
        self.next_address += -(-num_bytes // GAP) * GAP + GAP
        return address

    def view(self, address: int, num_bytes: int) -> Bytes:
        base = max(start for start in self.memory if start <= address)
        assert address + num_bytes <= base + len(self.memory[base]), f"{num_bytes} bytes at {address:#x} lie nowhere"
        return self.memory[base][address - base : address - base + num_bytes]

    def store(self, address: int, data: bytes) -> None:
        self.view(address, len(data))[:] = np.frombuffer(data, np.uint8)

    def word(self, address: int) -> int:
        return int.from_bytes(self.view(address, 4).tobytes(), "little")

    def addresses(self, rank: int) -> Addresses:
        ranks = range(len(self.programs))
        return Addresses(
            input=self.bases["input", rank],
            output=tuple(self.bases["output", peer] for peer in ranks),
            staging=tuple(self.bases["staging", peer] for peer in ranks),
            output_flags=tuple(self.bases["output_flags", peer] for peer in ranks),
            staging_flags=tuple(self.bases["staging_flags", peer] for peer in ranks),
        )

    def calls(self, rank: int) -> tuple[tuple[DriverCall, ...], tuple[DriverCall, ...]]:
        program, addresses, early = self.programs[rank], self.addresses(rank), self.early_release
        before = lower(program, addresses, program.cycle(early_release=early))
        return before, lower(program, addresses, program.release if early else ())

    def run(self, rounds: int, begin: Callable[[int, int], None], end: Callable[[int, int], None], *, seed: int,
            one_queue: bool = False) -> None:  # fmt: skip
        """Every rank does its calls `rounds` times; `begin` and `end` (round, rank) run on lane 0 before and after.

        `one_queue`: all lanes of a rank in one, as the driver may put them.
        """
        order, events = random.Random(seed), set[tuple[int, int, int]]()
        lanes: dict[tuple[int, int], list[Iterator[bool]]] = {}

        def queue(calls: Sequence[DriverCall], rank: int, number: int) -> None:
            for call in calls:
                lane = (rank, 0 if one_queue else call.lane)
                lanes.setdefault(lane, []).append(self.action(call, rank, number, events))

        for rank in range(len(self.programs)):
            before, after = self.calls(rank)
            for number in range(rounds):
                lanes.setdefault((rank, 0), []).append(_once(begin, number, rank))
                queue(before, rank, number)
                lanes[rank, 0].append(_once(end, number, rank))
                queue(after, rank, number)
        idle = 0
        while lanes:
            lane = order.choice(list(lanes))
            progress = next(lanes[lane][0], None)
            idle = idle + 1 if progress is False else 0
            if progress is None:
                lanes[lane].pop(0)
            if not lanes[lane]:
                del lanes[lane]
            if idle > 200 * (len(lanes) + 1):
                raise Deadlock(f"lanes {sorted(lanes)} wait for ever")

    def action(self, call: DriverCall, rank: int, number: int, events: set[tuple[int, int, int]]) -> Iterator[bool]:
        """One call, piece by piece; False where it could not go on."""
        match call:
            case CopyAsync(target, source, num_bytes):
                for low, high in _pieces(num_bytes):
                    self.view(target, num_bytes)[low:high] = self.view(source, num_bytes)[low:high]
                    yield True
            case ReduceLaunch(sources, target, num_bytes):
                for low, high in _pieces(num_bytes):
                    self.view(target, num_bytes)[low:high] = _added(
                        [self.view(s, num_bytes)[low:high] for s in sources]
                    )
                    yield True
            case MemoryOperations(operations):
                assert 0 < len(operations) < 256
                for operation in operations:
                    while operation.kind == "wait" and self.word(operation.address) < operation.value:
                        yield False
                    if operation.kind == "write":
                        assert not (operation.value and self.word(operation.address)), "a signal was lost"
                        self.store(operation.address, operation.value.to_bytes(4, "little"))
                    yield True
            case RecordEvent(event):
                events.add((rank, number, event))
            case AwaitEvent(event):
                while (rank, number, event) not in events:
                    yield False


def _once(what: Callable[[int, int], None], number: int, rank: int) -> Iterator[bool]:
    what(number, rank)
    yield True


def _added(arrays: Sequence[Bytes]) -> Bytes:
    total: Bytes = np.add.reduce(arrays, dtype=np.uint8)
    return total


def _pieces(num_bytes: int) -> list[tuple[int, int]]:
    cuts = [0, num_bytes // 3, num_bytes]
    return [(low, high) for low, high in pairwise(cuts) if high > low]


def filled(call: Call, number: int, rank: int) -> Bytes:
    """The input of `rank` in round `number`; of broadcast and scatter the root's alone counts."""
    return np.random.default_rng([number, rank]).integers(0, 256, call.input_bytes(rank), np.uint8)


def expected(call: Call, number: int, rank: int) -> Bytes:
    """The output of `rank`, made from all inputs without any program."""
    world = range(call.world_size)
    inputs = [filled(call, number, source) for source in world]
    if call.reduces:
        whole = _added(inputs)
        if call.operation == "all_reduce":
            return whole
        cuts = [0, *accumulate(call.sizes[rank])]
        return whole[cuts[rank] : cuts[rank + 1]]
    blocks = []
    for source in world:
        size = call.sizes[source][rank]
        start = 0 if call.operation in ("all_gather", "gather", "broadcast") else sum(call.sizes[source][:rank])
        blocks.append(inputs[source][start : start + size])
    return np.concatenate(blocks)


def replayed(programs: tuple[Program, ...], *, seed: int, one_queue: bool = False, early: bool = False) -> bool:
    """Run the programs in random order, `ROUNDS` times back to back; compare every output, and the flags at the end.

    Return False: all is well.
    """
    machine, call = Machine(programs, early_release=early), programs[0].call

    def begin(number: int, rank: int) -> None:
        data = filled(call, number, rank)
        if call.operation == "barrier" or (call.operation in ("broadcast", "scatter") and rank != call.root):
            return
        own = call.source_span(rank, rank)
        offset = 0 if call.operation in ("all_reduce", "scatter") else own.offset if own.buffer == "output" else 0
        machine.view(machine.bases[own.buffer, rank] + offset, len(data))[:] = data
        if call.operation == "scatter" and call.own == "in_place":
            machine.view(machine.bases["output", rank], own.num_bytes)[:] = data[own.offset :][: own.num_bytes]

    def end(number: int, rank: int) -> None:
        wanted = expected(call, number, rank)
        have = machine.view(machine.bases["output", rank], len(wanted)).copy()
        if call.own == "consumer" and not call.reduces:  # the own block is where it was
            start = sum(call.sizes[source][rank] for source in range(rank))
            have[start : start + call.sizes[rank][rank]] = wanted[start : start + call.sizes[rank][rank]]
        assert np.array_equal(have, wanted), f"round {number}, rank {rank}, seed {seed}"

    machine.run(ROUNDS, begin, end, seed=seed, one_queue=one_queue)
    assert machine.flags() == machine.at_rest, "flags are not at rest"
    return False
