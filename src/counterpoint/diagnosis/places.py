"""Name where in the program a collective stands: its parallel group, phase, and module or layer.

Nothing is guessed from order or size: a name comes from what the program calls the group, from ranges around the
launch, or from the thread that launched it.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt

from counterpoint.trace.timeline import I64, HostKind, Timeline

_MOST_PAIRS = 4_000_000  # of launches and ranges around them: the widest ranges are left out beyond
_LONGEST_NAME = 400  # of a range that names a phase or module
_WORD = re.compile(r"[a-z]+")
_PARALLEL = {
    "tp": ("tp", "tensor"),
    "cp": ("cp", "context"),
    "pp": ("pp", "pipeline"),
    "ep": ("ep", "expert", "experts", "moe"),
    "dp": ("dp", "data", "fsdp", "hsdp", "ddp"),
}
_FORWARD = re.compile(r"FSDP::(pre|post)_forward|forward$|\.forward\b|^#* ?forward ?#*$|^nn\.Module: ", re.IGNORECASE)
_BACKWARD = re.compile(
    r"FSDP::(root_)?(pre|post)_backward|FSDP::backward|^autograd::engine::evaluate_function|^torch::autograd::"
    r"|Backward\d*$|^#* ?backward ?#*$",
    re.IGNORECASE,
)
_OPTIMIZER = re.compile(r"^Optimizer\.step#|^#* ?optimi[sz]er([ ._]step)? ?#*$", re.IGNORECASE)
_MODULE = re.compile(r"^nn\.Module: (.+)$|^FSDP::\w+ \((.+)\)$")
_AUTOGRAD = "autograd::engine::evaluate_function"
_OF_THE_MAIN_THREAD = ("ProfilerStep", "Optimizer.step")
_PHASES = (None, "forward", "backward", "optimizer")


def parallel_of(*names: str | None) -> str | None:
    """Return which parallelism a process group serves by its names: dp, tp, pp, ep, cp, or several as dp+cp."""
    for name in names:
        words = set(_WORD.findall((name or "").lower()))
        found = [kind for kind, signs in _PARALLEL.items() if words & set(signs)]
        if "ep" in found and ("dp" in found or "tp" in found):
            found.remove("ep")  # replicas or slices of experts
        if found:
            return "+".join(sorted(found, key=("dp", "tp", "pp", "ep", "cp").index))
    return None


def phases_and_modules(timeline: Timeline, rows: I64) -> tuple[tuple[str | None, ...], tuple[str | None, ...]]:
    """Return phase (forward, backward, optimizer) and module of the launches of some GPU operations."""
    host, gpu, names = timeline.host, timeline.gpu, timeline.names
    ranges = np.isin(host.kind, (HostKind.OP, HostKind.ANNOTATION, HostKind.PYTHON))
    table = np.zeros(len(names), np.int64)
    modules: dict[int, str | None] = {}
    if len(rows):
        for i in np.unique(host.name[ranges]).tolist():
            if len(names[i]) <= _LONGEST_NAME:
                table[i], modules[i] = _phase_of(names[i]), _module_of(names[i])
    named = np.array([modules.get(i) is not None for i in range(len(names))], bool)
    ranges[ranges] = ((table > 0) | named)[host.name[ranges]] if len(names) else False
    phase, module = np.zeros(len(rows), np.int64), np.full(len(rows), -1, np.int64)
    backward = _autograd_threads(timeline)
    for thread in np.unique(gpu.launch_thread[rows]).tolist():
        here = np.flatnonzero((gpu.launch_thread[rows] == thread) & np.isfinite(gpu.launch_start[rows]))
        here = here[np.argsort(gpu.launch_start[rows[here]], kind="stable")]
        own = np.flatnonzero(ranges & (host.thread == thread))
        which, at = _around(gpu.launch_start[rows[here]], host.start[own], host.end[own])
        name = host.name[own[which]]
        np.maximum.at(phase, here[at], table[name])  # optimizer and backward say more than forward, which they enclose
        inner = named[name]
        module[here[at[inner]]] = name[inner]  # of several the last counts, which is the innermost
        if thread in backward:
            phase[here] = np.maximum(phase[here], _PHASES.index("backward"))
    return (
        tuple(_PHASES[i] for i in phase.tolist()),
        tuple(modules[i] if i >= 0 else None for i in module.tolist()),
    )


def _phase_of(name: str) -> int:
    if _OPTIMIZER.search(name):
        return _PHASES.index("optimizer")
    if _BACKWARD.search(name):
        return _PHASES.index("backward")
    return _PHASES.index("forward") if _FORWARD.search(name) else 0


def _module_of(name: str) -> str | None:
    found = _MODULE.match(name)
    return None if found is None else (found.group(1) or found.group(2))[:120]


def _autograd_threads(timeline: Timeline) -> set[int]:
    """Return the threads that run nothing but backward: autograd's own, one per device."""
    host, names = timeline.host, timeline.names
    begun = np.array([name.startswith(_AUTOGRAD) for name in names], bool)
    other = np.array([name.startswith(_OF_THE_MAIN_THREAD) for name in names], bool)
    if not begun.any() or not other.any():
        return set()
    is_range = host.kind != HostKind.RUNTIME
    main = set(np.unique(host.thread[is_range & other[host.name]]).tolist())
    return set(np.unique(host.thread[is_range & begun[host.name]]).tolist()) - main if main else set()


def _around(
    at: npt.NDArray[np.float64], start: npt.NDArray[np.float64], end: npt.NDArray[np.float64]
) -> tuple[I64, I64]:
    """Return every pair of a range, in their order, and of a time (sorted) in it."""
    low, high = np.searchsorted(at, start, side="left"), np.searchsorted(at, end, side="right")
    count = np.maximum(high - low, 0)
    if count.sum() > _MOST_PAIRS:
        narrow = np.argsort(count, kind="stable")
        count[narrow[np.cumsum(count[narrow]) > _MOST_PAIRS]] = 0
    which = np.repeat(np.arange(len(start)), count)
    position = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(low, count)
    return which, position
