"""Define the named suites as data: their pairs and building blocks.

`quick` one minute; `pairs` independent pairs, the table of docs/results/pairs.md; `conccl`, `resource-aware` and
`forum` the scenarios of ConCCL (arXiv 2412.14335), of "Resource-aware Computation-Communication Overlap" (arXiv
2606.09200) and of NVIDIA's forum, thread 337991; `tensor` matmuls that depend on communication; `expert` tokens that
travel to their experts and back, alone and with compute; `machine` what `counterpoint tune --machine` fits a profile
to, in under two minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product

import msgspec

from counterpoint.collectives.program.operations import BY_TORCH, OPERATIONS, measured_by
from counterpoint.errors import Misconfigured, printable
from counterpoint.measurement.mechanisms import BASES, find_mechanism
from counterpoint.measurement.workloads import EXPERT_LAYERS, ROUTINGS, llama_layer
from counterpoint.pair.together import REDUCTIONS
from counterpoint.records.measurement import Block, Scenario

STOCK = ("nccl", "nccl+priority=high", "nccl_zero_cta", "zero_sm", "zero_sm+gemm_sms=fit")
GEMM = "gemm 8192x8192x8192"
LARGE_GEMM = "gemm 8192x57344x8192"
LOADS = (GEMM, "llama-8b layer 4096", "llama-70b layer 2048", LARGE_GEMM)
CONCCL_GEMMS = (GEMM, LARGE_GEMM, "gemm 8192x8192x28672", "gemm 16384x10240x8192", "gemm 4096x4096x16384")
FORUM = (
    "nccl",
    "nccl+priority=high",
    "nccl+order=comm_resident",
    "nccl+cga_cluster=2+gemm_sms=108",
    "nccl+max_ctas=16+cga_cluster=2+gemm_sms=114",  # 57 clusters need as many rounds for its tiles as 60 would
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


def pairs_of(
    workloads: Iterable[str], collectives: Iterable[str], ratios: Iterable[float], mechanisms: Sequence[str] = STOCK
) -> tuple[Scenario, ...]:
    """Return a scenario per combination; at ratio r, the collective takes r times as long as the workload."""
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
    """Return the names in `mechanisms` that apply to this collective."""
    without = {"nccl_zero_cta"} if OPERATIONS[collective].layout.reduces else {"zero_sm+gemm_sms=fit"}
    without |= set() if collective in measured_by("programs") else {"zero_sm"}
    return tuple(name for name in mechanisms if name not in without)


TENSOR_MECHANISMS = ("torch", "serial", "cuts", "auto")
GATHERED_MATMULS = (  # M, N and K on each rank; with N and K exchanged their rows are to be scattered
    (8192, 7168, 8192),
    (8192, 7168, 4096),
    (8192, 5120, 8192),
    (8192, 28672, 8192),
    (4096, 7168, 8192),
    (8192, 1280, 8192),
)
TINY_MATMUL = (1024, 1024, 512)  # float32; the smallest matmul that is cut into pieces
LLAMA_ROWS = 8192


def _tensor_blocks(device: str, world_size: int, mechanisms: tuple[str, ...]) -> tuple[Block, ...]:
    """Return blocks of matmuls with a collective: the results page's shapes, and Llama-3 layers split over the ranks.

    Rows are rounded up to a multiple that ranks can share. Matrices that they cannot share are left out.
    """
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
    return tuple(Block(name=name, what=name, mechanisms=mechanisms) for name in dict.fromkeys(names))


EXPERT_MECHANISMS = ("torch", "gather", "slabs", "auto")
EXPERT_TOKENS = (1024, 4096, 8192)  # of a rank


def _expert_blocks(device: str, world_size: int, mechanisms: tuple[str, ...]) -> tuple[Block, ...]:
    """Return blocks of token exchanges of MoE layers whose experts divide evenly among `world_size` ranks."""
    on_cpus = device == "cpu"
    layers = [name for name, layer in EXPERT_LAYERS.items() if layer.experts % world_size == 0]
    return tuple(
        Block(name=name, what=name, mechanisms=mechanisms)
        for layer, tokens, routing in product(layers, (128,) if on_cpus else EXPERT_TOKENS, ROUTINGS)
        if (layer == "tiny") is on_cpus
        for name in [f"exchange {layer} {tokens} {routing}"]
    )


def _chosen(suite: str, mechanisms: Sequence[str] | None, there: Sequence[str]) -> tuple[str, ...]:
    """Return the mechanisms to measure, without duplicates; raise Misconfigured for one that the suite lacks."""
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
    """Return the mechanism that profiles call `nccl_capped`: NCCL limited to 16 CTAs, a GEMM to the other SMs."""
    return f"nccl+max_ctas=16+cga_cluster=2+gemm_sms={num_sms - 16}"


def few_sms(num_sms: int = SMS) -> tuple[str, ...]:
    """Return the `zero_sm` mechanisms whose GEMM leaves 8 or 16 SMs free for the sums of reductions."""
    return tuple(f"zero_sm+gemm_sms={num_sms - free}" for free in (8, 16))


def _machine_pairs(device: str, num_sms: int) -> tuple[Scenario, ...]:
    """Return pairs that show how compute and collective slow each other, on GPUs also with SMs divided between them.

    A collective that would wait for one long GEMM starts between shorter ones, so a layer is measured like a GEMM.
    """
    if device == "cpu":
        return tuple(_sized(_CPU_GEMM, name, 4, ("gloo", "zero_sm")) for name in ("all_gather", "all_reduce"))
    by_nccl = (capped(num_sms), f"nccl+max_ctas=8+gemm_sms={num_sms - 8}")
    summed = few_sms(num_sms)
    divided = {"all_gather": by_nccl, "all_reduce": (*by_nccl, *summed), "reduce_scatter": summed}
    return tuple(
        scenario
        for workload, collective in product(MACHINE_LOADS, ("all_gather", "all_to_all", *REDUCTIONS))
        for scenario in pairs_of(
            (workload,),
            (collective,),
            (0.5, 2),
            ("nccl", "nccl_zero_cta", "zero_sm", *(divided.get(collective, ()) if workload == GEMM else ())),
        )
    )


def _machine_blocks(device: str, num_sms: int) -> tuple[Block, ...]:
    """Return blocks that measure collectives by size and CTAs, GEMMs by SMs and load, memory stream, sum, launches."""
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


PAIRS: dict[str, Callable[[], tuple[Scenario, ...]]] = {  # suites of pairs by the mechanisms of `STOCK` and `FORUM`
    "quick": lambda: pairs_of((GEMM,), ("all_gather", "all_reduce"), (0.5, 1)),
    "pairs": lambda: pairs_of(LOADS, ("all_gather", "all_to_all", *REDUCTIONS), (0.25, 0.5, 1, 2)),
    "conccl": lambda: pairs_of(CONCCL_GEMMS, ("all_gather", "all_to_all"), (0.5, 1, 2)),
    "resource-aware": lambda: tuple(
        _sized(workload, collective, 896)
        for workload, collective in product((GEMM, LARGE_GEMM), ("all_reduce", "all_to_all"))
    ),
    "forum": lambda: pairs_of((GEMM,), ("all_gather",), (0.25, 0.5, 1), FORUM),
}
SUITES = (*PAIRS, "tensor", "expert", "machine")


def parts_of(
    suite: str, *, device: str, world_size: int = 2, mechanisms: Sequence[str] | None = None, num_sms: int = SMS
) -> tuple[Scenario | Block, ...]:
    """Return the pairs and building blocks of a named suite, with the given mechanisms or the suite's own.

    The layers of `tensor` and `expert` are divided among `world_size` ranks; `machine` divides the `num_sms` of the
    GPU.

    Raises:
        Misconfigured: there is no such suite or mechanism, or the suite takes none.
    """
    if suite not in SUITES:
        raise Misconfigured(f"there is no suite {printable(suite)!r}; choose from: {', '.join(SUITES)}")
    if suite == "tensor":
        return _tensor_blocks(device, world_size, _chosen(suite, mechanisms, TENSOR_MECHANISMS))
    if suite == "expert":
        return _expert_blocks(device, world_size, _chosen(suite, mechanisms, EXPERT_MECHANISMS))
    if suite == "machine":
        if mechanisms:
            raise Misconfigured("suite 'machine' measures all that a profile holds: it takes no --mechanism")
        return (*_machine_pairs(device, num_sms), *_machine_blocks(device, num_sms))
    for name in mechanisms or ():
        find_mechanism(name, device)
    if device == "cpu":
        if suite != "quick":
            raise Misconfigured(f"suite {suite!r} is about GPUs; on a CPU there are quick, tensor, expert, machine")
        return pairs_of((_CPU_GEMM,), ("all_gather", "all_reduce"), (0.5, 1), tuple(mechanisms or ("gloo",)))
    scenarios = PAIRS[suite]()
    if mechanisms:
        chosen = tuple(dict.fromkeys(mechanisms))
        scenarios = tuple(msgspec.structs.replace(scenario, mechanisms=chosen) for scenario in scenarios)
    return scenarios
