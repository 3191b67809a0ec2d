"""A clock runs the programs: how long a call takes on a machine of given rates.

What costs time: the host issues one step after the other; a step of a lane begins when the one before has ended; a copy
has a fixed part and its bytes, which share the receiver's link with other copies into it; a reduction or a local copy
moves its bytes through device memory, and begins only when SMs are free. Other steps cost the latency of a flag.
Between hosts (`Network`) bytes share the network cards, and every message needs SMs.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from counterpoint.collectives.program import (
    BETWEEN,
    Await,
    Batch,
    Copy,
    Flag,
    LocalCopy,
    Program,
    Record,
    Reduce,
    Signal,
    Step,
)
from counterpoint.errors import CounterpointError, Misconfigured

__all__ = ["H200", "Network", "Prediction", "Rates", "Timed", "bus_gb_per_s", "simulate"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """A machine. Bandwidths GB/s, times µs."""

    push_gb_per_s: float = 384.0  # one copy engine over NVLink, all GPUs at once
    link_gb_per_s: float = 384.0  # into one GPU, shared by all copies into it
    hbm_gb_per_s: float = 3900.0  # device memory, bytes read and bytes written counted
    copy_us: float = 6.7  # a copy besides its bytes
    kernel_us: float = 5.5  # a reduction or local copy besides its bytes
    batch_us: float = 0.7  # signals and waits of one batch, once they need not wait
    signal_us: float = 4.1  # until the peer sees a signal
    event_us: float = 7.4  # until another lane of the same GPU sees an event
    call_us: float = 0.0  # of the host, for each step; 0: it is ahead, as with graphs
    launch_us: float = 12.0  # before the first step and after the last one


H200 = Rates()
"""4 × H200, NV18, 2026-11-21, the host ahead: fitted to 95 times alone of four operations (64 KiB to 1 GiB, algorithms,
up to two chunks and a last one), 2.9 % off on average. On those of another run (results/collectives-alone-4xh200.json)
it is 3.5 % off, 21 % at most; more chunks take up to 30 % longer than it says. On 8 × H200 an all_gather of 1 MiB, 16
MiB, 1 GiB was measured at 67, 125, 2472 µs (2026-11-20), and comes out at 75, 111, 2519."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """Between hosts of `local` ranks each: a network card for each GPU, and a library that drives it with kernels.

    Assumed, not measured: 400 Gb/s less what protocols take; a message of NCCL over InfiniBand."""

    local: int
    nic_gb_per_s: float = 45.0  # in and out, each
    message_us: float = 15.0  # a message besides its bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class Timed:
    """One step of one rank, when it ran. `start_us`: when its lane came to it."""

    rank: int
    lane: int
    step: Step
    start_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """When each rank has its output, counted from the moment the first rank began, and every step on the way."""

    rank_us: tuple[float, ...]
    steps: tuple[Timed, ...]

    @property
    def us(self) -> float:
        """The slowest rank."""
        return max(self.rank_us)


def bus_gb_per_s(operation: str, num_bytes: int, world_size: int, us: float) -> float:
    """Bus bandwidth as nccl-tests counts it; `num_bytes` of the full array."""
    factor = 2.0 if operation == "all_reduce" else 1.0
    moves_all = operation in ("broadcast", "send_recv")
    return num_bytes / us / 1000 * (1.0 if moves_all else factor * (world_size - 1) / world_size)


def simulate(
    programs: Sequence[Program],
    rates: Rates = H200,
    *,
    early_release: bool = False,
    arrive_us: Sequence[float] = (),
    sms_free_us: float = 0.0,
    network: Network | None = None,
) -> Prediction:
    """Run the programs of all ranks once.

    Args:
        early_release: output was released before the call, and no rank has to say so.
        arrive_us: when each rank begins; all at 0 if empty.
        sms_free_us: until then a resident GEMM holds every SM; reductions, local copies and messages to other hosts
            wait.
        network: where ranks are on several hosts (`flattened`); None: all are on one.

    Raises:
        Misconfigured: `programs` or `arrive_us` are not one for each rank, or they make no whole hosts.
        CounterpointError: the programs deadlock; `check` says why.
    """
    arrive = tuple(arrive_us) or (0.0,) * len(programs)
    if not programs or len(programs) != programs[0].world_size or len(arrive) != len(programs):
        raise Misconfigured(f"{len(programs)} programs and {len(arrive)} times of arrival: give one for each rank")
    network = network or Network(local=len(programs))
    if network.local < 1 or len(programs) % network.local:
        raise Misconfigured(f"{len(programs)} ranks on hosts of {network.local}: give a divisor")
    clock = _Clock(rates, network, sms_free_us, dict(enumerate(arrive)))
    for program in programs:
        clock.add(program, early_release)
    clock.run()
    return Prediction(rank_us=tuple(clock.ended[rank] for rank in range(len(programs))), steps=tuple(clock.timed))


Key: TypeAlias = tuple[int, Flag] | tuple[int, int]  # a word of a rank, or an event of a rank


@dataclass(frozen=True, slots=True)
class _Until:
    us: float


@dataclass(frozen=True, slots=True)
class _For:
    key: Key


@dataclass(slots=True)
class _Flow:
    """Bytes on their way to `target`."""

    target: int
    left: float
    far: bool = False  # to another host
    lane: _Lane | None = None


_Lane: TypeAlias = Iterator[_Until | _For | _Flow]


@dataclass(slots=True)
class _Clock:
    """Lanes are generators that say what they wait for: a moment, a word or event, or the end of their bytes."""

    rates: Rates
    network: Network
    sms_free_us: float
    ended: dict[int, float]
    now: float = 0.0
    timed: list[Timed] = field(default_factory=list)
    alarms: list[tuple[float, int, _Lane | Key]] = field(default_factory=list)
    flows: list[_Flow] = field(default_factory=list)
    come: set[Key] = field(default_factory=set)
    waiting: dict[Key, _Lane] = field(default_factory=dict)
    tickets: int = 0

    def add(self, program: Program, early_release: bool) -> None:
        """The lanes of one rank, with the moment at which the host has issued each step."""
        lanes: dict[int, list[tuple[float, Step]]] = {}
        issued = self.ended[program.rank] + self.rates.launch_us
        for step in program.cycle(early_release=early_release):
            if step.lane < BETWEEN or isinstance(step, Await):  # of another library: one call for all that follows
                issued += self.rates.call_us
            lanes.setdefault(step.lane, []).append((issued, step))
        for peer in range(program.world_size):
            self.come.add((program.rank, Flag("staging", "ready", peer)))
            if early_release:
                self.come.add((program.rank, Flag("output", "ready", peer)))
        for steps in lanes.values():
            self.resume(self.lane(program.rank, steps))

    def run(self) -> None:
        while self.alarms or self.flows:
            rates = self.flow_rates()
            moments = [self.now + flow.left / rate for flow, rate in zip(self.flows, rates, strict=True)]
            then = min([*moments, *(alarm[0] for alarm in self.alarms[:1])])
            for flow, rate in zip(self.flows, rates, strict=True):
                flow.left -= (then - self.now) * rate
            self.now = then
            landed = [flow for flow, moment in zip(self.flows, moments, strict=True) if moment <= then]
            self.flows = [flow for flow in self.flows if flow not in landed]
            for flow in landed:
                assert flow.lane is not None
                self.resume(flow.lane)
            while self.alarms and self.alarms[0][0] <= self.now:
                self.ring(heapq.heappop(self.alarms)[2])
        if self.waiting:
            ranks = sorted({rank for rank, _ in self.waiting})
            raise CounterpointError(f"ranks {ranks} wait for ever: let `check` say why")

    def flow_rates(self) -> list[float]:
        """Bytes per µs of each flow: one engine sends it, and all flows to one GPU share its link, or its card."""
        into = Counter((flow.target, flow.far) for flow in self.flows)
        near, link, card = self.rates.push_gb_per_s, self.rates.link_gb_per_s, self.network.nic_gb_per_s
        return [
            1000 * (card / into[flow.target, True] if flow.far else min(near, link / into[flow.target, False]))
            for flow in self.flows
        ]

    def ring(self, what: _Lane | Key) -> None:
        if not isinstance(what, tuple):
            self.resume(what)
            return
        self.come.add(what)
        if what in self.waiting:
            self.resume(self.waiting.pop(what))

    def at(self, us: float, what: _Lane | Key) -> None:
        self.tickets += 1  # first come, first served
        heapq.heappush(self.alarms, (us, self.tickets, what))

    def resume(self, lane: _Lane) -> None:
        """Let `lane` go on until it waits for something that has not come."""
        for wish in lane:
            if isinstance(wish, _Flow):
                wish.lane = lane
                self.flows.append(wish)
                return
            if isinstance(wish, _For) and wish.key not in self.come:
                self.waiting[wish.key] = lane
                return
            if isinstance(wish, _Until) and wish.us > self.now:
                self.at(wish.us, lane)
                return

    def lane(self, rank: int, steps: list[tuple[float, Step]]) -> _Lane:
        for issued, step in steps:
            yield _Until(issued)
            start = self.now
            yield from self.step(rank, step)
            self.timed.append(Timed(rank=rank, lane=step.lane, step=step, start_us=start, end_us=self.now))
            self.ended[rank] = max(self.ended[rank], self.now)

    def step(self, rank: int, step: Step) -> _Lane:
        rates = self.rates
        match step:
            case Copy(peer, source) if rank // self.network.local != peer // self.network.local:
                yield _Until(self.sms_free_us)
                yield _Until(self.now + self.network.message_us)
                yield _Flow(peer, source.num_bytes, far=True)
            case Copy(peer, source):
                yield _Until(self.now + rates.copy_us)
                yield _Flow(peer, source.num_bytes)
            case LocalCopy(source):
                yield _Until(self.sms_free_us)
                yield _Until(self.now + rates.kernel_us + 2 * source.num_bytes / rates.hbm_gb_per_s / 1000)
            case Reduce(sources, target):
                yield _Until(self.sms_free_us)
                moved = (len(sources) + 1) * target.num_bytes
                yield _Until(self.now + rates.kernel_us + moved / rates.hbm_gb_per_s / 1000)
            case Batch(operations):
                yield _Until(self.now + (rates.batch_us if step.lane < BETWEEN else 0.0))
                for operation in operations:
                    if isinstance(operation, Signal):
                        self.at(self.now + rates.signal_us, (operation.peer, operation.flag))
                    else:
                        yield _For((rank, operation.flag))
                        self.come.remove((rank, operation.flag))
            case Record(event):
                self.at(self.now + rates.event_us, (rank, event))
            case Await(event):
                yield _For((rank, event))
