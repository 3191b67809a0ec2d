"""Predict one rank's time in a layer and in a part of a pipeline stage: compute by kind, and exposed communication.

forward   = compute + every exchange                            activations are needed before anything can go on
            exchanges in pieces beside a matmul count only the matmul's extra time (`pieces_us`)
backward  = compute + recomputed + exchanges; those `during_dw` run together with the weight gradients' products:
            exposed = together(dW, exchanges) - dW              (`pair/together.py`)
experts   `overlap_ep` = "halves": one half of an exchange is exposed, one runs together with the products of experts;
            "micro_batches": it runs together with all compute of the layer, which is that of another micro-batch
recomputed: selective: the chosen modules, a whole feed-forward block with its exchanges; full: forward again, with its
            exchanges, in all layers of a part or the first few of them, up to the last product or its input
zero 3    + copies, and the exposed part of gathering parameters and scattering gradients (`data_parallel.py`)
offload   + what copying activations to the host takes longer than forward, and back longer than backward
host      + what the host takes longer to launch all kernels and collectives of a micro-batch than the GPU to run them:
            it runs ahead of the GPU, from forward into backward, so only its total counts; none with CUDA graphs
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache

import msgspec
from msgspec.structs import astuple, replace

from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.pair.arrivals import ShardedMatmul, TensorOperation
from counterpoint.pair.curves import estimated_curve
from counterpoint.pair.matmul_choice import cut, with_best_chunks
from counterpoint.pair.together import kept_us
from counterpoint.plan.compute.layers import LayerWork, LocalShape, embedding_work, head_work, layer_work, mtp_work
from counterpoint.plan.compute.memory import offloaded_bytes
from counterpoint.plan.compute.operations import FlashAttentionOp, MatmulOp, MemoryBoundOp, Operation
from counterpoint.plan.compute.roofline import GpuRates, cost, host_us
from counterpoint.plan.job.cluster import plan_profile
from counterpoint.plan.job.job import Job
from counterpoint.plan.job.model import Experts, Model, ParameterCount, layer_parameters
from counterpoint.plan.job.parallel import StagePart, part_parameters
from counterpoint.plan.network.estimate import MeshTimes
from counterpoint.plan.step.data_parallel import layer_collectives, layer_copies_us, overlapped_in_pieces_us
from counterpoint.plan.step.exchanges import Exchange, layer_exchanges
from counterpoint.records import Record

LAST_PRODUCT = "ffn out"  # of a dense layer: backward needs the input of this matmul, and nothing after it
EXPOSED = {"tp": "tensor_us", "cp": "context_us", "ep": "expert_us"}


DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp8": "float8_e4m3fn", "fp32": "float32"}  # of operands, by precision


@lru_cache(maxsize=4096)
def pieces_us(
    operation: TensorOperation, columns: int, depth: int, dtype: str, rows: int, ranks: int, gpu: tuple[str, str]
) -> float:
    """Return how many µs longer a matmul is estimated to take with communication in pieces beside it than alone.

    It has `rows` over all ranks, `columns`, and `depth` elements in each sum; `gpu` has the GPU's name and profile
    file.

    Raises:
        Misconfigured: the GPU's data sheet is not known.
    """
    profile = plan_profile(*gpu)
    try:
        curve = estimated_curve(columns, depth, dtype, rows, profile)
    except Unsupported as error:
        raise Misconfigured(f"parallel.pieces_tp: {error}; leave it out") from None
    shares = tuple(rows // ranks + (rank < rows % ranks) for rank in range(ranks))
    task = with_best_chunks(ShardedMatmul(operation=operation, curves=(curve,), shard_rows=shares), profile)
    return max(0.0, cut(task, 0, profile).us - curve.us(rows))


class TimeByPart(Record, frozen=True, kw_only=True):
    """Holds the µs of a rank by part of a step; communication counts only where it is exposed."""

    matmul_us: float = 0.0
    attention_us: float = 0.0
    memory_bound_us: float = 0.0
    recompute_us: float = 0.0
    shard_copies_us: float = 0.0
    tensor_us: float = 0.0
    context_us: float = 0.0
    expert_us: float = 0.0
    shards_us: float = 0.0
    offload_us: float = 0.0
    host_us: float = 0.0

    @property
    def total_us(self) -> float:
        """Return the sum of all parts, in µs."""
        return float(sum(astuple(self)))

    @property
    def compute_us(self) -> float:
        """Return the µs in which the GPU computes, recomputes or copies shards."""
        return self.matmul_us + self.attention_us + self.memory_bound_us + self.recompute_us + self.shard_copies_us

    def plus(self, other: TimeByPart, times: float = 1.0) -> TimeByPart:
        """Return this time + `times` · `other`."""
        pairs = zip(self.__struct_fields__, astuple(self), astuple(other), strict=True)
        return TimeByPart(**{name: mine + times * more for name, mine, more in pairs})


class MicroBatchTime(Record, frozen=True, kw_only=True):
    """Holds the time of one micro-batch in several layers."""

    forward: TimeByPart = TimeByPart()  # of all these layers
    backward: TimeByPart = TimeByPart()  # of all these layers
    weight_us: float = 0.0  # the part of backward that only makes weight gradients
    launch_us: tuple[float, float] = (0.0, 0.0)  # host time of forward and backward
    weight_launch_us: float = 0.0  # the part of backward's launches that only make weight gradients
    kernels: float = 0.0  # number of kernels that the host launches
    comm_us: dict[str, float] = msgspec.field(default_factory=dict)  # communication alone, by axis, both directions

    @property
    def total_us(self) -> float:
        """Return the µs of forward and backward."""
        return self.forward.total_us + self.backward.total_us

    @property
    def gpu_us(self) -> float:
        """Return the µs of forward and backward, without the time in which the GPU waits for its host."""
        return self.total_us - self.forward.host_us - self.backward.host_us

    def with_host(self) -> MicroBatchTime:
        """Return this time, with the µs that the GPU waits for its host added to backward.

        The wait is not divided between forward and backward: a slower kernel could shift it to where it hides more
        communication.
        """
        late = TimeByPart(host_us=max(sum(self.launch_us) - self.gpu_us, 0.0))
        return replace(self, backward=self.backward.plus(late))

    def plus(self, other: MicroBatchTime, times: float = 1.0) -> MicroBatchTime:
        """Return this time + `times` · `other`."""
        comm_us = dict(self.comm_us)
        for axis, us in other.comm_us.items():
            comm_us[axis] = comm_us.get(axis, 0.0) + times * us
        return MicroBatchTime(
            forward=self.forward.plus(other.forward, times),
            backward=self.backward.plus(other.backward, times),
            weight_us=self.weight_us + times * other.weight_us,
            launch_us=(self.launch_us[0] + times * other.launch_us[0], self.launch_us[1] + times * other.launch_us[1]),
            weight_launch_us=self.weight_launch_us + times * other.weight_launch_us,
            kernels=self.kernels + times * other.kernels,
            comm_us=comm_us,
        )


class LayerTimes(Record, frozen=True, kw_only=True):
    """Holds the time of one dense layer and of one layer with experts, with the job's recomputation.

    Where only some layers are recomputed in full, `rest` has the times of the others.
    """

    dense: MicroBatchTime
    routed: MicroBatchTime
    rest: LayerTimes | None = None

    def mean_us(self, model: Model) -> float:
        """Return the mean µs of a layer, forward and backward; with method "block", of layers not recomputed."""
        if self.rest is not None:
            return self.rest.mean_us(model)
        found = self.of_part(StagePart(layers=model.layers, routed=model.expert_layers), 0)
        return found.total_us / model.layers

    def of_part(self, part: StagePart, again: int) -> MicroBatchTime:
        """Return one micro-batch's time in the layers of a stage's part, with `again` of them recomputed in full."""
        found = MicroBatchTime().plus(self.dense, part.layers - part.routed)
        if part.routed:
            found = found.plus(self.routed, part.routed)
        if self.rest is None or again == part.layers:
            return found
        share = again / part.layers
        return MicroBatchTime().plus(found, share).plus(self.rest.of_part(part, 0), 1 - share)


def layer_times(job: Job, rates: GpuRates, prices: MeshTimes) -> LayerTimes:
    """Return the time of one layer of each kind in the job: dense, with experts, and without recomputation."""
    dense = layer_time(job, rates, prices)
    routed = layer_time(job, rates, prices, job.model.experts) if job.model.expert_layers or job.model.mtp else dense
    rest = None
    if job.training.recompute_method == "block":
        kept = replace(job.training, recompute="none", recompute_method=None, recompute_num_layers=None)
        rest = layer_times(replace(job, training=kept), rates, prices)
    return LayerTimes(dense=dense, routed=routed, rest=rest)


def part_time(job: Job, rates: GpuRates, prices: MeshTimes, part: StagePart, layers: LayerTimes) -> MicroBatchTime:
    """Return one micro-batch's time in a stage's part: layers, embedding, head, zero 3's copies and collectives."""
    found = layers.of_part(part, job.training.recomputed_layers(part.layers))
    found = _with_ends(found, job, rates, part, layers)
    if job.parallel.zero == 3 and job.parallel.dp * job.parallel.cp > 1:
        found = found.plus(_sharding_time(job, rates, prices, part, found))
    return found.with_host()


def with_offloading(job: Job, part: StagePart, time: MicroBatchTime) -> MicroBatchTime:
    """Return a part's time plus the exposed time to copy activations to the host (forward) and back (backward)."""
    if not job.training.offload_activations:
        return time
    copy_us = offloaded_bytes(job, part) / job.cluster.gpu.host_bytes_per_us
    ways = (time.forward, replace(time.backward, host_us=0.0))
    forward, backward = (way.plus(TimeByPart(offload_us=max(copy_us - way.total_us, 0.0))) for way in ways)
    return replace(time, forward=forward, backward=backward).with_host()


def layer_time(job: Job, rates: GpuRates, prices: MeshTimes, experts: Experts | None = None) -> MicroBatchTime:
    """Return the time of one micro-batch in one layer; without `experts` the layer is dense."""
    model, parallel, training = job.model, job.parallel, job.training
    work = layer_work(model, LocalShape.of(parallel, training), experts)
    exchanges = layer_exchanges(model, parallel, training, experts)
    sent, sent_back = ([each for each in exchanges if each.backward == back] for back in (False, True))
    forward = _compute(work.forward, rates)
    again, repeated = _again(job, work, sent, routed=experts is not None)
    backward = (*work.backward, *_accumulation(job, experts))
    back = _compute(backward, rates)
    weight_us = _weight_us(work.backward, rates)
    apart = work.experts or LayerWork()
    experts_us, experts_back_us = (_compute(way, rates).total_us for way in (apart.forward, apart.backward))
    recompute_us = _compute(again, rates).total_us
    late = _exposed(job, rates, prices, sent_back, weight_us, experts_back_us, back.total_us)
    for name, us in _exposed(job, rates, prices, repeated, 0.0, experts_us, recompute_us).items():
        late[name] = late.get(name, 0.0) + us
    comm_us: dict[str, float] = {}
    for exchange in (*exchanges, *repeated):
        comm_us[exchange.axis] = comm_us.get(exchange.axis, 0.0) + exchange.us(prices)
    return MicroBatchTime(
        forward=forward.plus(TimeByPart(**_exposed(job, rates, prices, sent, 0.0, experts_us, forward.total_us))),
        backward=back.plus(TimeByPart(recompute_us=recompute_us, **late)),
        weight_us=weight_us,
        launch_us=(
            _launch_us(job, rates, work.forward, sent),
            _launch_us(job, rates, (*backward, *again), (*sent_back, *repeated)),
        ),
        weight_launch_us=_launch_us(job, rates, _weight_gradients(work.backward), ()),
        kernels=sum(operation.kernels for operation in (*work.forward, *backward, *again)),
        comm_us=comm_us,
    )


def _without_last(exchange: Exchange) -> Exchange:
    """Return an exchange less the last matmul's collective, which early-stopped recomputation skips."""
    last = exchange.axis == "tp" and exchange.operation in ("reduce_scatter", "all_reduce") and exchange.product is None
    return replace(exchange, count=exchange.count - 1) if last else exchange


def _again(
    job: Job, work: LayerWork, sent: list[Exchange], *, routed: bool
) -> tuple[tuple[Operation, ...], list[Exchange]]:
    """Return the operations of `work` and the forward exchanges of `sent` that backward repeats."""
    training = job.training
    if training.recompute == "full":
        if not training.early_stop or routed:  # the combine needs the experts' outputs again
            return work.forward, sent
        return tuple(op for op in work.forward if op.name != LAST_PRODUCT), [_without_last(each) for each in sent]
    if training.recompute == "none":
        return (), []
    modules = training.recompute_modules
    block = [replace(exchange, count=exchange.ffn) for exchange in sent if exchange.ffn]
    return work.recomputed(modules, routed=routed), block if ("moe" if routed else "mlp") in modules else []


def end_us(job: Job, rates: GpuRates, layers: LayerTimes) -> tuple[float, float]:
    """Return the µs, forward plus backward, of the embedding, and of the head with multi-token prediction."""
    ends = StagePart(layers=0, embedding=True), StagePart(layers=0, head=True, mtp=job.model.mtp)
    first, last = (_with_ends(MicroBatchTime(), job, rates, end, layers) for end in ends)
    return first.total_us, last.total_us


def _with_ends(found: MicroBatchTime, job: Job, rates: GpuRates, part: StagePart, layers: LayerTimes) -> MicroBatchTime:
    """Return `found` plus the time of the part's embedding, head and multi-token prediction, if the part has them."""
    if part.embedding:
        found = found.plus(_end_time(job, rates, embedding_work))
    if part.head:
        found = found.plus(_end_time(job, rates, head_work))
    if part.mtp:
        found = found.plus(layers.routed, part.mtp).plus(_end_time(job, rates, mtp_work), part.mtp)
    return found


def _end_time(job: Job, rates: GpuRates, work_of: Callable[[Model, LocalShape], LayerWork]) -> MicroBatchTime:
    work = work_of(job.model, LocalShape.of(job.parallel, job.training))
    return MicroBatchTime(
        forward=_compute(work.forward, rates),
        backward=_compute(work.backward, rates),
        weight_us=_weight_us(work.backward, rates),
        launch_us=(_launch_us(job, rates, work.forward, ()), _launch_us(job, rates, work.backward, ())),
        weight_launch_us=_launch_us(job, rates, _weight_gradients(work.backward), ()),
        kernels=sum(operation.kernels for operation in (*work.forward, *work.backward)),
    )


def _launch_us(job: Job, rates: GpuRates, operations: Iterable[Operation], sent: Iterable[Exchange]) -> float:
    """Return the host's µs to launch operations and collectives; 0 with CUDA graphs."""
    if job.training.cuda_graphs:
        return 0.0
    collectives = sum(exchange.count for exchange in sent)
    return host_us(operations, rates) + collectives * rates.efficiency.host_collective_us


def _weight_us(operations: Iterable[Operation], rates: GpuRates) -> float:
    return sum(cost(op, rates).us for op in _weight_gradients(operations))


def _weight_gradients(operations: Iterable[Operation]) -> list[MatmulOp]:
    return [op for op in operations if isinstance(op, MatmulOp) and op.weight_gradient]


def _compute(operations: Iterable[Operation], rates: GpuRates) -> TimeByPart:
    us = {"matmul_us": 0.0, "attention_us": 0.0, "memory_bound_us": 0.0}
    for operation in operations:
        kind = "memory_bound_us"
        if isinstance(operation, MatmulOp):
            kind = "matmul_us"
        elif isinstance(operation, FlashAttentionOp):
            kind = "attention_us"
        us[kind] += cost(operation, rates).us
    return TimeByPart(**us)


def _exposed(
    job: Job,
    rates: GpuRates,
    prices: MeshTimes,
    exchanges: Iterable[Exchange],
    weight_us: float,
    experts_us: float,
    compute_us: float,
) -> dict[str, float]:
    """Return the µs of exposed communication by part; exchanges during dW share one exposed time, by their µs alone."""
    exposed: dict[str, float] = {}
    during_dw, halves, others = [], [], []
    for exchange in exchanges:
        name = EXPOSED[exchange.axis]
        if exchange.during_dw:
            during_dw.append(exchange)
        elif exchange.beside == "experts":
            halves.append((exchange.operation, exchange.us(prices) / 2))
        elif exchange.beside == "micro_batch":
            others.append((exchange.operation, exchange.us(prices)))
        elif exchange.product is not None:
            us = _beside_product_us(job, prices, exchange, exchange.product)
            exposed[name] = exposed.get(name, 0.0) + us
        else:
            exposed[name] = exposed.get(name, 0.0) + exchange.us(prices)
    if during_dw:
        comms = tuple((exchange.operation, exchange.us(prices)) for exchange in during_dw)
        both = kept_us(weight_us, comms, job.disturbance_of("tp"), persistent=rates.efficiency.persistent)
        for exchange, (_, us) in zip(during_dw, comms, strict=True):
            part = us / sum(alone for _, alone in comms)
            name = EXPOSED[exchange.axis]
            exposed[name] = exposed.get(name, 0.0) + (both - weight_us) * part
    if others:
        both = kept_us(compute_us, others, job.disturbance_of("ep"), persistent=rates.efficiency.persistent)
        exposed["expert_us"] = both - compute_us
    if halves:  # the first half's dispatch and the second half's combine overlap nothing
        both = kept_us(experts_us, halves, job.disturbance_of("ep"), persistent=rates.efficiency.persistent)
        exposed["expert_us"] = sum(us for _, us in halves) + both - experts_us
    return exposed


def _beside_product_us(job: Job, prices: MeshTimes, exchange: Exchange, product: tuple[int, int]) -> float:
    """Return how many µs longer a matmul takes with its exchange in pieces than alone; at most the exchange's µs."""
    local = LocalShape.of(job.parallel, job.training)
    scatter = exchange.operation == "reduce_scatter"
    us = pieces_us(
        "matmul_reduce_scatter" if scatter else "all_gather_matmul",
        *product,
        DTYPES[job.training.precision],
        local.tokens,
        job.parallel.tp,
        (job.cluster.gpu.name, job.cluster.gpu.machine),
    )
    return min(us, exchange.us(prices))


def _accumulation(job: Job, experts: Experts | None) -> tuple[Operation, ...]:
    """Return the kernel that adds gradients to earlier micro-batches' gradients; () if the dW matmul adds them."""
    training, parallel = job.training, job.parallel
    if training.fused_accumulation or training.micro_batches(parallel) == 1 or parallel.zero == 3:
        return ()
    elements = layer_parameters(job.model, experts).of_rank(parallel.tp, parallel.ep, parallel.experts_cut).total
    return (MemoryBoundOp(name="gradients added up", num_bytes=elements * (2 + 2 * training.grad_bytes)),)


def _sharding_time(
    job: Job, rates: GpuRates, prices: MeshTimes, part: StagePart, alone: MicroBatchTime
) -> MicroBatchTime:
    """Return the time that zero 3 adds to a stage's part: copies, and exposed communication of layers and both ends."""
    mechanism, persistent = job.disturbance_of("dp"), rates.efficiency.persistent
    count = max(part.layers + part.mtp, 1)
    alike = StagePart(layers=part.layers, routed=part.routed, mtp=part.mtp)
    layers = part_parameters(job.model, job.parallel, alike)
    ends = part_parameters(job.model, job.parallel, StagePart(layers=0, embedding=part.embedding, head=part.head))
    layer = ParameterCount(shared=layers.shared / count, experts=layers.experts / count)
    each, end = job.training.gathered_bytes, job.training.element_bytes
    sent, copies = layer_collectives(job, prices, layer, each), layer_copies_us(job, rates, layers, each)
    end_sent, end_copies = layer_collectives(job, prices, ends, end), layer_copies_us(job, rates, ends, end)
    found, comm_us = [], 0.0
    for turn, compute in enumerate((alone.forward, alone.backward)):
        comms = [(name, us * (part.layers + part.mtp)) for name, us in sent[turn]]
        # embedding and head stay unsharded until backward: they are gathered once, and nothing overlaps that
        end_us = sum(us for name, us in end_sent[turn] if turn == 0 or name != "all_gather")
        exposed = sum(us for _, us in comms) + end_us
        comm_us += exposed
        copy_us = copies[turn] + end_copies[turn]
        if job.parallel.overlap_dp:
            compute_us = compute.total_us + copy_us
            both = overlapped_in_pieces_us(compute_us, comms, count, mechanism, persistent=persistent)
            exposed = both - compute_us + end_us
        found.append(TimeByPart(shard_copies_us=copy_us, shards_us=exposed))
    each_us = 0.0 if job.training.cuda_graphs else (part.layers + 1) * rates.efficiency.host_shard_us
    again = 2 if job.parallel.reshard_after_forward else 1  # backward gathers once more, and reduces
    return MicroBatchTime(
        forward=found[0], backward=found[1], launch_us=(each_us, again * each_us), comm_us={"shards": comm_us}
    )
