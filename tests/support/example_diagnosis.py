"""A diagnosis as a training job would give it, one with hostile names, an empty one."""

import random

import msgspec

from counterpoint.records.diagnosis import (
    Account,
    Collective,
    Diagnosis,
    Finding,
    KernelCause,
    KernelComparison,
    RankAccount,
    Replay,
    Source,
    StepTime,
    Straggler,
    TimelineLane,
    WhatIfStep,
)

WORLD, STEPS, LAYERS, STEP_US = 8, 3, 8, 90_600.0
LATE, LATE_US = 5, 6_400.0
MANY, LATE_OF_MANY = 256, 197
GEMM = "nvjet_tst_192x192_64x4_2x1_v_bz_coopB_TNN"
HOSTILE = "<script>alert(1)</script>\x1b[31m\"quoted' [bold]</script><img src=//x.invalid/a>\u2028" + "x" * 5000


def account(rank: int, *, late: bool = False) -> RankAccount:
    """Three steps of a rank; the late rank waits least."""
    wait = (1_100.0 if late else 7_300.0 + 90 * rank) * STEPS
    transfer, compute, comm = 9_800.0 * STEPS, 68_900.0 * STEPS, (41_000.0 if late else 47_200.0 + 90 * rank) * STEPS
    exposed = wait + transfer
    return RankAccount(
        rank=rank, duration_us=STEP_US * STEPS, compute_us=compute, comm_us=comm, overlapped_us=comm - exposed,
        exposed_comm_us=exposed, memcpy_us=900.0 * STEPS, idle_us=STEP_US * STEPS - compute - exposed - 400.0 * STEPS,
        wait_us=wait, transfer_us=transfer, hidden=1 - exposed / comm, comm_to_compute=comm / compute, mfu=0.43,
        exposed_wait_us=wait,
    )  # fmt: skip


def mean(accounts: list[RankAccount]) -> Account:
    columns = {f.name: [getattr(a, f.name) for a in accounts] for f in msgspec.structs.fields(Account)}
    means = {name: None if None in column else sum(column) / len(column) for name, column in columns.items()}
    return msgspec.convert(means, Account)


def collectives(rng: random.Random) -> tuple[Collective, ...]:
    found = []
    for index in range(STEPS * LAYERS * 2):
        step, layer = divmod(index, LAYERS * 2)
        op = "all_gather" if layer < LAYERS else "reduce_scatter"
        start = step * STEP_US + layer * 5_200.0 + 2_000.0
        usual = 800.0 if layer % 5 else 2_900.0
        waits: dict[str, float | None] = {
            str(r): 0.0 if r == LATE else usual * rng.uniform(0.9, 1.1) for r in range(WORLD)
        }
        found.append(
            Collective(
                op=op, group="fsdp", index=index, bytes=436_224_000, ranks=tuple(range(WORLD)), last_rank=LATE,
                start_us=start, end_us=start + 2_900 + 1_180, wait_us=waits,
                transfer_us=1_180.0 * rng.uniform(0.97, 1.2), algo_gb_per_s=369.7,
                bus_gb_per_s=323.5 * rng.uniform(0.85, 1.0), exposed_us=640.0 * rng.uniform(0.2, 2.2), num_ctas=24,
                joined_by="seq",
                step=f"ProfilerStep#{step + 3}",
            )
        )  # fmt: skip
    return tuple(found)


def kernel(
    name: str, slowdown: float, cost: float, cause: KernelCause, waves: tuple[int, int] | None
) -> KernelComparison:
    alone = 1_420.0
    return KernelComparison(
        name=name, grid=(2, 66, 1), block=(384, 1, 1), shapes="[[2048, 4096], [4096, 14336]]", alone_count=41,
        overlapped_count=55, alone_us=alone, alone_p10_us=alone * 0.98, alone_p90_us=alone * 1.03,
        overlapped_us=alone * slowdown, overlapped_p10_us=alone * slowdown * 0.9,
        overlapped_p90_us=alone * slowdown * 1.2, slowdown=slowdown, cost_us=cost * STEPS, cause=cause,
        waves_alone=waves and waves[0], waves_overlapped=waves and waves[1], blocks_per_sm=1, comm_ctas=24,
        comm_ctas_without_extra_wave=0 if waves else None,
    )  # fmt: skip


def lanes(spans: int = 6_000, world: int = WORLD) -> list[TimelineLane]:
    """About `spans` spans over compute, communication, wait and memcpy lanes of every rank."""
    rng, found = random.Random(1), []
    per_rank = max(1, spans // world)
    for rank in range(world):
        n = max(1, int(per_rank * 0.7))
        pitch = STEP_US * STEPS / n
        stalled = range(0 if rank != LATE else STEPS)
        stalls = {int(n * (step + 0.41) / STEPS) + k for step in stalled for k in range(max(1, n // 40))}
        busy = [i for i in range(n) if i not in stalls and i % (n // STEPS or 1) < 0.93 * n / STEPS]
        names = (GEMM, "void at::native::elementwise_kernel<4>", "flash_fwd_kernel", "void rms_norm<bf16>")
        found.append(
            TimelineLane(
                rank=rank, name="compute", start_us=tuple(i * pitch for i in busy),
                duration_us=tuple(pitch * rng.uniform(0.6, 0.98) for _ in busy),
                labels=tuple(names[i % 4] for i in busy),
            )
        )  # fmt: skip
        comm = max(1, int(per_rank * 0.15))
        gap = STEP_US * STEPS / comm
        length = [gap * (0.4 if rank == LATE else 0.62) * rng.uniform(0.9, 1.1) for _ in range(comm)]
        starts = tuple(i * gap + gap * (0.3 if rank == LATE else 0.08) for i in range(comm))
        kind = ("ncclDevKernel_AllGather_RING_LL", "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL")
        labels = tuple(kind[i % 2] for i in range(comm))
        found.append(
            TimelineLane(rank=rank, name="communication", start_us=starts, duration_us=tuple(length), labels=labels)
        )
        wait = tuple(x * (0.02 if rank == LATE else 0.36) for x in length)
        found.append(TimelineLane(rank=rank, name="wait", start_us=starts, duration_us=wait, labels=labels))
        few = starts[::6]
        copies = ("Memcpy HtoD",) * len(few)
        found.append(
            TimelineLane(rank=rank, name="memcpy", start_us=few, duration_us=(gap * 0.2,) * len(few), labels=copies)
        )
    return found


def training() -> Diagnosis:
    """8 ranks of FSDP2 on H200, rank 5 stalled by its host."""
    ranks = [account(rank, late=rank == LATE) for rank in range(WORLD)]
    stall = "GPU had no work for 6.4 ms while the main thread sat in aten::item (cudaStreamSynchronize) after layer 3"
    return Diagnosis(
        source=Source(format="kineto", files=tuple(f"fsdp2/rank{r}.json.gz" for r in range(WORLD)), events=318_204),
        world_size=WORLD, ranks=tuple(range(WORLD)), missing_ranks=(), gpu="NVIDIA H200",
        clock_offsets_us={str(r): 0.0 if r == 0 else -1.4 * r for r in range(WORLD)},
        clock_uncertainty_us={str(r): 0.6 for r in range(WORLD)}, clock_drift_ppm={str(r): None for r in range(WORLD)},
        verdict="62 % of communication is hidden; of the 17.1 ms that are not, 7.5 ms are spent waiting for rank 5, "
        "whose host stalls in aten::item.",
        notes=("Gradient norm ran on all ranks at once and was left out of the join.",),
        steps=tuple(
            StepTime(name=f"ProfilerStep#{s + 3}", start_us=s * STEP_US, duration_us=STEP_US) for s in range(STEPS)
        ),
        totals=mean(ranks), per_rank=tuple(ranks), collectives=collectives(random.Random(7)),
        stragglers=(
            Straggler(
                rank=LATE, delay_us=LATE_US * STEPS, times_last=44, cause="host_stall", evidence=stall,
                detail="aten::item", start_us=37_000.0, end_us=43_400.0,
            ),
        ),
        kernels=(
            kernel(GEMM, 1.61, 4_200.0, "tail_effect", (1, 2)),
            kernel("flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4>>", 1.14, 1_100.0, "sm_contention", None),
            kernel(
                "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add<BFloat16>>", 1.31, 700.0,
                "bandwidth", None,
            ),
            kernel("void rms_norm<bf16>", 1.0, 0.0, "none", None),
        ),
        findings=(
            Finding(
                kind="straggler", cost_us=6_300.0, severity="high",
                title="Rank 5 makes the others wait: its host stalls",
                evidence=f"{stall}; it came last to 44 of 48 collectives.",
                advice="Take .item() out of the training loop, or read the value a step later with non_blocking=True.",
                rank=5, start_us=37_000.0, end_us=43_400.0,
            ),
            Finding(
                kind="tail_effect", cost_us=4_200.0, severity="medium", title="GEMMs need a second wave beside NCCL",
                evidence=f"{GEMM}: 132 blocks, one per SM; 24 communication CTAs leave 108 SMs: 1 wave becomes 2.",
                advice="Give the GEMM 108 SMs: cublasSetSmCountTarget(handle, 108), or NCCL 8 CTAs: NCCL_MAX_CTAS=8.",
                start_us=120_000.0, end_us=134_000.0,
            ),
            Finding(
                kind="exposed_comm", cost_us=1_900.0, severity="low",
                title="The first all_gather of the step hides behind nothing",
                evidence="all_gather #0 of fsdp, 1.9 ms, no compute runs on any rank.",
                advice="Prefetch it at the end of the previous step: module.unshard(async_op=True).",
            ),
        ),
        replay=Replay(
            measured_us=STEP_US, replayed_us=91_300.0, error=0.0077, steps=STEPS,
            what_if=(
                WhatIfStep(name="no straggler", step_us=85_000.0),
                WhatIfStep(name="no contention", step_us=87_100.0),
                WhatIfStep(name="launch order fixed", step_us=89_900.0),
                WhatIfStep(name="communication twice as fast", step_us=82_700.0),
                WhatIfStep(name="communication free", step_us=71_200.0),
            ),
        ),
    )  # fmt: skip


def empty() -> Diagnosis:
    """One rank that only ran on a CPU: no collectives, no kernels, no replay."""
    alone = RankAccount(
        rank=0, duration_us=1_000.0, compute_us=0.0, comm_us=0.0, overlapped_us=0.0, exposed_comm_us=0.0, memcpy_us=0.0,
        idle_us=1_000.0, wait_us=0.0, transfer_us=0.0, hidden=None, comm_to_compute=None,
    )  # fmt: skip
    return Diagnosis(
        source=Source(format="kineto", files=("rank0.json",), events=12), world_size=1, ranks=(0,), missing_ranks=(),
        gpu=None, clock_offsets_us={"0": 0.0}, clock_uncertainty_us={"0": None}, clock_drift_ppm={"0": None},
        verdict="No communication was found.", notes=(), steps=(), totals=mean([alone]), per_rank=(alone,),
        collectives=(), stragglers=(), kernels=(), findings=(), replay=None,
    )  # fmt: skip


def hostile() -> tuple[Diagnosis, list[TimelineLane]]:
    """`HOSTILE` wherever a trace or a path can put a name."""
    base, change = training(), msgspec.structs.replace
    assert base.replay is not None
    spans = [change(lane, labels=(HOSTILE,) * len(lane.labels)) for lane in lanes(400)]
    return change(
        base, verdict=HOSTILE, gpu=HOSTILE, notes=(HOSTILE,), source=change(base.source, files=(HOSTILE,)),
        steps=tuple(change(step, name=HOSTILE) for step in base.steps),
        collectives=tuple(change(c, op=HOSTILE, group=HOSTILE, step=HOSTILE) for c in base.collectives),
        kernels=tuple(change(k, name=HOSTILE, shapes=HOSTILE) for k in base.kernels),
        stragglers=tuple(change(s, evidence=HOSTILE, detail=HOSTILE) for s in base.stragglers),
        findings=tuple(change(f, kind=HOSTILE, title=HOSTILE, evidence=HOSTILE, advice=HOSTILE) for f in base.findings),
        replay=change(base.replay, what_if=tuple(change(w, name=HOSTILE) for w in base.replay.what_if)),
    ), spans  # fmt: skip


def of_256_ranks() -> Diagnosis:
    """A job whose late rank computes more than any other, so that nothing but its lateness tells."""
    base, change = training(), msgspec.structs.replace
    accounts = [change(account(rank % 8, late=rank == LATE_OF_MANY), rank=rank) for rank in range(MANY)]
    accounts[LATE_OF_MANY] = change(accounts[LATE_OF_MANY], compute_us=1.2 * accounts[LATE_OF_MANY].compute_us)
    return change(
        base, per_rank=tuple(accounts), ranks=tuple(range(MANY)), world_size=MANY,
        stragglers=(change(base.stragglers[0], rank=LATE_OF_MANY),),
    )  # fmt: skip
