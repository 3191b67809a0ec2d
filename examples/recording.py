"""What every recorder shares: start the ranks, profile N steps, write one Kineto trace per rank and where it came from.

A trace without its origin proves nothing later, so the traces and `provenance.json` (machine, versions, command line,
what was planted) are written by one function, `record`. Plain torch; the ranks are started by torchrun:

    torchrun --nproc-per-node 8 examples/record_fsdp.py --out traces/fsdp-healthy
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import datetime
import gc
import gzip
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function


@dataclass(frozen=True, kw_only=True)
class Job:
    """One rank of the recorded job, and how it wants to be recorded."""

    rank: int
    world_size: int
    device: torch.device
    out: Path
    warmup: int
    steps: int
    cuda_sync_events: bool

    @property
    def on_gpu(self) -> bool:
        """Whether the ranks run on GPUs."""
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        """Wait for this rank's GPU; nothing to do on a CPU."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def parser(description: str | None) -> argparse.ArgumentParser:
    """The options that every recorder has."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--out", type=Path, required=True, help="folder for rank*.json.gz and provenance.json")
    options.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: gloo, for small sizes")
    options.add_argument("--warmup", type=int, default=5, help="steps before the recorded ones")
    options.add_argument("--steps", type=int, default=3, help="recorded steps")
    options.add_argument("--cuda-sync-events", action="store_true", help="record waits for streams and events too")
    return options


@contextlib.contextmanager
def joined(args: argparse.Namespace, *, nccl_options: Any = None) -> Iterator[Job]:
    """Be in the process group that torchrun prepared. `nccl_options` is a `dist.ProcessGroupNCCL.Options` or None."""
    if "RANK" not in os.environ:
        raise SystemExit("start this with torchrun --nproc-per-node N, see the top of the file")
    local_rank = int(os.environ["LOCAL_RANK"])
    if args.device == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, pg_options=nccl_options)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")
    torch.manual_seed(1234 + dist.get_rank())
    gc.disable()  # as large training runs do: a collection at a random moment would be a fault nobody planted
    gc.collect()
    try:
        yield Job(
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            device=device,
            out=args.out,
            warmup=args.warmup,
            steps=args.steps,
            cuda_sync_events=args.cuda_sync_events,
        )
    finally:
        dist.destroy_process_group()


def record(step: Callable[[int], None], job: Job, *, planted: dict[str, Any] | None) -> dict[str, int]:
    """Run `step(index)` for the warm-up and the recorded steps; write this rank's trace and, on rank 0, the provenance.

    Recorded steps carry the name `ProfilerStep#{index}`. The GPU is idle when the first of them starts, so the trace
    holds no kernel of an earlier step. Host clocks of the steps are kept beside the trace, for a check of its times.

    Returns: how often each GPU activity occurs in the trace of rank 0; nothing on the other ranks.
    """
    job.out.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if job.on_gpu else [])]
    # Only what was asked for is named: a torch that does not know the option then raises instead of ignoring it.
    options = torch._C._profiler._ExperimentalConfig(enable_cuda_sync_events=True) if job.cuda_sync_events else None
    profiler = profile(activities=activities, record_shapes=True, with_stack=False, experimental_config=options)
    profiler.prepare_trace()
    for index in range(job.warmup):
        step(index)
    job.synchronize()
    profiler.start_trace()
    dist.barrier()  # ranks start their profilers at different times: that wait stays outside of the steps
    job.synchronize()
    step_ms: list[float] = []
    for index in range(job.warmup, job.warmup + job.steps):
        with record_function(f"ProfilerStep#{index}"):
            started = time.perf_counter()
            step(index)
            step_ms.append(round((time.perf_counter() - started) * 1e3, 3))
    job.synchronize()
    profiler.stop_trace()
    trace = job.out / f"rank{job.rank}.json"
    profiler.export_chrome_trace(str(trace))
    compressed = trace.with_suffix(".json.gz")
    compressed.write_bytes(gzip.compress(trace.read_bytes(), compresslevel=6, mtime=0))

    seen: dict[str, int] = {}
    all_step_ms: list[Any] = [None] * job.world_size
    dist.all_gather_object(all_step_ms, step_ms)
    if job.rank == 0:
        seen = gpu_activity(trace)
        names = [f"ProfilerStep#{index}" for index in range(job.warmup, job.warmup + job.steps)]
        facts = provenance(job, planted) | {
            "steps": names,
            "host_step_ms": {str(rank): values for rank, values in enumerate(all_step_ms)},
            "gpu_activity_rank0": seen,
        }
        (job.out / "provenance.json").write_text(json.dumps(facts, indent=1) + "\n")
        print(f"{job.out}: {job.world_size} ranks, host step ms on rank 0: {step_ms}", flush=True)
    trace.unlink()
    dist.barrier()
    return seen


def provenance(job: Job, planted: dict[str, Any] | None) -> dict[str, Any]:
    """Machine, versions, command line, date, and what was planted: enough to record the set again."""
    nccl: Any = torch.cuda.nccl.version() if job.on_gpu else ()  # type: ignore[no-untyped-call]
    script = Path(sys.argv[0]).name
    arguments = " ".join(sys.argv[1:])
    switches = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(("NCCL_", "TORCH_SYMM"))}
    switches.pop("NCCL_VERSION", None)  # set by container images: a package, not the library that runs
    return {
        "recorded": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"torchrun --nproc-per-node {job.world_size} examples/{script} {arguments}",
        "environment": switches,
        "machine": machine(job),
        "versions": {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": ".".join(str(part) for part in nccl) or None,
            "python": platform.python_version(),
        },
        "world_size": job.world_size,
        "planted": planted,
    }


def machine(job: Job) -> dict[str, Any]:
    """The processor that ran it, how many there were, and the driver."""
    if not job.on_gpu:
        return {"device": "cpu", "cpus": os.cpu_count(), "architecture": platform.machine()}
    properties = torch.cuda.get_device_properties(job.device)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "device": properties.name,
        "count": torch.cuda.device_count(),
        "sms": properties.multi_processor_count,
        "memory_gb": round(properties.total_memory / 1e9, 1),
        "driver": driver or "unknown",
        "cpus": os.cpu_count(),
    }


def gpu_activity(trace: Path) -> dict[str, int]:
    """How often each GPU activity occurs in a trace: shows at a glance which mechanism really ran."""
    events = json.loads(trace.read_text())["traceEvents"]
    on_gpu = (e["name"] for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset", "cuda_sync"))
    return dict(collections.Counter(name[:120] for name in on_gpu).most_common(40))
