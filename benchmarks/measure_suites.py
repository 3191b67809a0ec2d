"""Measure the pairs and building blocks from which shipped fits and rules were made, as `counterpoint measure` does.

`budget`: divisions of the SMs, and the building blocks that the budget rule predicts them from (budget_rule.py).
`reductions`: how many SMs the sums of zero-SM collectives need next to a GEMM (sum_sms.py). `blocks`: bus bandwidth of
four collectives from 1 KiB to 1 GiB by SMs and by copy engines, of all_gather by CTAs, and GEMM time by SMs
(collective_model.py).

    python benchmarks/measure_suites.py budget --out results/budget-pairs-4xh200.json
    python benchmarks/measure_suites.py reductions --rounds 6 --timeout 60 --out results/reductions-4xh200.json
    python benchmarks/measure_suites.py blocks --nproc 2 --rounds 8 --timeout 60 --out results/blocks-2xh200.json

It writes JSON and a table as `counterpoint measure --out` does; `python benchmarks/provenance.py` compresses long ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import cycle, product
from pathlib import Path

import msgspec

from counterpoint.measurement.api import count_ranks, measure_parts
from counterpoint.measurement.suites import GEMM, LOADS, pairs_of
from counterpoint.pair.together import REDUCTIONS
from counterpoint.records.measurement import Block, Scenario
from counterpoint.rendering.measurement_tables import markdown

__all__ = [
    "BUDGET",
    "BUDGET_GEMMS",
    "BUDGET_LIMITS",
    "BUDGET_SIZES",
    "BUDGET_SMS",
    "SUITES",
    "blocks",
    "budget_blocks",
    "budget_pairs",
]

BUDGET = (
    "nccl",
    "nccl+max_ctas=16",
    "nccl+max_ctas=8",
    "nccl+gemm_sms=108",
    "nccl+max_ctas=16+gemm_sms=116",
    "nccl+max_ctas=8+gemm_sms=124",
    "nccl+cga_cluster=2+gemm_sms=108",
    "nccl+max_ctas=16+cga_cluster=2+gemm_sms=116",
    "nccl+max_ctas=12+cga_cluster=2+gemm_sms=120",
    "nccl+max_ctas=8+cga_cluster=2+gemm_sms=124",
    "nccl+max_ctas=4+cga_cluster=2+gemm_sms=128",
)
BUDGET_LIMITS = tuple(dict.fromkeys(name.partition("+gemm_sms")[0] for name in BUDGET))  # the settings of NCCL alone
BUDGET_GEMMS = (
    "gemm 2048x2816x8192",  # a tensor-parallel shard: 176 tiles, one wave and a third
    "gemm 4096x4096x4096",
    "gemm 4096x6144x4096",  # Llama-3 8B at 4096 tokens: q, k and v
    "gemm 4096x28672x4096",  # gate and up
    GEMM,
    "gemm 2048x57344x8192",  # Llama-3 70B at 2048 tokens: gate and up
)
BUDGET_COLLECTIVES = ("all_gather", *REDUCTIONS)
BUDGET_SMS = (128, 124, 120, 116, 108, 100)  # those of the mechanisms, and one below
BUDGET_SIZES = tuple(1 << power for power in (21, 23, 25, 27, 29, 31))  # 2 MiB to 2 GiB
RATIOS = (0.25, 0.5, 1, 2)
SUMS = ("nccl", "zero_sm", *(f"zero_sm+gemm_sms={sms}" for sms in (128, 124, 120, 116, "fit")))
CTAS = ("nccl", *(f"nccl+max_ctas={ctas}" for ctas in (1, 2, 4, 8, 16, 24, 32)))


def budget_pairs() -> tuple[Scenario, ...]:
    """The pairs of `budget`; the collectives take turns, so that each meets every GEMM and every ratio."""
    points = zip(product(BUDGET_GEMMS, RATIOS), cycle(BUDGET_COLLECTIVES), strict=False)  # cycle has no end
    return tuple(
        scenario
        for (gemm, ratio), collective in points
        for scenario in pairs_of((gemm,), (collective,), (ratio,), BUDGET)
    )


def budget_blocks() -> tuple[Block, ...]:
    """Both sides of these pairs alone, by every limit."""
    return (
        *_by_sms(BUDGET_GEMMS, BUDGET_SMS),
        *(
            Block(name=f"{collective} by CTAs", what=collective, mechanisms=BUDGET_LIMITS, sizes_bytes=BUDGET_SIZES)
            for collective in BUDGET_COLLECTIVES
        ),
    )


def blocks() -> tuple[Block, ...]:
    """Bandwidth by size, CTAs and engines; GEMM time by SMs."""
    sizes = tuple(1 << power for power in range(10, 31, 2))
    collectives = tuple(
        Block(
            name=name,
            what=name,
            mechanisms=("nccl",) if name in REDUCTIONS else ("nccl", "nccl_zero_cta"),
            sizes_bytes=sizes,
        )
        for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    )
    ctas = Block(
        name="all_gather by CTAs",
        what="all_gather",
        mechanisms=CTAS,
        sizes_bytes=(16 << 20, 128 << 20, 1 << 30),
    )
    return (*collectives, ctas, *_by_sms(LOADS, (128, 124, 120, 116, 112, 108, 100, 92, 84, 66)))


def _by_sms(gemms: tuple[str, ...], numbers: tuple[int, ...]) -> tuple[Block, ...]:
    settings = ("stock", *(f"gemm_sms={sms}" for sms in numbers))
    return tuple(Block(name=f"{gemm} by SMs", what=gemm, mechanisms=settings) for gemm in gemms)


SUITES: dict[str, Callable[[], tuple[Scenario | Block, ...]]] = {
    "budget": lambda: (*budget_pairs(), *budget_blocks()),
    "reductions": lambda: pairs_of(LOADS, REDUCTIONS, RATIOS, SUMS),
    "blocks": blocks,
}


def main() -> None:
    """Measure a suite, and keep it with its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=SUITES)
    parser.add_argument("--nproc", type=int, help="ranks; by default all GPUs")
    parser.add_argument("--rounds", type=int, default=12, help="of which two are dropped")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds without a finished part")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    measured = measure_parts(
        args.suite, SUITES[args.suite](), device="cuda", world_size=count_ranks("cuda", args.nproc),
        rounds=args.rounds, timeout_s=args.timeout,
        progress=lambda done, total, now: print(f"{done} of {total}: {now}", flush=True),
    )  # fmt: skip
    args.out.write_bytes(msgspec.json.encode(measured) + b"\n")
    args.out.with_suffix(".md").write_text(markdown(measured))


if __name__ == "__main__":
    main()
