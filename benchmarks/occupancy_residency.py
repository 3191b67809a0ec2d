"""Who lives beside whom: a block like NCCL's next to the blocks of a GEMM, written down by the SMs themselves.

24 guest blocks with the threads, registers and shared memory of a communication kernel are launched beside an 8192³
GEMM: 400 µs later, at once, or 100 µs before; with priority or without. Every block of both writes on which SM it ran,
and from when to when. One GPU, no NCCL.

    python benchmarks/occupancy_residency.py --out results/occupancy-residency.json
"""

from __future__ import annotations

import argparse
import ctypes
from collections import defaultdict
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from cuda.bindings import driver, nvrtc
from occupancy_workloads import Workload, gemm
from provenance import gpu_provenance, write_result

from counterpoint.controls.control import call_driver
from counterpoint.controls.occupancy import OccupancyShaping, device_limits
from counterpoint.machine.occupancy import Footprint, SmLimits, blocks_beside

NUM_GUESTS, GUEST_LIFE_NS = 24, 800_000
HEAD_START_NS = {"gemm_first": 400_000, "together": 0, "guest_first": 100_000}
GUESTS = (  # threads, registers, bytes of shared memory
    (544, 96, 103808),  # NCCL 2.28's all-reduce on Hopper
    (640, 96, 103808),  # its all-to-all
    (544, 96, 32768),  # the same with less shared memory
    (288, 96, 103808),  # NCCL_NTHREADS=256
    (544, 32, 103808),  # with fewer registers
)
CASES = (("gemm_first", False), ("gemm_first", True), ("together", True), ("guest_first", False))
SOURCE = """
extern "C" __global__ void __launch_bounds__(THREADS) guest(long long* log, long long life_ns, float seed) {
    float held[HELD];  // keeps registers busy
    #pragma unroll
    for (int i = 0; i < HELD; i++) held[i] = seed * i + threadIdx.x;
    long long start, now;
    unsigned sm;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
    do {
        #pragma unroll
        for (int i = 0; i < HELD; i++) held[i] = held[i] * held[(i + 7) % HELD] + seed;
        asm volatile("nanosleep.u32 200;");
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < life_ns);
    float sum = 0;
    #pragma unroll
    for (int i = 0; i < HELD; i++) sum += held[i];
    if (threadIdx.x == 0) {
        log[blockIdx.x * 3] = sum == 0.5f ? -1 : sm;  // uses what was held
        log[blockIdx.x * 3 + 1] = start;
        log[blockIdx.x * 3 + 2] = now;
    }
}
"""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One launch of both."""

    guest: Footprint
    gemm_blocks: int  # per SM, alone
    gemm_smem_bytes: int
    order: str
    priority: bool
    guest_waited_us: float  # from its launch to the start of its last block; the GEMM takes about 3.6 ms
    sms_shared: int  # of those with a guest: where a GEMM block began and ended during its life
    blocks_beside: int  # most GEMM blocks beside one guest at once
    blocks_beside_predicted: int


def compiled(threads: int, registers: int) -> tuple[Any, int]:
    """A guest with as near to `registers` registers a thread as the compiler gives, and how many it gave."""
    best: tuple[Any, int] | None = None
    for held in range(2, 120, 2):
        source = SOURCE.replace("THREADS", str(threads)).replace("HELD", str(held))
        _, program = nvrtc.nvrtcCreateProgram(source.encode(), b"guest.cu", 0, [], [])
        (status,) = nvrtc.nvrtcCompileProgram(program, 1, [b"--gpu-architecture=sm_90"])
        assert int(status) == 0, status
        cubin = b" " * nvrtc.nvrtcGetCUBINSize(program)[1]
        nvrtc.nvrtcGetCUBIN(program, cubin)
        function = call_driver("cuModuleGetFunction", call_driver("cuModuleLoadData", cubin), b"guest")
        given = int(call_driver("cuFuncGetAttribute", driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS, function))
        if best is None or abs(given - registers) < abs(best[1] - registers):
            best = function, given
        if given >= registers:
            break
    assert best is not None
    return best


def launch(function: Any, blocks: int, footprint: Footprint, stream: Any, log: Any, life_ns: int) -> None:
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    call_driver("cuFuncSetAttribute", function, most, footprint.smem_bytes)
    arguments = ((log.data_ptr(), life_ns, 0.5), (ctypes.c_void_p, ctypes.c_longlong, ctypes.c_float))
    threads, smem = footprint.threads, footprint.smem_bytes
    call_driver("cuLaunchKernel", function, blocks, 1, 1, threads, 1, 1, smem, stream.cuda_stream, arguments, 0)


class Bench:
    """Two streams, and a guest of one block that holds the second of them back."""

    def __init__(self, work: Workload, log: Any) -> None:
        self.work, self.log = work, log
        self.compute = torch.cuda.Stream()
        self.comm = {False: torch.cuda.Stream(), True: torch.cuda.Stream(priority=-1)}
        self.guests, self.held = (torch.zeros(NUM_GUESTS, 3, dtype=torch.int64, device="cuda") for _ in range(2))
        self.small = Footprint(threads=32, regs_per_thread=32, smem_bytes=0)
        self.hold, _ = compiled(32, 32)

    def run(self, function: Any, guest: Footprint, wanted: int | None, order: str, priority: bool) -> None:
        """Queue both behind a spin, the second one's start held back by a block that takes one place on one SM."""
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000)
        ready = torch.cuda.Event()
        ready.record()
        comm = self.comm[priority]
        for stream in (self.compute, comm):
            stream.wait_event(ready)
        late = {"gemm_first": comm, "guest_first": self.compute}.get(order)
        if late is not None:
            launch(self.hold, 1, self.small, late, self.held, HEAD_START_NS[order])
        with torch.cuda.stream(self.compute):
            if wanted is None:
                self.work.queue()
            else:
                with OccupancyShaping(blocks_per_sm=wanted, kernels="matmul").launches():
                    self.work.queue()
        launch(function, NUM_GUESTS, guest, comm, self.guests, GUEST_LIFE_NS)
        torch.cuda.synchronize()

    def seen(self, order: str) -> tuple[float, int, int]:
        """(µs that the last guest waited, SMs shared, most GEMM blocks beside one guest)."""
        lives: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for sm, start, end in self.guests.tolist():
            lives[sm].append((start, end))
        inside: dict[int, list[tuple[int, int]]] = defaultdict(list)
        log = self.log.tolist()
        for sm, start, end in log:
            if any(begin < start and end < last for begin, last in lives[sm]):
                inside[sm] += [(start, 1), (end, -1)]
        alone = [sm for sm, each in lives.items() if len(each) == 1 and inside[sm]]
        last = max(start for each in lives.values() for start, _ in each)
        asked = min(start for _, start, _ in log) + (HEAD_START_NS[order] if order == "gemm_first" else 0)
        if order == "guest_first":
            asked -= HEAD_START_NS[order]
        beside = max((most(inside[sm]) for sm in alone), default=0)
        return (last - asked) / 1e3, sum(bool(each) for each in inside.values()), beside


def most(changes: list[tuple[int, int]]) -> int:
    """The most that were alive at once, of (moment, +1 or -1)."""
    alive = highest = 0
    for _, change in sorted(changes):
        alive += change
        highest = max(highest, alive)
    return highest


def gemm_block(work: Workload, wanted: int | None) -> tuple[int, Footprint]:
    """Blocks per SM of the GEMM with this setting (None: as it is), and what one of them takes."""
    with OccupancyShaping(blocks_per_sm=wanted or 1, kernels="matmul").launches() as shaper:
        work.queue()
    (found,) = shaper.shapes
    if wanted is None:
        return found.blocks_before, found.kernel.footprint
    smem = found.kernel.static_smem_bytes + found.dynamic_smem_bytes
    return found.blocks_after, replace(found.kernel.footprint, smem_bytes=smem)


def study(sm: SmLimits) -> list[Seen]:
    """Every guest beside every number of GEMM blocks per SM."""
    log = torch.zeros(128 * 128, 3, dtype=torch.int64, device="cuda")
    bench = Bench(gemm("8192", 32, log), log)
    rows = []
    for threads, registers, smem in GUESTS:
        function, given = compiled(threads, registers)
        guest = Footprint(threads=threads, regs_per_thread=given, smem_bytes=smem)
        for wanted in (None, 6, 4, 3, 2, 1):
            blocks, block = gemm_block(bench.work, wanted)
            for order, priority in CASES:
                bench.run(function, guest, wanted, order, priority)
                waited, shared, beside = bench.seen(order)
                rows.append(
                    Seen(
                        guest=guest,
                        gemm_blocks=blocks,
                        gemm_smem_bytes=block.smem_bytes,
                        order=order,
                        priority=priority,
                        guest_waited_us=round(waited, 1),
                        sms_shared=shared,
                        blocks_beside=beside,
                        blocks_beside_predicted=blocks_beside(block, guest, sm=sm),
                    )
                )
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.zeros(1, device="cuda")
    rows = study(device_limits())
    facts = gpu_provenance(["triton", "cuda-bindings"], world_size=1)
    columns = ("guest", "GEMM", "order", "priority", "guest waited", "SMs shared", "GEMM blocks beside it", "predicted")
    table = [
        [
            f"{row.guest.threads} × {row.guest.regs_per_thread} regs, {row.guest.smem_bytes} B",
            f"{row.gemm_blocks} a SM, {row.gemm_smem_bytes} B",
            row.order,
            "high" if row.priority else "0",
            f"{row.guest_waited_us:.0f} µs",
            *map(str, (row.sms_shared, row.blocks_beside, row.blocks_beside_predicted)),
        ]
        for row in rows
    ]
    write_result(args.out, {"provenance": facts, "rows": [asdict(row) for row in rows]}, columns, table)


if __name__ == "__main__":
    main()
