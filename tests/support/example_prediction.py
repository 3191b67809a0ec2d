"""Predictions for the tests of the report: usual, of one stage, hostile."""

import msgspec

from counterpoint.records.prediction import (
    Bar,
    Curve,
    PartChange,
    PlanOutcome,
    Prediction,
    RatioError,
    SearchResult,
    StepInterval,
    TimePart,
)

HOSTILE = "</script><script>alert(1)</script>\x1b[31m"


def bare() -> Prediction:
    return Prediction(
        model="small", gpu="H100", gpus=16, step_us=10_000.0,
        parts=(
            TimePart(name="matmul", us=7_000.0, means="matrix products"),
            TimePart(name="gradients", us=3_000.0, means="exposed: gradients between replicas"),
        ),
        comm=(TimePart(name="gradients", us=5_000.0, means="replicas"),), exposed_comm_us=3_000.0,
        comm_to_compute=5 / 7, serial_us=12_000.0, ideal_us=7_000.0, micro_batches=2, tokens_per_s=1e6,
        model_tflops=400.0, mfu=0.4, memory={"parameters": 20.0, "activations": 10.0}, memory_available_gib=80.0,
        fits=True, verdict="fits: 30.0 of 80 GiB", validated="not validated", notes=("figures: made up",), job={},
    )  # fmt: skip


def usual() -> Prediction:
    """Two stages, a curve, sensitivities, a search."""
    bars = tuple(
        Bar(stage=stage, kind=kind, micro=micro, part=0, start_us=start, end_us=start + 900.0)
        for micro in range(2)
        for stage, kind, start in ((0, "F", 1000.0 * micro), (1, "F", 1000.0 * (micro + 1)), (1, "B", 4000.0 + micro))
    )
    points = (
        PlanOutcome(
            label="2", step_us=1e4, low_us=9.6e3, high_us=1.12e4, mfu=0.4, exposed_comm_us=3e3, tokens_per_s=1e6,
            memory_gib=30.0, fits=True, fits_probability=0.999,
        ),
        PlanOutcome(label="3", why_not="3 does not divide 16"),
        PlanOutcome(
            label="4", step_us=6e3, low_us=5.7e3, high_us=6.6e3, mfu=0.35, exposed_comm_us=2e3, tokens_per_s=2e6,
            memory_gib=90.0, fits=False, fits_probability=0.3,
        ),
    )  # fmt: skip
    choices = tuple(
        PlanOutcome(
            settings={"parallel.dp": 8, "parallel.zero": zero}, step_us=step_us, low_us=step_us, high_us=1.2 * step_us,
            mfu=0.45, memory_gib=40.0, fits_probability=0.98, too_close=more is not None, on_front=more is None,
            tokens_per_s=8.1e9 / step_us, more=more,
        )
        for zero, step_us, more in ((1, 9e3, None), (2, 9.1e3, PartChange(name="bubble", change=100 / 9000)))
    )  # fmt: skip
    return msgspec.structs.replace(
        bare(),
        timeline=bars, curves=(Curve(name="nodes", points=points),),
        sensitivities=(PlanOutcome(label="NVLink, twice", step_us=9e3),),
        search=SearchResult(considered=9, priced=4, too_large=3, impossible=2, choices=choices), asked={"nodes": "2"},
        fits_probability=0.97, fits_source="200 configurations of papers",
        interval=StepInterval(
            level=0.8, seen=0.81, low_us=9.6e3, usual_us=1.02e4, high_us=1.12e4, rows=60, sources=("one", "two"),
            alike=1.4, slowest_us=100.0,
        ),
        comparisons=RatioError(level=0.8, factor=1.05, pairs=1200, sources=4),
    )  # fmt: skip


def hostile() -> Prediction:
    whole = usual()
    assert whole.interval is not None
    unlucky = PlanOutcome(label=HOSTILE, why_not=HOSTILE)
    return msgspec.structs.replace(
        whole, model=HOSTILE, gpu=HOSTILE, notes=(HOSTILE,), validated=HOSTILE, fits_source=HOSTILE,
        interval=msgspec.structs.replace(whole.interval, sources=(HOSTILE,)), verdict=HOSTILE, asked={HOSTILE: HOSTILE},
        curves=(Curve(name=HOSTILE, means=HOSTILE, points=(*whole.curves[0].points, unlucky)),),
    )  # fmt: skip
