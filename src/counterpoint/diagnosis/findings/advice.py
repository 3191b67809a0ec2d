"""Write the advice of findings: a sentence that names a setting and its value and fits the software in the trace.

Only settings that were seen to take effect are advised (docs/reference/diagnosis.md, "Knobs that do nothing"); each
sentence was measured or read in source.
"""

from __future__ import annotations

import re

from counterpoint.diagnosis.analysis.analysis import Analysis
from counterpoint.diagnosis.analysis.experts import EXPERTS
from counterpoint.diagnosis.analysis.replay import ZERO_SM
from counterpoint.diagnosis.reading.traced_job import TracedJob, TracedStack
from counterpoint.records.causes import IDLE_CAUSES
from counterpoint.records.diagnosis import (
    Account,
    HostTime,
    IdleCause,
    KernelComparison,
    Straggler,
    ranks_in_words,
)

_NO_SM_COLLECTIVES = "collectives that take no SM (copy engines)"
_OVERLAP = "counterpoint.overlap(model) after fully_shard (for shards within one host"
_ZERO_CTA = (
    ": NCCL's zero-CTA policy needs both buffers registered as symmetric windows and a stream that is not the default "
    "one; check that the trace shows Memcpy PtoP"
)
ADVICE_ON_EXPERTS = (
    "balance the router (auxiliary loss or bias, a capacity factor), or place experts by load and replicate those that "
    "get most tokens. Faster links would not help"
)
_OF_THE_STEP = re.compile(  # names of ranges that are a step's own work and cannot be moved out of the step
    r"forward|backward|optimizer|^(aten|autograd|torch|c10d|nccl|fsdp|FSDP)::?|Backward\d*$|^nn\.Module|^##"
    r"|^torch/(?!serialization|storage|package|hub|multiprocessing|utils/data|distributed/checkpoint)"
    r"|^(cuda|hip|cu)[A-Z]|Torch-Compiled|TorchDynamo|CompiledF|record_param_comms|torchinductor|eval_with_key",
    re.I,
)
_SAVES = re.compile(r"torch/(serialization|distributed/checkpoint)|torch\.save|(save|write|dump)_checkpoint", re.I)
_MAKES = re.compile(
    r"^aten::(rand|randn|randint|randperm|normal_?|uniform_?|random_|bernoulli_?|exponential_|full|fill_|zeros|zero_"
    r"|ones|arange|linspace)$"
)
_OPTIMIZER = re.compile(r"optimizer\.(step|zero_grad)|_foreach_|\badamw?\b|\bsgd\b", re.I)
_FUSED = re.compile(r"_fused_(adam|sgd|adagrad)|FusedAdam", re.I)
_ABOUT_SHARE = 0.9  # if cost / exposed time is below this share, or above its inverse, the text says so


def advise_straggler(s: Straggler, stack: TracedStack) -> str:
    """Return the advice on one late rank, or on several ranks that are late together."""
    whose = ranks_in_words(s.ranks)
    if s.cause == "late_input":
        return IDLE_CAUSES["late_input"].advice
    if s.detail == EXPERTS:
        return ADVICE_ON_EXPERTS
    if s.cause == "more_work":
        return "balance the batch: pack sequences to equal tokens per rank, or sort and deal them out by length"
    if s.cause == "slow_kernel":
        return (
            f"look at what {s.detail} works on, on rank {s.rank} beside the others (tokens of experts, lengths of "
            "sequences, sparsity), and deal it out evenly. The GPU itself is as fast as the others in everything else"
        )
    if s.cause == "slow_kernels" and stack.vendor != "nvidia":
        look = "amd-smi metric (clocks, temperature, errors), " if stack.vendor == "amd" else ""
        where = "machine" if stack.vendor == "cpu" else "GPU"
        return (
            f"look at the {where} of {whose}: {look}throttling, other processes on it; drain the node if it stays slow"
        )
    if s.cause == "slow_kernels":
        return (
            f"look at the GPU of {whose}: nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE,ECC (throttling, row "
            "remaps), other processes on it (nvidia-smi pmon); drain the node if it stays slow"
        )
    if s.cause == "host_stall":
        return _advise_stalled_host(s, whose)
    if s.cause == "no_host_events":
        return IDLE_CAUSES["no_launch_recorded"].advice
    return "record all ranks with with_stack=True and record_shapes=True, and diagnose again"


def _advise_stalled_host(s: Straggler, whose: str) -> str:
    if s.detail == "launch":
        return (
            f"look at the CPUs of the host of {whose}, which launches more slowly than others: clocks and power "
            "limits, CPU limits of the container, NUMA binding, other processes. Else " + IDLE_CAUSES["launch"].advice
        )
    if s.detail is None or s.detail in IDLE_CAUSES:
        return IDLE_CAUSES[s.detail or "unrecorded"].advice
    otherwise = f"take {s.detail} out of the step of {whose}: do it ahead, or in a worker process"
    return advise_operation(s.detail, otherwise)


def advise_kernel(worst: KernelComparison, num_sms: int | None, stack: TracedStack, no_sm: str) -> str:
    """Return the advice on kernels that communication slows."""
    if worst.cause == "bandwidth" or stack.vendor == "cpu":
        return (
            "fuse these kernels, or let a GEMM run beside the collective instead. No knob removes it: they share memory"
            " bandwidth and power with the transfer"
        )
    ctas, spare = worst.comm_ctas or 0, worst.comm_ctas_without_extra_wave or 0
    limit = _fewer_sms_for_the_gemm(num_sms, ctas, stack)
    if worst.cause == "tail_effect" and spare >= 4:
        most = spare // 4 * 4
        how = (
            f" (ProcessGroupNCCL.Options().config.max_ctas = {most}, a multiple of its cluster of 4; all_to_all rounds "
            "up to a power of two)"
            if stack.nvidia_nccl
            else ""
        )
        first = f"use {no_sm}; or " * stack.overlaps
        return f"{first}limit the collective to {most} CTAs{how}: up to {spare} fit without an extra wave; or {limit}"
    fit = f"only {spare} CTAs fit" if spare else "no CTA fits"
    return f"use {no_sm}; or {limit}. Without an extra wave {fit} beside it"


def remedy_of(advice: str) -> str | None:
    """Return the name of the change that an advice names first, where one change removes several findings."""
    return ZERO_SM if advice.startswith(f"use {_OVERLAP}") else None


def no_sm_collectives(a: Analysis) -> str:
    """Return text on what can replace collectives that need SMs, with the replayed step time if it is shorter."""
    if not a.stack.overlaps:
        return _NO_SM_COLLECTIVES + _ZERO_CTA * a.stack.nvidia_nccl
    played = a.replay
    would = next((w.step_us for w in played.what_if if w.name == ZERO_SM), None) if played else None
    if played is None or would is None or would >= played.replayed_us:
        return f"{_OVERLAP})"
    return f"{_OVERLAP}; replayed: {would / 1e3:.1f} instead of {played.replayed_us / 1e3:.1f} ms {a.job.each})"


def _fewer_sms_for_the_gemm(num_sms: int | None, ctas: int, stack: TracedStack) -> str:
    sms = "SMs - CTAs" if num_sms is None else str(num_sms - max(ctas, 1))
    if stack.vendor != "nvidia":
        return f"give the GEMM a grid that needs no more than {sms} {'CUs' if stack.vendor == 'amd' else 'SMs'}"
    return (
        f"give the GEMM {sms} SMs: cublasSetSmCountTarget(torch.cuda.current_blas_handle(), {sms}) in every thread "
        "that launches (autograd's too), and check the grid of the kernel"
    )


def advise_launch_order(num_sms: int | None, ctas: int, stack: TracedStack, no_sm: str) -> str:
    """Return the advice on collectives that had to wait for free SMs."""
    ways = [
        "launch the collective before the kernel that blocks it",
        _fewer_sms_for_the_gemm(num_sms, ctas, stack),
        f"use {no_sm}",
    ]
    ways.sort(key=lambda way: no_sm in way and stack.overlaps, reverse=True)
    return f"{'; or '.join(ways)}. Stream priority does not pre-empt a resident kernel"


def advise_exposed(account: Account, stack: TracedStack, no_sm: str, *, late: bool, by_copies: bool) -> str:
    """Return the advice on exposed communication; `late`: ranks are; `by_copies`: most is copies, which need no SM."""
    if (account.wait_us or 0.0) > (account.transfer_us or 0.0):
        first = "fix the late ranks first" if late else "even out the ranks' work: none is late throughout"
        return f"{first}. Most of it is waiting: faster links would not help"
    ratio = account.comm_to_compute or 0.0
    if ratio > 1:
        return (
            "more tokens per rank or gradient accumulation, fewer ranks per group, or a smaller dtype of what is sent"
            + " (MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))" * stack.fsdp
            + f". Communication takes {ratio:.1f} x as long as compute"
        )
    if by_copies:
        return (
            "begin it earlier (prefetch), or make the first and the last module smaller. It takes no SM already, so "
            "no kernel holds it up: it begins too late, or nothing is left to run beside it, as for the first gather "
            "and the last scatter of a step"
        )
    if stack.vendor == "cpu":
        return (
            "begin it as soon as its input is there (async_op=True), and wait for it where its result is needed. There "
            "is enough compute to hide it behind"
        )
    nothing = (
        ". Prefetching two FSDP2 layers instead of one and registering NCCL's buffers changed nothing measurable on "
        "8 x H200"
    )
    if stack.overlaps:
        return f"use {no_sm}: its collectives start whatever runs. There is enough compute beside it{nothing}"
    return (
        f"use {_NO_SM_COLLECTIVES}: they start whatever runs and slow nothing down; where a matmul waits for its own "
        "collective (tensor parallelism), split both and overlap the parts. There is enough compute to hide it behind"
    )


def advise_idle(job: TracedJob, columns: list[int], cause: IdleCause, named: tuple[HostTime, ...]) -> str:
    """Return the advice on a cause of idle time; `named`: the host operations with most of that time."""
    known = IDLE_CAUSES[cause.category]
    advice = known.advice
    if not job.uses_torch:
        return known.advice_without_torch or advice
    if cause.category == "operation" and named:
        return advise_operation(named[0].name, advice)
    if job.digests[0].device.from_host and cause.category in ("launch", "between_kernels"):
        return "fewer, larger operations: torch.compile, larger batches"
    if job.digests[0].device.from_host and cause.category == "unrecorded":
        return "record operations and Python too: ProfilerActivity.CPU and with_stack=True, on all threads that work"
    if cause.category == "launch":
        names = [o.name for o in (*cause.operations, *cause.functions)]
        names += job.digests[columns[0]].names
        if any(map(_OPTIMIZER.search, names)) and not any(map(_FUSED.search, names)):
            advice += "; the optimizer with fused=True (or foreach=True)"
    return advice


def advise_operation(name: str, otherwise: str) -> str:
    """Return the advice on a long host operation that saves, makes tensors or belongs to the step; else `otherwise`."""
    if _SAVES.search(name):
        return (
            "save in the background: torch.distributed.checkpoint.async_save, or a thread that writes a copy in memory"
        )
    if _MAKES.search(name):
        return (
            "the host computes for so long in it only if its tensor is on the CPU: make it on the GPU (device='cuda')"
        )
    if not _OF_THE_STEP.search(name):
        return otherwise
    return (
        "it is a part of the step itself: find what the host does in it for so long (with_stack=True shows the Python "
        "code; a first call, changing shapes, a busy machine), or take the host out of it: torch.compile, CUDA graphs"
    )


def short_name(name: str, most: int = 80) -> str:
    """Return a name, cut to `most` characters if it is longer; a cut name ends with …."""
    return name if len(name) <= most else name[: most - 3] + "…"


def in_parentheses(*names: str | None) -> str:
    """Return the names that are not None in parentheses, as ` (dp, backward)`; empty if all are None."""
    known = [name for name in names if name]
    return f" ({', '.join(known)})" if known else ""


def saves_otherwise(job: TracedJob, cost: float, exposed: float) -> str:
    """Return text on the time that removing a problem saves, if that differs much from the exposed time; else ""."""
    what = "a step" if job.has_steps else "the recording"
    if cost * _ABOUT_SHARE > exposed:
        return f"; without it {what} would take {cost / 1e3:.2f} ms less, for other work waits for it"
    if cost >= _ABOUT_SHARE * exposed:
        return ""
    return f"; without it {what} would take only {cost / 1e3:.2f} ms less, for it waits for something else meanwhile"
