"""Kineto traces of a made-up FSDP2 job: the shape of real ones, any size, the same bytes on every machine.

A small clockwork runs all ranks in lock step: a host thread that launches, a compute stream, a gather stream and a
scatter stream per rank. A collective ends when the last rank has arrived and the data has moved, so the ranks of one
job fit together as real ones do. Operations, kernels, the share of each kind of event and the layout of the file
(several lines an event, host events first, kernels and launches with their flow arrows after them) follow what torch
2.11 wrote for a Llama-3-8B-shaped model on 8 x H200 (samples/), but operations tell only their input sizes, as older
releases do: about 260 bytes an event instead of 309.
"""

from __future__ import annotations

import contextlib
import json
import random
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from synthetic_model import Block, Kernel, Op, backward_of, forward_layer, lay_out, unshard_layer

__all__ = ["Job", "write_traces"]

BASE_US = 1_305_516_300_000.0  # where Kineto's clock happens to stand
PID = 4242
MAIN, AUTOGRAD = 4242, 4577  # threads
COMPUTE, GATHER_COPY, GATHER, SCATTER = 7, 31, 35, 39  # streams
LAUNCH_LATENCY_US = 4.0
FRAMES = (
    "torch/nn/modules/module.py(1773): _wrapped_call_impl",
    "model/layers.py({line}): forward",
    "<built-in method {op} of type object at 0x7fd1c2a4{line:04x}>",
)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is trained. The events of one rank are about `steps * micro_batches * layers * 1000`; with stacks, 2500."""

    world_size: int = 8
    steps: int = 20
    micro_batches: int = 2
    layers: int = 32
    tokens: int = 4096
    seed: int = 7
    kernel_scale: float = 1.0  # of the time of kernels and transfers: small ones leave the GPU idle between launches
    stacks: bool = False  # whether Python functions are recorded, three around each operation


# --- one rank, writing what it does -----------------------------------------------------------------------------------


class Rank:
    """The clocks of one rank; writes events if it has files to write to."""

    def __init__(self, rank: int, job: Job, files: tuple[IO[str], IO[str]] | None) -> None:
        self.rank = rank
        self.job = job
        self.files = files
        self.random = random.Random(job.seed * 1000 + rank)
        self.host = 0.0
        self.thread = MAIN
        self.stream_end = dict.fromkeys((COMPUTE, GATHER_COPY, GATHER, SCATTER), 0.0)
        self.correlation = 1
        self.external = 1
        self.index = 0
        self.frames = 0
        self.events = 0

    def write(self, text: str, *, events: int = 1, launched: bool = False) -> None:
        self.events += events
        if self.files is not None:
            self.files[launched].write(text)

    def run(self, block: Block, *, backward: bool = False, flows: int = 0) -> None:
        """Walk through `block` on this thread; `flows` is where the arrows from forward to backward are numbered."""
        scale = self.random.uniform(0.97, 1.06)
        begin = self.host
        self.host += block.host_us * scale
        if self.files is not None:
            self._write_ops(block, begin, scale, backward=backward, flows=flows)
        for offset, kernel in block.launches:
            self.launch(kernel, COMPUTE, at=begin + offset * scale)

    def _write_ops(self, block: Block, begin: float, scale: float, *, backward: bool, flows: int) -> None:
        thread, lines = self.thread, []
        for number, (offset, duration, name, dims) in enumerate(block.ops):
            ts = BASE_US + begin + offset * scale
            sequence = flows + (number // 2 if backward else number)
            lines.append(
                f'  {{\n    "ph": "X", "cat": "cpu_op", "name": "{name}", "pid": {PID}, "tid": {thread},\n'
                f'    "ts": {ts:.3f}, "dur": {duration * scale:.3f},\n    "args": {{\n'
                f'      "External id": {self.external + number},"Sequence number": {sequence}, "Fwd thread id": '
                f'{1 if backward else 0}, "Record function id": 0, "Input Dims": {dims}, '
                f'"Ev Idx": {self.index + number}\n    }}\n  }},\n'
            )
            if number % (8 if backward else 4) == 0:
                end, tail = ("f", ', "bp": "e"') if backward else ("s", "")
                lines.append(
                    f'  {{\n    "ph": "{end}", "id": {sequence}, "pid": {PID}, "tid": {thread}, "ts": {ts:.3f},\n'
                    f'    "cat": "fwdbwd", "name": "fwdbwd"{tail}\n  }},\n'
                )
            if number % 96 == 0:
                lines.append(self._memory_event(ts, thread, number))
            if self.job.stacks:
                lines += self._frames(ts, duration * scale, number, name)
        self.external += len(block.ops)
        self.index += len(block.ops)
        self.write("".join(lines), events=len(lines))

    def _frames(self, ts: float, us: float, number: int, name: str) -> list[str]:
        op, within = name.rpartition(":")[2].replace(" ", ""), []
        for depth, frame in enumerate(FRAMES):
            self.frames += 1
            margin = 0.04 * (len(FRAMES) - depth)
            within.append(
                f'  {{\n    "ph": "X", "cat": "python_function", "name": "{frame.format(line=number, op=op)}", '
                f'"pid": {PID}, "tid": {self.thread},\n    "ts": {ts - margin:.3f}, "dur": {us + 2 * margin:.3f},\n'
                f'    "args": {{\n      "Python parent id": {self.frames - 1}, "Python id": {self.frames}, '
                f'"Ev Idx": {self.index + number}\n    }}\n  }},\n'
            )
        return within

    def _memory_event(self, ts: float, thread: int, number: int) -> str:
        held = 48_318_382_080 + 33_554_432 * (number % 96)
        return (
            f'  {{\n    "ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]",\n    "pid": {PID}, '
            f'"tid": {thread},\n    "ts": {ts:.3f},\n    "args": {{\n      "Total Reserved": 118111600640, '
            f'"Total Allocated": {held}, "Bytes": 33554432, "Device Id": {self.rank}, "Device Type": 1, '
            f'"Addr": {140216842854592 + held}, "Ev Idx": {self.index + number}\n    }}\n  }},\n'
        )

    def range(self, name: str, begin: float, *, category: str = "user_annotation") -> None:
        """A range from `begin` to now, on this thread."""
        self.write(
            f'  {{\n    "ph": "X", "cat": "{category}", "name": "{name}", "pid": {PID}, "tid": {self.thread},\n'
            f'    "ts": {BASE_US + begin:.3f}, "dur": {self.host - begin:.3f},\n    "args": {{\n'
            f'      "External id": {self.external},"Record function id": 0, "Ev Idx": {self.index}\n    }}\n  }},\n'
        )
        self.external += 1
        self.index += 1

    def call(self, name: str, us: float, *, cbid: int) -> None:
        """A call of the CUDA runtime that launches nothing; Kineto draws an arrow's head at it all the same."""
        begin, correlation = self.host, self.next_correlation()
        self.host += us
        self._write_call("cuda_runtime", name, begin, us, cbid, correlation, arrow=', "bp": "e"')

    def next_correlation(self) -> int:
        self.correlation += 2
        return self.correlation

    def _write_call(
        self, category: str, name: str, begin: float, us: float, cbid: int, correlation: int, *, arrow: str
    ) -> None:
        self.write(
            f'  {{\n    "ph": "X", "cat": "{category}", "name": "{name}", "pid": {PID}, "tid": {self.thread},\n'
            f'    "ts": {BASE_US + begin:.3f}, "dur": {us:.3f},\n    "args": {{\n'
            f'      "External id": {self.external},      "cbid": {cbid}, "correlation": {correlation}\n    }}\n  }},\n'
            f'  {{\n    "ph": "{"f" if arrow else "s"}", "id": {correlation}, "pid": {PID}, "tid": {self.thread}, '
            f'"ts": {BASE_US + begin:.3f},\n    "cat": "ac2g", "name": "ac2g"{arrow}\n  }},\n',
            events=2,
            launched=True,
        )

    def launch(self, kernel: Kernel, stream: int, *, at: float | None = None) -> None:
        """Launch `kernel`: it starts when the launch has reached the GPU and its stream is free."""
        begin = self.host if at is None else at
        if at is None:
            self.host += 4.5
        start = max(begin + 4.2 + LAUNCH_LATENCY_US, self.stream_end[stream] + 0.9)
        duration = kernel.us * self.job.kernel_scale * max(0.9, self.random.gauss(1.0, 0.012))
        self.stream_end[stream] = start + duration
        self.put(kernel, stream, start, duration, launched_at=begin)

    def put(
        self,
        kernel: Kernel,
        stream: int,
        start: float,
        duration: float,
        *,
        launched_at: float,
        collective: str = "",
    ) -> None:
        """Write one kernel or memset, the call that launched it, and the arrow from one to the other."""
        correlation = self.next_correlation()
        if self.files is None:
            return
        at, identity = f"{BASE_US + start:.3f}", f'"pid": {self.rank}, "tid": {stream}'
        is_kernel = not kernel.name.startswith("Memset")
        facts = (
            self._kernel_facts(kernel) + collective if is_kernel else '"bytes": 4, "memory bandwidth (GB/s)": 0.0022'
        )
        self.write(
            f'  {{\n    "ph": "X", "cat": "{"kernel" if is_kernel else "gpu_memset"}", "name": "{kernel.name}", '
            f'{identity},\n    "ts": {at}, "dur": {duration:.3f},\n    "args": {{\n'
            f'      "External id": {self.external},      "device": {self.rank}, "context": 1,      '
            f'"stream": {stream}, "correlation": {correlation},      {facts}\n    }}\n  }},\n'
            f'  {{\n    "ph": "f", "id": {correlation}, {identity}, "ts": {at},\n'
            '    "cat": "ac2g", "name": "ac2g", "bp": "e"\n  },\n',
            events=2,
            launched=True,
        )
        category, name, cbid = ("cuda_runtime", "cudaLaunchKernel", 211)
        if kernel.name.startswith(("nvjet", "nccl")):
            category, name, cbid = ("cuda_driver", "cuLaunchKernelEx", 652)
        elif not is_kernel:
            name, cbid = "cudaMemsetAsync", 51
        self._write_call(category, name, launched_at, 4.2, cbid, correlation, arrow="")

    @staticmethod
    def _kernel_facts(kernel: Kernel) -> str:
        blocks, threads = kernel.grid[0] * kernel.grid[1] * kernel.grid[2], kernel.block[0] * kernel.block[1]
        occupancy = min(100, int(65536 / (kernel.regs * threads)) * threads * 100 // 2048)
        return (
            f'"registers per thread": {kernel.regs},      "shared memory": {kernel.smem},      '
            f'"blocks per SM": {blocks / 132:.6f},      "warps per SM": {blocks * threads / 32 / 132:.6f},      '
            f'"grid": {list(kernel.grid)},      "block": {list(kernel.block)},      '
            f'"est. achieved occupancy %": {occupancy}'
        )

    def range_on_gpu(self, name: str, stream: int, begin: float) -> None:
        """A range of the host as it shows on a stream, from `begin` to the end of what is queued there."""
        self.write(
            f'  {{\n    "ph": "X", "cat": "gpu_user_annotation", "name": "{name}", "pid": {self.rank}, '
            f'"tid": {stream},\n'
            f'    "ts": {BASE_US + begin:.3f}, "dur": {self.stream_end[stream] - begin:.3f},\n'
            f'    "args": {{\n      "External id": {self.external}\n    }}\n  }},\n',
            launched=True,
        )


# --- the job ----------------------------------------------------------------------------------------------------------


class Communication(NamedTuple):
    """One kind of collective of the job."""

    op: str
    kernel: str
    stream: int
    in_nelems: int
    out_nelems: int
    dtype: str
    transfer_us: float


LAYER_WEIGHTS = 218_112_000
ALL_GATHER = Communication(
    "_allgather_base", "AllGather_RING_LL", GATHER, LAYER_WEIGHTS // 8, LAYER_WEIGHTS, "BFloat16", 1130.0
)
REDUCE_SCATTER = Communication(
    "_reduce_scatter_base", "ReduceScatter_Sum_f32_RING_LL", SCATTER, LAYER_WEIGHTS, LAYER_WEIGHTS // 8, "Float", 2250.0
)
COPY_IN = Kernel(
    "void at::native::(anonymous namespace)::split_with_sizes_copy_out_contiguous_no_cast_kernel<unsigned char>(char*)",
    31.0,
    (1056, 9, 1),
    (512, 1, 1),
    40,
)
COPY_OUT = COPY_IN._replace(us=205.0)
ADAM = Kernel(
    "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
    "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4, "
    "(at::native::ADAM_MODE)1, false> >(at::native::(anonymous namespace)::FusedOptimizerTensorListMetadata<4>)",
    310.0,
    (320, 1, 1),
    (512, 1, 1),
    96,
)


class Ranks:
    """All ranks of the job, moved in lock step."""

    def __init__(self, job: Job, ranks: Sequence[Rank]) -> None:
        self.job = job
        self.ranks = ranks
        self.sequence = 0
        forward = forward_layer(job.tokens)
        self.forward = lay_out(forward)
        self.backward = lay_out(backward_of(op) for op in reversed(forward))
        optimizer = Op("aten::_fused_adamw_", ((),), (Op("aten::_foreach_add_", ((), ())),), ADAM)
        self.unshard = lay_out(unshard_layer())
        self.optimizer = lay_out(optimizer for _ in range(job.layers))

    def step(self, number: int) -> None:
        begins = [rank.host for rank in self.ranks]
        for micro_batch in range(self.job.micro_batches):
            base = (number * self.job.micro_batches + micro_batch) * self.job.layers
            for layer in range(self.job.layers):
                self.forward_layer(layer, flows=(base + layer) * len(self.forward.ops))
            for layer in reversed(range(self.job.layers)):
                self.backward_layer(layer, flows=(base + layer) * len(self.forward.ops))
        for rank, begin in zip(self.ranks, begins, strict=True):
            rank.thread = MAIN
            rank.stream_end[COMPUTE] = max(rank.stream_end.values())
            started = rank.host
            rank.run(self.optimizer)
            rank.range("Optimizer.step#AdamW.step", started)
            idle = max(rank.stream_end.values()) - rank.host
            rank.call("cudaStreamSynchronize", max(idle, 0.0) + 9.0, cbid=131)
            rank.range(f"ProfilerStep#{number}", begin)

    def forward_layer(self, layer: int, *, flows: int) -> None:
        begins = [rank.host for rank in self.ranks]
        self.gather(layer)
        for rank, begin in zip(self.ranks, begins, strict=True):
            rank.range(f"FSDP::pre_forward (layers.{layer})", begin)
            rank.run(self.forward, flows=flows)

    def backward_layer(self, layer: int, *, flows: int) -> None:
        for rank in self.ranks:
            rank.thread = AUTOGRAD
        self.gather(layer)
        for rank in self.ranks:
            rank.run(self.backward, backward=True, flows=flows)
            rank.call("cudaEventRecordWithFlags", 1.1, cbid=456)
            rank.call("cudaStreamWaitEvent", 0.9, cbid=147)
            rank.stream_end[SCATTER] = max(rank.stream_end[SCATTER], rank.stream_end[COMPUTE])
            rank.launch(COPY_OUT, SCATTER)
        self.collective(REDUCE_SCATTER)

    def gather(self, layer: int) -> None:
        """FSDP's unshard: copy in, gather beside the layer before, copy out on the compute stream."""
        begins = [rank.host for rank in self.ranks]
        for rank in self.ranks:
            rank.run(self.unshard)
            for _ in range(4):  # the caching allocator asks whether blocks used on other streams are free
                rank.call("cudaEventQuery", 0.8, cbid=136)
                rank.call("cudaEventRecordWithFlags", 1.1, cbid=456)
                rank.call("cudaStreamWaitEvent", 0.9, cbid=147)
            rank.launch(COPY_IN, GATHER_COPY)
            rank.stream_end[GATHER] = max(rank.stream_end[GATHER], rank.stream_end[GATHER_COPY])
        self.collective(ALL_GATHER)
        for rank, begin in zip(self.ranks, begins, strict=True):
            rank.range(f"FSDP::all_gather (layers.{layer})", begin)
            rank.call("cudaEventRecordWithFlags", 1.1, cbid=456)
            rank.call("cudaStreamWaitEvent", 0.9, cbid=147)
            rank.stream_end[COMPUTE] = max(rank.stream_end[COMPUTE], rank.stream_end[GATHER])
            started, queued = rank.host, rank.stream_end[COMPUTE]
            rank.launch(COPY_OUT, COMPUTE)
            rank.range_on_gpu(f"FSDP::all_gather_copy_out (layers.{layer})", COMPUTE, queued)
            rank.stream_end[GATHER_COPY] = rank.stream_end[COMPUTE]  # the buffer is reused: the next gather waits
            rank.range(f"FSDP::all_gather_copy_out (layers.{layer})", started)

    def collective(self, what: Communication) -> None:
        """Each rank launches; all end together, `transfer_us` after the last has started."""
        self.sequence += 1
        starts, launches = [], []
        for rank in self.ranks:
            began = rank.host
            rank.call("cudaEventQuery", 0.7, cbid=136)
            launches.append(rank.host)
            rank.host += 6.1
            starts.append(max(rank.host + LAUNCH_LATENCY_US, rank.stream_end[what.stream] + 1.1))
            self._announce(rank, what, began)
        end = max(starts) + what.transfer_us * self.job.kernel_scale * self.ranks[0].random.uniform(0.98, 1.05)
        name = f"ncclDevKernel_{what.kernel}(ncclDevKernelArgsStorage<4096ul>)"
        kernel = Kernel(name, 0.0, (24, 1, 1), (544, 1, 1), 96, 82_240)
        for rank, start, launched_at in zip(self.ranks, starts, launches, strict=True):
            own_end = end + rank.random.uniform(0.0, 3.0)
            rank.stream_end[what.stream] = own_end
            told = f", {self._metadata(rank, what)}"
            rank.put(kernel, what.stream, start, own_end - start, launched_at=launched_at, collective=told)
            rank.range_on_gpu(f"nccl:{what.op}", what.stream, start)

    def _announce(self, rank: Rank, what: Communication, began: float) -> None:
        """What c10d says on the host: the operation, and `record_param_comms` with the metadata."""
        rank.range(f"c10d::{what.op}_", began, category="cpu_op")
        rank.range(f"nccl:{what.op}", began)
        rank.write(
            f'  {{\n    "ph": "X", "cat": "cpu_op", "name": "record_param_comms", "pid": {PID}, "tid": {rank.thread},\n'
            f'    "ts": {BASE_US + began:.3f}, "dur": {rank.host - began:.3f},\n    "args": {{\n'
            f'      "External id": {rank.external},"Record function id": 0, {self._metadata(rank, what)}, '
            f'"Ev Idx": {rank.index}\n    }}\n  }},\n'
        )

    def _metadata(self, rank: Rank, what: Communication) -> str:
        members = list(range(self.job.world_size))
        return (
            f'"Collective name": "{what.op}", "In msg nelems": {what.in_nelems}, "Out msg nelems": {what.out_nelems}, '
            f'"Group size": {len(members)}, "dtype": "{what.dtype}", "In split size": "[]", "Out split size": "[]", '
            f'"Process Group Name": "0", "Process Group Description": "default_pg", '
            f'"Process Group Ranks": "{members}", "Rank": {rank.rank}, "Seq": {self.sequence}'
        )


# --- the file ---------------------------------------------------------------------------------------------------------


def header(job: Job, rank: int) -> str:
    """Everything before the events: the GPUs and the process groups."""
    device = {
        "name": "NVIDIA H200", "totalGlobalMem": 150_110_011_392, "computeMajor": 9, "computeMinor": 0,
        "maxThreadsPerBlock": 1024, "maxThreadsPerMultiprocessor": 2048, "regsPerBlock": 65536, "warpSize": 32,
        "sharedMemPerBlock": 49152, "numSms": 132, "regsPerMultiprocessor": 65536,
        "sharedMemPerBlockOptin": 232448, "sharedMemPerMultiprocessor": 233472,
    }  # fmt: skip
    members = list(range(job.world_size))
    group = {"pg_name": "0", "pg_desc": "default_pg", "backend_config": "cuda:nccl", "pg_size": len(members)}
    distributed = {
        "backend": "nccl", "rank": rank, "world_size": job.world_size, "pg_count": 1,
        "pg_config": [group | {"ranks": members}], "nccl_version": "2.28.9",
    }  # fmt: skip
    facts = {
        "schemaVersion": 1,
        "deviceProperties": [{"id": number} | device for number in members],
        "cuda_runtime_version": 13000,
        "distributedInfo": distributed,
        "with_stack": int(job.stacks), "record_shapes": 1, "profile_memory": 1,
        "displayTimeUnit": "ms",
        "baseTimeNanoseconds": 1_775_078_550_000_000_000,
    }  # fmt: skip
    return json.dumps(facts, indent=2)[:-2] + ',\n  "traceEvents": [\n'


def footer(last_us: float) -> str:
    """The profiler's own span and the end of the file."""
    return (
        f'  {{\n    "ph": "X", "cat": "Trace", "ts": {BASE_US:.3f}, "dur": {last_us:.3f},\n    "pid": "Spans", '
        '"tid": "PyTorch Profiler",\n    "name": "PyTorch Profiler (0)",\n    "args": {\n      "Op count": 0\n    }\n'
        '  },\n  {\n    "name": "Record Window End", "ph": "i", "s": "g",\n    "pid": "", "tid": "", '
        f'"ts": {BASE_US + last_us:.3f}\n  }}\n  ],\n  "traceName": "trace.json"\n}}\n'
    )


def write_traces(job: Job, folder: Path, ranks: Sequence[int]) -> dict[int, int]:
    """Write `folder/rank{r}.json` for each of `ranks`; returns the number of events of each.

    The other ranks run too, since a collective waits for all, but write nothing.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        parts = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        files = {
            rank: (
                stack.enter_context((parts / f"{rank}.host").open("w+")),
                stack.enter_context((parts / f"{rank}.gpu").open("w+")),
            )
            for rank in ranks
        }
        everyone = [Rank(rank, job, files.get(rank)) for rank in range(job.world_size)]
        together = Ranks(job, everyone)
        for number in range(job.steps):
            together.step(number)
        for rank, (host, gpu) in files.items():
            with (folder / f"rank{rank}.json").open("w") as trace:
                trace.write(header(job, rank))
                for part in (host, gpu):
                    part.seek(0)
                    shutil.copyfileobj(part, trace, 1 << 20)
                trace.write(footer(everyone[rank].host + 100.0))
    return {rank: everyone[rank].events + 2 for rank in ranks}
