"""Say what a GPU operation is, by its name and metadata and never by its stream.

Names seen in the wild (2020-2026): `ncclKernel_AllReduce_RING_LL_Sum_float(...)`, `ncclDevKernel_AllGather_RING_LL`,
`ncclSymkDevKernel_...`, RCCL's `ncclDevKernel_Generic_4`, `mscclKernel_...`, `nvshmemi_...`, DeepEP's
`deep_ep::intranode::dispatch<...>`, PyTorch's symmetric-memory kernels, vLLM's and TensorRT-LLM's one- and two-shot
all-reduce, TransformerEngine's userbuffers. A copy from a peer's memory is communication; one that stays on the device
is not.
"""

from __future__ import annotations

import re

from counterpoint.trace.timeline import Kind

_SCOPE = r"^(?:void )?(?:(?:\w+|\(anonymous namespace\))::)*"
_COMM_KERNEL = re.compile(
    r"^nccl(?:Dev|Sym|Symk)*Kernel|^nccl\w*Kernel_|^ncclSymm?k?\w*|^rccl|^msccl|^void msccl|mscclpp"
    r"|nvshmem"
    r"|(?:deep_?|hybrid_)ep::(?:\w+::)*(?:cached_)?(?:dispatch|combine|notify|barrier|clean_low_latency)"
    rf"|{_SCOPE}(?:(?:one|two)_shot_all_reduce|multimem_\w+|all_to_all_vdev|symm_mem_\w+|cached_notify)"
    r"|c10d::(?:symmetric_memory|intra_node_comm)"
    r"|\bbarrier_kernel\b|put_signal_kernel|wait_signal_kernel|stream_write_value32_kernel"
    r"|cross_device_reduce_[12]stage|(?:one|two)ShotAllReduceKernel|allreduce_fusion_kernel|lamport\w*AllReduce"
    r"|userbuffers_\w+"
    r"|quick_?reduce|hcclKernel|oneccl_",
    re.IGNORECASE,
)
_NCCL_OP = re.compile(r"(AllReduce|AllGather|ReduceScatter|Broadcast|SendRecv|AllToAll|Reduce)", re.IGNORECASE)
_OPS = (  # first hit wins: longer names before the names they contain
    ("reduce_scatter", re.compile(r"reduce_?scatter", re.I)),
    ("all_reduce", re.compile(r"all_?reduce|cross_device_reduce|userbuffers_fp16_sum", re.I)),
    ("all_gather", re.compile(r"all_?gather", re.I)),
    ("all_to_all", re.compile(r"all_?to_?all", re.I)),
    ("broadcast", re.compile(r"broad_?cast", re.I)),
    ("send_recv", re.compile(r"send_?recv|batch_?isend", re.I)),
    ("barrier", re.compile(r"barrier", re.I)),
    ("notify", re.compile(r"notify", re.I)),
    ("dispatch", re.compile(r"dispatch", re.I)),
    ("combine", re.compile(r"combine", re.I)),
    ("gather", re.compile(r"gather", re.I)),
    ("scatter", re.compile(r"scatter", re.I)),
    ("send", re.compile(r"^i?send|pushsend|nccl:send", re.I)),
    ("recv", re.compile(r"^i?recv|pushrecv|nccl:recv", re.I)),
    ("reduce", re.compile(r"reduce", re.I)),
)
_DTYPE_BYTES = {
    "double": 8, "float64": 8, "long": 8, "int64": 8, "complexfloat": 8, "complexdouble": 16,
    "float": 4, "float32": 4, "int": 4, "int32": 4, "uint32": 4, "complexhalf": 4,
    "half": 2, "float16": 2, "bfloat16": 2, "short": 2, "int16": 2, "uint16": 2,
    "char": 1, "int8": 1, "byte": 1, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip


def is_multi_tensor(name: str) -> bool:
    """Return whether a kernel goes over a list of tensors, as PyTorch's foreach and fused optimizers and Apex' do."""
    return "multi_tensor_apply" in name


def kernel_kind(name: str, *, has_collective: bool = False) -> Kind:
    """Return COMM for a kernel with collective metadata or the name of a communication kernel, else COMPUTE."""
    return Kind.COMM if has_collective or _COMM_KERNEL.search(name) else Kind.COMPUTE


def memcpy_kind(name: str) -> Kind:
    """Return COMM for a copy between devices (`Memcpy PtoP`), MEMCPY for every other copy or memset."""
    return Kind.COMM if "PtoP" in name or "P2P" in name or "Peer" in name else Kind.MEMCPY


def normal_op(name: str) -> str:
    """Return PyTorch's name for an operation: `_allgather_base` -> `all_gather`; unknown names in lower case."""
    for op, pattern in _OPS:
        if pattern.search(name):
            return op
    return name.strip().lower() or "unknown"


def collective_op(kernel_name: str) -> str:
    """Return the collective that a communication kernel or peer copy carries out, as far as its name says."""
    if kernel_name.startswith("Memcpy"):
        return "peer_copy"
    if "nccl" in kernel_name.lower():
        found = _NCCL_OP.search(kernel_name)
        return normal_op(found.group(1)) if found else "nccl"
    op = normal_op(kernel_name)
    return op if any(op == known for known, _ in _OPS) else "unknown"


def is_barrier(op: str) -> bool:
    """Return whether an operation carries no payload."""
    return op in ("barrier", "notify")


def dtype_bytes(dtype: str | None) -> int | None:
    """Return the bytes of one element of a dtype as the profiler spells it (`c10::Half`); None if unknown."""
    if dtype is None:
        return None
    return _DTYPE_BYTES.get(dtype.strip().lower().removeprefix("c10::").removeprefix("torch."))
