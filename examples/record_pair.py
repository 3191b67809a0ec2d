"""Record the tail-effect pair: one GEMM and one all-gather of about the same length, in every launch order.

A bf16 8192 x 8192 x 8192 GEMM on Hopper is one persistent kernel that takes every SM. Whatever needs an SM and comes
second waits for all of it; if the all-gather comes first and holds some SMs, the GEMM's last blocks wait for those.
Each recorded step holds five cases, each under its own name: `pair.compute_alone`, `pair.comm_alone`,
`pair.together`, `pair.comm_first`, `pair.compute_first` (the second one about 100 us later).

    torchrun --nproc-per-node 8 examples/record_pair.py --out traces/pair-nccl --mechanism nccl
    torchrun --nproc-per-node 8 examples/record_pair.py --out traces/pair-ce --mechanism copy_engine

Every case is queued behind a spin kernel, so that launch times of the host play no part, and the ranks are aligned by
a tiny all-reduce right before it. The delay is a copy to pinned host memory: unlike a kernel it needs no SM. Its
length is in the trace, as its name is: `Memcpy DtoH`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import recording
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from recording import Job
from torch import Tensor
from torch.profiler import record_function

CASES = ("compute_alone", "comm_alone", "together", "comm_first", "compute_first")
MECHANISMS = ("nccl", "nccl_zero_cta", "copy_engine", "low_contention")
HEAD_START_US = 100.0
SPIN_CYCLES = 4_000_000  # about 2 ms: longer than the host needs to queue one case


def nccl_options(args: argparse.Namespace) -> Any:
    """Process group options for the mechanism; raises if this torch cannot set what was asked for."""
    options = dist.ProcessGroupNCCL.Options()
    if args.max_ctas is not None:
        options.config.max_ctas = args.max_ctas
    if args.mechanism == "nccl_zero_cta":
        policy = getattr(dist.ProcessGroupNCCL, "NCCL_CTA_POLICY_ZERO", None)
        if policy is None or not hasattr(options.config, "cta_policy"):
            raise SystemExit(f"nccl_zero_cta: torch {torch.__version__} has no cta_policy; it needs NCCL 2.28 or later")
        options.config.cta_policy = policy
    return options


def all_gather(mechanism: str, numel: int, job: Job) -> Callable[[], None]:
    """A function that gathers `numel` bf16 elements of every rank on the current stream, by the named mechanism."""
    if mechanism == "nccl":
        shard = torch.randn(numel, device=job.device, dtype=torch.bfloat16)
        whole = torch.empty(numel * job.world_size, device=job.device, dtype=torch.bfloat16)
        return lambda: dist.all_gather_into_tensor(whole, shard)

    group = dist.group.WORLD
    assert group is not None
    dist.all_reduce(torch.ones(1, device=job.device))  # the communicator has to exist before memory is registered
    if mechanism == "nccl_zero_cta":
        symm_mem.set_backend("NCCL")
    symmetric_shard = symm_mem.empty(numel, device=job.device, dtype=torch.bfloat16).normal_()
    symm_mem.rendezvous(symmetric_shard, group)
    if mechanism == "low_contention":
        gather = torch.ops.symm_mem._low_contention_all_gather
        wait = torch.ops._c10d_functional.wait_tensor
        return lambda: wait(gather(symmetric_shard, group.group_name))
    symmetric_whole = symm_mem.empty(numel * job.world_size, device=job.device, dtype=torch.bfloat16)
    handle = symm_mem.rendezvous(symmetric_whole, group)
    if mechanism == "nccl_zero_cta":
        return lambda: dist.all_gather_into_tensor(symmetric_whole, symmetric_shard)

    # In a rotation every link carries one copy at a time. The ranks are aligned before and after: no flags are needed.
    peers = [(job.rank + step) % job.world_size for step in range(1, job.world_size)]
    places = [handle.get_buffer(peer, (numel,), torch.bfloat16, job.rank * numel) for peer in peers]
    symmetric_whole[job.rank * numel :][:numel].copy_(symmetric_shard)  # the own shard stays in place

    def push(_mapped: Tensor = symmetric_whole) -> None:  # holds what the peers write to: it must outlive this function
        for place in places:
            place.copy_(symmetric_shard, non_blocking=True)

    return push


def event(*, timing: bool = False) -> torch.cuda.Event:
    """A CUDA event (torch leaves their constructor untyped)."""
    return torch.cuda.Event(enable_timing=timing)  # type: ignore[no-untyped-call]


class Delay:
    """Holds a stream for about a chosen time without an SM: a copy to pinned host memory whose length was measured."""

    def __init__(self, microseconds: float, device: torch.device) -> None:
        bytes_, copies = 4 << 20, 50
        source = torch.empty(bytes_, dtype=torch.uint8, device=device)
        target = torch.empty(bytes_, dtype=torch.uint8, pin_memory=True)
        begin, end = event(timing=True), event(timing=True)
        dist.barrier()  # all GPUs measure at once, as they will copy at once: they share the way to the host
        for index in range(2 * copies):  # the first half is a warm-up
            if index == copies:
                begin.record()
            target.copy_(source, non_blocking=True)
        end.record()
        torch.cuda.synchronize(device)
        length = min(bytes_, int(bytes_ * microseconds / (begin.elapsed_time(end) * 1e3 / copies)))
        self.source, self.target = source[:length], target[:length]

    def __call__(self) -> None:
        self.target.copy_(self.source, non_blocking=True)


class Pair:
    """The two operations, their streams, and the five ways to run them."""

    def __init__(self, args: argparse.Namespace, job: Job) -> None:
        size = args.size
        self.left, self.right, self.product = (
            torch.randn(size, size, device=job.device, dtype=torch.bfloat16) for _ in range(3)
        )
        numel = int(args.megabytes * 2**20) // 2 // job.world_size
        self.gather = all_gather(args.mechanism, numel, job)
        self.compute_stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self.comm_stream = torch.cuda.Stream(priority=args.comm_priority)  # type: ignore[no-untyped-call]
        self.delay = Delay(HEAD_START_US, job.device)
        self.flag: Tensor = torch.ones(1, device=job.device)
        torch.cuda.synchronize(job.device)

    def queue(
        self, stream: torch.cuda.Stream, work: Callable[[], object], ready: torch.cuda.Event, *, late: bool
    ) -> None:
        """Put `work` on the stream: after `ready`, and if late, after the head start of the other side."""
        with torch.cuda.stream(stream):
            stream.wait_event(ready)
            if late:
                self.delay()
            work()

    def matmul(self) -> None:
        """The compute side."""
        torch.mm(self.left, self.right, out=self.product)

    def run(self, case: str) -> None:
        """Queue one case behind a spin kernel and wait for its end."""
        with record_function("pair.align"):
            torch.cuda._sleep(SPIN_CYCLES)  # type: ignore[no-untyped-call]
            dist.all_reduce(self.flag, op=dist.ReduceOp.MAX)
            ready = event()
            ready.record()
        compute = (self.compute_stream, self.matmul, case == "comm_first")
        comm = (self.comm_stream, self.gather, case == "compute_first")
        parts = {"compute_alone": (compute,), "comm_alone": (comm,), "comm_first": (comm, compute)}
        with record_function(f"pair.{case}"):
            for stream, work, late in parts.get(case, (compute, comm)):
                self.queue(stream, work, ready, late=late)
        torch.cuda.current_stream().wait_stream(self.compute_stream)
        torch.cuda.current_stream().wait_stream(self.comm_stream)
        torch.cuda.synchronize()


def main() -> None:
    """Parse, join the other ranks, record the pair."""
    parser = recording.parser(__doc__)
    parser.add_argument("--mechanism", choices=MECHANISMS, default="nccl")
    parser.add_argument("--size", type=int, default=8192, help="the GEMM is size x size x size")
    parser.add_argument("--megabytes", type=float, default=512, help="the whole gathered array, MiB")
    parser.add_argument("--max-ctas", type=int, help="thread blocks that NCCL may use")
    parser.add_argument("--comm-priority", type=int, default=0, help="stream priority of the all-gather, -1 is high")
    args = parser.parse_args()
    if args.device != "cuda":
        raise SystemExit("record_pair.py: streams and SMs are what it is about, so it needs GPUs")
    with recording.joined(args, nccl_options=nccl_options(args)) as job:
        pair = Pair(args, job)

        def step(index: int) -> None:
            for case in CASES:
                pair.run(case)

        planted = {"kind": "tail_effect", "mechanism": args.mechanism, "cases": list(CASES)}
        seen = recording.record(step, job, planted=planted)
        if job.rank == 0 and args.mechanism != "nccl" and not any("PtoP" in name for name in seen):
            raise SystemExit(f"{args.mechanism} did not take effect: the trace holds no copy between GPUs, but {seen}")


if __name__ == "__main__":
    main()
