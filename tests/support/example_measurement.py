"""Measurements made up for the tests of their reports."""

from typing import Any

from counterpoint.records.measurement import BlockRow, Environment, Measurement, Order, Row, Timing

HOSTILE = "</script><script>alert(1)</script><b>|`\x1b[31m"


def timing(us: float) -> Timing:
    return Timing(us=us, p10_us=us * 0.9, p90_us=us * 1.1, rank=0, per_rank_us=(us, us))


def row(
    mechanism: str = "nccl", order: Order = "together", *, together: float = 1500.0, comm: float = 1000.0, **other: Any
) -> Row:
    """T_g 1000 µs, T_c 1000 µs: `hidden` is 0.5 unless told."""
    serial = 1000.0 + comm
    fields: dict[str, Any] = {
        "scenario": "one", "workload": "gemm 8192x8192x8192", "collective": "all_gather", "size_bytes": 1 << 30,
        "ratio": 1.0, "mechanism": mechanism, "order": order, "compute_alone": timing(1000.0),
        "compute_controlled": timing(1050.0),
        "comm_alone": timing(comm), "best_comm_alone_us": comm, "best_mechanism": mechanism, "serial": timing(serial),
        "together": timing(together), "compute_together": timing(1100.0), "comm_together": timing(1200.0),
        "head_start_us": 0.0, "hidden": (serial - together) / min(1000.0, comm), "ideal_fraction": 0.3,
        "compute_kept": 0.91, "comm_kept": 0.83, "pair_class": "GC-equal",
    }  # fmt: skip
    return Row(**(fields | other))


def measurement(*rows: Row, **other: Any) -> Measurement:
    where = Environment(
        device="cuda", gpu="NVIDIA H200", world_size=8, driver="580.1", torch="2.11.0", nccl="2.28.9",
        counterpoint="0.1.0", commit="abc", command=("counterpoint", "measure"), date="2026-11-21T03:00:00+00:00",
        variables={"NCCL_NVLS_ENABLE": "0"},
    )  # fmt: skip
    fields: dict[str, Any] = {"suite": "quick", "environment": where, "rounds": 12, "dropped_rounds": 2, "rows": rows}
    return Measurement(**(fields | other))


def usual() -> Measurement:
    """Two mechanisms, two orders, one marked row; nccl hides 0.5 together and -0.1 compute first."""
    return measurement(
        row("nccl"),
        row("nccl", "compute_first", together=2100.0),
        row("nccl+max_ctas=8"),
        row("nccl+max_ctas=8", "compute_first", together=1000.0, marked="max_ctas=8 had no effect: 24 CTAs ran"),
        unavailable={"nccl+green=108": "the driver is too old"},
    )


def hostile() -> Measurement:
    bad = row(HOSTILE, workload=HOSTILE, collective=HOSTILE, scenario=HOSTILE, marked=HOSTILE)
    return measurement(bad, suite=HOSTILE, unavailable={HOSTILE: HOSTILE})


def blocks() -> Measurement:
    block = BlockRow(
        what="all_gather", mechanism="nccl+max_ctas=8", size_bytes=1 << 20, num_ctas=8, time=timing(22.0), gb_per_s=47.7
    )
    return measurement(suite="blocks", blocks=(block,))


def exchanges() -> Measurement:
    """Alone `torch` is fastest and `auto` took `gather`; together with experts `gather` is fastest."""
    made, pairs = [], []
    for leg, longer in (("dispatch", 1.0), ("combine", 2.0)):
        what = f"{leg} mixtral-8x7b 1024 zipf"
        alone = {"torch": 100.0, "gather": 110.0, "slabs": 10.0, "auto": 111.0}
        for mechanism, us in alone.items():
            path = {"auto": "gather"}.get(mechanism, mechanism)
            marked = "wrong on rank 1" if mechanism == "slabs" else None
            made.append(BlockRow(what=what, mechanism=mechanism, time=timing(longer * us), path=path, marked=marked))
        pairs += [
            row(mechanism, together=longer * us, scenario=f"{what} | x", workload="experts x", collective=what)
            for mechanism, us in {"torch": 200.0, "gather": 120.0, "auto": 121.0}.items()
        ]
    return measurement(*pairs, suite="expert", blocks=tuple(made))


def matmuls() -> Measurement:
    """One that can hide, where `cuts` is 1.25 times as fast as torch, and one that cannot, where `cuts` is marked."""
    made = []
    for what, can_hide, comm in (
        ("all_gather_matmul 8192x7168x8192", True, 400.0),
        ("matmul_reduce_scatter 8192x8192x1280", False, 1250.0),
    ):

        def block(mechanism: str, us: float, what: str = what, can_hide: bool = can_hide, **more: Any) -> BlockRow:
            return BlockRow(what=what, mechanism=mechanism, time=timing(us), can_hide=can_hide, **more)

        made += [
            block("matmul alone", 1000.0, tflops=700.0),
            block("nccl alone", comm, size_bytes=1 << 27, gb_per_s=350.0),
            block("torch", 1500.0, over_longer=1500.0 / max(1000.0, comm) - 1, path="torch", why="asked for torch"),
            block("cuts", 1200.0, over_longer=1200.0 / max(1000.0, comm) - 1, path="cuts" if can_hide else "torch",
                  marked=None if can_hide else "ran as torch: no shared memory"),
            block("auto", 1200.0, over_longer=1200.0 / max(1000.0, comm) - 1, path="cuts", why="cuts is the simplest"),
        ]  # fmt: skip
    return measurement(suite="tensor", blocks=tuple(made))
