"""A tuning with every kind of choice, for tests."""

from typing import Any

from msgspec.structs import replace

from counterpoint.records.measurement import Environment
from counterpoint.records.tuning import LEAVE, StepTuning, StepVariant, Tried, Tuned, TunedPair

HOSTILE = (
    "x'\"`$(touch pwned)`\n\r\u2028\\; touch pwned #{}: &a *a [\x1b]0;"
    "</script><script>alert(1)</script>,0,1,ring,simple,1 é"
)


def example_tuned() -> Tuned:
    """Return a tuning of two H200s: an all_gather by copies, an all_reduce that stays, a matmul in pieces."""
    return Tuned(
        seconds=118.0,
        profile="0123456789abcdef",
        made=Environment(
            device="cuda", gpu="NVIDIA H200", world_size=2, driver="580.95.05", torch="2.11.0+cu130", nccl="2.28.9",
            counterpoint="0.1.0", commit="0" * 40, command=("counterpoint", "tune", "pairs.toml"),
            date="2026-11-23T00:00:00+00:00", variables={"NCCL_NVLS_ENABLE": "0"},
        ),
        step=StepTuning(
            before_us=150_100.0, after_us=138_900.0, sigma_us=260.0,
            variants=(
                StepVariant(name="stock", us=150_100.0, sigma_us=200.0, runs=10),
                StepVariant(name="tuned", us=138_900.0, sigma_us=180.0, runs=10),
            ),
            falsified=("all_reduce of 65536 bytes by zero_sm: 0.4 % slower",),
        ),
        notes=("one pair of the trace has no shapes",),
        pair=(
            TunedPair(
                operation="all_gather", compute="gemm 8192x8192x8192", bytes_per_rank=64 << 20, ranks=2,
                first="compute_first", calls=12, where=("layers.*",), mechanism="zero_sm",
                why="4.0 % less than stock, 2 sigma are 0.5 %", us=1600.0, sigma_us=3.0, stock="nccl", stock_us=1667.0,
                stock_sigma_us=4.0, compute_us=1500.0, comm_us=350.0, next_best="nccl+max_ctas=8", next_best_us=1640.0,
                tried=(
                    Tried(mechanism="nccl", us=1667.0, sigma_us=4.0, runs=10),
                    Tried(mechanism="zero_sm", us=1600.0, sigma_us=3.0, runs=10, predicted_us=1590.0),
                    Tried(mechanism="nccl+max_ctas=8", us=1640.0, sigma_us=5.0, runs=10, marked="8 CTAs without it"),
                ),
            ),
            TunedPair(
                operation="all_reduce", compute="gemm 1024x1024x1024", bytes_per_rank=32 << 10, ranks=2,
                mechanism=LEAVE, why="nothing is faster by 2 sigma", us=40.0, sigma_us=1.0, stock="nccl", stock_us=40.0,
                stock_sigma_us=1.0,
            ),
            TunedPair(
                operation="all_gather_matmul", compute="gemm 8192x7168x8192", bytes_per_rank=64 << 20, ranks=2,
                mechanism="cuts", why="12 % less than stock, 2 sigma are 0.4 %", us=1300.0, sigma_us=2.0, stock="torch",
                stock_us=1480.0, stock_sigma_us=3.0,
            ),
        ),
    )  # fmt: skip


def tuned_pair(mechanism: str, *, us: float = 90.0, stock_us: float = 100.0, **more: Any) -> TunedPair:
    """Return an all_gather of 1 MiB from each of two ranks, 10 µs faster than by stock NCCL."""
    stock = more.pop("stock", "nccl")
    fields = {"operation": "all_gather", "compute": "gemm 64x64x64", "bytes_per_rank": 1 << 20, "ranks": 2} | more
    return TunedPair(
        **{"mechanism": mechanism, "why": "measured", "us": us, "sigma_us": 1.0, "stock": stock, "stock_us": stock_us}
        | {"stock_sigma_us": 1.0}
        | fields
    )


def hostile_tuned() -> Tuned:
    """Return a tuning whose names are code in every format, with a pair of each kind of choice."""
    names: dict[str, Any] = {"compute": HOSTILE, "where": (HOSTILE,), "why": HOSTILE}
    pairs = (
        tuned_pair("nccl+max_ctas=8+priority=high+gemm_sms=124", **names),
        tuned_pair("zero_sm", **names, bytes_per_rank=1 << 24),
        tuned_pair("cuts", **names, operation="all_gather_matmul", stock="torch"),
        tuned_pair("gather", **names, operation="exchange", stock="torch"),
    )
    usual = example_tuned()
    made = replace(usual.made, gpu=HOSTILE, torch=HOSTILE, date=HOSTILE)
    return replace(usual, pair=pairs, made=made, notes=(HOSTILE,))
