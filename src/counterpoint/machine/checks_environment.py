"""Checks of variables that decide whether things overlap: when a value hurts, what that means, the fix.

NCCL's variables may also stand in /etc/nccl.conf, which the environment overrides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from counterpoint.machine.readings import Readings
from counterpoint.machine.verdict import fine, problem, warning
from counterpoint.records.machine import Check

__all__ = ["RULES", "environment"]

FULL_SPEED_CTAS = 16  # NCCL all-gather of 1 GiB on 8 × H200: 24 CTAs 343, 16 311, 8 169, 4 86 GB/s (2026-11-20)
MOST_CONNECTIONS = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """One variable and when its value hurts."""

    variable: str
    hurts: Callable[[str], bool]
    breaks: bool = False  # a problem, not a warning
    means: str
    fix: str


def _on(value: str) -> bool:
    """Set to something other than a no."""
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def _off(value: str) -> bool:
    return value.strip() == "0"


def _below(limit: int) -> Callable[[str], bool]:
    def hurts(value: str) -> bool:
        number = _whole(value)
        return number is not None and 0 < number < limit

    return hurts


def _whole(value: str) -> int | None:
    text = value.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _not_a_connection_count(value: str) -> bool:
    number = _whole(value)
    return number is None or not 1 <= number <= MOST_CONNECTIONS


_REMOVE = "unset it"
_FEW_CTAS = (
    "NCCL cannot fill the links: on 8 × H200 an all-gather of 1 GiB took 1.8 times as long with 8 CTAs as with 16"
)

RULES: tuple[Rule, ...] = (
    Rule(
        variable="CUDA_LAUNCH_BLOCKING",
        hurts=_on,
        breaks=True,
        means="the host waits for every kernel before it launches the next: nothing overlaps at all",
        fix="unset it; it is for debugging",
    ),
    Rule(
        variable="CUDA_DEVICE_MAX_CONNECTIONS",
        hurts=lambda value: _whole(value) == 1,
        means="all streams share one hardware queue, so work starts in launch order: FSDP's all-gather waits behind "
        "compute. Recipes of tensor parallelism with its own overlap (Megatron) ask for 1",
        fix="unset it (8) unless such a recipe asks for it; never together with FSDP. It is read when CUDA starts",
    ),
    Rule(
        variable="CUDA_DEVICE_MAX_CONNECTIONS",
        hurts=_not_a_connection_count,
        means=f"not a number from 1 to {MOST_CONNECTIONS}: the driver does not take it as you wrote it",
        fix=f"unset it, or give a whole number from 1 to {MOST_CONNECTIONS}",
    ),
    Rule(
        variable="TORCH_NCCL_BLOCKING_WAIT",
        hurts=_on,
        breaks=True,
        means="wait() holds the host until the collective has ended: no compute is queued, and the GPU runs dry",
        fix=_REMOVE,
    ),
    Rule(
        variable="NCCL_BLOCKING_WAIT",
        hurts=_on,
        breaks=True,
        means="the old name of TORCH_NCCL_BLOCKING_WAIT: wait() holds the host until the collective has ended",
        fix=_REMOVE,
    ),
    Rule(
        variable="TORCH_NCCL_AVOID_RECORD_STREAMS",
        hurts=_off,
        means="does nothing any more: torch 2.11 never calls record_stream for collectives, whatever it says",
        fix=_REMOVE,
    ),
    Rule(
        variable="NCCL_P2P_DISABLE",
        hurts=_on,
        breaks=True,
        means="NCCL goes through host memory, not NVLink: collectives take many times as long",
        fix=_REMOVE,
    ),
    Rule(
        variable="NCCL_P2P_LEVEL",
        hurts=lambda value: value.strip().upper() in ("LOC", "0"),
        breaks=True,
        means="NCCL goes through host memory, not NVLink: collectives take many times as long",
        fix="unset it, or NVL at the least",
    ),
    Rule(
        variable="NCCL_SHM_DISABLE",
        hurts=_on,
        means="pairs without peer access talk over the network, even inside this machine",
        fix=_REMOVE,
    ),
    Rule(variable="NCCL_MAX_CTAS", hurts=_below(FULL_SPEED_CTAS), means=_FEW_CTAS, fix="unset it, and limit per group"),
    Rule(
        variable="NCCL_MAX_NCHANNELS",
        hurts=_below(FULL_SPEED_CTAS),
        means=_FEW_CTAS,
        fix="unset it, and limit per group",
    ),
    Rule(
        variable="NCCL_ALGO",
        hurts=lambda value: bool(value.strip()),
        means="NCCL no longer chooses by size and operation; what is forced suits some sizes only",
        fix=_REMOVE,
    ),
    Rule(
        variable="NCCL_PROTO",
        hurts=lambda value: bool(value.strip()),
        means="NCCL no longer chooses by size: LL wastes bandwidth on large messages, Simple is slow on small ones",
        fix=_REMOVE,
    ),
    Rule(
        variable="NCCL_CUMEM_ENABLE",
        hurts=_off,
        means="no buffer becomes a symmetric window: no zero-CTA policy, no symmetric kernels, without a word",
        fix=_REMOVE,
    ),
    Rule(
        variable="NCCL_WIN_ENABLE",
        hurts=_off,
        means="window registration is off: no zero-CTA policy, no symmetric kernels, without a word",
        fix=_REMOVE,
    ),
    Rule(
        variable="NCCL_LAUNCH_ORDER_IMPLICIT",
        hurts=_on,
        means="operations of different communicators start in the order in which the host issued them: an FSDP "
        "collective that is ready waits for a tensor-parallel one that is not",
        fix="unset it unless communicators run at once and deadlock without it",
    ),
    Rule(
        variable="NCCL_IB_DISABLE",
        hurts=_on,
        means="between machines NCCL uses TCP sockets: CPU time and host copies, a fraction of the bandwidth",
        fix=_REMOVE,
    ),
    Rule(
        variable="NCCL_NET_GDR_LEVEL",
        hurts=lambda value: value.strip().upper() in ("LOC", "0"),
        means="GPUDirect is off: traffic to other machines is copied through host memory",
        fix=_REMOVE,
    ),
    Rule(
        variable="PYTORCH_NO_CUDA_MEMORY_CACHING",
        hurts=_on,
        breaks=True,
        means="every allocation is a cudaMalloc and every free a cudaFree, which waits for the whole device",
        fix="unset it; it is for memory checkers",
    ),
    Rule(
        variable="PYTORCH_CUDA_ALLOC_CONF",
        hurts=lambda value: "cudamallocasync" in value.lower(),
        means="cudaMallocAsync has no memory pools: NCCL's registered and symmetric buffers are unavailable",
        fix="take backend:cudaMallocAsync out of it; expandable_segments:True is the usual cure for fragmentation",
    ),
)


def environment(readings: Readings) -> list[Check]:
    """One check for every variable that hurts, named `environment.NAME`; `environment` alone if none does."""
    conf = readings.system.nccl_conf if readings.system else {}
    values = conf | readings.environment
    found = []
    for rule in RULES:
        value = values.get(rule.variable)
        if value is not None and rule.hurts(value):
            where = "" if rule.variable in readings.environment else " in /etc/nccl.conf"
            make = problem if rule.breaks else warning
            name, seen = f"environment.{rule.variable}", f"{rule.variable}={value}{where}"
            found.append(make(name, seen, means=rule.means, fix=rule.fix, value=value))
    watched = len({rule.variable for rule in RULES})
    return found or [fine("environment", f"none of {watched} variables that hurt is set", set=len(values))]
