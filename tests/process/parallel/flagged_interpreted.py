"""Runs the matmuls that poll in Triton's interpreter, on memory of this process: one of its own, as it is a mode of it.

Started by path with the cases as JSON on standard input; writes for each `right`, or what was not. The interpreter
multiplies bfloat16 as if it were integers, so all is float16 here.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from typing import Any
from unittest.mock import patch

import torch
from triton.runtime.interpreter import InterpreterBuilder

from counterpoint.pair.arrivals import ShardedRows
from counterpoint.parallel.tensor.flagged import MatmulTiles, bind_flagged, stored_tiles

TILES = MatmulTiles(rows=16, columns=16, depth=16, group=2)
NAN = float("nan")
REAL_ATOMICS = InterpreterBuilder.create_atomic_rmw


@dataclass
class Case:
    """Everything that a matmul is bound to, with random operands; no word is set."""

    seed: int = 0
    rank: int = 0
    rows: tuple[int, ...] = (20,)
    batch: int = 1
    chunk_rows: int | None = None
    k: int = 32
    n: int = 24
    transposed: bool = True
    out: str = "float32"
    dtype: str = "float16"
    bias: bool = False
    average: bool = False
    programs: int = 3
    max_spins: int = 100_000  # seconds

    def __post_init__(self) -> None:
        self.layout = ShardedRows(rank=self.rank, rows=tuple(self.rows), batch=self.batch, chunk_rows=self.chunk_rows)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.a = self.random(self.layout.total, self.k)
        b = self.random(self.k, self.n)
        self.b = b.t().contiguous().t() if self.transposed else b
        self.bias_values = self.random(self.n) if self.bias else None
        self.words = torch.zeros(512, dtype=torch.int32)
        self.stored = torch.zeros(512, dtype=torch.int32)
        self.error = torch.zeros(1, dtype=torch.int32)

    def random(self, *shape: int) -> torch.Tensor:
        values = torch.randn(*shape, generator=self.generator)
        wanted: torch.Tensor = values.to(getattr(torch, self.dtype))
        return wanted

    def full(self, *shape: int) -> torch.Tensor:
        return torch.full(shape, NAN, dtype=getattr(torch, self.out))

    def place(self, peer: int) -> torch.Tensor:
        """The rows of the matrix that are the peer's, in the order of its shard."""
        slab, before = sum(self.rows), sum(self.rows[:peer])
        found = [torch.arange(self.rows[peer]) + b * slab + before for b in range(self.batch)]
        return torch.cat(found)

    def product(self) -> torch.Tensor:
        return self.a.double() @ self.b.double()

    def common(self) -> dict[str, Any]:
        return {
            "words": self.words.data_ptr(), "error": self.error.data_ptr(), "num_sms": self.programs,
            "tiles": TILES, "max_spins": self.max_spins, "bias": self.bias_values,
        }  # fmt: skip

    def arrive(self, peer: int, chunk: int) -> None:
        self.words[self.layout.word(peer, chunk)] = 1

    def all_staged(self) -> None:
        """Say that every peer has sent every chunk of the own shard."""
        for peer in range(len(self.rows)):
            for chunk in range(len(self.layout.chunks(self.rank))):
                self.arrive(peer, chunk)

    def bound_gather(self) -> Callable[[], None]:
        """The matmul of what is gathered; `gathered` has NaN wherever nothing has arrived, `c` wherever none is."""
        own = self.a[self.place(self.rank)]
        self.gathered, self.c = torch.full_like(self.a.float(), NAN).to(self.a.dtype), self.full(len(self.a), self.n)
        tensors = {"own": own, "gathered": self.gathered, "b": self.b, "out": self.c}
        return bind_flagged("all_gather_matmul", tensors, self.layout, **self.common())

    def deliver(self, peer: int, chunk: int) -> None:
        rows = self.place(peer)[list(self.layout.chunks(peer)[chunk])]
        self.gathered[rows] = self.a[rows]
        self.arrive(peer, chunk)

    def chunks(self) -> list[tuple[int, int]]:
        """What peers send in an all_gather, in the order of arrival."""
        order = [(self.rank - turn) % len(self.rows) for turn in range(1, len(self.rows))]
        return [(peer, chunk) for peer in order for chunk in range(len(self.layout.chunks(peer)))]

    def bound_scatter(self) -> Callable[[], None]:
        """The matmul whose sums are scattered; `staged` is what peers have sent, but NaN at the own place."""
        own = self.layout.shard(self.rank)
        self.partial, self.c = self.full(len(self.a), self.n), self.full(own, self.n)
        self.staged = torch.randn(len(self.rows), own, self.n, generator=self.generator).to(self.c.dtype)
        self.staged[self.rank] = NAN
        return bind_flagged(
            "matmul_reduce_scatter",
            {"a": self.a, "b": self.b, "partial": self.partial, "staged": self.staged, "out": self.c},
            self.layout, stored=self.stored.data_ptr(), average=self.average, **self.common(),
        )  # fmt: skip


def close(what: str, got: torch.Tensor, wanted: torch.Tensor) -> str:
    """`right`, or by how much not: float32 accumulation of products of about 1, then the rounding of `got`."""
    limit = 1e-5 + torch.finfo(got.dtype).eps
    error = ((got.double() - wanted).abs() / wanted.abs().clamp(min=1)).max().item() if got.numel() else 0.0
    return "right" if error <= limit else f"{what}: off by {error}"


def added(case: Case, wanted: torch.Tensor) -> torch.Tensor:
    return wanted if case.bias_values is None else wanted + case.bias_values.double()


def gather(case: Case) -> str:
    """All has arrived; the own rows of `gathered` are NaN."""
    launch = case.bound_gather()
    for peer, chunk in case.chunks():
        case.deliver(peer, chunk)
    launch()
    if case.error.item():
        return f"error word {case.error.item()}"
    return close("c", case.c, added(case, case.product()))


def late(case: Case) -> str:
    """Chunks arrive in random order with random delays while the matmul runs."""
    launch, order = case.bound_gather(), case.chunks()
    random.Random(case.seed).shuffle(order)

    def push() -> None:
        for peer, chunk in order:
            time.sleep(random.random() * 0.1)
            case.deliver(peer, chunk)

    thread = Thread(target=push)
    thread.start()
    launch()
    thread.join()
    return close("c", case.c, added(case, case.product()))


def order(case: Case) -> str:
    """Each chunk is delivered when all before it are done, by one program: with another order none would ever end."""
    launch, wanted, recorded = case.bound_gather(), case.product(), []

    def done(rows: torch.Tensor) -> bool:
        return not bool(case.c[rows].isnan().any())

    def push() -> None:
        before = case.place(case.rank)
        for peer, chunk in case.chunks():
            until = time.monotonic() + 60
            while not done(before) and time.monotonic() < until:
                time.sleep(0.001)
            rows = case.place(peer)[list(case.layout.chunks(peer)[chunk])]
            recorded.append(done(before) and bool(case.c[rows].isnan().all()))
            case.deliver(peer, chunk)
            before = rows

    thread = Thread(target=push)
    thread.start()
    launch()
    thread.join()
    if not all(recorded):
        return f"not in the order of arrival: {recorded}"
    return close("c", case.c, added(case, wanted))


def lost(case: Case) -> str:
    """Whatever two chunks never arrive: the kernel ends, and says the first of them that it waits for."""
    launch, chunks = case.bound_gather(), case.chunks()
    for first in range(len(chunks)):
        for second in range(first, len(chunks)):
            case.words.zero_()
            case.error.zero_()
            for peer, chunk in [c for i, c in enumerate(chunks) if i not in {first, second}]:
                case.deliver(peer, chunk)
            launch()
            missing = case.layout.missing(int(case.error.item()))
            if missing != chunks[first]:
                return f"{chunks[first]} and {chunks[second]} missing, said {missing}"
    return "right"


def polls(case: Case) -> str:
    """One program polls each word once, if all are set; if none is, it polls only the first one in vain."""
    mine = len(case.layout.chunks(case.rank)) * (len(case.rows) - 1)
    for launch, words in ((case.bound_gather(), len(case.chunks())), (case.bound_scatter(), mine)):
        for value in (0, 1):
            case.words.fill_(value)
            case.stored.zero_()
            with patch.object(InterpreterBuilder, "create_atomic_rmw", autospec=True) as atomics:
                atomics.side_effect = REAL_ATOMICS
                launch()
            asked = atomics.call_count - int(case.stored.sum())
            wanted = words if value else words + case.max_spins
            if asked != wanted:
                return f"{asked} polls of {words} words that are {value}"
    return "right"


def scatter(case: Case) -> str:
    """All has been staged: own rows are the sum, peers' are in `partial` and counted, and nothing else is written."""
    launch, wanted, mine = case.bound_scatter(), case.product(), case.place(case.rank)
    case.all_staged()
    launch()
    if case.error.item():
        return f"error word {case.error.item()}"
    total = wanted[mine] + sum(
        (case.staged[peer].double() for peer in range(len(case.rows)) if peer != case.rank), torch.zeros(1)
    )
    if case.average:
        total /= len(case.rows)
    answers = [close("out", case.c, added(case, total))]
    for peer in range(len(case.rows)):
        part = case.partial[case.place(peer)]
        if peer == case.rank:
            answers.append("right" if part.isnan().all() else "own rows of partial were written")
        else:
            answers.append(close(f"partial of {peer}", part, wanted[case.place(peer)]))
    expected = torch.zeros_like(case.stored)
    for (peer, chunk), count in stored_tiles(case.layout, case.n, TILES).items():
        expected[case.layout.word(peer, chunk)] = count
    answers.append("right" if torch.equal(case.stored, expected) else f"counted {case.stored[:20].tolist()}")
    return next((answer for answer in answers if answer != "right"), "right")


def together(case: Case) -> str:
    """Ranks that send each other what they have counted get the sum of all: first they store, then they add."""
    ranks = [Case(**{**vars_of(case), "rank": rank, "seed": rank, "max_spins": 1}) for rank in range(len(case.rows))]
    launches = [rank.bound_scatter() for rank in ranks]
    for launch in launches:
        launch()
    for me, sender in enumerate(ranks):
        for peer, receiver in enumerate(ranks):
            if peer != me:
                receiver.staged[me] = sender.partial[sender.place(peer)]
    total = sum((rank.product() for rank in ranks), torch.zeros(1))
    for me, rank in enumerate(ranks):
        if len(ranks) > 1 and rank.layout.shard(me) and rank.layout.missing(int(rank.error.item())) is None:
            return f"rank {me} has waited for nobody"
        rank.all_staged()
        rank.error.zero_()
        launches[me]()
        answer = close(f"out of {me}", rank.c, added(rank, total[rank.place(me)]))
        if answer != "right" or rank.error.item():
            return f"{answer}, error word {rank.error.item()}"
    return "right"


def ascending(case: Case) -> str:
    """The bits are those of float32 additions rank after rank: 2^24 + 1 - 2^24 depends on it."""
    launch = case.bound_scatter()
    case.a.zero_()
    values = [float(1 << 24), 1.0, -float(1 << 24), 3.0, 1e-3, float(1 << 20), -1.0, 0.5]
    total = torch.zeros(())
    for peer in range(len(case.rows)):
        if peer != case.rank:
            case.staged[peer] = values[peer]
            total = total + torch.tensor(values[peer])
    case.all_staged()
    launch()
    return "right" if (case.c == total).all() else f"{case.c[0, 0]} instead of {total}"


def lost_partials(case: Case) -> str:
    """What any one peer has not sent is named, and the kernel ends."""
    launch = case.bound_scatter()
    for peer in range(len(case.rows)):
        for chunk in range(len(case.layout.chunks(case.rank))):
            case.error.zero_()
            case.all_staged()
            case.words[case.layout.word(peer, chunk)] = 0
            launch()
            missing = case.layout.missing(int(case.error.item()))
            if missing != (None if peer == case.rank else (peer, chunk)):
                return f"{(peer, chunk)} missing, said {missing}"
    return "right"


def vars_of(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in Case.__dataclass_fields__}


RUNS = {run.__name__: run for run in (gather, late, order, lost, polls, scatter, together, ascending, lost_partials)}


if __name__ == "__main__":
    json.dump([RUNS[given.pop("run")](Case(**given)) for given in json.load(sys.stdin)], sys.stdout)
