"""Define every cause that a diagnosis can find: its name, the texts of its finding, and the advice.

The analyses, the terminal and the page take their words from this file. To add a cause, add a row to this file,
and the code that finds the cause.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """Describes one cause of lost time: its `name` in the records of a diagnosis, and the texts of its finding."""

    name: str
    short: str  # name of the cause in a table
    title: str = ""  # title of its finding; "": it has no finding of its own
    kind: str = ""  # kind of that finding; "": `straggler`, or the name of a cause of slow kernels
    advice: str = ""
    advice_without_torch: str = ""  # advice to programs without PyTorch; "": the same advice
    stalls_host: bool = False  # the host pauses, so that other ranks may wait for it
    recorded: bool = True  # False: the trace does not show what the host did


def _by_name(*causes: Cause) -> dict[str, Cause]:
    return {cause.name: cause for cause in causes}


IDLE_CAUSES = _by_name(  # in the order of their numbers in a digest
    Cause(
        # the host spent long in one operation or Python function
        name="operation",
        short="long host operation",
        title="The GPUs run out of work while the host is in long operations",
        kind="host_stall",
        advice="move that operation out of the step, do it ahead, or in a worker process",
        advice_without_torch="find why that takes so long (a first call loads kernels, allocating and registering "
        "memory is slow), and do it ahead, or in another thread",
        stalls_host=True,
    ),
    Cause(
        # the host launches more slowly than the GPU runs, without a single long pause
        name="launch",
        short="slow launches (host-bound)",
        title="The GPUs wait for launches: host-bound",
        kind="host_bound",
        advice="fewer, larger launches: CUDA graphs or torch.compile(mode='reduce-overhead') where shapes are fixed, "
        "larger batches, fewer small kernels (fuse element-wise operations)",
        advice_without_torch="fewer, larger launches: CUDA graphs where they repeat, larger batches, fewer small "
        "kernels (fuse them)",
    ),
    Cause(
        name="allocator",
        short="allocator",
        title="The GPUs wait for the allocator",
        kind="host_stall",
        advice="start with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, remove torch.cuda.empty_cache() from "
        "the step, and lower peak memory until torch.cuda.memory_stats()['num_alloc_retries'] stays 0",
        advice_without_torch="allocate before the loop and use it again, or take cudaMallocAsync with a pool that "
        "keeps memory",
        stalls_host=True,
    ),
    Cause(
        name="garbage_collection",
        short="garbage collection",
        title="The GPUs wait for garbage collection",
        kind="host_stall",
        advice="call gc.freeze() after warm-up and gc.disable(), then gc.collect() on every rank at the same step",
        stalls_host=True,
    ),
    Cause(
        name="late_input",
        short="late input",
        title="The GPUs wait for input",
        kind="late_input",
        advice="raise DataLoader(num_workers=...) and prefetch_factor, set pin_memory=True, and copy with "
        "non_blocking=True",
        advice_without_torch="read ahead in threads of their own into pinned memory (cudaHostAlloc), and copy by "
        "cudaMemcpyAsync",
        stalls_host=True,
    ),
    Cause(
        # the host had waited for the GPU, so that no operation was queued when the GPU was done
        name="synchronise",
        short="synchronisation",
        title="The GPUs run out of work at synchronisations",
        kind="host_stall",
        advice="remove .item(), .cpu(), print(loss) and torch.cuda.synchronize() from the step, or read the value a "
        "step later",
        advice_without_torch="take cudaDeviceSynchronize, cudaStreamSynchronize and blocking copies out of the loop, "
        "or wait only where the host needs the result",
    ),
    Cause(
        name="copy",
        short="blocking copy",
        title="The GPUs run out of work while a copy blocks the host",
        kind="host_stall",
        advice="copy from and to pinned memory with non_blocking=True: from pageable memory the host itself copies, "
        "and waits",
        advice_without_torch="copy from and to pinned memory (cudaHostAlloc, cudaHostRegister) by cudaMemcpyAsync: "
        "from pageable memory the host itself copies, and waits",
    ),
    Cause(
        # CUDA was starting, kernels were loaded or compiled, or a graph was captured
        name="start_up",
        short="start-up, compilation, capture",
        title="The GPUs wait for start-up: CUDA, kernels and graphs are loaded, compiled or captured",
        kind="start_up",
        advice="it happens once: record after warm-up (torch.profiler.schedule(wait=, warmup=, active=)) to see the "
        "steps that follow; if it comes again in every step, shapes change: fix them, or mark them dynamic",
        advice_without_torch="it happens once: warm up, and record what follows (cudaProfilerStart() with nsys "
        "profile --capture-range=cudaProfilerApi)",
        stalls_host=True,
    ),
    Cause(
        # the profiler's own work
        name="profiler",
        short="profiler",
        title="The GPUs wait while the profiler itself works",
        kind="host_stall",
        advice="it is not in an unprofiled run; record fewer steps, without stacks and shapes",
        advice_without_torch="it is not in an unprofiled run; trace less: nsys profile --trace=cuda,nvtx --sample=none",
        stalls_host=True,
    ),
    Cause(
        # the next operation was launched in time, but waited for an event, another stream or another rank
        name="queued",
        short="queued, but held up",
        title="Work that was launched in time is held up by an event, a stream or another rank",
        kind="queued",
        advice="see what its stream waits for: torch.cuda.Stream.wait_stream and wait_event, a collective of another "
        "rank, or work that this trace does not hold",
        advice_without_torch="see what its stream waits for: cudaStreamWaitEvent, the default stream, a collective "
        "of another rank, or work that this trace does not hold",
    ),
    Cause(
        # the next operation was launched in time: the few µs from one kernel to the next
        name="between_kernels",
        short="between queued kernels",
        title="Short pauses between queued kernels add up",
        kind="queued",
        advice="fewer, larger kernels: torch.compile or fused implementations; CUDA graphs shorten each pause",
        advice_without_torch="fewer, larger kernels (fuse them); CUDA graphs shorten each pause",
    ),
    Cause(
        # the trace does not say when the next operation was launched, nor what the host did
        name="no_launch_recorded",
        short="launch not recorded",
        title="The GPUs idle, and the trace does not hold the launches that would say why",
        kind="not_recorded",
        advice="record the host too (ProfilerActivity.CPU beside ProfilerActivity.CUDA); keep all events",
        advice_without_torch="record the host too: nsys profile --trace=cuda,nvtx,osrt; keep all events",
        recorded=False,
    ),
    Cause(
        # the host launched nothing, and no range of any thread says what it did
        name="unrecorded",
        short="host, not recorded",
        title="The GPUs run out of work while the host does something that was not recorded",
        kind="host_stall",
        advice="record with torch.profiler.profile(with_stack=True) to see which Python code it is; if it is none, "
        "garbage collection may be: call gc.freeze() after warm-up and gc.disable(), then gc.collect() on every rank "
        "at the same step",
        advice_without_torch="record what the host does: nsys profile --trace=cuda,nvtx,osrt, with NVTX ranges "
        "around parts of the program",
        stalls_host=True,
        recorded=False,
    ),
    Cause(
        # before the first event of the trace or after its last
        name="nothing_recorded",
        short="before or after all events",
        title="Nothing was recorded before the first event or after the last, neither of host nor GPU",
        kind="not_recorded",
        advice="record whole steps, and keep all events (a trace that was cut or sampled does not hold why); if the "
        "program did nothing then, torch.profiler.profile(with_stack=True) shows where it was",
        advice_without_torch="record all of what is asked about, and the host too: nsys profile --trace=cuda,nvtx,osrt",
        recorded=False,
    ),
    Cause(
        # the first operation of its stream was launched long ago, so it waits for work that was not recorded
        name="earlier_work",
        short="behind work not recorded",
        title="The first operations wait for work launched before the recording, which it does not hold",
        kind="not_recorded",
        advice="leave this time out of account: the GPU was probably busy. Synchronise before the recording begins, "
        "or record further steps: torch.profiler.schedule(wait=, warmup=, active=)",
        advice_without_torch="leave this time out of account: the GPU was probably busy. Call "
        "cudaDeviceSynchronize() before the recording begins",
    ),
    Cause(
        # the time between migrations of unified memory, which no call launches: the host touches a page
        name="page_migration",
        short="unified memory, page by page",
        title="The GPUs idle while the host touches unified memory, which moves page by page",
        kind="host_stall",
        advice="move it at once, before it is used: cudaMemPrefetchAsync to cudaCpuDeviceId where the host is next, "
        "to the GPU where a kernel does; or copy by cudaMemcpyAsync between pinned and device memory instead",
    ),
    Cause(
        # another GPU of the same process works, so that not all of its GPUs idle
        name="other_gpu",
        short="another GPU of the process works",
    ),
)
STRAGGLER_CAUSES = _by_name(  # titles go on after "Rank 3 makes the others wait:"
    Cause(name="host_stall", short="host stall", title="its host stalls"),
    Cause(name="slow_kernels", short="slower kernels", title="its kernels are slow"),
    Cause(name="slow_kernel", short="one slower kernel", title="one of its kernels takes longer"),
    Cause(name="more_work", short="more work", title="it has more work"),
    Cause(name="late_input", short="late input", title="its input is late"),
    Cause(name="no_host_events", short="no host events", title="cause unknown, the trace has no host events"),
    Cause(name="unknown", short="unknown cause", title="cause not found"),
)
KERNEL_CAUSES = _by_name(
    Cause(
        name="tail_effect",
        short="tail effect",
        title="Tail effect: {kernels} in need of an extra wave beside communication",
    ),
    Cause(name="sm_contention", short="SM contention", title="{kernels} slowed by the SMs that communication takes"),
    Cause(
        name="bandwidth",
        short="bandwidth or power",
        title="{kernels} slowed by the bandwidth or power that communication takes",
    ),
    Cause(name="none", short="none"),
)
COMPUTE_CAUSES = _by_name(  # `short` names the change that a replay tries
    Cause(
        name="unfused_attention",
        short="attention fused",
        title="Attention runs as single kernels: a softmax between two batched GEMMs",
        advice="call torch.nn.functional.scaled_dot_product_attention (transformers: attn_implementation='sdpa'): "
        "it never writes the scores to memory",
        advice_without_torch="use a fused kernel of attention (FlashAttention, cuDNN), which never writes the scores",
    ),
    Cause(
        name="elementwise_chains",
        short="element-wise chains fused",
        title="Element-wise kernels in a row read and write their tensors each time",
        advice="torch.compile(model) fuses them; optimizers have fused=True",
        advice_without_torch="fuse each chain into one kernel",
    ),
    Cause(
        name="fp32_products",
        short="products in TF32",
        title="Matrix products in FP32 leave the tensor cores idle",
        advice="torch.set_float32_matmul_precision('high'), for convolutions torch.backends.cudnn.allow_tf32 = True; "
        "or torch.autocast('cuda', torch.bfloat16), which multiplies twice as fast again",
        advice_without_torch="compute in TF32 (CUBLAS_COMPUTE_32F_FAST_TF32) or in bf16",
    ),
    Cause(
        name="layout_copies",
        short="no casts and copies",
        title="Casts, copies and changes of layout",
        advice="keep tensors in the dtype that computes (weights in bf16, or FSDP2's MixedPrecisionPolicy) and in the "
        "layout that kernels want (.to(memory_format=torch.channels_last) for convolutions); avoid .contiguous() and "
        "torch.cat on large tensors",
        advice_without_torch="keep tensors in the dtype and the layout that the kernels want",
    ),
    Cause(
        name="tiny_kernels",
        short="tiny kernels fused",
        title="Many kernels of a few µs in a row",
        advice="torch.compile(model) fuses them, and optimizers have fused=True; larger batches make them longer",
        advice_without_torch="fuse them, or give each more work",
    ),
    Cause(
        name="partial_waves",
        short="full waves",
        title="The last wave of GEMMs leaves SMs idle",
        advice="choose sizes (tokens per microbatch, padded vocabulary, hidden size) whose number of tiles is a "
        "multiple of the SMs or a little less",
    ),
    Cause(
        name="far_below_rate",
        short="slow operators at 40 % of the card's rate",
        title="Operators run far below the card's rate",
        advice="begin with the first one named: larger batches, sizes that are multiples of 64, contiguous inputs "
        "(channels_last for convolutions and batch norm), a fused kernel or a newer library",
    ),
)
