"""What is advised fits what was seen."""

from dataclasses import replace
from typing import Any

import pytest

from counterpoint.diagnosis.analysis.analysis import Analysis
from counterpoint.diagnosis.findings.communication import find_exposed
from counterpoint.diagnosis.findings.findings import in_order, verdict
from counterpoint.diagnosis.reading.traced_job import assemble, traced_stack
from counterpoint.records.causes import IDLE_CAUSES, Cause
from counterpoint.records.diagnosis import Diagnosis, Finding
from counterpoint.rendering.diagnosis_tables import idle_sentence
from counterpoint.trace.timeline import Device, Kind
from tests.support.job_builder import H200, Op, comm, diagnosed, digested, job, op, rank

NAN = float("nan")


def advice(*, copies: bool) -> str:
    """For a step of 100 µs of compute and as much communication after it, by copy engines or by NCCL."""
    alone: Op = comm("all_gather", 100, 190)
    if copies:
        alone = Op(name="Memcpy PtoP (Device -> Device)", start=100, end=190, kind=Kind.COMM, stream=24, bytes=1 << 20)
    j = job(rank(op("matmul", 0, 100, launch=0.0), alone))
    (finding,) = (f for f in find_exposed(Analysis(j)))
    return finding.advice


@pytest.mark.parametrize(
    ("copies", "said"), [(True, "It takes no SM already"), (False, "use collectives that take no SM")]
)
def test_copy_engines_are_not_advised_where_they_are_used(copies: bool, said: str) -> None:
    """What copies leave exposed begins too late; what NCCL does may have waited for SMs."""
    assert said in advice(copies=copies)


AMD, CPU = Device(name="AMD Instinct MI300X", num_sms=304), Device(name="cpu")
NVIDIA_ONLY = ("cublas", "nvidia-smi", "NCCL", "max_ctas", "FSDP", "MixedPrecision")


def contended(device: Device, kernel: str = "gemm_kernel") -> Diagnosis:
    """Two ranks whose one-wave kernels need a second wave beside a collective, and one exposed collective a step."""
    ranks = []
    for late in (0.0, 5.0):
        ops: list[Op] = []
        for i in range(4):
            at = 570.0 * i
            more: dict[str, Any] = {"launch": float(i), "grid": (device.num_sms or 132, 1, 1)}
            ops.append(op(kernel, at, at + 200 + i, **more))
            ops.append(op(kernel, at + 210, at + 560 + i, **more))
            ops.append(comm("all_gather", at + 205 + late, at + 565, launch=float(i)))
        ops.append(comm("reduce_scatter", 2300.0, 2600.0, launch=5.0))
        ranks.append(rank(*ops, device=device))
    return diagnosed(*ranks)


@pytest.mark.parametrize("device", [AMD, CPU], ids=["amd", "cpu"])
def test_knobs_of_nvidia_and_of_fsdp_are_not_advised_elsewhere(device: Device) -> None:
    findings = contended(device).findings
    assert findings
    assert not [(f.title, knob) for f in findings for knob in NVIDIA_ONLY if knob in f.advice]


def test_knobs_of_nvidia_are_advised_on_nvidia() -> None:
    (finding,) = (f for f in contended(H200).findings if f.kind == "tail_effect")
    assert "cublasSetSmCountTarget" in finding.advice
    assert "NCCL's zero-CTA policy" in finding.advice


@pytest.mark.parametrize(
    ("device", "kernel", "vendor"),
    [
        ("", "nvjet_sm90_tst", "nvidia"), ("", "Cijk_Ailk_Bljk", "amd"), ("", "gemm", None),
        ("NVIDIA A100-PG509-200", "gemm", "nvidia"), ("AMD Instinct MI300X", "gemm", "amd"),
        ("Tesla V100-SXM2-16GB", "gemm", "nvidia"), ("cpu", "gemm", "cpu"),
    ],
)  # fmt: skip
def test_vendor(device: str, kernel: str, vendor: str | None) -> None:
    assert traced_stack(job(rank(op(kernel, 0, 10), device=Device(name=device)))).vendor == vendor


CHUNK_CAT = "void at::native::detail::chunk_cat_cuda_kernel<float, c10::BFloat16>(c10::BFloat16**)"


@pytest.mark.parametrize(
    ("device", "kernel", "overlaps"),
    [(H200, CHUNK_CAT, True), (H200, "nvjet_tst", False), (Device(name="AMD Instinct MI300X"), CHUNK_CAT, False)],
)
def test_overlap_is_advised_where_it_applies(device: Device, kernel: str, overlaps: bool) -> None:
    """To FSDP2 over NCCL on NVIDIA's GPUs, and to nothing else."""
    found = traced_stack(job(rank(op(kernel, 0, 10), comm("all_gather", 10, 20), device=device)))
    assert found.overlaps is overlaps


def test_collectives_at_the_same_time_count_once() -> None:
    """Two collectives on two streams, 100 µs each, 80 of them together: 120 µs, of a step of 220."""
    ops = (
        op("matmul", 0, 100, launch=0.0), comm("all_gather", 100, 200), comm("all_reduce", 120, 220, stream=21),
    )  # fmt: skip
    j = job(rank(*ops), rank(*ops))
    a = Analysis(j)
    assert (a.per_rank[0].wait_us or 0.0) + (a.per_rank[0].transfer_us or 0.0) == pytest.approx(120.0)
    assert sum(kind.exposed_us for kind in a.kinds) == pytest.approx(a.totals.exposed_comm_us)
    assert {k.op: round(k.exposed_us, 3) for k in a.kinds} == {"all_gather": 100.0, "all_reduce": 20.0}


def test_of_concurrent_collectives_the_one_that_compute_waits_for_is_exposed() -> None:
    """The reduce-scatter runs on until 320; the kernel at 201 waits for the all-reduce, that at 250 for none."""
    ops = (
        op("matmul", 0, 100, launch=0.0), comm("reduce_scatter", 100, 320), comm("all_reduce", 105, 200, stream=21),
        op("add", 201, 240), op("add", 250, 350),
    )  # fmt: skip
    exposed = {k.op: k.exposed_us for k in Analysis(job(rank(*ops), rank(*ops))).kinds}
    assert exposed == {"all_reduce": pytest.approx(95.0), "reduce_scatter": pytest.approx(5 + 1 + 10)}


def test_no_finding_reads_zero_and_a_recording_without_steps_is_no_step() -> None:
    found = contended(H200)
    assert all(round(f.cost_us / 1e3, 2) > 0 for f in found.findings)
    ops = (op("matmul", 0, 100, launch=0.0), comm("all_gather", 100, 190))
    whole = diagnosed(rank(*ops, steps=()))
    assert whole.steps[0].name == "whole trace"
    assert not [f.title for f in whole.findings if "the step" in f.title]
    assert "of the recording (0.09 ms) is communication" in str(whole.findings)


def test_a_gpu_that_was_not_recorded_is_judged_by_nobody() -> None:
    """Operations of the host stand for its own, and say nothing of it."""
    unseen = replace(H200, recorded=False)
    parts = [op("aten::mm", 0, 100, launch=NAN), op("aten::mm", 2000, 2100, launch=NAN)]
    d = diagnosed(rank(*parts, steps=((0.0, 2100.0),), device=unseen))
    assert "GPU activity was not recorded" in d.verdict
    assert (d.findings, d.idle, d.replay, d.stragglers) == ((), None, None, ())


def test_communication_without_any_compute_in_the_trace() -> None:
    """A rank whose collectives were recorded alone: nobody knows what ran beside them."""
    parts = [comm("all_reduce", 0, 900, launch=NAN), op("aten::empty", 905, 906, launch=NAN)]
    d = diagnosed(rank(*parts, steps=((0.0, 1000.0),), device=CPU))
    assert d.findings[0].advice.startswith("record compute as well")
    assert d.verdict.endswith("ms of it can be saved.")


def test_communication_that_costs_nothing_is_explained() -> None:
    """The host launches every 100 µs: without the collective of 60 the step would be as long."""
    parts: list[Op] = []
    for i in range(40):
        at = 100.0 * i
        parts += [op("add", at + 10, at + 20, launch=at), comm("all_gather", at + 30, at + 90, launch=at + 21)]
    parts.append(op("add", 4010, 4020, launch=4000))
    d = diagnosed(rank(*parts, steps=((0.0, 4020.0),)))
    assert "exposed_comm" not in [f.kind for f in d.findings]
    assert "waits for it. Without communication it would take as long" in d.verdict


def test_times_are_of_the_recording_where_no_steps_were_found() -> None:
    """Ten kernels 4 ms apart, and nothing that repeats by name."""
    ops = [op(f"kernel{i}", 4000.0 * i, 4000.0 * i + 20, launch=4000.0 * i - 10) for i in range(1, 11)]
    d = diagnosed(rank(*ops, steps=()))
    assert not d.has_steps
    assert d.findings
    assert not [f for f in d.findings if "a step" in f.title + f.evidence or "the step" in f.title + f.evidence]
    assert "in the recording, of which" in idle_sentence(d)
    assert "the trace does not hold why for the other" in idle_sentence(d)


def test_ranks_without_a_trace_are_named_in_runs() -> None:
    """A reader counts 0-2, 4-127; and waiting is spoken of only where there is communication."""
    alone = replace(digested(rank(op("a", 0, 100), comm("all_gather", 100, 190)), 3), world_size=128)
    notes = assemble([alone]).notes
    assert any(note.startswith("no trace of ranks 0-2, 4-127 (of 128 ranks): where one of them") for note in notes)
    silent = replace(digested(rank(op("a", 0, 100)), 1), world_size=2)
    assert "no trace of rank 0 (of 2 ranks)" in assemble([silent]).notes


def test_one_file_of_several_gpus_is_one_file() -> None:
    """An Nsight Systems export of two processes does not hold two traces."""
    digests = [replace(digested(rank(op("a", 0, 100)), n, 2), rank_known=False, path="export.sqlite") for n in range(2)]
    assert any(note.startswith("the file does not say which ranks its 2 GPUs are") for note in assemble(digests).notes)
    apart = [replace(d, path=f"{n}.json") for n, d in enumerate(digests)]
    assert any(note.startswith("2 traces without a rank") for note in assemble(apart).notes)


@pytest.mark.parametrize(("last", "said"), [(100, "A step takes 0.1 ms; no"), (5_000, "A step takes 1.3 ms on average, "
    "usually 0.1 (longest: ProfilerStep#3, 5.0 ms); no")])  # fmt: skip
def test_verdict_tells_the_usual_step_beside_the_mean(last: int, said: str) -> None:
    """Where one long step makes the mean longer than what a reader sees again."""
    begins = (0, 100, 200, 300)
    r = rank(*[op("a", at + 10, at + 95) for at in begins], steps=[(0, 100), (100, 200), (200, 300), (300, 300 + last)])
    assert diagnosed(r).verdict.startswith(said)


@pytest.mark.parametrize("cause", [c for c in IDLE_CAUSES.values() if c.title], ids=lambda c: c.name)
def test_a_cause_with_a_finding_has_all_its_words(cause: Cause) -> None:
    assert cause.short
    assert cause.kind
    assert cause.advice


def finding(kind: str, cost_us: float) -> Finding:
    return Finding(kind=kind, cost_us=cost_us, severity="low", title=kind.capitalize(), evidence="", advice="")


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        (
            {"exposed_comm": 90.0, "host_bound": 60.0},
            "Main cause: host_bound (0.06 ms a step).",
        ),
        (
            {"exposed_comm": 90.0, "host_bound": 10.0},
            "Main loss: exposed_comm; at most 0.09 ms of it can be saved.",
        ),
        ({"host_bound": 90.0, "exposed_comm": 60.0}, "Main cause: host_bound (0.09 ms a step)."),
    ],
)
def test_the_verdict_names_the_first_finding_and_causes_come_before_symptoms(
    costs: dict[str, float], said: str
) -> None:
    j = job(rank(op("matmul", 0, 100, launch=0.0), comm("all_gather", 100, 190)))
    found = in_order(finding(*item) for item in costs.items())
    assert said in verdict(Analysis(j), found)
    assert found[0].title.lower() in said
