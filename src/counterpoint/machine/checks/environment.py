"""Check the variables that decide whether things overlap: when a value hurts, what that means, the fix.

NCCL's variables may also stand in /etc/nccl.conf, which the environment overrides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from counterpoint.machine.checks.verdict import fine, problem, warning
from counterpoint.machine.profile import Profile
from counterpoint.machine.readings import Readings
from counterpoint.records.machine import Check

__all__ = ["RULES", "environment"]

MOST_CONNECTIONS = 32


class Rule(NamedTuple):
    """Describes one variable and when its value hurts."""

    variable: str
    hurts: Callable[[str, Profile], bool]
    means: str
    fix: str = "unset it"
    breaks: bool = False  # a problem, not a warning


def _on(value: str, profile: Profile) -> bool:
    """Return whether a variable is set to something other than a no."""
    return value.strip().lower() not in ("", "0", "false", "no", "off")


def _off(value: str, profile: Profile) -> bool:
    return value.strip() == "0"


def _few_ctas(value: str, profile: Profile) -> bool:
    """Return whether so many CTAs cannot fill the links."""
    number = _whole(value)
    return number is not None and 0 < number < profile.nccl.full_speed_ctas


def _whole(value: str) -> int | None:
    text = value.strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _not_a_connection_count(value: str, profile: Profile) -> bool:
    number = _whole(value)
    return number is None or not 1 <= number <= MOST_CONNECTIONS


def _one(value: str, profile: Profile) -> bool:
    return _whole(value) == 1


def _local(value: str, profile: Profile) -> bool:
    """Return whether a level is `LOC`, which allows no direct access to a peer."""
    return value.strip().upper() in ("LOC", "0")


def _given(value: str, profile: Profile) -> bool:
    return bool(value.strip())


_FEW_CTAS = (
    "NCCL cannot fill the links: on 8 × H200 an all-gather of 1 GiB took 1.8 times as long with 8 CTAs as with 16"
)

# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("CUDA_LAUNCH_BLOCKING", _on,
         "the host waits for every kernel before it launches the next: nothing overlaps at all",
         "unset it; it is for debugging", breaks=True),
    Rule("CUDA_DEVICE_MAX_CONNECTIONS", _one,
         "all streams share one hardware queue, so work starts in launch order: FSDP's all-gather waits behind "
         "compute. Recipes of tensor parallelism with its own overlap (Megatron) ask for 1",
         "unset it (8) unless such a recipe asks for it; never together with FSDP. It is read when CUDA starts"),
    Rule("CUDA_DEVICE_MAX_CONNECTIONS", _not_a_connection_count,
         f"not a number from 1 to {MOST_CONNECTIONS}: the driver does not take it as you wrote it",
         f"unset it, or give a whole number from 1 to {MOST_CONNECTIONS}"),
    Rule("TORCH_NCCL_BLOCKING_WAIT", _on,
         "wait() holds the host until the collective has ended: no compute is queued, and the GPU runs dry",
         breaks=True),
    Rule("NCCL_BLOCKING_WAIT", _on,
         "the old name of TORCH_NCCL_BLOCKING_WAIT: wait() holds the host until the collective has ended",
         breaks=True),
    Rule("TORCH_NCCL_AVOID_RECORD_STREAMS", _off,
         "does nothing any more: torch 2.11 never calls record_stream for collectives, whatever it says"),
    Rule("NCCL_P2P_DISABLE", _on, "NCCL goes through host memory, not NVLink: collectives take many times as long",
         breaks=True),
    Rule("NCCL_P2P_LEVEL", _local, "NCCL goes through host memory, not NVLink: collectives take many times as long",
         "unset it, or NVL at the least", breaks=True),
    Rule("NCCL_SHM_DISABLE", _on, "pairs without peer access talk over the network, even inside this machine"),
    Rule("NCCL_MAX_CTAS", _few_ctas, _FEW_CTAS, "unset it, and limit per group"),
    Rule("NCCL_MAX_NCHANNELS", _few_ctas, _FEW_CTAS, "unset it, and limit per group"),
    Rule("NCCL_ALGO", _given, "NCCL no longer chooses by size and operation; what is forced suits some sizes only"),
    Rule("NCCL_PROTO", _given,
         "NCCL no longer chooses by size: LL wastes bandwidth on large messages, Simple is slow on small ones"),
    Rule("NCCL_CUMEM_ENABLE", _off,
         "no buffer becomes a symmetric window: no zero-CTA policy, no symmetric kernels, without a word"),
    Rule("NCCL_WIN_ENABLE", _off,
         "window registration is off: no zero-CTA policy, no symmetric kernels, without a word"),
    Rule("NCCL_LAUNCH_ORDER_IMPLICIT", _on,
         "operations of different communicators start in the order in which the host issued them: an FSDP "
         "collective that is ready waits for a tensor-parallel one that is not",
         "unset it unless communicators run at once and deadlock without it"),
    Rule("NCCL_IB_DISABLE", _on,
         "between machines NCCL uses TCP sockets: CPU time and host copies, a fraction of the bandwidth"),
    Rule("NCCL_NET_GDR_LEVEL", _local, "GPUDirect is off: traffic to other machines is copied through host memory"),
    Rule("PYTORCH_NO_CUDA_MEMORY_CACHING", _on,
         "every allocation is a cudaMalloc and every free a cudaFree, which waits for the whole device",
         "unset it; it is for memory checkers", breaks=True),
    Rule("PYTORCH_CUDA_ALLOC_CONF", lambda value, profile: "cudamallocasync" in value.lower(),
         "cudaMallocAsync has no memory pools: NCCL's registered and symmetric buffers are unavailable",
         "take backend:cudaMallocAsync out of it; expandable_segments:True is the usual cure for fragmentation"),
)
# fmt: on


def environment(readings: Readings, profile: Profile) -> list[Check]:
    """Return a check for every variable that hurts, named `environment.NAME`; `environment` alone if none does."""
    conf = readings.system.nccl_conf if readings.system else {}
    values = conf | readings.environment
    found = []
    for rule in RULES:
        value = values.get(rule.variable)
        if value is not None and rule.hurts(value, profile):
            where = "" if rule.variable in readings.environment else " in /etc/nccl.conf"
            make = problem if rule.breaks else warning
            name, seen = f"environment.{rule.variable}", f"{rule.variable}={value}{where}"
            found.append(make(name, seen, means=rule.means, fix=rule.fix, value=value))
    watched = len({rule.variable for rule in RULES})
    return found or [fine("environment", f"none of {watched} variables that hurt is set", set=len(values))]
