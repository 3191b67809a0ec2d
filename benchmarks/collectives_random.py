"""Random collectives of the communicator on all GPUs of this machine, every bit against NCCL or a sum in rank order.

    torchrun --nproc-per-node 8 benchmarks/collectives_random.py --count 10000 --json results/collectives-random.json
    torchrun --nproc-per-node 2 benchmarks/collectives_random.py --device cpu --count 100 --max-bytes 65536

On CPUs nothing is captured, there are no streams, and it is compared with gloo.
Operation, dtype, size, alignment, memory of the output (symmetric, released early, plain), layout of the input (sliced,
strided, transposed, expanded, overlapping), channel, stream, async or not, captured or not, one rank late: drawn from
one seed on all ranks. What moves data has to give NCCL's bits, sums
those of plain torch, rank after rank. Prints and keeps how many there were of each kind, and every mismatch; the exit
status is 1 where there is one.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from provenance import write_table
from step_rig import origin, start, synchronize

from counterpoint.collectives.communicator import Communicator
from counterpoint.collectives.cpu.call import reference
from counterpoint.collectives.host.group import torch_function
from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.collectives.program.reductions import Reduction, ReductionOp

OPERATIONS = ("all_gather", "all_gather coalesced", "all_to_all", "uneven all_to_all", "broadcast", "scatter", "gather",
              "send_recv", "reduce_scatter", "reduce_scatter coalesced", "all_reduce", "barrier")  # fmt: skip
EARLY = ("all_gather", "all_to_all", "all_gather coalesced")
CAPTURED = ("all_gather", "reduce_scatter", "all_to_all")  # twice the same is once
SUMMED = ("reduce_scatter", "all_reduce", "reduce_scatter coalesced")
PLACED = ("send_recv", "uneven all_to_all", "all_gather coalesced")  # outputs of empty() only
FLOATS = (torch.bfloat16, torch.float32, torch.float16)
DTYPES = (*FLOATS, torch.float64, torch.uint8, torch.int32, torch.int64, torch.bool, torch.complex64)
MOST_CAPTURED_BYTES = 1 << 16  # what is captured keeps its memory
SKEW = 16  # elements by which an output may be shifted
COLUMNS = ("operation", "calls", "early", "plain output", "async", "captured", "mismatches")


class Draws:
    """One seeded sequence of collectives, the same on every rank."""

    def __init__(self, communicator: Communicator, *, seed: int, max_bytes: int) -> None:
        self.comm, self.seed, self.max_bytes = communicator, seed, max_bytes
        self.rank, self.n, self.device = communicator.rank, communicator.world_size, communicator.device
        self.on_gpu = self.device.type == "cuda"
        self.streams = [torch.cuda.Stream(self.device) for _ in range(3)] if self.on_gpu else []
        self.counts: Counter[tuple[str, str]] = Counter()
        self.graphs: list[torch.cuda.CUDAGraph] = []

    def one(self, index: int) -> str:
        """Does the `index`-th; what is wrong with it, or nothing."""
        self.dice = dice = random.Random(self.seed * 1_000_003 + index)
        self.name = dice.choice([name for name in OPERATIONS if self.n > 1 or name != "send_recv"])
        self.dtype = dice.choice(FLOATS if self.name in SUMMED else DTYPES)
        size = dice.choice([0, 1, 17, 2 ** dice.uniform(0, self.max_bytes.bit_length() - 1)])
        self.numel = int(min(size, self.max_bytes) / self.dtype.itemsize / self.n)
        memory = ("symmetric", "symmetric", "plain", "early" if self.name in EARLY else "symmetric")
        self.kind = dice.choice(memory)
        if self.name in PLACED and (self.kind == "plain" or self.name not in EARLY):
            self.kind = "symmetric"
        small = self.numel * self.dtype.itemsize * self.n <= MOST_CAPTURED_BYTES
        self.captured = self.on_gpu and small and self.kind != "early" and self.name in CAPTURED and dice.random() < 0.1
        self.options = {"channel": dice.randrange(self.comm.channels), "async_op": dice.random() < 0.5}
        late = dice.randrange(2 * self.n) == self.rank
        out, wanted = self.on_a_stream(late) if self.on_gpu else self.both(late)
        kinds = {"calls": True, self.kind: True, "async": self.options["async_op"], "captured": self.captured}
        self.counts.update((self.name, what) for what, so in kinds.items() if so)
        if out is None or torch.equal(_bits(out), _bits(wanted)):
            return ""
        self.counts[self.name, "mismatches"] += 1
        how = f"{self.kind}, {self.options}, captured {self.captured}"
        return f"call {index}: {self.name} of {self.numel} {self.dtype} a rank, {how}"

    def on_a_stream(self, late: bool) -> tuple[Any, Any]:
        """Does it on a drawn stream, behind the current one, which then waits for it."""
        stream = self.dice.choice(self.streams)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            found = self.both(late)
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return found

    def both(self, late: bool) -> tuple[Any, Any]:
        """What came out, and what must have."""
        if late and self.on_gpu:
            torch.cuda._sleep(1_000_000)
        elif late:
            time.sleep(1e-3)
        found: tuple[Any, Any] = getattr(self, "_" + self.name.replace(" ", "_"))()
        return found

    def data(self, numel: int, salt: int = 0) -> torch.Tensor:
        """This rank's input."""
        generator = torch.Generator(self.device).manual_seed(self.dice.getrandbits(32) * 64 + self.rank + salt)
        if self.dtype.is_floating_point:
            return torch.randn(numel, device=self.device, generator=generator).to(self.dtype)
        if self.dtype == torch.bool:
            return torch.rand(numel, device=self.device, generator=generator) < 0.5
        size = (max(1, numel) * self.dtype.itemsize,)
        raw = torch.randint(0, 256, size, device=self.device, generator=generator, dtype=torch.uint8)
        return raw.view(self.dtype)[:numel]

    def laid_out(self, own: torch.Tensor, *, flat: bool = False) -> torch.Tensor:
        """As many elements in a drawn layout; `flat`: in one dimension."""
        numel = own.numel()
        match self.dice.choice(("plain", "plain", "sliced", "strided", "expanded", "transposed", "overlapping")):
            case "sliced":
                return torch.cat([own[:3], own])[min(3, numel) :]
            case "strided":
                return torch.zeros(3 * numel, dtype=self.dtype, device=self.device)[::3].copy_(own)
            case "expanded" if numel:
                return own[:1].expand(numel)
            case "transposed" if not flat and numel % 2 == 0:
                return own.view(-1, 2).t()
            case "overlapping" if not flat and numel and numel % 3 == 0:
                return own[: numel // 3 + 2].unfold(0, numel // 3, 1)
        return own

    def room(self, numel: int, most: int | None = None) -> torch.Tensor:
        """An output of the drawn kind; `most`: elements that every rank makes, to have it at the same place."""
        skew = self.dice.randrange(SKEW)
        if self.kind == "plain":
            return torch.empty(numel + skew, dtype=self.dtype, device=self.device)[skew:]
        room = self.comm.empty((most or numel) + skew, dtype=self.dtype, early_release=self.kind == "early")
        made: torch.Tensor = room[skew : skew + numel]
        return made

    def run(self, call: Any) -> None:
        """The call, at once or in a graph."""
        if self.captured:
            call(channel=self.options["channel"])  # makes what a capture cannot
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="relaxed"):
                call(channel=self.options["channel"])
            graph.replay()
            self.graphs.append(graph)
            return
        work = call(**self.options)
        if work is not None:
            work.wait()

    def _all_gather(self) -> tuple[Any, Any]:
        mine, out = self.data(self.numel), self.room(self.numel * self.n)
        laid_out = self.laid_out(mine)
        in_place = out[self.rank * self.numel : (self.rank + 1) * self.numel]
        mine = in_place.copy_(mine) if self.dice.random() < 0.5 else laid_out
        self.run(lambda **options: self.comm.all_gather(out, mine, **options))
        return out, self.gathered(mine.clone())

    def _all_gather_coalesced(self) -> tuple[Any, Any]:
        """Of three tensors with gaps between them, the last one first; in place or not."""
        numels = [self.numel, self.dice.choice([0, 5]), self.numel // 3]
        starts = [0, self.numel * self.n + 32, (self.numel + 5) * self.n + 64]
        mine, out = [self.data(numel, salt) for salt, numel in enumerate(numels)], self.room(starts[2] * 2 + 64)
        outs = [out[start : start + numel * self.n] for start, numel in zip(starts, numels, strict=True)]
        if self.dice.random() < 0.5:
            blocks = [one[self.rank * numel :][:numel] for one, numel in zip(outs, numels, strict=True)]
            mine = [block.copy_(own) for block, own in zip(blocks, mine, strict=True)]
        else:
            mine = [self.laid_out(own) for own in mine]
        self.run(lambda **options: self.comm.all_gather_coalesced(outs[::-1], mine[::-1], **options))
        return torch.cat(outs), torch.cat([self.gathered(own.clone()) for own in mine])

    def _reduce_scatter_coalesced(self) -> tuple[Any, Any]:
        """Of three tensors, two of which cannot be shared equally; half of the narrow ones kept in float32."""
        how, numels = self.how(), [self.numel * self.n, self.dice.choice([0, 5]), self.numel]
        wide = self.dtype.itemsize == 2 and self.dice.random() < 0.5
        how = replace(how, result="float32" if wide else "")
        kept, shares = getattr(torch, how.result_dtype), [-(-numel // self.n) for numel in numels]
        mine = [self.laid_out(self.data(numel, salt)) for salt, numel in enumerate(numels)]
        out = torch.zeros(sum(shares), dtype=kept, device=self.device)
        outs = out.split(shares)
        self.run(lambda **o: self.comm.reduce_scatter_coalesced(outs, mine, how.op, factor=how.factor, **o))
        wanted = [self.combined(own, how) for own in mine]
        padded = [torch.cat([one, one.new_zeros(s * self.n - len(one))]) for one, s in zip(wanted, shares, strict=True)]
        return out, torch.cat([one[self.rank * share :][:share] for one, share in zip(padded, shares, strict=True)])

    def gathered(self, mine: torch.Tensor) -> torch.Tensor:
        """By NCCL."""
        raw = _bits(mine)
        wanted = torch.empty(raw.numel() * self.n, dtype=torch.uint8, device=self.device)
        torch_function("all_gather")(wanted, raw)
        return wanted

    def _all_to_all(self) -> tuple[Any, Any]:
        mine, out = self.laid_out(self.data(self.numel * self.n), flat=True), self.room(self.numel * self.n)
        self.run(lambda **options: self.comm.all_to_all(out, mine, **options))
        wanted = torch.empty_like(_bits(mine))
        dist.all_to_all_single(wanted, _bits(mine))
        return out, wanted

    def _uneven_all_to_all(self) -> tuple[Any, Any]:
        splits = [[self.dice.choice([0, 1, self.numel]) for _ in range(self.n)] for _ in range(self.n)]
        sends, comes = splits[self.rank], [row[self.rank] for row in splits]
        mine = self.laid_out(self.data(sum(sends)), flat=True)
        out = self.room(sum(comes), self.n * max(1, self.numel))
        self.run(lambda **options: self.comm.all_to_all(out, mine, comes, sends, **options))
        wanted, size = torch.empty(out.nbytes, dtype=torch.uint8, device=self.device), self.dtype.itemsize
        dist.all_to_all_single(wanted, _bits(mine), [size * rows for rows in comes], [size * rows for rows in sends])
        return out, wanted

    def _broadcast(self) -> tuple[Any, Any]:
        out, src = self.room(self.numel), self.dice.randrange(self.n)
        out.copy_(self.data(self.numel))
        wanted = _bits(out).clone()
        self.run(lambda **options: self.comm.broadcast(out, src, **options))
        dist.broadcast(wanted, src)
        return out, wanted

    def _scatter(self) -> tuple[Any, Any]:
        out, src = self.room(self.numel), self.dice.randrange(self.n)
        blocks = self.laid_out(self.data(self.numel * self.n))
        self.run(lambda **options: self.comm.scatter(out, blocks if src == self.rank else None, src, **options))
        whole = _bits(blocks).clone()
        dist.broadcast(whole, src)
        return out, whole[self.rank * out.nbytes : (self.rank + 1) * out.nbytes]

    def _gather(self) -> tuple[Any, Any]:
        dst, mine = self.dice.randrange(self.n), self.laid_out(self.data(self.numel))
        out = self.room(self.numel * self.n)
        self.run(lambda **options: self.comm.gather(mine, out if dst == self.rank else None, dst, **options))
        wanted = self.gathered(mine)
        return (out, wanted) if dst == self.rank else (None, None)

    def _send_recv(self) -> tuple[Any, Any]:
        pair, mine = self.dice.sample(range(self.n), 2), self.laid_out(self.data(self.numel))
        out = self.room(self.numel)
        wanted = self.gathered(mine)
        if self.rank not in pair:
            return None, None
        peer = pair[1 - pair.index(self.rank)]
        self.run(lambda **options: self.comm.send_recv(out, mine, peer, **options))
        return out, wanted[peer * out.nbytes : (peer + 1) * out.nbytes]

    def _reduce_scatter(self) -> tuple[Any, Any]:
        mine, out, how = self.laid_out(self.data(self.numel * self.n)), self.room(self.numel), self.how()
        self.run(lambda **options: self.comm.reduce_scatter(out, mine, how.op, factor=how.factor, **options))
        return out, self.combined(mine, how)[self.rank * self.numel : (self.rank + 1) * self.numel]

    def _all_reduce(self) -> tuple[Any, Any]:
        out, how = self.room(self.numel), self.how()
        out.copy_(self.data(self.numel))
        mine = out.clone()
        self.run(lambda **options: self.comm.all_reduce(out, how.op, factor=how.factor, **options))
        return out, self.combined(mine, how)

    def _barrier(self) -> tuple[Any, Any]:
        self.run(self.comm.barrier)
        return None, None

    def how(self) -> Reduction:
        op: ReductionOp = self.dice.choice(("sum", "sum", "avg", "max", "min", "premul_sum"))
        return Reduction(op=op, dtype=str(self.dtype)[6:], factor=0.3 if op == "premul_sum" else 1.0)

    def combined(self, mine: torch.Tensor, how: Reduction) -> torch.Tensor:
        """Rank after rank, from inputs that NCCL gathered."""
        whole: torch.Tensor = reference(list(self.gathered(mine).view(self.dtype).view(self.n, -1)), how)
        return whole


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def rows(counts: Counter[tuple[str, str]]) -> list[tuple[str, ...]]:
    """The table: how many calls of each operation there were, of each kind."""
    kinds = ("calls", "early", "plain", "async", "captured", "mismatches")
    return [(name, *(str(counts[name, kind]) for kind in kinds)) for name in OPERATIONS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="where to keep the result")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-bytes", type=int, default=256 << 20, help="of the full array")
    parser.add_argument(
        "--chunk-bytes", type=int, help="of the communicator; None: each new size is tuned, which takes"
    )
    parser.add_argument("--staging-bytes", type=int, help="of the communicator")
    asked = parser.parse_args()
    device = start(asked.device)
    rank = dist.get_rank()
    started, wrong = time.monotonic(), list[str]()
    options = {"chunk_bytes": asked.chunk_bytes, "staging_bytes": asked.staging_bytes}
    with Communicator(
        device=device, options=CommunicatorOptions(timeout_s=60, reserve_bytes=2 * asked.max_bytes, **options)
    ) as communicator:
        draws = Draws(communicator, seed=asked.seed, max_bytes=asked.max_bytes)
        for index in range(asked.count):
            told = draws.one(index)
            wrong += [f"rank {rank}: {told}"] if told else []
            if index % 500 == 499 and rank == 0:
                print(f"{index + 1} calls, {len(wrong)} mismatches, {time.monotonic() - started:.0f} s", flush=True)
        synchronize(device)
        communicator.check()
        draws.graphs.clear()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, wrong)
    mismatches = [text for each in everyone for text in each]
    if rank == 0:
        _show(asked, draws.counts, mismatches)
    dist.destroy_process_group()
    sys.exit(bool(mismatches))


def _show(asked: argparse.Namespace, counts: Counter[tuple[str, str]], wrong: list[str]) -> None:
    table = rows(counts)
    for row in (COLUMNS, *table):
        print(f"{row[0]:20}" + "".join(f"{cell:>14}" for cell in row[1:]))
    print("\n".join(wrong[:20]) or "no mismatch")
    if asked.json is not None:
        facts = origin(asked.device, dist.get_world_size())
        write_table(
            asked.json, COLUMNS, table, provenance=facts, seed=asked.seed, max_bytes=asked.max_bytes, mismatches=wrong
        )


if __name__ == "__main__":
    main()
