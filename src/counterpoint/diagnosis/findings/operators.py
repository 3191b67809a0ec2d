"""Find compute that takes longer than this GPU needs for it, and say what takes most of a step's compute."""

from __future__ import annotations

from collections.abc import Iterator

from counterpoint.diagnosis.analysis.analysis import Analysis
from counterpoint.diagnosis.analysis.compute_losses import FAR, ComputeLoss
from counterpoint.diagnosis.findings.advice import short_name
from counterpoint.diagnosis.findings.compute import LEAST_SHARE
from counterpoint.diagnosis.reading.operator_work import shapes_cut
from counterpoint.records.causes import COMPUTE_CAUSES
from counterpoint.records.diagnosis import Finding
from counterpoint.records.operators import OperatorTime

_NAMED = 3
_LONGEST_NAME = 60
_LESS = ("partial_waves", "fp32_products", "far_below_rate")  # of these operations only a part of the time is lost
_COMPUTE_BOUND = 0.5  # share of a step


def find_compute_losses(a: Analysis) -> Iterator[Finding]:
    """Yield a finding for each cause that makes compute longer; it costs what a replay with shorter kernels saves."""
    for loss in a.compute_losses:
        cause = COMPUTE_CAUSES[loss.cause]
        cost = min(a.saved_us.get(cause.short, loss.lost_us), loss.lost_us)
        if cost < LEAST_SHARE * a.step_us:
            continue
        yield Finding.of(
            cause.name,
            cost,
            a.step_us,
            title=cause.title,
            evidence=_evidence(a, loss),
            advice=cause.advice if a.job.uses_torch else cause.advice_without_torch or cause.advice,
        )


def _evidence(a: Analysis, loss: ComputeLoss) -> str:
    job = a.job
    by_lost = [(name, lost if loss.cause in _LESS else us) for name, us, lost in loss.worst]
    named = ", ".join(f"{short_name(name, _LONGEST_NAME)} {_ms(us)} ms" for name, us in by_lost[:_NAMED])
    more = f" and {len(loss.worst) - _NAMED} more" if len(loss.worst) > _NAMED else ""
    count = f"{loss.count:,.0f} kernels take" if loss.count >= 1.5 else "one kernel takes"
    text = f"{count} {_ms(loss.whole_us)} ms {job.each_rank}, {_ms(loss.lost_us)} ms of it needlessly: {named}{more}"
    if loss.cause == "layout_copies":
        text = f"{count} {_ms(loss.whole_us)} ms {job.each_rank}, and compute nothing: {named}{more}"
    if loss.cause == "fp32_products" and a.card is not None:
        rates = a.card.tflops
        text += (
            f"; this card reaches {rates['fp32']:,.0f} TFLOP/s in FP32, {rates['tf32']:,.0f} in TF32 ({a.card.source})"
        )
    if loss.cause == "far_below_rate":
        concerned = {name for name, *_ in loss.worst}
        far = [o for o in a.operators if o.of_card is not None and o.of_card < FAR and o.operator in concerned]
        far = sorted(far, key=lambda o: -(o.lost_us or 0.0))[:_NAMED]
        text += "; " + "; ".join(map(rate_in_words, far))
    return text


def rate_in_words(row: OperatorTime) -> str:
    """Return what an operator reaches, as "aten::mm 4096x4096, 4096x4096: 664 TFLOP/s, 71% of the card's rate"."""
    name = row.operator or short_name(row.kernels[0].name if row.kernels else "", _LONGEST_NAME)
    name += f" {shapes_cut(row.shapes, _LONGEST_NAME)}" if row.shapes else ""
    name += f" in {row.phase}" if row.phase else ""
    if row.of_card is None:
        return name
    rate = f"{row.gb_per_s:,.0f} GB/s" if row.tflops is None else f"{row.tflops:,.0f} TFLOP/s"
    return f"{name}: {rate}, {row.of_card:.0%} of the card's rate"


def compute_in_words(a: Analysis) -> str:
    """Return a sentence on what takes most of a compute-bound step; "" if compute takes less than half of the step."""
    share = a.totals.compute_us / a.totals.duration_us if a.totals.duration_us > 0 else 0.0
    if share < _COMPUTE_BOUND or not a.operators:
        return ""
    most = a.operators[0]
    return (
        f" Compute takes {share:.0%} of the {a.job.whole}; of its operators the longest, with {_ms(most.us)} ms "
        f"{a.job.each_rank}, is {rate_in_words(most)}."
    )


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f}"
