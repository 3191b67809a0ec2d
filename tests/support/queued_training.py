"""Made-up steps of FSDP and DDP on two ranks: a host launches, streams run in order, and work waits for other work.

What makes them fast or slow is said by arguments: whether gathers wait for compute, whether all streams share one
queue, which layers one bucket or unit holds. All times in µs.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from counterpoint.trace.timeline import CollectiveInfo, HostKind, Kind
from tests.support.job_builder import Host, Op, Rank, rank

COMPUTE, GATHER, SCATTER = 7, 20, 24
MATMUL_US, GATHER_US, LAYERS = 600.0, 500.0, 6
_CALL_US, _LATENCY_US = 4.0, 6.0
_GATHER = "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
_SCATTER = "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


@dataclass
class Machine:
    """One rank's host, which launches one operation after the other, and its GPU.

    `one_queue`: an operation begins no earlier than the one launched before it, as with one connection.
    """

    one_queue: bool = False
    host_us: float = 0.0
    launched_us: float = 0.0  # start of the operation launched last
    stream_end: dict[int, float] = field(default_factory=dict)
    parts: list[Op | Host] = field(default_factory=list)
    seq: int = 0

    def launch(self, name: str, stream: int, us: float, after: Iterable[float] = (), **more: Any) -> float:
        """Launch an operation that waits for the times `after`, and return its end."""
        start = max(self.host_us + _LATENCY_US, self.stream_end.get(stream, 0.0) + 1.0, *after)
        start = max(start, self.launched_us + 1.0) if self.one_queue else start
        self.parts.append(
            Op(name=name, start=start, end=start + us, stream=stream, launch=self.host_us, call_us=_CALL_US, **more)
        )
        self.host_us += _CALL_US + 1.0
        self.launched_us, self.stream_end[stream] = start, start + us
        return start + us

    def collective(
        self, op: str, kernel: str, stream: int, us: float, after: Iterable[float], nelems: tuple[int, int]
    ) -> float:
        info = CollectiveInfo(op=op, group="0", group_desc="mesh_dp", group_size=2, seq=self.seq,
                              in_nelems=nelems[0], out_nelems=nelems[1], dtype="Float")  # fmt: skip
        self.seq += 1
        return self.launch(kernel, stream, us, after, kind=Kind.COMM, grid=(24, 1, 1), info=info)

    def within(self, name: str, begin: float) -> None:
        """Add a range of the host from `begin` until now."""
        self.parts.append(Host(name=name, start=begin, end=self.host_us, kind=HostKind.ANNOTATION))

    def step(self, begin: float) -> tuple[float, float]:
        """End a step: the host waits for the GPU."""
        end = max(self.stream_end.values())
        self.parts.append(Host(name="cudaDeviceSynchronize", start=self.host_us, end=end, kind=HostKind.RUNTIME))
        self.host_us = end + 5.0
        return begin, self.host_us


def fsdp(
    *, layers: int = LAYERS, prefetch: bool = True, one_queue: bool = False, gather_us: float = GATHER_US,
    payloads: Sequence[int] = (1 << 20,), us_of_payload: Sequence[float] = (), steps: int = 3,
) -> Rank:  # fmt: skip
    """Steps of FSDP2; `layers` 1: one unit of all parameters.

    `payloads`: elements of each rank's part, in turn by layer, of which the gathers take `us_of_payload`.
    """
    m, ranges = Machine(one_queue=one_queue), []
    for _ in range(steps):
        begin, computed = m.host_us, 0.0
        for backward in (False, True):
            for layer in reversed(range(layers)) if backward else range(layers):
                at = m.host_us
                part = payloads[layer % len(payloads)]
                us = us_of_payload[layer % len(payloads)] if us_of_payload else gather_us
                gathered = m.collective(
                    "all_gather", _GATHER, GATHER, us, () if prefetch else (computed,), (part, 2 * part)
                )
                m.within(f"FSDP::pre_{'backward' if backward else 'forward'} (layers.{layer})", at)
                for _ in range(4 if backward else 2):
                    computed = m.launch("nvjet_tst_128x256_NTT", COMPUTE, MATMUL_US * LAYERS / layers, (gathered,))
                if backward:
                    at = m.host_us
                    m.collective("reduce_scatter", _SCATTER, SCATTER, us, (computed,), (2 * part, part))
                    m.within(f"FSDP::post_backward (layers.{layer})", at)
        at = m.host_us
        m.launch("multi_tensor_apply_kernel<FusedAdam>", COMPUTE, 300.0, m.stream_end.values())
        m.within("Optimizer.step#AdamW.step", at)
        ranges.append(m.step(begin))
    return rank(*m.parts, steps=ranges)


def ddp(*, buckets: Sequence[tuple[int, float]], us_of_mib: float = 20.0, steps: int = 3) -> Rank:
    """Steps of DDP; `buckets`: (layers of the backward pass after which it is full, MiB)."""
    m, ranges = Machine(), []
    for _ in range(steps):
        begin = at = m.host_us
        for _ in range(2 * LAYERS):
            m.launch("nvjet_tst_128x256_NTT", COMPUTE, MATMUL_US)
        m.within("DistributedDataParallel.forward", at)
        for layer in range(1, LAYERS + 1):
            at = m.host_us
            for _ in range(4):
                computed = m.launch("nvjet_tst_256x128_NNT", COMPUTE, MATMUL_US)
            for _, mib in [b for b in buckets if b[0] == layer]:
                size = int(mib * (1 << 18))
                m.collective("all_reduce", _REDUCE, GATHER, mib * us_of_mib, (computed,), (size, size))
            m.within("autograd::engine::evaluate_function: MmBackward0", at)
        at = m.host_us
        m.launch("multi_tensor_apply_kernel<FusedAdam>", COMPUTE, 300.0, m.stream_end.values())
        m.within("Optimizer.step#AdamW.step", at)
        ranges.append(m.step(begin))
    return rank(*m.parts, steps=ranges)
