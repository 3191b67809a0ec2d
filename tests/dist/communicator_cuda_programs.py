"""What ranks run to test the communicator of GPUs where there are none: everything but the GPU is real."""

import ctypes
import gc
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.cuda.driver import Graph
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.program import tuning
from counterpoint.collectives.submit import submitter
from counterpoint.collectives.submit.tensors import copied, sendable
from counterpoint.measurement.session import Session
from tests.dist.collective_programs import CALLS, Case, Draws, all_right, joined
from tests.support.ranks import PATIENT, TIMEOUT_S, patient, said
from tests.support.software_gpu import OneQueueDriver, SoftwareGpu

COLLECTIVES = "all_reduce", "all_gather", "broadcast", "barrier", "even all_to_all", "uneven all_to_all"
FAR_S = 600.0  # longer than a test may take


def delays(seed: int, rank: int) -> Callable[[str], None]:
    """Lets streams of a rank linger before some actions."""
    dice = random.Random(f"{seed} {rank}")

    def linger(name: str) -> None:
        if dice.random() < 0.02:
            time.sleep(dice.random() * 2e-3)

    return linger


class GpuDraws(Draws):
    """Random collectives on random streams, half of them with `async_op`, some outputs released early."""

    def __init__(self, communicator: Communicator, gpu: SoftwareGpu, seed: int, max_bytes: int) -> None:
        super().__init__(communicator, seed, max_bytes)
        self.gpu, self.streams, self.kept = gpu, [gpu.new_stream() for _ in range(2)], list[Any]()

    def start(self) -> Case:
        self.kept = []
        self.stream = self.random.choice(self.streams)
        self.gpu.use(self.stream)
        return GpuCase(self, super().start())

    def inputs(self, dtype: Any, numel: int) -> list[Any]:
        made = super().inputs(dtype, numel)
        self.kept.append(made)
        self.options["async_op"] = self.random.random() < 0.5
        return made

    def laid_out(self, rows: list[Any], *, flat: bool = False) -> tuple[list[Any], Any]:
        self.kept.append(super().laid_out(rows, flat=flat))
        found: tuple[list[Any], Any] = self.kept[-1]
        return found

    def strided(self, own: Any) -> Any:
        self.kept.append(super().strided(own))
        return self.kept[-1]

    def symmetric(self, num_bytes: int) -> Any:
        self.kept.append(super().symmetric(num_bytes))
        return self.kept[-1]

    def room(self, dtype: Any, numel: int) -> Any:
        skipped, kind = self.random.randrange(4), self.random.choice(("symmetric", "early", "plain"))
        self.early = False
        if kind == "plain" and self.name != "send_recv":
            room = torch.empty(numel + skipped, dtype=dtype)
        else:
            early = self.early = kind == "early" and self.name in ("all_gather", "all_to_all")
            most = numel if self.name != "uneven" else self.most  # pools are alike if ranks ask for the same
            room = self.comm.empty(most + skipped, dtype=dtype, early_release=early)
        self.kept.append(room)
        return room[skipped : skipped + numel]


class GpuCase(Case):
    """Keeps on every rank what was drawn, so that pools stay alike, and compares when the stream has come so far."""

    def __init__(self, draws: GpuDraws, case: Case) -> None:
        super().__init__(case.name, case.work, case.output, case.wanted)
        self.draws, self.kept, self.stream = draws, draws.kept, draws.stream

    def check(self) -> None:
        self.draws.gpu.use(self.stream)
        if self.work is not None:
            assert self.work.wait(TIMEOUT_S)
        self.draws.gpu.synchronize()
        self.draws.comm.check()
        self.work = None
        super().check()


def random_collectives(session: Session, seed: int, count: int, max_bytes: int) -> int:
    """How many of `count` random collectives came out right: up to four under way, on two channels and two streams.

    Most chunks are pushed in turns, as large ones are.
    """
    gpu = SoftwareGpu(delays(seed, session.rank))
    options: dict[str, Any] = {
        "debug": seed % 2 == 1, "graphs": seed % 3 != 2, "staging_bytes": (None, 5000)[seed % 2],
    }  # fmt: skip
    with (
        patch.object(tuning, "TURN_BYTES", 64),
        _copies_kept(),
        Communicator(device=gpu, options=patient(chunk_bytes=(None, 1024)[seed % 2], **options)) as communicator,
    ):
        return all_right(GpuDraws(communicator, gpu, seed, max_bytes), count)


class EitherDraws:
    """Random collectives of several communicators, in one order on all ranks."""

    def __init__(self, draws: list[GpuDraws], seed: int) -> None:
        self.draws, self.random = draws, random.Random(seed)

    def start(self) -> Case:
        return self.random.choice(self.draws).start()


def on_one_queue(session: Session, seed: int, count: int, max_bytes: int) -> int:
    """How many came out right of `count` random collectives of two communicators whose streams share one queue."""
    gpu = SoftwareGpu(delays(seed, session.rank), OneQueueDriver)
    with (
        patch.object(tuning, "TURN_BYTES", 64),
        _copies_kept(),
        Communicator(device=gpu, options=patient(chunk_bytes=1024)) as one,
        Communicator(device=gpu, options=patient(graphs=False)) as other,
    ):
        draws = [GpuDraws(each, gpu, seed + salt, max_bytes) for salt, each in enumerate((one, other))]
        return all_right(EitherDraws(draws, seed), count)


@contextmanager
def _copies_kept() -> Iterator[None]:
    """Keeps copies of inputs, as the allocator of a GPU does until its stream has come to the end of the call."""
    kept = list[Any]()

    def keeping(copy: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def made(tensor: Any) -> Any:
            found = copy(tensor)
            given = getattr(tensor, "tensors", [tensor])
            kept.extend(one for one in getattr(found, "tensors", [found]) if all(one is not each for each in given))
            return found

        return made

    with patch.object(submitter, "sendable", keeping(sendable)), patch.object(submitter, "copied", keeping(copied)):
        yield


def view(tensor: Any) -> Any:
    """The same bytes, which does not keep them: as a kernel sees them, for which the host does not wait."""
    raw = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return torch.frombuffer(raw, dtype=tensor.dtype).view(tensor.shape)


def steps_in_stream_order(session: Session, early: bool, two_streams: bool, steps: int) -> tuple[int, int, int, bool]:
    """Nothing waits on the host: (steps that read wrong data, regions, events made, graphs were replayed)."""
    gpu, wrong = SoftwareGpu(delays(1, session.rank)), list[int]()
    streams = [gpu.new_stream() for _ in range(2 if two_streams else 1)]
    with Communicator(device=gpu, options=PATIENT) as communicator:
        n, rank = communicator.world_size, communicator.rank
        for step in range(steps):
            gpu.use(streams[step % len(streams)])
            shards = communicator.empty(n, 64 << step % 3, dtype=torch.int32, early_release=early)
            seen, number = view(shards), step * 10
            gpu.kernel(lambda seen=seen, number=number: seen[rank].fill_(number + rank))  # type: ignore[misc]
            work = communicator.all_gather(shards, shards[rank], async_op=step % 4 == 3)
            if work is not None:
                work.wait()
            wanted = torch.arange(n, dtype=torch.int32)[:, None] + number

            def read(seen: Any = seen, wanted: Any = wanted, step: int = step) -> None:
                if not bool((seen == wanted).all()):
                    wrong.append(step)

            gpu.kernel(read)
            del shards, work
            if step % 50 == 49:
                gpu.synchronize()
        for stream in streams:
            gpu.use(stream)
            joined(communicator, gpu)
        transport: Any = communicator._transport
        made = len(transport.context.memory._own), len(transport.context.events._made)
        return len(wrong), *made, gpu.driver.launches > 0


def captured(session: Session) -> list[list[float]]:
    """Means that kernels saw of a gather and a sum, captured with them and replayed three times."""
    gpu, seen = SoftwareGpu(), list[list[float]]()
    with Communicator(device=gpu, options=PATIENT) as communicator:
        n, rank = communicator.world_size, communicator.rank
        stream = gpu.new_stream()
        gpu.use(stream)
        shards, total = communicator.empty(n, 100), communicator.empty(3000)
        communicator.all_reduce(total.zero_())  # makes staging, which a capture cannot
        gpu.synchronize()
        shards.fill_(rank)
        gpu.driver.cuStreamBeginCapture(stream, 2)
        gpu.kernel(lambda: shards[rank].add_(1))
        work = communicator.all_gather(shards, shards[rank], async_op=True)
        assert work is not None
        work.wait()
        gpu.kernel(lambda: total.fill_(float(shards.sum())))
        communicator.all_reduce(total)
        gpu.kernel(lambda: seen.append([float(shards.mean()), float(total.mean())]))
        graph = gpu.driver.cuStreamEndCapture(stream)[1]
        for _ in range(3):
            gpu.driver.cuGraphLaunch(graph, stream)
        joined(communicator, gpu)
    return seen


def refused_in_a_capture(session: Session) -> list[str]:
    """What is said to an early release, to a region to be made beside the capture, and to a call with neither."""
    gpu, told = SoftwareGpu(), list[str]()
    with Communicator(device=gpu, options=PATIENT) as communicator:
        n, rank = communicator.world_size, communicator.rank
        held, plain = [communicator.empty(n, 8, early_release=True)], communicator.empty(n, 8)
        gpu.driver.cuStreamBeginCapture(gpu.current_stream(), 2)
        told.append(said(lambda: communicator.all_gather(held[0], held[0][rank]))[0])
        told.append(said(lambda: communicator.empty(1 << 24))[0])
        communicator.record_stream(held[0])
        held.clear()  # in the graph for ever: its block is not given to anyone else
        told.append(said(lambda: communicator.all_gather(plain, plain[rank]))[0])
        gpu.driver.cuStreamEndCapture(gpu.current_stream())
        again = communicator.empty(n, 8, early_release=True)
        again[rank] = rank
        communicator.all_gather(again, again[rank])
        gpu.synchronize()
        told.append(f"{again[:, 0].tolist()} in block {communicator._transport.early._count - 1}")
    return told


def captured_again(session: Session, times: int) -> list[list[bool]]:
    """By channel, of which captures a call's end is kept after so many: those of no capture, then by their number.

    Calls of channel 1 are on a stream of their own, in the capture of which the current one is the origin.
    """
    gpu, numbers = SoftwareGpu(), [0]
    with Communicator(device=gpu, options=patient(channels=2)) as communicator:
        stream = gpu.current_stream()
        shards = [communicator.empty(communicator.world_size, 8) for _ in range(2)]
        for _ in range(times):
            gpu.driver.cuStreamBeginCapture(stream, 2)
            numbers.append(gpu.capture_of(stream))
            for channel, one in enumerate(shards):
                for _ in range(2):
                    work = communicator.all_gather(one, one[0], channel=channel, async_op=channel == 1)
                    if work is not None:
                        work.wait()
            gpu.driver.cuStreamEndCapture(stream)
        transport: Any = communicator._transport
        return [[number in channel.last for number in numbers] for channel in transport.channels]


def died_in_a_capture(session: Session) -> list[int]:
    """Bytes that are free while a tensor of 1 MiB lives, and when it has died in a capture that has ended since."""
    gpu, free = SoftwareGpu(), list[int]()
    with Communicator(device=gpu, options=PATIENT) as communicator:
        transport: Any = communicator._transport
        stream, other = gpu.new_stream(), gpu.new_stream()
        gpu.use(stream)
        held = [communicator.empty(1 << 20, dtype=torch.uint8)]
        free.append(transport.pool.free_bytes)
        gpu.driver.cuStreamBeginCapture(stream, 2)
        held.clear()
        gpu.use(other)
        communicator.empty(16)  # asks whether the memory may be used again
        gpu.driver.cuStreamEndCapture(stream)
        free.append(transport.pool.free_bytes)
    return free


def refused(session: Session) -> list[str]:
    """What is said to calls that cannot be made, before anything is sent; a good call ends well after them."""
    gpu = SoftwareGpu()
    with Communicator(device=gpu, options=PATIENT) as communicator:
        n, rank = communicator.world_size, communicator.rank
        early, good = communicator.empty(n, 8, early_release=True), communicator.empty(n, 8).fill_(rank)
        told = [
            said(lambda: communicator.reduce_scatter(early[0], early))[0],
            said(lambda: communicator.broadcast(early))[0],
            said(lambda: communicator.recv(torch.zeros(3), (rank + 1) % n))[0],
            said(lambda: communicator.record_stream(torch.zeros(3)))[0],
        ]
        communicator.all_gather(good, good[rank])
        gpu.synchronize()
        return [*told, str(good[:, 0].tolist())]


def sharing_a_gpu(session: Session, share: list[bool | None]) -> str:
    """Return what rank r is told when it opens a communicator with `share_gpu=share[r]`."""
    return said(lambda: Communicator(device=SoftwareGpu(), options=patient(share_gpu=share[session.rank])).close())[0]


def in_place_on_one(session: Session) -> list[float]:
    """Return what every rank's row holds after a gather that is in place on rank 0 alone."""
    communicator = Communicator(device=(gpu := SoftwareGpu()), options=PATIENT)
    shards = communicator.empty(communicator.world_size, 64)
    mine = shards[0].zero_() if session.rank == 0 else torch.full((64,), float(session.rank))
    communicator.all_gather(shards, mine)
    joined(communicator, gpu)
    found = [float(row.unique()) for row in shards]
    session.gather(0)
    communicator.close()
    return found


def other_places(session: Session, late: int) -> tuple[str, int, float]:
    """What is said when outputs lie at different places and rank `late` comes last; how many copies ran before."""
    early_copies, communicators = list[str](), list[Communicator]()

    def note(name: str) -> None:
        transport: Any = communicators[0]._transport if communicators else None
        if name == "copy" and transport.context.failure.error is None:
            early_copies.append(name)

    gpu = SoftwareGpu(note)
    communicator = Communicator(device=gpu, options=PATIENT)
    communicators.append(communicator)
    n, rank = communicator.world_size, communicator.rank
    extra = communicator.empty(4096, dtype=torch.uint8) if rank == 0 else communicator.empty(8, dtype=torch.uint8)
    shards = communicator.empty(n, 1000, dtype=torch.uint8)
    if rank == late:
        time.sleep(0.3)

    def call() -> None:
        communicator.all_gather(shards, torch.full((1000,), rank, dtype=torch.uint8))
        joined(communicator, gpu)

    told, _, seconds = said(call)
    session.gather(0)
    communicator.close()
    del extra
    return told, len(early_copies), seconds


def one_stays_away(session: Session) -> tuple[str, tuple[int, ...]]:
    """What ranks are told when rank 1 does not call."""
    gpu = SoftwareGpu()
    communicator = Communicator(device=gpu, options=CommunicatorOptions(timeout_s=0.5))
    tensor = communicator.empty(100).zero_()

    def call() -> None:
        if session.rank != 1:
            communicator.all_reduce(tensor)
        gpu.synchronize()
        time.sleep(0.2 if session.rank != 1 else 0.0)
        communicator.check()

    text, ranks, _ = said(call)
    session.gather(0)
    communicator.close()
    return text, ranks


def a_long_kernel(session: Session, timeout_s: float, busy_s: float) -> str:
    """What is said when all ranks call behind kernels that take longer than the time-out."""
    gpu = SoftwareGpu()
    with Communicator(device=gpu, options=CommunicatorOptions(timeout_s=timeout_s)) as communicator:
        tensor = communicator.empty(100).fill_(1)
        communicator.all_reduce(tensor)  # makes staging
        gpu.kernel(lambda: time.sleep(busy_s))

        def call() -> None:
            communicator.all_reduce(tensor)
            joined(communicator, gpu)

        return said(call)[0]


def one_behind_the_other(session: Session, timeout_s: float, late_s: float) -> str:
    """What is said when two calls are under way at once and rank 1's GPU comes late to each of them."""
    gpu = SoftwareGpu()
    with Communicator(device=gpu, options=CommunicatorOptions(timeout_s=timeout_s)) as communicator:
        tensor = communicator.empty(100).fill_(1)
        communicator.all_reduce(tensor)  # makes staging

        def call() -> None:
            works = []
            for _ in range(2):
                if session.rank == 1:
                    gpu.kernel(lambda: time.sleep(late_s))
                works.append(communicator.all_reduce(tensor, async_op=True))
            for work in works:
                assert work is not None
                work.wait()
            joined(communicator, gpu)

        return said(call)[0]


def reserved(session: Session) -> tuple[int, int, str]:
    """(regions with 1 MiB reserved, regions after tensors of so much); what is said to a hook on a GPU."""
    gpu = SoftwareGpu()
    with Communicator(device=gpu, options=patient(reserve_bytes=1 << 20)) as communicator:
        transport: Any = communicator._transport
        before = len(transport.context.memory._own)
        tensors = [communicator.empty(1 << 19, dtype=torch.uint8) for _ in range(2)]
        told = said(lambda: Communicator(device=gpu, before_step=lambda program, step: None))[0]
        return before, len(transport.context.memory._own) + 0 * len(tensors), told


def nothing(session: Session) -> tuple[tuple[int, ...], str, int]:
    """Shape and device of a tensor without elements, and the bytes of regions that it took."""
    with Communicator(device=SoftwareGpu(), options=PATIENT) as communicator:
        tensor = communicator.empty(0, 5)
        transport: Any = communicator._transport
        return tuple(tensor.shape), tensor.device.type, transport.pool.free_bytes


def sums_on(session: Session, sum_sms: int | None) -> tuple[set[int | None], float]:
    """On how many SMs an all_reduce adds up, and what comes out."""
    gpu = SoftwareGpu()
    with Communicator(device=gpu, options=patient(sum_sms=sum_sms)) as communicator:
        total = communicator.empty(100).fill_(session.rank + 1.0)
        communicator.all_reduce(total)
        gpu.synchronize()
        return gpu.summed_on, float(total.mean())


def growth_alone(session: Session) -> tuple[str, tuple[int, ...]]:
    """What rank 0 is told that alone asks for memory that has to be made by all."""
    communicator = Communicator(device=SoftwareGpu(), options=CommunicatorOptions(timeout_s=0.5))
    text, ranks, _ = said(lambda: communicator.empty(100)) if session.rank == 0 else ("", (), 0.0)
    session.gather(0)
    communicator.close()
    return text, ranks


def left_behind(session: Session) -> list[str]:
    before, gpu = set(threading.enumerate()), SoftwareGpu()
    with Communicator(device=gpu, options=PATIENT) as communicator:
        tensor = communicator.empty(1000).fill_(1)
        for _ in range(3):
            communicator.all_reduce(tensor, async_op=True)
    after = set(threading.enumerate()) - before - {stream.thread for stream in gpu.driver.streams.values()}
    return sorted(thread.name for thread in after if isinstance(thread, threading.Thread))


def cache_of_two(session: Session, steps: int) -> tuple[int, int, int, int]:
    """(right results, what is kept, what waits to go, graphs that are open) of many programs where two may be kept."""
    gpu, right = SoftwareGpu(), 0
    with Communicator(device=gpu, options=PATIENT) as communicator:
        transport: Any = communicator._transport
        transport.channels[0]._cache._most = 2
        tensor = communicator.empty(1 << 12)
        for step in range(steps):
            part = tensor[: 100 * (1 + step // 3 % 5)].fill_(1)
            communicator.all_reduce(part)
            gpu.synchronize()
            right += bool((part == session.world_size).all())
        cache = transport.channels[0]._cache
        graphs = sum(issubclass(type(each), Graph) and bool(each._executable) for each in gc.get_objects())
        return right, len(cache), len(cache._leaving), graphs


def cache_of_two_in_captures(session: Session, captures: int) -> tuple[int, int]:
    """(right results, what waits to go) of five programs in each capture, replayed at the end, where two are kept."""
    gpu, graphs, seen = SoftwareGpu(), list[Any](), list[bool]()

    def note(part: torch.Tensor) -> None:
        seen.append(bool((part == session.world_size).all()))

    with Communicator(device=gpu, options=PATIENT) as communicator:
        transport: Any = communicator._transport
        cache = transport.channels[0]._cache
        cache._most = 2
        stream, tensor = gpu.current_stream(), communicator.empty(1 << 12)
        communicator.all_reduce(tensor)  # makes staging, which a capture cannot
        gpu.synchronize()
        for _ in range(captures):
            gpu.driver.cuStreamBeginCapture(stream, 2)
            for step in range(5):
                part = tensor[: 100 * (1 + step)]
                gpu.kernel(partial(part.fill_, 1))
                communicator.all_reduce(part)
                gpu.kernel(partial(note, part))
            graphs.append(gpu.driver.cuStreamEndCapture(stream)[1])
        for graph in graphs:
            gpu.driver.cuGraphLaunch(graph, stream)
        joined(communicator, gpu)
        return sum(seen), len(cache._leaving)


def in_a_new_thread(action: Callable[[], object]) -> str:
    told = list[str]()
    thread = threading.Thread(target=lambda: told.append(said(action)[0]))
    thread.start()
    thread.join()
    return told[0]


def every_verb_in_a_new_thread(session: Session) -> dict[str, str]:
    """What each verb of a communicator is told, each in a thread of its own that has no context, but for ""."""
    gpu, made = SoftwareGpu(), dict[str, Any]()
    n, rank, mine, received = session.world_size, session.rank, torch.ones(4, 8), torch.zeros(4, 8)

    def opens() -> None:
        made["all"] = Communicator(device=gpu, options=patient(mailbox_bytes=4096, channels=3))

    told = {"opens": in_a_new_thread(opens)}
    communicator: Communicator = made["all"]

    def gathers_early() -> None:
        early = communicator.empty(n, 8, early_release=True)
        communicator.all_gather(early, early[rank])

    def cuts(action: Callable[[Any], object]) -> None:
        rows = communicator.empty(n * 4, 8)
        work = communicator.partitioned_all_gather(rows, mine, chunk_rows=2, supplied=False, channel=1)
        action(work)
        work.finish()

    def sends() -> None:
        work = communicator.send(mine, (rank + 1) % n, async_op=True)
        communicator.recv(received, (rank - 1) % n)
        assert work is not None
        work.wait()

    def begins() -> None:
        made["work"] = communicator.all_reduce(made["empty"][0], async_op=True)

    def call(name: str) -> None:
        CALLS[name](communicator, made["empty"].view(-1))

    verbs: dict[str, Callable[[], object]] = {
        "empty": lambda: made.update(empty=communicator.empty(n, 600).fill_(1)),
        "empties again": lambda: communicator.empty(1 << 24),
        "is_symmetric": lambda: communicator.is_symmetric(made["empty"]),
        "record_stream": lambda: communicator.record_stream(made["empty"]),
        "reuses": lambda: communicator.empty(1 << 24),
        "gathers_early": gathers_early,
        "gathers_early again": gathers_early,
        **{name: partial(call, name) for name in COLLECTIVES},
        "sends": sends,
        "begins": begins,
        "is_completed": lambda: made["work"].is_completed(),
        "wait": lambda: made["work"].wait(),
        "waits on the host": lambda: made["work"].wait(TIMEOUT_S),
        "exception": lambda: made["work"].exception(),
        "ready": lambda: cuts(lambda work: work.ready(1)),
        "arrived": lambda: cuts(lambda work: (work.ready(9), work.arrived(9))),
        "check": communicator.check,
        "close": communicator.close,
    }
    for name, verb in verbs.items():
        told[name] = in_a_new_thread(verb)
        gpu.synchronize()
    return {name: text for name, text in told.items() if text}


def ended_without_peers(session: Session, how: str) -> tuple[str, str]:
    """What is said to the work of a call that rank 1 never makes, when rank 0 aborts or drops the communicator."""
    communicator: Any = Communicator(device=(gpu := SoftwareGpu()), options=CommunicatorOptions(timeout_s=FAR_S))
    shards = communicator.empty(session.world_size, 100).zero_()
    told, again = "", ""
    if session.rank == 0:
        work: Any = communicator.all_gather(shards, shards[0], async_op=True)
        if how == "abort":
            communicator.abort()
            again = said(communicator.close)[0]
        else:
            del communicator
            gc.collect()
        told = said(work.wait)[0]
        gpu.synchronize()
    session.gather(0)
    return told, again
