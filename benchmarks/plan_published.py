"""Claim: one set of constants per GPU generation predicts published step times, also those it was not fitted to.

    python benchmarks/plan_published.py                 # the tables, results/plan-published.{json,md}
    python benchmarks/plan_published.py --leave-out     # and both fitted constants again without each model (a minute)

Two constants of Ampere, `matmul` and `memory`, are fitted, to the 18 rows marked so; nothing is to any other row. What
a paper leaves open is set by what its software did at that time, for all of its rows alike (`docs/results/planner.md`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import msgspec
from provenance import provenance, read_result, write_result
from tables import print_table

from counterpoint.machine.profile import Efficiency, shipped_profile
from counterpoint.plan.compute.roofline import GpuRates
from counterpoint.plan.job.cluster import Cluster, find_gpu
from counterpoint.plan.job.job import Job
from counterpoint.plan.job.model import Model, find_model, model_flops
from counterpoint.plan.job.parallel import Parallel, Training
from counterpoint.plan.network.estimate import CollectiveTimes
from counterpoint.plan.network.protocols import levels, network_of
from counterpoint.plan.step.step import PredictedStep, expected_slowest, predict_step

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = ("group", "row", "published", "unit", "predicted", "error", "exposed", "bubble")
WHOLE = 1 << 36  # one bucket: gradients are reduced at once, after the last micro-batch
Recompute = Literal["none", "selective", "full"]
KINDS: tuple[Recompute, Recompute] = ("full", "selective")
VARIANTS = {"stock": "stock", "overlap": "zero-SM", "bound": "bound", "floor": "floor"}  # of fsdp_step.py, and here
PROTOTYPE = {"stock": "stock", "copied": "zero-SM, copied", "bound": "bound", "floor": "floor"}
Read = Callable[[Job, PredictedStep], float]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure; `read` takes it from a predicted step, `slower` says if more of it is worse."""

    group: str
    name: str
    job: Job
    published: float
    unit: str
    read: Read
    fitted: bool = False


def cluster(gpu: str, network: str, gpus: int) -> Cluster:
    return Cluster(gpu=find_gpu(gpu), levels=levels(network, gpus))


def seconds(job: Job, found: PredictedStep) -> float:
    return found.step_us / 1e6


def with_recomputation(job: Job, found: PredictedStep) -> float:
    """TFLOP/s per GPU as arXiv 2104.04473 counts them: recomputation included (its equation 3)."""
    m, t = job.model, job.training
    matrices = 96.0 * t.global_batch * t.sequence * m.layers * m.hidden**2
    flops = matrices * (1 + t.sequence / (6 * m.hidden) + m.vocab / (16 * m.layers * m.hidden))
    return flops / job.parallel.world_size / found.step_us / 1e6


def causal(job: Job, found: PredictedStep) -> float:
    """TFLOP/s per GPU with the half of attention that causal models need."""
    m, sequence = job.model, job.training.sequence
    whole = model_flops(m, sequence)
    attention = 3 * 4.0 * m.heads * m.head_width * sequence * m.layers
    return found.model_tflops * (1 - attention / 2 / whole)


def megatron(layers: int, hidden: int, heads: int) -> Model:
    return Model(layers=layers, hidden=hidden, heads=heads, vocab=51200, tied=True, dropout=True)


def iteration_times() -> list[Row]:
    """arXiv 2205.05198, table 5: Megatron-LM of 2022 without flash attention, sends between stages not overlapped."""
    group, found = "A100 iteration times", []
    for name, shape, (gpus, tp, pp, virtual), (batch, micro), times in (
        ("22B", (48, 6144, 64), (8, 8, 1, 1), (4, 4), (1.42, 1.10)),
        ("175B", (96, 12288, 96), (64, 8, 8, 3), (64, 1), (18.13, 13.75)),
        ("530B", (105, 20480, 128), (280, 8, 35, 3), (280, 1), (49.05, 37.83)),
        ("1T", (128, 25600, 160), (512, 8, 64, 1), (512, 1), (94.42, 71.49)),
    ):
        for kind, published in zip(KINDS, times, strict=True):
            parallel = Parallel(
                tp=tp, pp=pp, virtual=virtual, schedule="interleaved" if virtual > 1 else "1f1b",
                sequence=kind == "selective", overlap_pp=False,
            )  # fmt: skip
            training = Training(
                sequence=2048, global_batch=batch, micro_batch=micro, precision="fp16", recompute=kind,
                flash_attention=False,
            )  # fmt: skip
            job = Job(
                model=megatron(*shape), parallel=parallel, training=training,
                cluster=cluster("A100", "a100-hdr-200", gpus),
            )  # fmt: skip
            found.append(Row(group=group, name=f"{name}, {kind}", job=job, published=published, unit="s",
                             read=seconds, fitted=True))  # fmt: skip
    return found


def megatron_2021(
    shape: tuple[int, int, int], mesh: tuple[int, int, int, int], batch: tuple[int, int], torch_ddp: bool
) -> Job:
    """Megatron-LM of 2021: full recomputation, fp16 gradients added up by kernels of their own, nothing overlapped."""
    tp, pp, virtual, gpus = mesh
    parallel = Parallel(
        dp=gpus // tp // pp, tp=tp, pp=pp, virtual=virtual, schedule="interleaved" if virtual > 1 else "1f1b",
        sequence=False, overlap_tp=False, overlap_pp=False, overlap_dp=torch_ddp,
        bucket_bytes=25 << 20 if torch_ddp else WHOLE,
    )  # fmt: skip
    training = Training(
        sequence=2048, global_batch=batch[0], micro_batch=batch[1], precision="fp16", recompute="full",
        flash_attention=False, grad_bytes=2, fused_accumulation=False,
    )  # fmt: skip
    return Job(
        model=megatron(*shape), parallel=parallel, training=training, cluster=cluster("A100", "a100-hdr-200", gpus)
    )


def weak_scaling() -> list[Row]:
    """arXiv 2104.04473, table 1; micro-batches, parts and DDP as in Megatron-LM's examples/sc21/run_table_1.sh."""
    rows = (
        ("1.7B", (24, 2304, 24), (1, 1, 1, 32), (512, 16), 137),
        ("3.6B", (30, 3072, 32), (2, 1, 1, 64), (512, 16), 138),
        ("7.5B", (36, 4096, 32), (4, 1, 1, 128), (512, 16), 142),
        ("18.4B", (40, 6144, 48), (8, 1, 1, 256), (1024, 8), 135),
        ("39.1B", (48, 8192, 64), (8, 2, 1, 512), (1536, 4), 138),
        ("76.1B", (60, 10240, 80), (8, 4, 3, 1024), (1792, 2), 140),
        ("145.6B", (80, 12288, 96), (8, 8, 2, 1536), (2304, 2), 148),
        ("310.1B", (96, 16384, 128), (8, 16, 2, 1920), (2160, 1), 155),
        ("529.6B", (105, 20480, 128), (8, 35, 3, 2520), (2520, 1), 163),
        ("1008B", (128, 25600, 160), (8, 64, 1, 3072), (3072, 1), 163),
    )
    return [
        Row(group="A100 weak scaling", name=name, job=megatron_2021(shape, mesh, batch, mesh[1] == 1), published=tflops,
            unit="TFLOP/s", read=with_recomputation, fitted=True)
        for name, shape, mesh, batch, tflops in rows
    ]  # fmt: skip


def strong_scaling() -> list[Row]:
    """arXiv 2104.04473, table 2, rows of pipeline and tensor parallelism; parts per stage are not given there."""
    rows = [("174.6B", (96, 12288, 96), (8, 12, 2), 1536, gpus, t) for gpus, t in ((384, 153), (768, 149), (1536, 141))]
    rows += [
        ("529.6B", (105, 20480, 128), (8, 35, 3), 2240, gpus, t) for gpus, t in ((560, 171), (1120, 167), (2240, 159))
    ]
    return [
        Row(group="A100 strong scaling", name=f"{name}, {gpus} GPUs", published=tflops, unit="TFLOP/s",
            job=megatron_2021(shape, (*mesh, gpus), (batch, 1), torch_ddp=False), read=with_recomputation)
        for name, shape, mesh, batch, gpus, tflops in rows
    ]  # fmt: skip


def fsdp_a100() -> list[Row]:
    """MosaicML's llm-foundry, scripts/train/benchmarking/README.md: FSDP with FlashAttention 1, eager, 2023."""
    found = []
    for name, shape, gpus, (micro, batch, again), tokens_per_s in (
        ("MPT-70B", (80, 8192, 64), 64, (8, 2048, True), 26274),
        ("MPT-70B", (80, 8192, 64), 32, (2, 1024, True), 11962),
        ("MPT-30B", (48, 7168, 56), 8, (3, 504, True), 7330),
        ("MPT-13B", (40, 5120, 40), 8, (2, 48, False), 18097),
        ("MPT-7B", (32, 4096, 32), 8, (6, 96, False), 37130),
        ("MPT-3B", (32, 2560, 20), 8, (10, 160, False), 86491),
        ("MPT-1B", (24, 2048, 16), 8, (14, 448, False), 164109),
    ):
        layers, hidden, heads = shape
        training = Training(
            sequence=2048, global_batch=batch, micro_batch=micro, recompute="full" if again else "none", grad_bytes=2,
            fused_kernels=False,
        )  # fmt: skip
        job = Job(
            model=Model(layers=layers, hidden=hidden, heads=heads, vocab=50368, tied=True),
            parallel=Parallel(dp=gpus, zero=3), training=training, cluster=cluster("A100", "a100-hdr-200", gpus),
        )  # fmt: skip
        found.append(Row(group="A100 FSDP", name=f"{name}, {gpus} GPUs", job=job, published=batch * 2048 / tokens_per_s,
                         unit="s", read=seconds))  # fmt: skip
    return found


def llama3() -> list[Row]:
    """arXiv 2407.21783, table 4: torch, eager, asynchronous sends, gradients added up in float32.

    Parameters stay gathered from forward to backward, which sends as much as zero = 1.
    Parts per stage are not given: one layer each, as embedding and head take a layer's place (its section 3.3.2).
    """
    found = []
    for gpus, cp, dp, sequence, batch, tflops in (
        (8192, 1, 64, 8192, 32, 430),
        (16384, 1, 128, 8192, 16, 400),
        (16384, 16, 8, 131072, 16, 380),
    ):
        parallel = Parallel(
            dp=dp, tp=8, pp=16, cp=cp, virtual=8, schedule="interleaved", zero=1, ends_count=True, overlap_tp=False
        )
        training = Training(
            sequence=sequence, global_batch=batch * dp, fused_kernels=False, fused_accumulation=False
        )  # fmt: skip
        job = Job(
            model=find_model("llama3-405b"), parallel=parallel, training=training,
            cluster=cluster("H100", "h100-roce-400", gpus),
        )  # fmt: skip
        found.append(Row(group="H100 Llama 3 405B", name=f"{gpus} GPUs, {sequence} tokens", job=job, published=tflops,
                         unit="TFLOP/s", read=causal))  # fmt: skip
    return found


def without_update(job: Job, found: PredictedStep) -> float:
    """Forward and backward, ms."""
    return (found.step_us - found.parts["optimizer_us"]) / 1e3


def slowest_of(ranks: int) -> Read:
    """One GPU that waits for nobody, but of so many the slowest was noted."""
    slowest = expected_slowest(shipped_profile("H200").efficiency.spread, ranks)
    return lambda job, found: without_update(job, found) * slowest


def with_copies(job: Job, found: PredictedStep) -> float:
    """Collectives do nothing, FSDP2's copies stay."""
    return without_update(job, found) - found.parts["shards_us"] / 1e3


def fsdp_step(group: str, name: str, model: Model, ranks: int, tokens: int, times: dict[str, float]) -> list[Row]:
    """Forward and backward under FSDP2, eager; `bound` has no communication, `floor` is not sharded."""
    kinds: dict[str, tuple[str, Read]] = {
        "stock": ("nccl", without_update),
        "zero-SM": ("zero_sm", without_update),
        "zero-SM, copied": ("zero_sm_copied", without_update),
        "bound": ("nccl", with_copies),
        "floor": ("nccl", slowest_of(ranks)),
    }
    found = []
    for kind in times:
        mechanism, read = kinds[kind]
        dp = 1 if kind == "floor" else ranks
        job = Job(
            model=model, parallel=Parallel(dp=dp, zero=3 if dp > 1 else 0),
            training=Training(sequence=tokens, global_batch=dp, grad_bytes=2, fused_kernels=False),
            cluster=cluster("H200", "nvlink-h100", 8), mechanism=mechanism,
        )  # fmt: skip
        found.append(Row(group=group, name=f"{name}{tokens} tokens, {kind}", job=job, published=times[kind], unit="ms",
                         read=read))  # fmt: skip
    return found


def fsdp_8xh200() -> list[Row]:
    """This project's measurements, 2026-11-20: FSDP2, eager, 12 layers of Llama-3-8B's shape without its ends."""
    model = Model(layers=12, hidden=4096, heads=32, kv_heads=8, ffn=14336, gated=True, vocab=1)
    return [
        row
        for tokens, times in ((2048, (91.0, 79.1, 62.3, 59.1)), (4096, (150.3, 138.2, 129.5, 117.6)),
                              (8192, (274.3, 261.5, 251.4, 239.1)))
        for row in fsdp_step("H200 FSDP2", "", model, 8, tokens, dict(zip(PROTOTYPE.values(), times, strict=True)))
    ]  # fmt: skip


def fsdp_fewer_h200(ranks: int) -> list[Row]:
    """This project's measurements, 2026-11-21, on other machines: layers of 8B's and of 70B's shape, small ends."""
    found = []
    for name, kind, (layers, hidden, heads, ffn) in (
        ("8B", "layers", (12, 4096, 32, 14336)),
        ("70B", "70b", (4, 8192, 64, 28672)),
    ):
        model = Model(layers=layers, hidden=hidden, heads=heads, kv_heads=8, ffn=ffn, gated=True, vocab=1024)
        measured: dict[int, dict[str, float]] = {}
        for row in json.loads(read_result(ROOT / "results" / f"fsdp-step-{kind}-{ranks}xh200.json"))["rows"]:
            if row["variant"] in VARIANTS:
                measured.setdefault(row["tokens"], {})[VARIANTS[row["variant"]]] = row["ms"]
        for tokens, times in measured.items():
            found += fsdp_step(f"{ranks} x H200 FSDP2", f"{name}, ", model, ranks, tokens, times)
    return found


def whole_steps() -> list[Row]:
    """This project's recordings, 2026-11-21, of `examples/record_fsdp.py` as it comes, on two machines: 8 layers of 8B,
    embedding, head, reduction in float32, clipping and AdamW; the mean step that `diagnose` finds."""
    model = Model(layers=8, hidden=4096, heads=32, kv_heads=8, ffn=14336, gated=True, vocab=128256)
    recorded = json.loads(read_result(ROOT / "results" / "plan-from-trace.json"))["rows"]
    return [
        Row(
            group="H200 FSDP2, whole steps", name=f"{ranks} GPUs", published=ms, unit="ms",
            read=lambda job, found: found.step_us / 1e3,
            job=Job(
                model=model, parallel=Parallel(dp=ranks, zero=3), cluster=cluster("H200", "nvlink-h100", 8),
                training=Training(sequence=4096, global_batch=ranks, grad_bytes=4, fused_kernels=False),
            ),
        )
        for ranks, ms in sorted({int(row[1]): float(row[2]) for row in recorded}.items())
    ]  # fmt: skip


def rows() -> list[Row]:
    """All of them."""
    return [
        *iteration_times(), *weak_scaling(), *strong_scaling(), *fsdp_a100(), *llama3(), *fsdp_8xh200(),
        *fsdp_fewer_h200(4), *fsdp_fewer_h200(2), *whole_steps(),
    ]  # fmt: skip


class Predictions:
    """Steps of rows; networks are priced once."""

    def __init__(self) -> None:
        self.prices: dict[tuple[str, int], CollectiveTimes] = {}

    def step(self, row: Row, efficiency: Efficiency | None = None) -> PredictedStep:
        key = (row.job.cluster.gpu.name, row.job.cluster.num_gpus)
        if key not in self.prices:
            self.prices[key] = CollectiveTimes(network_of(row.job.cluster))
        rates = GpuRates.of(row.job.cluster.gpu, row.job.training.precision, efficiency)
        return predict_step(row.job, prices=self.prices[key], rates=rates)

    def error(self, row: Row, efficiency: Efficiency | None = None) -> float:
        """Of the step's time: predicted / published - 1, turned round for rates."""
        ratio = row.read(row.job, self.step(row, efficiency)) / row.published
        return (ratio if row.unit in ("s", "ms") else 1 / ratio) - 1


def leave_out(predictions: Predictions, fitted: Sequence[Row]) -> dict[str, float]:
    """Mean error on each model when both constants are fitted to the rows of the others, on the grid of the fit."""
    grid = [
        msgspec.structs.replace(shipped_profile("A100").efficiency, matmul=matmul, memory=memory)
        for matmul in (0.91, 0.93, 0.95, 0.97) for memory in (0.60, 0.64, 0.68, 0.72)
    ]  # fmt: skip
    errors = [[predictions.error(row, efficiency) for row in fitted] for efficiency in grid]
    models = [row.name.split(",")[0] for row in fitted]
    found = {}
    for left in dict.fromkeys(models):
        kept = [i for i, name in enumerate(models) if name != left]
        best = min(errors, key=lambda each: sum(each[i] ** 2 for i in kept))
        found[left] = fmean(abs(best[i]) for i, name in enumerate(models) if name == left)
    return found


def summary(errors: dict[str, list[float]]) -> list[str]:
    return [
        f"{group}: mean {fmean(map(abs, each)):.1%}, worst {max(map(abs, each)):.1%} of {len(each)}"
        for group, each in errors.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--leave-out", action="store_true")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "plan-published.json")
    args = parser.parse_args()
    predictions = Predictions()
    lines, kept, errors = [], [], dict[str, list[float]]()
    for row in rows():
        found, error = predictions.step(row), predictions.error(row)
        value = row.read(row.job, found)
        line = [
            row.group + (", fitted" if row.fitted else ""), row.name, f"{row.published:.4g}", row.unit, f"{value:.4g}",
            f"{error:+.1%}", f"{found.exposed_comm_us / found.step_us:.0%}",
            f"{found.parts['bubble_us'] / found.step_us:.0%}",
        ]  # fmt: skip
        errors.setdefault(line[0], []).append(error)
        lines.append(line)
        kept.append({"group": row.group, "row": row.name, "published": row.published, "unit": row.unit,
                     "predicted": value, "error": error, "parts_us": found.parts})  # fmt: skip
    print_table(COLUMNS, lines, width=140)
    print("\n".join(summary(errors)))
    result: dict[str, Any] = {"provenance": provenance(("counterpoint",)), "rows": kept, "summary": summary(errors)}
    if args.leave_out:
        left = leave_out(predictions, [row for row in rows() if row.fitted])
        result["leave_one_model_out"] = left
        print(f"leave one model out: mean {fmean(left.values()):.1%}, worst {max(left.values()):.1%}: {left}")
    write_result(args.out, result, COLUMNS, lines)


if __name__ == "__main__":
    main()
