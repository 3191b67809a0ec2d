"""What ranks run to test collectives: random ones beside what must come out, and ranks that fail in every way."""

import atexit
import gc
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.cpu.call import reference
from counterpoint.collectives.host.group import torch_function
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.program import tuning
from counterpoint.collectives.program.reductions import Reduction
from counterpoint.collectives.program.steps import Program, Step
from counterpoint.machine.profile import Profile
from counterpoint.measurement.session import Session
from tests.support.ranks import PATIENT, TIMEOUT_S, error_of, patient, said
from tests.support.software_gpu import SoftwareGpu

DTYPES = (
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn, torch.uint32,
)  # fmt: skip
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SUMMED = (*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
WIDENED = {torch.bfloat16: torch.float32, torch.float16: torch.float32}
MOVEMENT = (
    "all_gather", "all_gather_coalesced", "all_to_all", "uneven", "broadcast", "scatter", "gather", "send_recv",
    "barrier",
)  # fmt: skip
SENT_TO_ALL = ("all_gather", "all_to_all")  # these may release their outputs early
REDUCTIONS = ("reduce_scatter", "reduce_scatter_coalesced", "all_reduce")
OPERATIONS = (*MOVEMENT, *REDUCTIONS)
DEVICES = pytest.mark.parametrize("device", [None, SoftwareGpu], ids=["CPU", "software GPU"])


@dataclass
class Case:
    """A collective under way: `wanted` is what `output` must hold, bit by bit."""

    name: str
    work: Any
    output: Any
    wanted: Any

    def check(self) -> None:
        assert self.work is None or self.work.wait()
        if self.output is not None:
            assert torch.equal(_bits(self.output), _bits(self.wanted)), f"wrong data of {self.name}"


class Draws:
    """One seeded sequence of random collectives: the same on every rank, and every rank knows everyone's inputs."""

    operations: tuple[str, ...] = OPERATIONS
    summed: tuple[torch.dtype, ...] = SUMMED

    def __init__(self, communicator: Any, seed: int, max_bytes: int) -> None:
        self.comm, self.random, self.max_bytes = communicator, random.Random(seed), max_bytes
        self.rank, self.n = communicator.rank, communicator.world_size

    def start(self) -> Case:
        name = self.random.choice([name for name in self.operations if self.n > 1 or name != "send_recv"])
        self.options: dict[str, Any] = {"channel": self.random.randrange(self.comm.channels), "async_op": True}
        dtype = self.random.choice(self.summed if name in REDUCTIONS else DTYPES)
        numel = int(2 ** self.random.uniform(0, self.max_bytes.bit_length()) / dtype.itemsize / self.n)
        numel = self.random.choice([0, 1, numel, numel, numel])
        self.name, self.most = name, self.n * max(1, numel)  # elements of any output
        work, output, wanted = getattr(self, f"_{name}")(dtype, numel)
        return Case(f"{name} of {numel} {dtype}", work, output, wanted)

    def inputs(self, dtype: Any, numel: int) -> list[Any]:
        state = torch.Generator().manual_seed(self.random.getrandbits(40))
        if dtype in FLOATS:
            return [torch.randn(numel, generator=state).to(dtype) for _ in range(self.n)]
        if dtype == torch.bool:
            return [torch.rand(numel, generator=state) < 0.5 for _ in range(self.n)]
        size = (self.n, max(1, numel) * dtype.itemsize)
        return [row[:numel] for row in torch.randint(0, 256, size, dtype=torch.uint8, generator=state).view(dtype)]

    def room(self, dtype: Any, numel: int) -> Any:
        """An output of either kind of memory, at any element."""
        skipped, self.early = self.random.randrange(4), self.random.random() < 0.5 and self.name in SENT_TO_ALL
        if self.random.random() < 0.5:
            return self.comm.empty(numel + skipped, dtype=dtype, early_release=self.early)[skipped:]
        return torch.empty(numel + skipped, dtype=dtype)[skipped:]

    def laid_out(self, rows: list[Any], *, flat: bool = False) -> tuple[list[Any], Any]:
        """The rows of all ranks, and the own one in memory of a drawn layout; `flat`: in one dimension."""
        own, numel = rows[self.rank], rows[0].numel()
        layouts = ("plain", "sliced", "strided", "expanded", *(() if flat else ("transposed", "overlapping")))
        match self.random.choice(layouts):
            case "sliced":
                return rows, torch.cat([own[:3], own])[min(3, numel) :]
            case "strided":
                return rows, self.strided(own)
            case "expanded" if numel:
                rows = [row[:1].expand(numel) for row in rows]
                return rows, rows[self.rank]
            case "transposed" if numel % 2 == 0:
                return rows, own.view(2, -1).t().contiguous().t()
            case "overlapping" if numel and numel % 3 == 0:
                windows = [row[: numel // 3 + 2].unfold(0, numel // 3, 1) for row in rows]
                return [window.reshape(-1) for window in windows], windows[self.rank]
        return rows, own

    def strided(self, own: Any) -> Any:
        """The same in every third place."""
        return torch.zeros(3 * len(own), dtype=own.dtype)[::3].copy_(own)

    def part(self, whole: Any, numel: int, rank: int) -> Any:
        """So many elements of `whole`: where the block of `rank` is, on all ranks, or another one or parts of two."""
        further, shift = self.random.choice([0, 0, self.random.randrange(self.n)]), self.random.choice([0, 0, 0.5])
        further, shift = (0, 0) if self.early else (further, shift)  # the rest is the peers' by now
        start = int(((rank + further) % self.n + shift) * numel)
        start -= numel if start + numel > whole.numel() else 0
        return whole[max(0, start) :][:numel]

    def _all_gather(self, dtype: Any, numel: int) -> tuple[Any, ...]:
        inputs, mine = self.laid_out(self.inputs(dtype, numel))
        output = self.room(dtype, numel * self.n)
        if self.random.random() < 0.5:
            mine = self.part(output, numel, self.rank).copy_(inputs[self.rank])
        return self.comm.all_gather(output, mine, **self.options), output, torch.cat(inputs)

    def symmetric(self, num_bytes: int) -> Any:
        """Bytes of either pool."""
        self.early = self.random.random() < 0.5
        return self.comm.empty(num_bytes, dtype=torch.uint8, early_release=self.early)

    def _all_gather_coalesced(self, dtype: Any, numel: int) -> tuple[Any, ...]:
        """Of up to five tensors of any dtypes, with gaps between them, in any order; in place or not."""
        dtypes = [dtype, *self.random.choices(DTYPES, k=self.random.randrange(5))]
        numels = [numel, *(self.random.choice([0, 1, 7, numel // 3]) for _ in dtypes[1:])]
        laid_out = [self.laid_out(self.inputs(one, count)) for one, count in zip(dtypes, numels, strict=True)]
        inputs, mine = [rows for rows, _ in laid_out], [own for _, own in laid_out]
        sizes = [-(-count * self.n * one.itemsize // 16) * 16 for one, count in zip(dtypes, numels, strict=True)]
        starts = list(accumulate([0, *(size + self.random.choice([0, 16, 160]) for size in sizes)]))
        room = self.symmetric(starts[-1] or 16)
        outputs = [
            room[start : start + count * self.n * one.itemsize].view(one)
            for start, count, one in zip(starts[:-1], numels, dtypes, strict=True)
        ]
        wanted = [torch.cat(each) for each in inputs]
        if self.random.random() < 0.5:
            own = [each[self.rank] for each in inputs]
            mine = [self.part(whole, len(one), self.rank).copy_(one) for whole, one in zip(outputs, own, strict=True)]
        order = self.random.sample(range(len(outputs)), len(outputs))
        work = self.comm.all_gather_coalesced([outputs[i] for i in order], [mine[i] for i in order], **self.options)
        return work, outputs, wanted

    def _reduce_scatter_coalesced(self, dtype: Any, numel: int) -> tuple[Any, ...]:
        """Of up to five tensors that need not be shared equally, kept as they are added up or as they were sent."""
        numels = [numel * self.n, *(self.random.choice([0, 1, 7, numel]) for _ in range(self.random.randrange(5)))]
        laid_out, how = [self.laid_out(self.inputs(dtype, count)) for count in numels], self._how(dtype)
        inputs, mine = [rows for rows, _ in laid_out], [own for _, own in laid_out]
        kept = self.random.choice([dtype, WIDENED.get(dtype, dtype)])
        how = replace(how, result=str(kept)[6:])
        shares = [-(-count // self.n) for count in numels]
        outputs = [torch.zeros(share, dtype=kept) for share in shares]
        whole = [
            torch.cat([reference(each, how), torch.zeros(share * self.n - count, dtype=kept)])
            for each, count, share in zip(inputs, numels, shares, strict=True)
        ]
        wanted = [one[self.rank * share :][:share] for one, share in zip(whole, shares, strict=True)]
        options = {"factor": how.factor, **self.options}
        return self.comm.reduce_scatter_coalesced(outputs, mine, how.op, **options), outputs, wanted

    def _all_to_all(self, dtype: Any, numel: int) -> tuple[Any, ...]:
        inputs, mine = self.laid_out(self.inputs(dtype, numel * self.n), flat=True)
        output = self.room(dtype, numel * self.n)
        wanted = torch.cat([each[self.rank * numel : (self.rank + 1) * numel] for each in inputs])
        return self.comm.all_to_all(output, mine, **self.options), output, wanted

    def _uneven(self, dtype: Any, numel: int) -> tuple[Any, ...]:
        splits = [[self.random.choice([0, 1, numel]) for _ in range(self.n)] for _ in range(self.n)]
        inputs = [self.inputs(dtype, sum(row))[rank] for rank, row in enumerate(splits)]
        mine = inputs[self.rank]
        if self.random.random() < 0.5:
            mine = self.strided(mine)
        wanted = torch.cat([each.split(row)[self.rank] for each, row in zip(inputs, splits, strict=True)])
        output, coming = self.room(dtype, wanted.numel()), [row[self.rank] for row in splits]
        work = self.comm.all_to_all(output, mine, coming, splits[self.rank], **self.options)
        return work, output, wanted

    def _broadcast(self, dtype: Any, numel: int) -> tuple[Any, ...]:
        inputs, output, src = self.inputs(dtype, numel), self.room(dtype, numel), self.random.randrange(self.n)
        output.copy_(inputs[self.rank])
        return self.comm.broadcast(output, src, **self.options), output, inputs[src]

    def _scatter(self, dtype: Any, numel: int) -> tuple[Any, ...]:
        src, output = self.random.randrange(self.n), self.room(dtype, numel)
        inputs, mine = self.laid_out(self.inputs(dtype, numel * self.n))
        wanted = inputs[src][self.rank * numel : (self.rank + 1) * numel]
        if self.random.random() < 0.3:
            mine = self.room(dtype, numel * self.n).copy_(inputs[self.rank])
            output = self.part(mine, numel, src)
        return self.comm.scatter(output, mine if src == self.rank else None, src, **self.options), output, wanted

    def _gather(self, dtype: Any, numel: int) -> tuple[Any, ...]:
        dst, output = self.random.randrange(self.n), self.room(dtype, numel * self.n)
        inputs, mine = self.laid_out(self.inputs(dtype, numel))
        if self.random.random() < 0.3:
            mine = self.part(output, numel, self.rank).copy_(inputs[self.rank])
        output = output if dst == self.rank else None
        return self.comm.gather(mine, output, dst, **self.options), output, torch.cat(inputs)

    def _send_recv(self, dtype: Any, numel: int) -> tuple[Any, ...]:
        one, other = self.random.sample(range(self.n), 2)
        kind, output = self.random.choice(("one way", "both", "in place")), self.room(dtype, numel)
        inputs, mine = self.laid_out(self.inputs(dtype, numel))
        peer = other if self.rank == one else one
        if self.rank not in (one, other):
            return None, None, None
        if kind != "one way":
            mine = output.copy_(inputs[self.rank]) if kind == "in place" else mine
            return self.comm.send_recv(output, mine, peer, **self.options), output, inputs[peer]
        if self.rank == one:
            return self.comm.send(mine, other, **self.options), None, None
        return self.comm.recv(output, one, **self.options), output, inputs[one]

    def _barrier(self, dtype: Any, numel: int) -> tuple[Any, ...]:
        return self.comm.barrier(**self.options), None, None

    def _reduce_scatter(self, dtype: Any, numel: int) -> tuple[Any, ...]:
        inputs, mine = self.laid_out(self.inputs(dtype, numel * self.n))
        output, how = self.room(dtype, numel), self._how(dtype)
        wanted = reference(inputs, how)[self.rank * numel : (self.rank + 1) * numel]
        if self.random.random() < 0.3:
            mine = self.room(dtype, numel * self.n).copy_(inputs[self.rank])
            output = self.part(mine, numel, self.rank)
        return self.comm.reduce_scatter(output, mine, how.op, factor=how.factor, **self.options), output, wanted

    def _all_reduce(self, dtype: Any, numel: int) -> tuple[Any, ...]:
        inputs, output, how = self.inputs(dtype, numel), self.room(dtype, numel), self._how(dtype)
        output.copy_(inputs[self.rank])
        return self.comm.all_reduce(output, how.op, factor=how.factor, **self.options), output, reference(inputs, how)

    def _how(self, dtype: Any) -> Reduction:
        op = self.random.choice(("sum", "max", "min", *(("avg", "premul_sum") if dtype in FLOATS else ())))
        return Reduction(op=op, dtype=str(dtype)[6:], factor=0.3 if op == "premul_sum" else 1.0)


def _bits(tensor: Any) -> Any:
    if isinstance(tensor, list):
        return torch.cat(list(map(_bits, tensor)))
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def delays(seed: int, rank: int) -> Callable[[Program, Step], None]:
    """A hook that lets a rank linger before some steps."""
    dice = random.Random(f"{seed} {rank}")

    def linger(program: Program, step: Step) -> None:
        if dice.random() < 0.05:
            time.sleep(dice.random() * 2e-3)

    return linger


def all_right(draws: Any, count: int) -> int:
    under_way, right = list[Case](), 0
    for _ in range(count):
        under_way.append(draws.start())
        if len(under_way) == 4:
            under_way.pop(draws.random.randrange(4)).check()
            right += 1
    for case in under_way:
        case.check()
        right += 1
    return right


def random_collectives(session: Session, seed: int, count: int, max_bytes: int, chunk_bytes: int = 1024) -> int:
    """How many of `count` random collectives came out right: up to four under way on three channels."""
    with Communicator(
        before_step=delays(seed, session.rank),
        options=patient(
            channels=3,
            chunk_bytes=chunk_bytes,
            staging_bytes=(None, 5000)[seed % 2],
            debug=seed % 2 == 1,
        ),
    ) as communicator:
        return all_right(Draws(communicator, seed, max_bytes), count)


def against_gloo(session: Session, operation: str) -> bool:
    """Whether data that gloo moves comes out the same, bit by bit."""
    n, rank, numel = session.world_size, session.rank, 1001
    mine = torch.randn(n * numel, generator=torch.Generator().manual_seed(rank))
    block, ours, theirs = mine[:numel], torch.zeros(n * numel), torch.zeros(n * numel)
    with Communicator(options=patient(chunk_bytes=256)) as communicator:
        match operation:
            case "all_gather":
                torch_function("all_gather")(theirs, block)
                communicator.all_gather(ours, block)
            case "all_to_all":
                dist.all_to_all_single(theirs, mine)
                communicator.all_to_all(ours, mine)
            case "broadcast":
                dist.broadcast(theirs.copy_(mine), n - 1)
                communicator.broadcast(ours.copy_(mine), n - 1)
            case "scatter":
                dist.scatter(theirs[:numel], list(mine.chunk(n)) if rank == 1 else None, 1)
                communicator.scatter(ours[:numel], mine if rank == 1 else None, 1)
            case "gather":
                dist.gather(block, list(theirs.chunk(n)) if rank == 1 else None, 1)
                communicator.gather(block, ours if rank == 1 else None, 1)
    return torch.equal(ours, theirs)


def errors_of_a_sum(session: Session, operation: str, dtype: Any) -> tuple[float, float]:
    """Relative error against float64: ours, and gloo's."""
    n, numel = session.world_size, 4096
    inputs = [torch.randn(n * numel, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(n)]
    exact = torch.stack(inputs).double().sum(0)
    ours, theirs = inputs[session.rank].clone(), inputs[session.rank].clone()
    with Communicator(options=patient(chunk_bytes=256)) as communicator:
        if operation == "all_reduce":
            communicator.all_reduce(ours)
            dist.all_reduce(theirs)
        else:
            communicator.reduce_scatter(ours[:numel], ours.clone())
            torch_function("reduce_scatter")(theirs[:numel], theirs.clone())
            exact, ours, theirs = exact.view(n, numel)[session.rank], ours[:numel], theirs[:numel]
    norm = exact.norm()
    return float((ours.double() - exact).norm() / norm), float((theirs.double() - exact).norm() / norm)


CALLS: dict[str, Callable[[Communicator, Any], object]] = {
    "all_reduce": lambda c, t: c.all_reduce(t),
    "all_reduce max": lambda c, t: c.all_reduce(t, "max"),
    "premul_sum 2": lambda c, t: c.all_reduce(t, "premul_sum", factor=2),
    "premul_sum 3": lambda c, t: c.all_reduce(t, "premul_sum", factor=3),
    "shorter all_reduce": lambda c, t: c.all_reduce(t[:-1]),
    "int32 all_reduce": lambda c, t: c.all_reduce(t.view(torch.int32)),
    "all_gather": lambda c, t: c.all_gather(t, t[: t.numel() // c.world_size]),
    "broadcast": lambda c, t: c.broadcast(t, 0),
    "broadcast of 1": lambda c, t: c.broadcast(t, 1),
    "barrier": lambda c, t: c.barrier(),
    "send": lambda c, t: c.send(t, 1 - c.rank),
    "recv": lambda c, t: c.recv(t, 1 - c.rank),
    "shorter recv": lambda c, t: c.recv(t[1:], 1 - c.rank),
    "even all_to_all": lambda c, t: c.all_to_all(t, t.clone()),
    "uneven all_to_all": lambda c, t: c.all_to_all(t, t.clone(), *[[t.numel() // c.world_size] * c.world_size] * 2),
    "all to rank 0": lambda c, t: c.all_to_all(t, t.clone(), *[[t.numel(), *[0] * (c.world_size - 1)]] * 2),
}


def call_each_its_own(
    session: Session, names: tuple[str, ...], debug: bool, device: Callable[[], Any] | None = None
) -> tuple[str, tuple[int, ...], float]:
    """What ranks are told when rank r calls `names[r]`, then a barrier, and waits for its device if that is a GPU."""
    gpu = device() if device else None
    options = patient(debug=debug, chunk_bytes=256)
    with Communicator(device=gpu, options=options) as communicator:
        tensor = communicator.empty(6000).zero_() if gpu else torch.zeros(6000)

        def calls() -> None:
            CALLS[names[session.rank]](communicator, tensor)
            communicator.barrier()
            joined(communicator, gpu)

        told = said(calls)
        dist.barrier()  # closing is another thing to be told of
        return told


def one_stays_away(session: Session, absent: int) -> tuple[str, tuple[int, ...], float]:
    """What ranks are told when one of them does not call; and then that one, when it does."""
    with Communicator(options=CommunicatorOptions(timeout_s=0.5)) as communicator:
        tensor = torch.zeros(100)
        if session.rank == absent:
            time.sleep(1.5)
        return said(lambda: communicator.all_reduce(tensor))


def one_closes(session: Session) -> tuple[str, tuple[int, ...], float]:
    """What rank 0 is told when rank 1 closes instead of calling."""
    communicator = Communicator(options=PATIENT)
    if session.rank == 1:
        communicator.close()
    told = said(communicator.barrier) if session.rank == 0 else ("", (), 0.0)
    dist.barrier()
    communicator.close()
    return told


def one_has_a_fault(session: Session) -> str:
    """What each rank raises when a step of rank 1 raises."""

    def fault(program: Program, step: Step) -> None:
        if session.rank == 1:
            raise OSError("the disk is on fire")

    with Communicator(before_step=fault, options=PATIENT) as communicator:
        text = error_of(lambda: communicator.all_reduce(torch.zeros(100)))
        dist.barrier()
        return text


def one_is_killed(
    session: Session, operation: str, at: int, device: Callable[[Any], Any] | None = None
) -> tuple[str, tuple[int, ...], float]:
    """What the others are told when rank 1 is killed before that step of a CPU, or that action of a GPU's streams."""
    count, lock = 0, threading.Lock()

    def kill(*_: object) -> None:
        nonlocal count
        with lock:
            count += 1
            if session.rank == 1 and count > at:
                os.kill(os.getpid(), signal.SIGKILL)

    gpu, options = device(kill) if device else None, patient(chunk_bytes=1024)
    communicator = Communicator(device=gpu, before_step=None if gpu else kill, options=options)
    tensor = communicator.empty(6000).zero_() if gpu else torch.zeros(6000)

    def calls() -> None:
        for _ in range(400):
            CALLS[operation](communicator, tensor)
            joined(communicator, gpu)

    with patch.object(tuning, "TURN_BYTES", 64):  # chunks are pushed in turns
        told = said(calls)
    communicator.close()
    return told


def joined(communicator: Communicator, gpu: Any) -> None:
    """Let the host wait for what a GPU was given, and say what went wrong there."""
    if gpu:
        gpu.synchronize()
        communicator.check()


BAD_CALLS: dict[str, Callable[[Communicator, Any], object]] = {
    "channel=2: allowed are 0 to 1": lambda c, t: c.all_reduce(t, channel=2),
    "broadcast with root=2": lambda c, t: c.broadcast(t, 2),
    "rank {rank} with rank {rank}: allowed are the others": lambda c, t: c.send(t, c.rank),
    "rank {rank} with rank 5": lambda c, t: c.recv(t, 5),
    "its layouts differ": lambda c, t: c.all_to_all(t, t),
    "one kind of split sizes": lambda c, t: c.all_to_all(t, t.clone(), [3, 3]),
    "output is missing on rank {rank}": lambda c, t: c.gather(t, None, c.rank),
    "input was given on rank {rank}": lambda c, t: c.scatter(t, t, 1 - c.rank),
    "(24, 24) bytes on rank {rank}: blocks are even, so give (24, 12)": lambda c, t: c.all_gather(t, t.clone()),
    "(24, 24) bytes on rank {rank}: blocks are even, so give (24, 48)": lambda c, t: c.reduce_scatter(t, t.clone()),
}


def bad_calls(session: Session) -> list[str]:
    """Bad calls that are not told what they should be, and what they are told. A good call ends well after them."""
    with Communicator(options=PATIENT) as communicator:
        tensor, wrong = torch.ones(6), []
        for wanted, call in BAD_CALLS.items():
            text, _, _ = said(lambda call=call: call(communicator, tensor))  # type: ignore[misc]
            if not text.startswith("Misconfigured") or wanted.format(rank=session.rank) not in text:
                wrong.append(f"{wanted}: {text}")
        communicator.all_reduce(tensor)
        return wrong + ([] if bool((tensor == session.world_size).all()) else [f"sum of {tensor}"])


LAYOUTS: dict[str, Callable[[Any], Any]] = {
    "strided": lambda whole: whole[::2],
    "transposed": lambda whole: whole.view(-1, 4).t(),
    "sliced": lambda whole: whole.view(-1, 4)[:, 1:3],
    "expanded": lambda whole: whole[:1].expand(len(whole)),
    "overlapping": lambda whole: whole[: len(whole) // 2 + 1].unfold(0, len(whole) // 2, 1),
    "negated": lambda whole: torch._neg_view(whole),
}

INTO: dict[str, Callable[[Communicator, Any, Any], object]] = {
    "all_gather": lambda c, out, t: c.all_gather(out, t[: out.numel() // c.world_size]),
    "all_gather_coalesced": lambda c, out, t: c.all_gather_coalesced([out], [t[: out.numel() // c.world_size]]),
    "reduce_scatter": lambda c, out, t: c.reduce_scatter(out, t[: out.numel() * c.world_size]),
    "reduce_scatter_coalesced": lambda c, out, t: c.reduce_scatter_coalesced([out], [t[: out.numel() * c.world_size]]),
    "all_reduce": lambda c, out, t: c.all_reduce(out),
    "all_to_all": lambda c, out, t: c.all_to_all(out, t[: out.numel()].view(out.shape)),
    "broadcast": lambda c, out, t: c.broadcast(out),
    "scatter": lambda c, out, t: c.scatter(out, t[: out.numel() * c.world_size] if c.rank == 0 else None),
    "gather": lambda c, out, t: c.gather(t[: out.numel() // c.world_size], out if c.rank == 0 else None),
    "send_recv": lambda c, out, t: c.send_recv(out, t[: out.numel()], 1 - c.rank),
    "coalesced outputs that overlap": lambda c, out, t: c.reduce_scatter_coalesced([t[:4], t[3:7]], [t[8:16], t[8:16]]),
}


def outputs_that_cannot_be_written(session: Session, device: Any = None) -> list[str]:
    """Layouts of outputs, in symmetric memory or not, that are not refused; a good call ends well after them."""
    with Communicator(device=device() if device else None, options=PATIENT) as communicator:
        wrong, tensor = [], torch.ones(64)
        for whole in (communicator.empty(16), torch.zeros(16)):
            for name, call in INTO.items():
                for layout, laid_out in LAYOUTS.items():
                    if name == "gather" and session.rank != 0:
                        continue  # it has no output
                    text, _, _ = said(partial(call, communicator, laid_out(whole), tensor))
                    if not text.startswith("Misconfigured"):
                        wrong.append(f"{name} into {layout}: {text}")
        work = communicator.all_reduce(tensor, async_op=True)
        assert work is not None
        assert work.wait(20.0)
        return wrong


def too_many_slices(session: Session) -> tuple[str, float]:
    """What is said to a staging of 4 kB for 16 MiB, and a sum that fits after it."""
    with Communicator(options=patient(staging_bytes=4096)) as communicator:
        large, small = torch.ones(1 << 22), torch.ones(1 << 12)
        told = said(lambda: communicator.reduce_scatter(large[: len(large) // communicator.world_size], large))[0]
        communicator.reduce_scatter(small[: len(small) // communicator.world_size], small.clone())
        return told, float(small[0])


def other_splits(session: Session) -> str:
    """What ranks are told of which each expects three rows and is sent one."""
    with Communicator(options=PATIENT) as communicator:
        told = said(lambda: communicator.all_to_all(torch.zeros(6), torch.zeros(2), [3, 3], [1, 1]))[0]
        dist.barrier()
        return told


def made_with(session: Session, options: list[dict[str, Any]]) -> str:
    """What rank r is told when it makes a communicator with `options[r]`."""
    given = options[session.rank]
    device = given.pop("device", None)
    return said(lambda: Communicator(device=device, options=CommunicatorOptions(**given)).close())[0]


def ended_as_python_does(thing: Any) -> bool:
    """Forks a child that leaves the `with` of `thing` and runs all finalizers, as `sys.exit` does: did it end well?

    What `sys.exit` does after that is not done: with gloo, torch's own teardown hangs or crashes in a forked child.
    """
    child = os.fork()
    if not child:
        try:
            thing.__exit__(None, None, None)
            atexit._run_exitfuncs()
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def _ended_by_finalizers(communicator: Communicator) -> bool:
    return ended_as_python_does(nullcontext())


def _ended_by_multiprocessing(communicator: Communicator) -> bool:
    child = multiprocessing.get_context("fork").Process(target=communicator.close)
    child.start()
    child.join()
    return child.exitcode == 0


def _ended_by_data_loader(communicator: Communicator) -> bool:
    numbers: Any = range(8)
    loader = torch.utils.data.DataLoader(numbers, num_workers=2, multiprocessing_context="fork")
    return [int(one) for batch in loader for one in batch] == list(range(8))


def _refused_in_the_child(communicator: Communicator) -> bool:
    child = os.fork()
    if not child:
        told = said(lambda: communicator.all_reduce(torch.ones(8)))[0]
        os._exit(0 if told.startswith("Misconfigured: a call in process") else 1)
    return os.waitpid(child, 0)[1] == 0


CHILDREN: dict[str, Callable[[Communicator], bool]] = {
    "os.fork": ended_as_python_does,
    "os.fork without with": _ended_by_finalizers,
    "multiprocessing": _ended_by_multiprocessing,
    "DataLoader": _ended_by_data_loader,
    "refused": _refused_in_the_child,
}


def forks(session: Session, how: str, device: Any = None) -> tuple[bool, float]:
    """Whether a child of each rank has ended well, and an all_reduce after that."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # these may have none
    with Communicator(device=device() if device else None, options=PATIENT) as communicator:
        well, tensor = CHILDREN[how](communicator), torch.ones(8)
        session.gather(0)  # every child has ended
        time.sleep(0.6 * session.rank)  # so that rank 0 looks whether the one that it waits for has closed
        work = communicator.all_reduce(tensor, async_op=True)
        assert work is not None
        assert work.wait(20.0)
        if device:
            communicator._transport.context.gpu.synchronize()  # type: ignore[attr-defined]
        return well, float(tensor.sum())


def repr_with(session: Session, profile: Profile | None) -> str:
    with Communicator(options=CommunicatorOptions(profile=profile)) as communicator:
        return repr(communicator)


def called_after_closing(session: Session) -> str:
    communicator = Communicator()
    communicator.close()
    communicator.close()  # once is enough, twice does no harm
    return said(communicator.barrier)[0]


def an_impatient_wait(session: Session) -> tuple[str, bool, bool]:
    """What rank 0 is told that waits 50 ms for rank 1, which comes later; whether it has ended then, or does."""
    with Communicator(options=PATIENT) as communicator:
        if session.rank == 1:
            time.sleep(0.3)
        work = communicator.barrier(async_op=True)
        assert work is not None
        told = said(lambda: work.wait(0.05))[0] if session.rank == 0 else ""
        return told, work.is_completed() and session.rank == 0, work.wait() and work.exception() is None


def channels_do_not_wait(session: Session, device: Any = None) -> tuple[bool, bool]:
    """Whether a call on one channel ends while another waits for rank 1; and whether that one ends, too."""
    gpu = device() if device else None
    with Communicator(device=gpu, options=PATIENT) as communicator:
        tensor = communicator.empty(10).fill_(1)
        early = communicator.barrier(channel=1, async_op=True) if session.rank == 0 else None
        communicator.all_reduce(tensor, channel=0)
        joined(communicator, gpu)
        waits = early is None or not early.is_completed()
        session.gather(0)  # rank 1 comes to the other channel only now
        late = early or communicator.barrier(channel=1, async_op=True)
        assert late is not None
        return waits, late.wait(TIMEOUT_S) and bool((tensor == session.world_size).all())


def groups_at_once(session: Session) -> list[float]:
    """Sums over two communicators of everyone and one of ranks 0 and 2, started in another order on every rank."""
    some = dist.new_group([0, 2])
    communicators = [Communicator(options=PATIENT), Communicator(options=PATIENT)]
    if session.rank in (0, 2):
        communicators.append(Communicator(some, options=PATIENT))
    tensors = [torch.full((1000,), float(session.rank + 1)) for _ in communicators]
    order = [(session.rank + index) % len(communicators) for index in range(len(communicators))]
    started = [communicators[i].all_reduce(tensors[i], async_op=True) for i in order]
    assert all(work is not None and work.wait() for work in started)
    for communicator in communicators:
        communicator.close()
    dist.destroy_process_group(some)
    return [float(tensor[0]) for tensor in tensors]


def outsider(session: Session) -> str:
    """What rank 1 is told about a group of rank 0 alone. Then it is gone: torch names further groups by how many a rank
    is in, which has to be the same on all ranks."""
    alone = dist.new_group([0])
    told = error_of(lambda: Communicator(alone).close())
    if session.rank == 0:
        dist.destroy_process_group(alone)
    return told


def steps_of_training(session: Session, steps: int) -> list[tuple[int, int]]:
    """(regions, bytes in use) after the first tenth of steps that make, gather and drop buffers, and after all."""
    gc.collect()  # what other tests left
    seen = []
    with Communicator(options=PATIENT) as communicator:
        n, rank, dice = session.world_size, session.rank, random.Random(7)
        held: list[Any] = []
        for step in range(1, steps + 1):
            shards = communicator.empty(n, dice.randrange(1, 5000), dtype=torch.bfloat16)
            shards[rank] = step
            communicator.all_gather(shards, shards[rank])
            assert bool((shards == torch.tensor(step, dtype=torch.bfloat16)).all())
            held.append(shards[0].view(-1))  # a view keeps the whole
            del shards, held[: len(held) - dice.randrange(1, 4)]
            if step % (steps // 10) == 0:
                seen.append((len(list(_mapped())), sum(_mapped())))
    return [seen[0], seen[-1]]


def own_block_left(session: Session) -> tuple[list[float], str]:
    """What an all_to_all that leaves the own block writes over -1; what is said where the output has a landing."""
    n, rank = session.world_size, session.rank
    mine = torch.arange(n, dtype=torch.float32) + 10 * rank
    with Communicator(options=PATIENT) as communicator:
        output = communicator.empty(n).fill_(-1)
        communicator.all_to_all(output, mine, leave_own=True)
        return output.tolist(), said(lambda: communicator.all_to_all(torch.zeros(n), mine, leave_own=True))[0]


def early_steps(session: Session, steps: int) -> tuple[int, int]:
    """(steps whose output was wrong, blocks made): outputs that are released early, read again late, used twice."""
    wrong, dice = 0, random.Random(3)
    with Communicator(before_step=delays(5, session.rank), options=PATIENT) as communicator:
        n, rank = session.world_size, session.rank
        held: list[tuple[Any, int]] = []
        for step in range(steps):
            shards = communicator.empty(n, 100 << step % 2, dtype=torch.int32, early_release=True)
            for number in range(step, step + dice.choice((1, 1, 2))):
                shards[rank] = number
                communicator.all_gather(shards, shards[rank], channel=step % 2)
            held.append((shards, number))
            del shards
            while len(held) > dice.randrange(4):
                tensor, number = held.pop(0)
                wrong += not bool((tensor == number).all())
                del tensor
        pool: Any = communicator._transport.early
        return wrong, pool._count


def early_refused(session: Session) -> list[str]:
    """What is said to calls in which not every rank sends to every other; and to other blocks on other ranks."""
    with Communicator(options=PATIENT) as communicator:
        n, rank = session.world_size, session.rank
        one, two = (communicator.empty(n, 8, early_release=True) for _ in range(2))
        told = [
            said(lambda: communicator.broadcast(one))[0],
            said(lambda: communicator.all_reduce(one))[0],
            said(lambda: communicator.gather(one[0], one if rank == 0 else None))[0],
        ]
        other = (one, two)[rank % 2]
        told.append(said(lambda: communicator.all_gather(other, other[rank]))[0])
        session.gather(0)
        return told


def same_place(session: Session) -> list[int]:
    """Offsets of buffers in use at the same time, relative to the first."""
    with Communicator(options=PATIENT) as communicator:
        first = communicator.empty(100, dtype=torch.uint8)
        dropped = [communicator.empty(1000, dtype=torch.float32) for _ in range(3)]
        del dropped[1]
        others = [communicator.empty(size, dtype=torch.float32) for size in (500, 300, 3000)]
        return [tensor.data_ptr() - first.data_ptr() for tensor in (*dropped, *others)]


def _mapped() -> Iterator[int]:
    for line in _lines_of_maps():
        low, high = (int(address, 16) for address in line.split()[0].split("-"))
        yield high - low


def left_behind(session: Session) -> tuple[int, int]:
    """(mappings, descriptors) that a communicator leaves after it was closed and its tensors dropped."""
    mapped, opened = _lines_of_maps(), _open_inodes()  # by programs that ran in this process before
    communicator = Communicator(options=PATIENT)
    tensor = communicator.empty(1000, dtype=torch.float32)
    communicator.all_reduce(tensor.zero_())
    communicator.all_reduce(torch.zeros(1000))
    communicator.close()
    usable = bool((tensor == 0).all())
    del tensor, communicator
    gc.collect()
    return len(_lines_of_maps() - mapped) + (not usable), len(_open_inodes() - opened)


def _lines_of_maps() -> set[str]:
    """What this process has mapped of the library's shared memory: address and inode are in the line."""
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "/memfd:counterpoint" in line}


def _open_inodes() -> set[int]:
    links = [link for link in Path("/proc/self/fd").iterdir() if "counterpoint" in str(_target(link))]
    return {link.stat().st_ino for link in links}


def _target(link: Path) -> Path | None:
    try:
        return link.readlink()
    except OSError:  # the directory's own descriptor
        return None
