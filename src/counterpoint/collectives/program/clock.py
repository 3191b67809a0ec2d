"""Simulate the programs of all ranks to predict how long a call takes on a machine with given rates.

The model: the host issues one step after the other; a step of a lane begins when the one before it has ended; a copy
costs a fixed time plus its bytes' time, which share the receiver's link with other copies into it; a reduction or a
local copy moves its bytes through device memory, and begins only when SMs are free. Other steps cost the latency of a
flag. Between hosts (`HostNetwork`) bytes share the network cards, and every message needs SMs.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from counterpoint.collectives.program.steps import (
    BETWEEN,
    BETWEEN_REDUCE,
    HERE,
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
)
from counterpoint.errors import CounterpointError, Misconfigured
from counterpoint.machine.profile import Rates, default_profile


@dataclass(frozen=True, kw_only=True, slots=True)
class HostNetwork:
    """Describes the network between hosts of `local` ranks each: a network card per GPU, used by NCCL, which needs SMs.

    Assumed, not measured: 400 Gb/s less protocol overhead; the cost of an NCCL message over InfiniBand.
    """

    local: int
    nic_gb_per_s: float = 45.0  # GB/s of a card in each direction
    message_us: float = 15.0  # us of a message without its bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class TimedStep:
    """Records when a step of a rank's program ran, in µs; `start_us` is when the step's lane (stream) reached it."""

    rank: int
    lane: int
    step: Step
    start_us: float
    end_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedCall:
    """Records when each rank had its output and when every step ran, in µs on the clock of `simulate`'s `arrive_us`."""

    rank_us: tuple[float, ...]
    steps: tuple[TimedStep, ...]

    @property
    def us(self) -> float:
        """Return the µs at which the slowest rank had its output."""
        return max(self.rank_us)


def simulate(
    programs: Sequence[Program],
    rates: Rates | None = None,
    *,
    early_release: bool = False,
    arrive_us: Sequence[float] = (),
    sms_free_us: float = 0.0,
    network: HostNetwork | None = None,
) -> SimulatedCall:
    """Simulate the programs of all ranks once; raise `CounterpointError` if they deadlock (`check` says why).

    Args:
        programs: one for each rank.
        rates: rates of the machine; None: the default profile's, H200.
        early_release: outputs were released before the call, which then has no handshake.
        arrive_us: when each rank begins; empty: all at 0.
        sms_free_us: until then a resident GEMM holds every SM; reductions, local copies and messages to other hosts
            wait.
        network: network between hosts, for programs of `flatten`; None: all ranks are on one host.

    Returns:
        The time at which each rank has its output, and when every step ran.

    Raises:
        Misconfigured: `programs` or `arrive_us` do not have one entry for each rank, or the last host is not full.
    """
    arrive = tuple(arrive_us) or (0.0,) * len(programs)
    if not programs or len(programs) != programs[0].world_size or len(arrive) != len(programs):
        raise Misconfigured(f"{len(programs)} programs and {len(arrive)} times of arrival: give one for each rank")
    network = network or HostNetwork(local=len(programs))
    if network.local < 1 or len(programs) % network.local:
        raise Misconfigured(f"{len(programs)} ranks on hosts of {network.local}: give a divisor")
    clock = _Clock(rates or default_profile().rates, network, sms_free_us, dict(enumerate(arrive)))
    for program in programs:
        clock.add(program, early_release)
    clock.run()
    return SimulatedCall(rank_us=tuple(clock.ended[rank] for rank in range(len(programs))), steps=tuple(clock.timed))


_OF_HOSTS = (BETWEEN, BETWEEN_REDUCE, HERE)
Key: TypeAlias = tuple[int, Flag] | tuple[int, int]  # a word of a rank, or an event of a rank


@dataclass(frozen=True, slots=True)
class _Until:
    us: float


@dataclass(frozen=True, slots=True)
class _For:
    key: Key


@dataclass(slots=True)
class _Flow:
    """Represents a transfer of bytes to the rank `target`; `left` bytes have not arrived yet."""

    target: int
    left: float
    far: bool = False  # whether the bytes go to another host
    lane: _Lane | None = None


_Lane: TypeAlias = Iterator[_Until | _For | _Flow]


@dataclass(slots=True)
class _Clock:
    """Simulates lanes as generators; each yields what to wait for next: a time, flag, event or transfer's end."""

    rates: Rates
    network: HostNetwork
    sms_free_us: float
    ended: dict[int, float]
    now: float = 0.0
    timed: list[TimedStep] = field(default_factory=list)
    alarms: list[tuple[float, int, _Lane | Key]] = field(default_factory=list)
    flows: list[_Flow] = field(default_factory=list)
    come: set[Key] = field(default_factory=set)
    waiting: dict[Key, _Lane] = field(default_factory=dict)
    tickets: int = 0

    def add(self, program: Program, early_release: bool) -> None:
        """Start the lanes of one rank's program; each step carries the µs at which the rank's host has issued it."""
        lanes: dict[int, list[tuple[float, Step]]] = {}
        issued = self.ended[program.rank] + self.rates.launch_us
        for step in program.cycle(early_release=early_release):
            if step.lane not in _OF_HOSTS or isinstance(step, AwaitEvent):  # between hosts: 1 call
                issued += self.rates.call_us
            lanes.setdefault(step.lane, []).append((issued, step))
        for peer in range(program.world_size):
            self.come.add((program.rank, Flag("staging", "ready", peer)))
            if early_release:
                self.come.add((program.rank, Flag("output", "ready", peer)))
        self.come.update((program.rank, flag) for flag in program.awaits_ready if flag.buffer == "mailbox")
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
        """Return each transfer's bytes per µs: an equal share of the link or network card into the target GPU.

        Inside a host bytes come by the GPU's link, and a flow gets no more than one copy engine moves; from another
        host they come by the GPU's network card.
        """
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
        self.tickets += 1  # alarms of one moment ring in the order in which they were set
        heapq.heappush(self.alarms, (us, self.tickets, what))

    def resume(self, lane: _Lane) -> None:
        """Let `lane` run until it waits for something that has not happened yet."""
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
            self.timed.append(TimedStep(rank=rank, lane=step.lane, step=step, start_us=start, end_us=self.now))
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
                yield _Until(self.now + (0.0 if step.lane in _OF_HOSTS else rates.batch_us))
                for operation in operations:
                    if isinstance(operation, Signal):
                        self.at(self.now + rates.signal_us, (operation.peer, operation.flag))
                    else:
                        yield _For((rank, operation.flag))
                        self.come.remove((rank, operation.flag))
            case RecordEvent(event):
                self.at(self.now + rates.event_us, (rank, event))
            case AwaitEvent(event):
                yield _For((rank, event))
