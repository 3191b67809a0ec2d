"""Claim: matmuls that poll are right whatever is late, and about as fast as cuBLAS. One GPU is enough; three minutes.

    python benchmarks/flagged_matmul.py --json results/flagged-matmul-h200.json

Peers are played by pinned memory of the host: copies from it and to it need no SM, as those between GPUs. In a trial
the chunks of all peers arrive in random order with random delays, each copy followed by its word; the matmul is
launched somewhere in between. Its bits have to be those of a run for which everything was there, and that run is
compared with float64. What a matmul stores for peers is copied by a stream that waits for the count of its tiles.

Then every shape and tile alone, with all words set, beside cuBLAS: interleaved in rounds, medians.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from provenance import gpu_provenance, write_result
from tables import print_table

from counterpoint.collectives.cuda.driver import Executor
from counterpoint.pair.arrivals import ShardedRows
from counterpoint.parallel.tensor.flagged import (
    MatmulTiles,
    TileRun,
    bind_flagged,
    stored_tiles,
    tile_runs,
)

SHAPES = ("8192x7168x8192", "8192x7168x4096", "8192x5120x8192", "8192x28672x8192", "4096x7168x8192", "8192x1280x8192")
TILES = {
    "128x256x64, 3 stages": MatmulTiles(),
    "128x256x64, 4 stages": MatmulTiles(stages=4),
    "128x128x64, 4 stages": MatmulTiles(columns=128, stages=4),
}
LAYOUTS = (
    ShardedRows(rank=0, rows=(512, 512)),
    ShardedRows(rank=5, rows=(256,) * 8, chunk_rows=128),
    ShardedRows(rank=2, rows=(700, 700, 700, 400), batch=2, chunk_rows=512),
)
WIDTH, DEPTH = 2048, 1024  # of the trials
WORLD = 8  # ranks of the shapes
SPINS = 20_000_000  # some ten seconds
SPIN_CYCLES = 500_000  # longer than the host needs for a launch
GREATER_OR_EQUAL = 0  # of CUstreamWaitValue_flags
Launch = Callable[[], object]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


class Words:
    """Words that matmuls poll, count in and complain to, and streams that write them or wait for them."""

    def __init__(self) -> None:
        self.arrived, self.stored, self.error = (torch.zeros(1024, dtype=torch.int32, device="cuda") for _ in range(3))
        self.executor = Executor()
        self.into, self.out_of = torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=-1)

    def addresses(self) -> dict[str, Any]:
        return {"words": self.arrived.data_ptr(), "error": self.error.data_ptr()}

    def write(self, word: int) -> None:
        """Set a word of arrival, behind the copies of the stream `into`."""
        self._call("cuStreamWriteValue32", self.into, self.arrived, word, 1)

    def await_stored(self, word: int, count: int) -> None:
        """Hold the stream `out_of` until so many tiles are counted."""
        self._call("cuStreamWaitValue32", self.out_of, self.stored, word, count)

    def _call(self, name: str, stream: torch.cuda.Stream, words: torch.Tensor, word: int, value: int) -> None:
        driver = self.executor.driver
        address = driver.CUdeviceptr(words.data_ptr() + 4 * word)
        self.executor.call(name, driver.CUstream(stream.cuda_stream), address, value, GREATER_OR_EQUAL)


def close(what: str, got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Stop unless `got` is the rounded `wanted`, but for the order of additions."""
    error = ((got.double() - wanted).abs() / (wanted.abs() + wanted.std())).max().item()
    if not error < 2**-7:  # bfloat16 rounds by up to 2^-9, and a partial sum was rounded before
        raise SystemExit(f"{what}: wrong by {error}")


def late(deliveries: list[Launch], launch: Launch, dice: random.Random) -> None:
    """Deliver in random order with random delays; launch somewhere in between."""
    order = [*deliveries]
    dice.shuffle(order)
    order.insert(dice.randrange(len(order) // 2 + 1), launch)
    for act in order:
        until = time.perf_counter() + dice.choice((0.0, 1e-5, 1e-4, 1e-3)) * dice.random()
        while time.perf_counter() < until:
            pass
        act()


def same(what: str, pairs: list[tuple[torch.Tensor, torch.Tensor]], words: Words) -> bool:
    """Return whether a trial gave the bits that it should have, and nothing was waited for in vain."""
    torch.cuda.synchronize()
    right = all(torch.equal(got.view(torch.int16), wanted.view(torch.int16)) for got, wanted in pairs)
    if words.error[0].item() or not right:
        print(f"{what}: error word {words.error[0].item()}, {'right' if right else 'WRONG'}")
    return right and not words.error[0].item()


class GatherTrials:
    """An all_gather -> matmul of one layout, whose peers are in pinned memory."""

    def __init__(self, layout: ShardedRows, words: Words) -> None:
        self.layout, self.words = layout, words
        a, weight = normal(layout.total, DEPTH), normal(WIDTH, DEPTH)
        self.host = a.cpu().pin_memory()
        self.parts = tile_runs(layout, "all_gather_matmul", 128)
        own = torch.cat([a[p.target : p.target + p.rows] for p in self.parts if p.peer == layout.rank])
        self.gathered, self.out = torch.empty_like(a), normal(layout.total, WIDTH)
        self.launch = bind_flagged(
            "all_gather_matmul", {"own": own, "gathered": self.gathered, "b": weight.t(), "out": self.out}, layout,
            **words.addresses(), max_spins=SPINS,
        )  # fmt: skip
        self.gathered.copy_(a)
        words.arrived.fill_(1)
        self.launch()
        self.wanted = self.out.clone()
        close(f"all_gather of {layout}", self.wanted, a.double() @ weight.double().t())

    def deliver(self, peer: int, chunk: int) -> None:
        with torch.cuda.stream(self.words.into):
            for part in self.parts:
                if (part.peer, part.chunk) == (peer, chunk):
                    rows = slice(part.target, part.target + part.rows)
                    self.gathered[rows].copy_(self.host[rows], non_blocking=True)
        self.words.write(self.layout.word(peer, chunk))

    def trial(self, dice: random.Random) -> bool:
        self.gathered.fill_(torch.nan)
        self.out.fill_(torch.nan)
        self.words.arrived.zero_()
        torch.cuda.synchronize()
        chunks = sorted({(part.peer, part.chunk) for part in self.parts if part.peer != self.layout.rank})
        late([partial(self.deliver, *chunk) for chunk in chunks], self.launch, dice)
        return same(f"all_gather of {self.layout}", [(self.out, self.wanted)], self.words)


class ScatterTrials:
    """A matmul -> reduce_scatter of one layout, whose peers send from and to pinned memory."""

    def __init__(self, layout: ShardedRows, words: Words) -> None:
        self.layout, self.words = layout, words
        a, weight = normal(layout.total, DEPTH), normal(WIDTH, DEPTH)
        rank, shard = layout.rank, layout.shard(layout.rank)
        self.staged = normal(layout.world_size, shard, WIDTH)
        self.host_staged = self.staged.cpu().pin_memory()
        self.partial, self.out = normal(layout.total, WIDTH), normal(shard, WIDTH)
        self.host_partial = torch.empty(layout.total, WIDTH, dtype=a.dtype, pin_memory=True)
        self.parts = tile_runs(layout, "matmul_reduce_scatter", 128)
        self.counts = stored_tiles(layout, WIDTH)
        self.launch = bind_flagged(
            "matmul_reduce_scatter",
            {"a": a, "b": weight.t(), "partial": self.partial, "staged": self.staged, "out": self.out},
            layout, stored=words.stored.data_ptr(), **words.addresses(), max_spins=SPINS,
        )  # fmt: skip
        words.arrived.fill_(1)
        self.launch()
        self.wanted, self.wanted_partial = self.out.clone(), self.partial.cpu()
        product = a.double() @ weight.double().t()
        for part in self.parts:
            rows, target = slice(part.source, part.source + part.rows), slice(part.target, part.target + part.rows)
            if part.peer == rank:
                others = sum(self.staged[peer, target].double() for peer in range(layout.world_size) if peer != rank)
                close(f"sum of {layout}", self.wanted[target], product[rows] + others)
            else:
                close(f"partial of {layout}", self.partial[target], product[rows])

    def deliver(self, peer: int, chunk: int) -> None:
        rows = self.layout.chunks(self.layout.rank)[chunk]
        with torch.cuda.stream(self.words.into):
            where = self.staged[peer, rows.start : rows.stop]
            where.copy_(self.host_staged[peer, rows.start : rows.stop], non_blocking=True)
        self.words.write(self.layout.word(peer, chunk))

    def sent(self) -> list[TileRun]:
        return [part for part in self.parts if part.peer != self.layout.rank]

    def start(self) -> None:
        """Launch it, and let another stream send each chunk as soon as all of its tiles are counted."""
        self.launch()
        for (peer, chunk), count in self.counts.items():
            self.words.await_stored(self.layout.word(peer, chunk), count)
            with torch.cuda.stream(self.words.out_of):
                for part in self.sent():
                    if (part.peer, part.chunk) == (peer, chunk):
                        rows = slice(part.target, part.target + part.rows)
                        self.host_partial[rows].copy_(self.partial[rows], non_blocking=True)

    def trial(self, dice: random.Random) -> bool:
        for tensor in (self.staged, self.partial, self.out, self.host_partial):
            tensor.fill_(torch.nan)
        self.words.arrived.zero_()
        self.words.stored.zero_()
        torch.cuda.synchronize()
        chunks = range(len(self.layout.chunks(self.layout.rank)))
        peers = [peer for peer in range(self.layout.world_size) if peer != self.layout.rank]
        late([partial(self.deliver, peer, chunk) for peer in peers for chunk in chunks], self.start, dice)
        rows = [slice(part.target, part.target + part.rows) for part in self.sent()]
        sent = [(self.host_partial[each], self.wanted_partial[each]) for each in rows]
        return same(f"reduce_scatter of {self.layout}", [(self.out, self.wanted), *sent], self.words)


def wrong_trials(count: int, seed: int) -> int:
    """Return how many of `count` trials of each kind went wrong, after saying which."""
    dice, words, wrong = random.Random(seed), Words(), 0
    for kind in (GatherTrials, ScatterTrials):
        rigs = [kind(layout, words) for layout in LAYOUTS]
        for trial in range(count):
            wrong += not rigs[trial % len(rigs)].trial(dice)
            words.error.zero_()
    return wrong


def launches(m: int, n: int, k: int, words: torch.Tensor) -> dict[str, Launch]:
    """cuBLAS and both matmuls with every tile; `words`: of arrival, all set, the error word and counts."""
    layout = ShardedRows(rank=0, rows=(m // WORLD,) * WORLD)
    a, weight = normal(m, k), normal(n, k)
    own, wanted, out, stored = a[: m // WORLD].clone(), *(normal(m, n) for _ in range(3))
    staged, scattered = torch.zeros(WORLD, m // WORLD, n, dtype=a.dtype, device="cuda"), normal(m // WORLD, n)
    at: dict[str, Any] = {"words": words[0].data_ptr(), "error": words[1].data_ptr()}
    found: dict[str, Launch] = {"cuBLAS": lambda: torch.mm(a, weight.t(), out=wanted)}
    found["cuBLAS"]()
    for name, tiles in TILES.items():
        gather = bind_flagged(
            "all_gather_matmul", {"own": own, "gathered": a, "b": weight.t(), "out": out}, layout,
            **at, tiles=tiles, max_spins=SPINS,
        )  # fmt: skip
        scatter = bind_flagged(
            "matmul_reduce_scatter",
            {"a": a, "b": weight.t(), "partial": stored, "staged": staged, "out": scattered},
            layout, stored=words[2].data_ptr(), **at, tiles=tiles, max_spins=SPINS,
        )  # fmt: skip
        gather()
        scatter()
        peers, mine = slice(m // WORLD, m), slice(m // WORLD)
        for got, right in ((out, wanted), (stored[peers], wanted[peers]), (scattered, wanted[mine])):
            error = ((got - right).abs().max() / right.std()).item()
            if not error < 2**-4:
                raise SystemExit(f"{m}x{n}x{k}, {name}: off from cuBLAS by {error} standard deviations")
        found[f"all_gather, {name}"], found[f"reduce_scatter, {name}"] = gather, scatter
    return found


def us(launch: Launch) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SPIN_CYCLES)
    begin.record()
    launch()
    end.record()
    end.synchronize()
    elapsed: float = begin.elapsed_time(end) * 1e3
    return elapsed


def speeds(shape: str, rounds: int, dice: random.Random) -> dict[str, float]:
    """µs by what was launched: the median of interleaved rounds, after two that do not count."""
    m, n, k = map(int, shape.split("x"))
    words = torch.ones(3, 64, dtype=torch.int32, device="cuda")
    words[1:] = 0
    found = launches(m, n, k, words)
    times: dict[str, list[float]] = {name: [] for name in found}
    for _ in range(rounds + 2):
        for name in dice.sample(sorted(found), len(found)):
            times[name].append(us(found[name]))
    if words[1, 0].item():
        raise SystemExit(f"{shape}: polled in vain, error word {int(words[1, 0])}")
    return {name: median(values[2:]) for name, values in times.items()}


def host_us(repeats: int = 200) -> dict[str, float]:
    """µs of the host to bind a matmul again, and to launch it."""
    words = Words()
    rig = GatherTrials(LAYOUTS[0], words)
    own, b = rig.gathered[: LAYOUTS[0].rows[0]].clone(), normal(WIDTH, DEPTH).t()

    def bind() -> None:
        bind_flagged(
            "all_gather_matmul", {"own": own, "gathered": rig.gathered, "b": b, "out": rig.out}, rig.layout,
            **words.addresses(), max_spins=SPINS,
        )  # fmt: skip

    taken = {}
    for name, act in (("bind", bind), ("launch", rig.launch)):
        act()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            act()
        taken[name] = (time.perf_counter() - begin) / repeats * 1e6
        torch.cuda.synchronize()
    return taken


def cells(times: dict[str, float]) -> list[str]:
    """µs of cuBLAS, then of each matmul its speed over that of cuBLAS."""
    alone = times["cuBLAS"]
    return [f"{alone:.0f}", *(f"{100 * alone / time:.0f} %" for name, time in times.items() if name != "cuBLAS")]


def main(arguments: list[str] | None = None) -> int:
    """Trials first, then the table; 1 if any trial went wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=300, help="of each kind")
    parser.add_argument("--shapes", nargs="*", default=SHAPES, metavar="MxNxK", help="M: a multiple of 1024")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args(arguments)
    torch.manual_seed(asked.seed)
    begin = time.monotonic()
    wrong = wrong_trials(asked.trials, asked.seed)
    print(f"{2 * asked.trials - wrong} of {2 * asked.trials} trials right, {time.monotonic() - begin:.0f} s")
    record: dict[str, Any] = {"trials": 2 * asked.trials, "wrong": wrong, "us": {}, "host_us": host_us()}
    print("host µs:", ", ".join(f"{name} {taken:.0f}" for name, taken in record["host_us"].items()))
    rows, columns = [], ["M x N x K", "cuBLAS µs"]
    for shape in asked.shapes:
        times = speeds(shape, asked.rounds, random.Random(asked.seed))
        record["us"][shape] = times
        rows.append([shape, *cells(times)])
        columns[2:] = [name for name in times if name != "cuBLAS"]
    print_table(columns, rows, title="speed, cuBLAS = 100 %")
    print(f"{time.monotonic() - begin:.0f} s in all")
    if asked.json is not None:
        record |= {"provenance": gpu_provenance(["torch", "triton", "cuda-bindings"], world_size=1)}
        write_result(asked.json, record, columns, rows)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
