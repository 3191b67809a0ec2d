"""Describe the named suites as data: which pairs and which building blocks.

`quick` one minute; `pairs` independent pairs, the table of docs/results/pairs.md; `reductions` how many SMs the sums of
zero-SM collectives need next to a GEMM; `conccl`, `resource-aware` and `forum` the scenarios of ConCCL (arXiv
2412.14335), of "Resource-aware Computation-Communication Overlap" (arXiv 2606.09200) and of NVIDIA's forum, thread
337991; `budget` divisions of the SMs, and the building blocks that the budget rule predicts them from
(docs/design/pair.md); `blocks` building blocks alone; `tensor` matmuls that depend on communication, by every way to
run them; `expert` tokens that travel to their experts and back, alone and beside compute; `machine` what
`counterpoint tune --machine` fits a profile to, in under two minutes; `full` everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import cycle, product

import msgspec

from counterpoint.collectives.program.operations import BY_TORCH, OPERATIONS, measured_by
from counterpoint.errors import Misconfigured, printable
from counterpoint.measurement.dependent import EXPERT_LAYERS, ROUTINGS
from counterpoint.measurement.mechanisms import BASES, find_mechanism
from counterpoint.measurement.workloads import llama_layer
from counterpoint.pair.together import REDUCTIONS
from counterpoint.records.measurement import Block, Scenario

STOCK = ("nccl", "nccl+priority=high", "nccl_zero_cta", "zero_sm", "zero_sm+gemm_sms=fit")
SUMS = ("nccl", "zero_sm", *(f"zero_sm+gemm_sms={sms}" for sms in (128, 124, 120, 116, "fit")))
GEMM = "gemm 8192x8192x8192"
LARGE_GEMM = "gemm 8192x57344x8192"
LOADS = (GEMM, "llama-8b layer 4096", "llama-70b layer 2048", LARGE_GEMM)
LAYERS = tuple(f"llama-{size}b layer {tokens}" for size, tokens in product((8, 70), (2048, 4096, 8192)))
OTHERS = ("gemm 2048x2816x8192*8", "gemm 64x57344x8192*4", "attention 4x32x4096x128", "elementwise 1073741824")
CONCCL_GEMMS = (GEMM, LARGE_GEMM, "gemm 8192x8192x28672", "gemm 16384x10240x8192", "gemm 4096x4096x16384")
FORUM = (
    "nccl",
    "nccl+priority=high",
    "nccl+order=comm_resident",
    "nccl+cga_cluster=2+gemm_sms=108",
    "nccl+max_ctas=16+cga_cluster=2+gemm_sms=114",  # 57 clusters: as many rounds of its tiles as 60 would take
    "nccl+max_ctas=16+cga_cluster=2+gemm_sms=116",
    "nccl+max_ctas=12+cga_cluster=2+gemm_sms=114",
    "nccl+max_ctas=12+cga_cluster=2+gemm_sms=120",
    "nccl+max_ctas=8+cga_cluster=2+gemm_sms=122",
    "nccl+max_ctas=8+cga_cluster=2+gemm_sms=124",
    "nccl+gemm_sms=108+order=comm_resident",
    "nccl+green=108",
    "nccl+green=108+gemm_sms=108",
    "nccl+max_ctas=16+green=116+gemm_sms=116",
    "nccl_zero_cta",
    "zero_sm",
)


def _pairs(
    workloads: Iterable[str], collectives: Iterable[str], ratios: Iterable[float], mechanisms: Sequence[str] = STOCK
) -> tuple[Scenario, ...]:
    """Return a scenario for every combination, with a collective `ratio` times as long as its workload."""
    return tuple(
        Scenario(
            name=f"{workload} | {collective} | {ratio:g}",
            workload=workload,
            collective=collective,
            ratio=ratio,
            mechanisms=_offered(mechanisms, collective),
        )
        for workload, collective, ratio in product(workloads, collectives, ratios)
    )


def _sized(workload: str, collective: str, size_mib: int, mechanisms: Sequence[str] = STOCK) -> Scenario:
    return Scenario(
        name=f"{workload} | {collective} | {size_mib} MiB",
        workload=workload,
        collective=collective,
        size_bytes=size_mib << 20,
        mechanisms=_offered(mechanisms, collective),
    )


def _offered(mechanisms: Sequence[str], collective: str) -> tuple[str, ...]:
    """Return those of `mechanisms` that are offered for this collective."""
    without = {"nccl_zero_cta"} if OPERATIONS[collective].layout.reduces else {"zero_sm+gemm_sms=fit"}
    without |= set() if collective in measured_by("programs") else {"zero_sm"}
    return tuple(name for name in mechanisms if name not in without)


BUDGET = (
    "nccl",
    "nccl+max_ctas=16",
    "nccl+max_ctas=8",
    "nccl+gemm_sms=108",
    "nccl+max_ctas=16+gemm_sms=116",
    "nccl+max_ctas=8+gemm_sms=124",
    "nccl+cga_cluster=2+gemm_sms=108",
    "nccl+max_ctas=16+cga_cluster=2+gemm_sms=116",
    "nccl+max_ctas=12+cga_cluster=2+gemm_sms=120",
    "nccl+max_ctas=8+cga_cluster=2+gemm_sms=124",
    "nccl+max_ctas=4+cga_cluster=2+gemm_sms=128",
)
BUDGET_LIMITS = tuple(dict.fromkeys(name.partition("+gemm_sms")[0] for name in BUDGET))  # the settings of NCCL alone
BUDGET_GEMMS = (
    "gemm 2048x2816x8192",  # a tensor-parallel shard: 176 tiles, one wave and a third
    "gemm 4096x4096x4096",
    "gemm 4096x6144x4096",  # Llama-3 8B at 4096 tokens: q, k and v
    "gemm 4096x28672x4096",  # gate and up
    GEMM,
    "gemm 2048x57344x8192",  # Llama-3 70B at 2048 tokens: gate and up
)
BUDGET_COLLECTIVES = ("all_gather", *REDUCTIONS)
BUDGET_SMS = (128, 124, 120, 116, 108, 100)  # those of the mechanisms, and one below
BUDGET_SIZES = tuple(1 << power for power in (21, 23, 25, 27, 29, 31))  # 2 MiB to 2 GiB


def _budget() -> tuple[Scenario, ...]:
    """Return the pairs of `budget`; the collectives take turns, so that each meets every GEMM and every ratio."""
    points = zip(product(BUDGET_GEMMS, (0.25, 0.5, 1, 2)), cycle(BUDGET_COLLECTIVES), strict=False)  # cycle has no end
    return tuple(
        scenario
        for (gemm, ratio), collective in points
        for scenario in _pairs((gemm,), (collective,), (ratio,), BUDGET)
    )


def _budget_blocks() -> tuple[Block, ...]:
    by_sms = ("stock", *(f"gemm_sms={sms}" for sms in BUDGET_SMS))
    return (
        *(Block(name=f"{gemm} by SMs", what=gemm, mechanisms=by_sms) for gemm in BUDGET_GEMMS),
        *(
            Block(name=f"{collective} by CTAs", what=collective, mechanisms=BUDGET_LIMITS, sizes_bytes=BUDGET_SIZES)
            for collective in BUDGET_COLLECTIVES
        ),
    )


def _blocks() -> tuple[Block, ...]:
    sizes = tuple(1 << power for power in range(10, 31, 2))
    collectives = tuple(
        Block(name=name, what=name, mechanisms=_offered(("nccl", "nccl_zero_cta"), name), sizes_bytes=sizes)
        for name in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    )
    ctas = Block(
        name="all_gather by CTAs",
        what="all_gather",
        mechanisms=("nccl", *(f"nccl+max_ctas={ctas}" for ctas in (1, 2, 4, 8, 16, 24, 32))),
        sizes_bytes=(16 << 20, 128 << 20, 1 << 30),
    )
    by_sms = ("stock", *(f"gemm_sms={sms}" for sms in (128, 124, 120, 116, 112, 108, 100, 92, 84, 66)))
    gemms = tuple(Block(name=f"{name} by SMs", what=name, mechanisms=by_sms) for name in LOADS)
    return (*collectives, ctas, *gemms)


SYMM_MEM = "symm_mem"  # torch's fused operations
TENSOR_MECHANISMS = ("torch", SYMM_MEM, "serial", "cuts", "flagged", "auto")
GATHERED_MATMULS = (  # M, N and K on each rank; with N and K exchanged their rows are to be scattered
    (8192, 7168, 8192),
    (8192, 7168, 4096),
    (8192, 5120, 8192),
    (8192, 28672, 8192),
    (4096, 7168, 8192),
    (8192, 1280, 8192),
)
TINY_MATMUL = (1024, 1024, 512)  # in float32, the smallest that is cut
LLAMA_ROWS = 8192


def _tensor_blocks(device: str, world_size: int, mechanisms: Sequence[str] | None) -> tuple[Block, ...]:
    """Return matmuls that depend on communication: those of the results, and Llama-3 layers divided among the ranks.

    Rows are rounded up to a multiple that ranks can share. Matrices that they cannot share are left out.

    Raises:
        Misconfigured: there is no such mechanism.
    """
    chosen = _chosen("tensor", mechanisms, TENSOR_MECHANISMS)
    gathered = list(GATHERED_MATMULS if device == "cuda" else (TINY_MATMUL,))
    scattered = [(m, k, n) for m, n, k in gathered]
    for billions in (8, 70) if device == "cuda" else ():
        qkv, out, gate_up, down = (one.sizes for one in llama_layer(billions, LLAMA_ROWS))
        gathered += [(m, n // world_size, k) for m, n, k in (qkv, gate_up) if n % world_size == 0]
        scattered += [(m, n, k // world_size) for m, n, k in (out, down) if k % world_size == 0]
    grain = 128 * world_size
    names = [
        f"{operation} {-(-m // grain) * grain}x{n}x{k}"
        for operation, shapes in (("all_gather_matmul", gathered), ("matmul_reduce_scatter", scattered))
        for m, n, k in shapes
    ]
    return tuple(Block(name=name, what=name, mechanisms=chosen) for name in dict.fromkeys(names))


EXPERT_MECHANISMS = ("torch", "nccl", SYMM_MEM, "gather", "slabs", "auto")
EXPERT_TOKENS = (1024, 4096, 8192)  # of a rank


def _expert_blocks(device: str, world_size: int, mechanisms: Sequence[str] | None) -> tuple[Block, ...]:
    """Return the exchanges of MoE layers whose experts these ranks can share.

    Raises:
        Misconfigured: there is no such mechanism.
    """
    chosen = _chosen("expert", mechanisms, EXPERT_MECHANISMS)
    on_cpus = device == "cpu"
    layers = [name for name, layer in EXPERT_LAYERS.items() if layer.experts % world_size == 0]
    return tuple(
        Block(name=name, what=name, mechanisms=chosen)
        for layer, tokens, routing in product(layers, (128,) if on_cpus else EXPERT_TOKENS, ROUTINGS)
        if (layer == "tiny") is on_cpus
        for name in [f"exchange {layer} {tokens} {routing}"]
    )


def _chosen(suite: str, mechanisms: Sequence[str] | None, there: Sequence[str]) -> tuple[str, ...]:
    """Return the mechanisms to measure, each once; raise Misconfigured for one that the suite does not have."""
    chosen = tuple(dict.fromkeys(mechanisms or there))
    wrong = next((name for name in chosen if name not in there), None)
    if wrong is not None:
        raise Misconfigured(
            f"there is no mechanism {printable(wrong)!r} of suite {suite!r}; choose from: {', '.join(there)}"
        )
    return chosen


SMS = 132  # of H100, H200 and where the GPU is not known
LASTING = f"lasting {GEMM}"
BURSTS = ("gemm 4096x4096x4096", "gemm 2048x2816x8192")  # too short for the power limit
STREAM = "elementwise 536870912"
SUM = f"sum {1 << 30}"
MACHINE_LOADS = (GEMM, "llama-8b layer 4096")
_CPU_GEMM = "gemm 512x512x512*8"
_MACHINE_SIZES = {
    "cuda": tuple(1 << power for power in range(16, 31, 2)),  # 64 KiB to 1 GiB
    "cpu": tuple(1 << power for power in (14, 18, 22)),
}
_CTA_SIZES = (32 << 20, 256 << 20, 1 << 30)
_CTA_LIMITS = ("nccl", *(f"nccl+max_ctas={ctas}" for ctas in (4, 8, 16)), "nccl+max_ctas=16+cga_cluster=2")


def capped(num_sms: int = SMS) -> str:
    """Return the mechanism that a profile calls `nccl_capped`: 16 CTAs beside a GEMM that leaves them their SMs."""
    return f"nccl+max_ctas=16+cga_cluster=2+gemm_sms={num_sms - 16}"


def few_sms(num_sms: int = SMS) -> tuple[str, ...]:
    """Return zero_sm beside GEMMs that leave few SMs, which add up."""
    return tuple(f"zero_sm+gemm_sms={num_sms - free}" for free in (8, 16))


def _machine_pairs(device: str, num_sms: int) -> tuple[Scenario, ...]:
    """Return pairs that tell what both sides lose; on GPUs also how SMs are divided, and how fast few of them sum.

    A collective that waits for one GEMM slips in between several: a layer counts as much as a GEMM.
    """
    if device == "cpu":
        return tuple(_sized(_CPU_GEMM, name, 4, ("gloo", "zero_sm")) for name in ("all_gather", "all_reduce"))
    by_nccl = (capped(num_sms), f"nccl+max_ctas=8+gemm_sms={num_sms - 8}")
    summed = few_sms(num_sms)
    divided = {"all_gather": by_nccl, "all_reduce": (*by_nccl, *summed), "reduce_scatter": summed}
    return tuple(
        scenario
        for workload, collective in product(MACHINE_LOADS, ("all_gather", "all_to_all", *REDUCTIONS))
        for scenario in _pairs(
            (workload,),
            (collective,),
            (0.5, 2),
            ("nccl", "nccl_zero_cta", "zero_sm", *(divided.get(collective, ()) if workload == GEMM else ())),
        )
    )


def _machine_blocks(device: str, num_sms: int) -> tuple[Block, ...]:
    """Return collectives alone by size and CTAs, GEMMs by SMs and under load, a stream, a sum and launches."""
    stock_and_own = BASES[device][0], "zero_sm"
    alone = tuple(
        Block(name=name, what=name, mechanisms=stock_and_own, sizes_bytes=_MACHINE_SIZES[device]) for name in BY_TORCH
    )
    launches = tuple(
        Block(name=name, what=name, mechanisms=("stock",)) for name in ("launch kernel", "launch collective")
    )
    if device == "cpu":
        return (*alone, *launches)
    ctas = tuple(
        Block(name=f"{name} by CTAs", what=name, mechanisms=_CTA_LIMITS, sizes_bytes=_CTA_SIZES)
        for name in ("all_gather", "all_reduce")
    )
    by_sms = ("stock", *(f"gemm_sms={sms}" for sms in (num_sms - 8, num_sms - 16, num_sms - 24)))
    return (
        *alone,
        *ctas,
        Block(name=f"{GEMM} by SMs", what=GEMM, mechanisms=by_sms),
        *(Block(name=what, what=what, mechanisms=("stock",)) for what in (*BURSTS, STREAM, SUM, LASTING)),
        *launches,
    )


SUITES: dict[str, Callable[[], tuple[Scenario, ...]]] = {
    "quick": lambda: _pairs((GEMM,), ("all_gather", "all_reduce"), (0.5, 1)),
    "pairs": lambda: _pairs(LOADS, ("all_gather", "all_to_all", *REDUCTIONS), (0.25, 0.5, 1, 2)),
    "reductions": lambda: _pairs(LOADS, REDUCTIONS, (0.25, 0.5, 1, 2), SUMS),
    "conccl": lambda: _pairs(CONCCL_GEMMS, ("all_gather", "all_to_all"), (0.5, 1, 2)),
    "resource-aware": lambda: tuple(
        _sized(workload, collective, 896)
        for workload, collective in product((GEMM, LARGE_GEMM), ("all_reduce", "all_to_all"))
    ),
    "forum": lambda: _pairs((GEMM,), ("all_gather",), (0.25, 0.5, 1), FORUM),
    "budget": _budget,
    "blocks": lambda: (),
    "machine": lambda: (),
    "tensor": lambda: (),
    "expert": lambda: (),
    "full": lambda: _pairs(
        (*LOADS[::3], *LAYERS, *OTHERS),
        measured_by("torch"),
        (0.25, 0.5, 1, 2, 4),
    ),
}

BLOCKS: dict[str, Callable[[], tuple[Block, ...]]] = {"budget": _budget_blocks, "blocks": _blocks}
_OWN_BLOCKS = {"tensor": _tensor_blocks, "expert": _expert_blocks}  # with mechanisms of their own, on CPUs, too


def scenarios_of(
    suite: str, *, device: str, mechanisms: Sequence[str] | None = None, num_sms: int = SMS
) -> tuple[Scenario, ...]:
    """Return the pairs of a suite.

    Args:
        suite: its name.
        device: cuda or cpu.
        mechanisms: those to measure; None: those of the suite.
        num_sms: SMs of the GPU, which `machine` divides.

    Raises:
        Misconfigured: there is no such suite or mechanism, or the suite takes none.
    """
    if suite not in SUITES:
        raise Misconfigured(f"there is no suite {printable(suite)!r}; choose from: {', '.join(SUITES)}")
    if suite == "machine":
        if mechanisms:
            raise Misconfigured("suite 'machine' measures all that a profile holds: it takes no --mechanism")
        return _machine_pairs(device, num_sms)
    if suite in _OWN_BLOCKS:
        return ()
    for name in mechanisms or ():
        find_mechanism(name, device)
    if device == "cpu":
        if suite != "quick":
            raise Misconfigured(
                f"suite {suite!r} is about GPUs; on a CPU there are quick, {', '.join(_OWN_BLOCKS)}, machine"
            )
        return _pairs((_CPU_GEMM,), ("all_gather", "all_reduce"), (0.5, 1), tuple(mechanisms or ("gloo",)))
    scenarios = SUITES[suite]()
    if mechanisms:
        if not scenarios:
            raise Misconfigured(f"suite {suite!r} measures building blocks: it takes no --mechanism")
        chosen = tuple(dict.fromkeys(mechanisms))
        scenarios = tuple(msgspec.structs.replace(scenario, mechanisms=chosen) for scenario in scenarios)
    return scenarios


def blocks_of(
    suite: str, *, device: str, world_size: int, mechanisms: Sequence[str] | None = None, num_sms: int = SMS
) -> tuple[Block, ...]:
    """Return the building blocks of a suite; some have none.

    Args:
        suite: its name.
        device: cuda or cpu.
        world_size: ranks, among which the layers of `tensor` and `expert` are divided.
        mechanisms: those of `tensor` and `expert` to measure; None: all.
        num_sms: SMs of the GPU, which `machine` divides.

    Raises:
        Misconfigured: the suite has no such mechanism.
    """
    if suite == "machine":
        return _machine_blocks(device, num_sms)
    if suite in _OWN_BLOCKS:
        return _OWN_BLOCKS[suite](device, world_size, mechanisms)
    return BLOCKS[suite]() if suite in BLOCKS else ()
