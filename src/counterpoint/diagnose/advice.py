"""What to change: the knob and its value. Each sentence was measured or read in source (docs/diagnose.md)."""

from __future__ import annotations

from counterpoint.records import Account, Kernel, Straggler

__all__ = ["CAUSE_TITLE", "IDLE", "IDLE_TITLE", "KERNEL_TITLE", "exposed", "kernel", "launch_order", "straggler"]

CAUSE_TITLE = {
    "host_stall": "its host stalls",
    "slow_kernels": "its kernels are slow",
    "more_work": "it has more work",
    "late_input": "its input is late",
    "unknown": "cause not found",
}
KERNEL_TITLE = {
    "tail_effect": "Tail effect: {kernels} in need of an extra wave beside communication",
    "sm_contention": "{kernels} slowed by the SMs that communication takes",
    "bandwidth": "{kernels} slowed by the bandwidth or power that communication takes",
}
IDLE_TITLE = {
    "launch": "The GPUs wait for launches: host-bound",
    "synchronise": "The GPUs run dry at synchronisations",
    "late_input": "The GPUs wait for input",
    "allocator": "The GPUs wait for the allocator",
    "garbage_collection": "The GPUs wait for garbage collection",
    "operation": "The GPUs run dry while the host is in one operation",
    "unrecorded": "The GPUs run dry while the host does something unrecorded",
}
_INPUT = "raise DataLoader(num_workers=...) and prefetch_factor, set pin_memory=True, and copy with non_blocking=True"
_ALLOCATOR = (
    "start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, remove torch.cuda.empty_cache() from the step, and "
    "lower peak memory until torch.cuda.memory_stats()['num_alloc_retries'] stays 0"
)
_GC = "call gc.freeze() after warm-up and gc.disable(), then gc.collect() on every rank at the same step"
IDLE = {
    "launch": "fewer, larger launches: torch.compile the blocks, with mode='reduce-overhead' (CUDA graphs) where "
    "shapes are fixed",
    "synchronise": "remove .item(), .cpu(), print(loss) and torch.cuda.synchronize() from the step, or read the value "
    "a step later",
    "late_input": _INPUT,
    "allocator": _ALLOCATOR,
    "garbage_collection": _GC,
    "operation": "move that operation out of the step or to another thread or process",
    "unrecorded": f"record with torch.profiler.profile(with_stack=True) to see which Python code it is; {_GC}",
}
_NO_SMS = (
    "collectives that take no SM (copy engines): NCCL's zero-CTA policy needs both buffers registered as symmetric "
    "windows and a stream that is not the default one; check that the trace shows Memcpy PtoP"
)


def straggler(s: Straggler) -> str:
    """For one late rank."""
    if s.cause == "late_input":
        return _INPUT
    if s.cause == "more_work":
        return "balance the batch: pack sequences to equal tokens per rank, or sort and deal them out by length"
    if s.cause == "slow_kernels":
        return (
            f"look at the GPU of rank {s.rank}: nvidia-smi -q -d CLOCK,PERFORMANCE,TEMPERATURE,ECC (throttling, row "
            "remaps), other processes on it (nvidia-smi pmon); drain the node if it stays slow"
        )
    if s.cause == "host_stall":
        known = {"allocator": _ALLOCATOR, "garbage_collection": _GC, "launch": IDLE["launch"]}
        if s.detail is None:
            return IDLE["unrecorded"]
        return known.get(
            s.detail, f"take {s.detail} out of the step of rank {s.rank}: do it ahead, or in a worker process"
        )
    return "record all ranks with with_stack=True and record_shapes=True, and diagnose again"


def kernel(worst: Kernel, num_sms: int | None) -> str:
    """For kernels slowed by communication."""
    if worst.cause == "bandwidth":
        return (
            "no knob removes it: they share HBM and power with the transfer. Fuse them, or let a GEMM run beside the "
            "collective instead"
        )
    ctas, spare = worst.comm_ctas or 0, worst.comm_ctas_without_extra_wave or 0
    limit = _fewer_sms_for_the_gemm(num_sms, ctas)
    if worst.cause == "tail_effect" and spare >= 4:
        most = spare // 4 * 4
        return (
            f"limit the collective to {most} CTAs (ProcessGroupNCCL.Options().config.max_ctas = {most}, a multiple of "
            f"its cluster of 4; all_to_all rounds up to a power of two): up to {spare} fit without an extra wave; or "
            f"{limit}"
        )
    return f"use {_NO_SMS} ({spare} CTAs fit without an extra wave); or {limit}"


def _fewer_sms_for_the_gemm(num_sms: int | None, ctas: int) -> str:
    sms = "SMs - CTAs" if num_sms is None else str(num_sms - max(ctas, 1))
    return (
        f"give the GEMM {sms} SMs: cublasSetSmCountTarget(torch.cuda.current_blas_handle(), {sms}) in every thread "
        "that launches (autograd's too), and check the grid of the kernel"
    )


def launch_order(num_sms: int | None, ctas: int) -> str:
    """For collectives that found no SM."""
    return (
        "stream priority does not pre-empt a resident kernel. Launch the collective before the kernel that blocks it; "
        f"or {_fewer_sms_for_the_gemm(num_sms, ctas)}; or use {_NO_SMS}"
    )


def exposed(account: Account, *, by_copies: bool = False) -> str:
    """For communication that nothing hides; `by_copies`: most of it needs no SM."""
    if account.wait_us > account.transfer_us:
        return "most of it is waiting: fix the late ranks and the launch order first; faster links would not help"
    ratio = account.comm_to_compute or 0.0
    if ratio > 1:
        return (
            f"communication takes {ratio:.1f} x as long as compute: more tokens per GPU or gradient accumulation, "
            "fewer ranks per group (HSDP, smaller TP), or a compressed dtype "
            "(MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))"
        )
    if by_copies:
        return (
            "it takes no SM already, so no kernel holds it up: it begins too late, or nothing is left to run beside "
            "it, as for the first gather and the last scatter of a step. Begin it earlier (prefetch), or make the "
            "first and the last module smaller"
        )
    return (
        "there is enough compute to hide it behind. Collectives that take no SM start whatever runs and slow nothing "
        "down; in tensor parallelism split the matmul and overlap its parts. Prefetching two FSDP2 layers instead of "
        "one and registering NCCL's buffers changed nothing measurable on 8 x H200"
    )
