"""Claim: a mechanism is chosen for tokens and experts only where it is predicted to win, and beside experts it hides.

Predicts a dispatch and a combine of MoE layers by the rates of a profile: alone, and beside the experts of as many
tokens, as with two half-batches. Nothing is measured here: `counterpoint measure expert` does that. The µs of the
experts are estimated by the data sheet, as `counterpoint plan` does.

    python benchmarks/expert_clock.py
    python benchmarks/expert_clock.py --ranks 8 --tokens 8192 --imbalance 1.5 --out results/expert-clock-h200.json
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from provenance import provenance, write_result
from tables import print_table

from counterpoint.errors import Unsupported
from counterpoint.machine.gpus import find_gpu
from counterpoint.machine.matmul import matmul_math_us
from counterpoint.machine.profile import Profile, shipped_profile
from counterpoint.measurement.suites import EXPERT_TOKENS
from counterpoint.measurement.workloads import EXPERT_LAYERS, ExpertLayer
from counterpoint.pair.expert_choice import EXCHANGE_MECHANISMS, ExpertExchange, ExpertPlan, choose_expert

__all__ = ["experts_us"]

RANKS = (2, 4, 8)
LAYERS = tuple(name for name in EXPERT_LAYERS if name != "tiny")
COLUMNS = (
    "layer", "ranks", "tokens", "experts µs", *(f"{name} µs" for name in EXCHANGE_MECHANISMS), "alone",
    *(f"+ {name}" for name in EXCHANGE_MECHANISMS), "beside", "× torch, serial", "hidden",
)  # fmt: skip


def experts_us(layer: ExpertLayer, ranks: int, tokens: int, profile: Profile) -> float:
    """Estimate the experts of one rank, forward: two grouped matmuls, rows evenly divided, and the gate between."""
    sheet = find_gpu(profile.gpu)
    if sheet is None or "bf16" not in sheet.tflops:
        raise Unsupported(f"no peak of {profile.gpu} in bf16 is known: give another GPU, as in --gpu H200")
    bandwidth, local = profile.sums.memory_gb_per_s * 1e3, layer.experts // ranks
    rows = -(-tokens * layer.top_k // local)

    def grouped_us(n: int, k: int) -> float:
        math_us = matmul_math_us(
            rows, n, k, batch=local, peak=sheet.tflops["bf16"] * 1e6, sms=sheet.sm.num_sms, bandwidth=bandwidth,
            known=profile.efficiency,
        )  # fmt: skip
        return max(math_us, 2 * local * (rows * (n + k) + n * k) / bandwidth) + profile.efficiency.launch_us

    gate_us = 2 * 3 * local * rows * layer.ffn / bandwidth + profile.efficiency.launch_us
    return grouped_us(2 * layer.ffn, layer.hidden) + gate_us + grouped_us(layer.hidden, layer.ffn)


def plans(
    layer: ExpertLayer, ranks: int, tokens: int, compute_us: float, imbalance: float, profile: Profile
) -> tuple[ExpertPlan, ExpertPlan]:
    """What is predicted alone, and beside so much compute."""
    task = ExpertExchange(
        ranks=ranks, top_k=layer.top_k, experts=layer.experts, tokens=tokens, hidden=layer.hidden, imbalance=imbalance
    )
    return choose_expert(task, profile), choose_expert(replace(task, beside_us=compute_us), profile)


def lines(args: argparse.Namespace, profile: Profile) -> Iterator[list[str]]:
    """A line for each layer, number of ranks and tokens."""
    for name in args.layers:
        layer = EXPERT_LAYERS[name]
        for ranks in args.ranks:
            for tokens in args.tokens if layer.experts % ranks == 0 else ():
                compute_us = args.imbalance * experts_us(layer, ranks, tokens, profile)
                alone, beside = plans(layer, ranks, tokens, compute_us, args.imbalance, profile)
                both_us = beside.predicted_us[beside.mechanism]
                serial_us = compute_us + alone.predicted_us[beside.mechanism]
                hidden = (serial_us - both_us) / min(compute_us, alone.predicted_us[beside.mechanism])
                yield [
                    name, str(ranks), str(tokens), f"{compute_us:,.0f}",
                    *(f"{alone.predicted_us[one]:,.0f}" for one in EXCHANGE_MECHANISMS), alone.mechanism,
                    *(f"{beside.predicted_us[one] - compute_us:,.0f}" for one in EXCHANGE_MECHANISMS), beside.mechanism,
                    f"{(compute_us + alone.predicted_us['torch']) / both_us:.2f}", f"{hidden:.2f}",
                ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="H200", help="whose profile")
    parser.add_argument("--layers", nargs="+", choices=LAYERS, default=LAYERS)
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS)
    parser.add_argument("--tokens", type=int, nargs="+", default=(128, *EXPERT_TOKENS), help="of a rank")
    parser.add_argument("--imbalance", type=float, default=1.0, help="rows of the rank with the most, over the mean")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    profile = shipped_profile(args.gpu)
    rows = list(lines(args, profile))
    title = f"µs of dispatch and combine on {profile.gpu}, predicted: alone, and what they add (+) to the experts"
    print_table(COLUMNS, rows, title=title, width=200)
    if args.out:
        options = {name: value for name, value in vars(args).items() if name != "out"}
        record = {"provenance": provenance(["counterpoint"]), "options": options, "rows": rows}
        write_result(args.out, record, COLUMNS, rows)


if __name__ == "__main__":
    main()
