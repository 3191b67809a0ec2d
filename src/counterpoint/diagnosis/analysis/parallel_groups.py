"""Find the parallelism (dp, tp, pp, ep, cp, sp) of a collective by its group's name, else by the group's traffic.

Programs name their groups: Megatron `TENSOR_MODEL_PARALLEL_GROUP`, DeviceMesh `mesh_dp_shard`, vLLM `tp:0`. Where no
name says it, the launch or kernel may (FSDP's ranges, DeepEP's kernels). Else it is told from the members of the group
and what it runs in which phase, but only where nothing else that is common does the same:

- tp: neighbouring ranks run all-reduces of activations in forward.
- dp: ranks apart run all-reduces or reduce-scatters in backward or in the optimizer, and nothing in forward.
- pp: ranks as far apart as can be (stages are the outermost division of the ranks) run nothing but sends and receives.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import lru_cache

import numpy as np

from counterpoint.diagnosis.reading.traced_job import TracedJob

_WORD = re.compile(r"[a-z]+")
_SIGNS = {
    "dp": ("dp", "data", "fsdp", "hsdp", "ddp", "efsdp", "edp"),
    "tp": ("tp", "tensor", "etp"),
    "pp": ("pp", "pipeline", "pipe"),
    "ep": ("ep", "expert", "experts", "moe", "eplb"),
    "cp": ("cp", "context", "dcp", "pcp"),
    "sp": ("sp", "sequence", "ulysses"),
}
_KIND = {sign: kind for kind, signs in _SIGNS.items() for sign in signs}
_OF_A_MESH = ("replicate", "shard")  # usual names of the two mesh axes of hybrid sharding
_EXPERTS = re.compile(r"moe|expert|router", re.IGNORECASE)
_ACTIVATIONS = 64 << 10  # bytes: activations are at least as large, metrics and flags are smaller
_GRADIENTS = 1 << 20
_CALLS_A_STEP = 2.0  # a step
_CALLS_A_STEP_OF_ALL = 8.0  # a step, in the group of all ranks
_ONE_HOST = 8  # ranks: groups of tensor parallelism are usually not larger


@lru_cache(maxsize=1 << 14)
def parallel_of(*names: str | None) -> str | None:
    """Return the parallelism that a process group's names state: dp, tp, pp, ep, cp, sp, or several as dp+cp."""
    for name in names:
        words = _WORD.findall((name or "").lower())
        found = {kind for kind in map(_KIND.get, words) if kind not in (None, "ep")}
        if any(_divides_experts(words, i) for i in range(len(words))):
            found.add("ep")
        if words[:1] == ["mesh"] and set(words) & set(_OF_A_MESH):
            found.add("dp")
        if found:
            return "+".join(kind for kind in _SIGNS if kind in found)
    return None


def _divides_experts(words: list[str], at: int) -> bool:
    """Return whether word `at` of a group's name means expert parallelism, not replicas or slices of experts.

    `EXPERT_MODEL_PARALLEL` does; `EXPERT_DATA_PARALLEL`, `moe_tp` and `dp_shard_mod_ep` do not.
    """
    before, after = words[at - 1] if at else "", words[at + 1] if at + 1 < len(words) else ""
    if _KIND.get(words[at]) == "ep":
        return _KIND.get(after) not in ("dp", "tp") and before not in ("mod", "in")
    return words[at] == "model" and words[0] == "expert" and (before == "and" or _KIND.get(after) == "pp")


def parallels(job: TracedJob) -> list[str | None]:
    """Return the parallelism that each joined collective serves; None: not known."""
    groups: dict[tuple[str, tuple[int, ...] | None], list[int]] = defaultdict(list)
    named: list[str | None] = []
    facts = []
    for j in range(len(job.joined)):
        column = int((job.joined.row[j] >= 0).argmax())
        comm, row = job.digests[column].comm, int(job.joined.row[j, column])
        facts.append((comm.op[row], comm.phase[row], int(comm.bytes[row])))
        own = parallel_of(comm.group_desc[row], job.joined.group[j]) or comm.serves[row]
        if own is None and comm.op[row] == "all_to_all" and _EXPERTS.search(comm.module[row] or ""):
            own = "ep"
        named.append(own)
        groups[job.joined.group[j], comm.group_ranks[row]].append(j)
    for (name, members), rows in groups.items():
        told = {named[j] for j in rows} - {None}
        if name == "?" or len(told) > 1:
            continue
        use = told.pop() if told else _by_use(job, members, [facts[j] for j in rows])
        for j in rows:
            named[j] = named[j] or use
    return named


def _by_use(job: TracedJob, members: tuple[int, ...] | None, facts: list[tuple[str, str | None, int]]) -> str | None:
    """Return a group's parallelism, guessed from its ranks and its collectives' operations, phases and bytes."""
    if members is None or len(members) < 2:
        return None
    apart = np.unique(np.diff(members))
    if len(apart) > 1 or apart[0] < 1:
        return None
    size, stride, steps = len(members), int(apart[0]), job.num_steps
    forward = [op for op, phase, num_bytes in facts if phase == "forward" and num_bytes >= _ACTIVATIONS]
    if stride == 1:
        often = _CALLS_A_STEP if size < job.world_size else _CALLS_A_STEP_OF_ALL
        in_place = size <= _ONE_HOST and members[0] % size == 0
        reduces = len(forward) >= often * steps and set(forward) == {"all_reduce"}
        return "tp" if in_place and reduces else None
    if all(op == "send_recv" for op, _, _ in facts):
        return "pp" if stride * size == job.world_size else None
    after = [op for op, phase, num_bytes in facts if phase in ("backward", "optimizer") and num_bytes >= _GRADIENTS]
    known = all(phase is not None for _, phase, num_bytes in facts if num_bytes >= _ACTIVATIONS)
    if known and not forward and {"all_reduce", "reduce_scatter"} & set(after):
        return "dp" if set(after) <= {"all_reduce", "reduce_scatter", "all_gather"} else None
    return None
