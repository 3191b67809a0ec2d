"""Classify GPU operations as compute, communication or copies, by name and metadata and never by stream.

A kernel is judged by its own name and namespaces, not by its template arguments and parameters, which may hold any
word: `at::native::elementwise_kernel<..., AllGatherCopy>` is compute. Libraries whose names are known (2020-2026):
NCCL and those that copy it (RCCL, MSCCL, HCCL, oneCCL), NVSHMEM, PyTorch's symmetric memory, the expert-parallel
libraries DeepEP, HybridEP, UCCL, MoRI, pplx and NCCL EP, the all-reduces and all-to-alls of TensorRT-LLM, FlashInfer,
vLLM, SGLang and AITER, and TransformerEngine's userbuffers. What such a library computes on one GPU before it sends
(the layout of a dispatch, prefix sums) is compute. A copy from a peer's memory is communication; one that stays on the
device is not.
"""

from __future__ import annotations

import re
from functools import lru_cache

from counterpoint.trace.timeline import Kind

_COLLECTIVE = r"all_?reduce|all_?gather|reduce_?scatter|all_?to_?all"
_CCL = re.compile(r"^(?:nccl|rccl|msccl|hccl|pccl|xccl|oneccl)", re.I)  # symbols of NCCL and its relatives
_WORDS = re.compile(  # quick first test: the name of every communication kernel has one of these words
    rf"ccl|{_COLLECTIVE}|a2a|shmem|symmetric_memory|symm_mem|multimem|intra_node|barrier|signal|write_value|dispatch"
    r"|combine|notify|sync|low_latency|cross_device|one_?shot|two_?shot|lamport|mnnvl|userbuffers|quick_?reduce",
    re.I,
)
_COMM_SYMBOL = re.compile(
    r"shmem|mscclpp|userbuffers|quick_?reduce|lamport(?!_init)"
    r"|(?:^|::)c10d::(?:symmetric_memory|intra_node_comm)"
    r"|(?:^|::)(?:trtllm_)?mnnvl\w*::"
    r"|(?:^|::)(?:deep_?ep|dpsk::ep|hybrid_?ep|uccl|nccl_ep|mori|pplx|mooncake)::.*(?:dispatch|combine|notify|barrier|sync)"
    r"|(?:^|::)(?:intranode|internode)(?:_ll)?::(?:cached_)?(?:dispatch|combine|notify|barrier|clean_low_latency)"
    r"|(?:^|::)clean_low_latency_buffer"
    r"|(?:^|::)Ep(?:Dispatch|Combine)(?!\w*::)"  # MoRI, which compiles kernels at run time under bare names
    r"|(?:^|::)\w*_ep_jit_\w*(?:dispatch|combine)|(?:^|::)a2a_(?:dispatch|combine)_(?:send|recv)"
    r"|(?:^|::)moe_?(?:a2a|all_?to_?all)"
    r"|(?:^|::)(?:multimem_|symm_mem_|cached_notify|barrier_kernel$|(?:put|wait)_signal_kernel|stream_write_value32_kernel)"
    r"|cross_device_(?:reduce|store)"
    rf"|(?:^|::)\w*(?:{_COLLECTIVE})\w*$",
    re.I,
)
_LOCAL_SYMBOL = re.compile(  # compute kernels named after a collective, and GEMMs with a collective inside
    r"layout|memset|metadata|sanitize|prefix_?sum|epilogue|prologue|permute|gemm|matmul|(?:^|_)mm_|_copy|copy_|pack"
    r"|^triton_(?:poi|red|per|for|tem|mm)_|(?:^|::)(?:at::native|cub|thrust|cutlass|cudnn|torch::native)::",
    re.I,
)
_PPLX_KERNEL = re.compile(r"^(?:dispatch|combine)Kernel$", re.I)  # pplx: named only in the argument types
_EXPERT_LEG = re.compile(r"(dispatch|combine)", re.I)
_TENSOR_PARALLEL = re.compile(r"cross_device_reduce|lamport|quick_?reduce|(?:trtllm|tensorrt_llm).*all_?reduce", re.I)
_UNNAMED = re.compile(r"(?:\(anonymous namespace\)|<unnamed>|\{anonymous\})::")
_MANGLED_START, _MANGLED_PART = re.compile(r"_Z(?:N[KVr]*)?L?"), re.compile(r"\d{1,6}")
_HOST_COLLECTIVE = re.compile(
    r"^(?:nccl|gloo|mpi|ucc|hccl|xccl|c10d|_c10d_functional|_c10d_functional_autograd)::?(\w+)"
)
_NCCL_OP = re.compile(
    r"(AllReduce|AllGather|ReduceScatter|Broadcast|SendRecv|AllToAll|Reduce|dispatch|combine)", re.IGNORECASE
)
_OPS = (  # the first match counts: longer names stand before the names that they contain
    ("reduce_scatter", re.compile(r"reduce_?scatter|userbuffers_\w*_rs", re.I)),
    ("all_gather", re.compile(r"all_?gather|userbuffers_\w*_ag", re.I)),
    ("all_reduce", re.compile(r"all_?reduce|cross_device_(?:reduce|store)|userbuffers_fp16_sum|lamport|mnnvl", re.I)),
    ("all_to_all", re.compile(r"all_?to_?all", re.I)),
    ("broadcast", re.compile(r"broad_?cast", re.I)),
    ("send_recv", re.compile(r"send_?recv|batch_?isend", re.I)),
    ("barrier", re.compile(r"barrier|clean_low_latency|device_sync", re.I)),
    ("notify", re.compile(r"notify", re.I)),
    ("all_to_all", re.compile(r"dispatch|combine|a2a", re.I)),  # tokens to the ranks of their experts, and back
    ("gather", re.compile(r"gather", re.I)),
    ("scatter", re.compile(r"scatter", re.I)),
    ("send", re.compile(r"^i?send|pushsend|pullsend|nccl:send", re.I)),
    ("recv", re.compile(r"^i?recv|pushrecv|pullrecv|nccl:recv", re.I)),
    ("reduce", re.compile(r"reduce", re.I)),
)
_REMEMBERED = 1 << 12  # names whose result is cached: the ranks of a job have the same names
_GEMM = ("gemm", "nvjet", "cutlass", "xmma", "sm90_", "sm80_", "Cijk_", "wgmma", "matmul", "ampere_", "hopper_")
_HOST_GEMM = frozenset(f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear"))
_VALUED = re.compile(r"conv|attention|flash_attn", re.I)
_NOT_GEMM = re.compile(r"splitk\w*reduce|reduce_kernel|flash|fmha|sdpa|attention", re.I)
_KNOWN_OPS = frozenset(op for op, _ in _OPS)
_DTYPE_BYTES = {
    "double": 8, "float64": 8, "long": 8, "long int": 8, "int64": 8, "complexfloat": 8, "complexdouble": 16,
    "float": 4, "float32": 4, "int": 4, "int32": 4, "uint32": 4, "complexhalf": 4,
    "half": 2, "float16": 2, "bfloat16": 2, "short": 2, "int16": 2, "uint16": 2,
    "char": 1, "int8": 1, "byte": 1, "unsigned char": 1, "signed char": 1, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
}  # fmt: skip

_TORCH_DTYPES = {  # dtypes whose C++ name differs from torch's
    "double": "float64", "float": "float32", "half": "float16", "long": "int64", "long int": "int64", "int": "int32",
    "short": "int16", "char": "int8", "signed char": "int8", "byte": "uint8", "unsigned char": "uint8",
    "complexfloat": "complex64", "complexdouble": "complex128", "complexhalf": "complex32",
}  # fmt: skip


def is_nccl(name: str) -> bool:
    """Return whether a kernel belongs to NCCL or to a library derived from NCCL (RCCL, MSCCL, HCCL)."""
    return bool(_CCL.search(_symbol(name)))


def is_matmul(name: str) -> bool:
    """Return whether a kernel is, by its name, a matrix product."""
    return any(key in name for key in _GEMM)


def is_host_matmul(name: str) -> bool:
    """Return whether a host operation is a matrix product (`aten::mm`), as found in traces without GPU activity."""
    return name in _HOST_GEMM


def has_valued_inputs(name: str) -> bool:
    """Return whether the work of a host operation depends on strides, paddings or masks among its inputs."""
    return bool(_VALUED.search(name)) and "::" in name


def is_gemm_kernel(name: str) -> bool:
    """Return whether a kernel is a GEMM, not attention or a split-K sum with a similar name."""
    return is_matmul(name) and not _NOT_GEMM.search(name)


def is_multi_tensor(name: str) -> bool:
    """Return whether a kernel processes a list of tensors, as in PyTorch's foreach and fused optimizers and Apex."""
    return "multi_tensor_apply" in name


@lru_cache(maxsize=_REMEMBERED)
def kernel_kind(name: str) -> Kind:
    """Return COMM for the name of a communication kernel, else COMPUTE."""
    if not _WORDS.search(name) or _LOCAL_SYMBOL.search(symbol := _symbol(name)):
        return Kind.COMPUTE
    pplx = "pplx::" in name and _PPLX_KERNEL.search(symbol)
    communicates = _CCL.search(symbol) or _COMM_SYMBOL.search(symbol) or "mscclpp" in name or pplx
    return Kind.COMM if communicates else Kind.COMPUTE


def _symbol(name: str) -> str:
    """Return a kernel's qualified name only: `a::f` for `void a::f<b, 2>(c*)` and for the mangled name."""
    if name.startswith("_Z"):
        return _demangled(name)
    depth, kept = 0, []
    for part in re.split(r"([<>(])", _UNNAMED.sub("", name)):
        if part == "<":
            depth += 1
        elif part == ">":
            depth = max(depth - 1, 0)
        elif part == "(" and depth == 0:
            break
        elif depth == 0:
            kept.append(part)
    words = "".join(kept).split()
    return words[-1] if words else ""


def _demangled(name: str) -> str:
    """Return the qualified name, up to its template arguments, in a mangled symbol (Itanium C++ ABI)."""
    start, parts = _MANGLED_START.match(name), []
    at = start.end() if start else 0
    while found := _MANGLED_PART.match(name, at):
        at = found.end() + int(found.group())
        parts.append(name[found.end() : at])
    return "::".join(part for part in parts if not part.startswith("_GLOBAL_"))


def memcpy_kind(name: str) -> Kind:
    """Return COMM for a copy between devices (`Memcpy PtoP`), MEMCPY for every other copy or memset."""
    return Kind.COMM if "PtoP" in name or "P2P" in name or "Peer" in name else Kind.MEMCPY


@lru_cache(maxsize=_REMEMBERED)
def normal_op(name: str) -> str:
    """Return PyTorch's name for an operation: `_allgather_base` -> `all_gather`; unknown names in lower case."""
    for op, pattern in _OPS:
        if pattern.search(name):
            return op
    return name.strip().lower() or "unknown"


def is_known_op(op: str) -> bool:
    """Return whether `op` names a known collective, unlike words such as `coalesced`."""
    return op in _KNOWN_OPS


@lru_cache(maxsize=_REMEMBERED)
def host_collective(name: str) -> str | None:
    """Return the collective that a host range such as `nccl:all_to_all` or `c10d::alltoall_base_` names, else None."""
    found = _HOST_COLLECTIVE.match(name)
    op = normal_op(found.group(1)) if found else ""
    return op if op in _KNOWN_OPS else None


@lru_cache(maxsize=_REMEMBERED)
def collective_op(kernel_name: str) -> str:
    """Return the collective, such as `all_gather`, that the name of a communication kernel or peer copy states."""
    if kernel_name.startswith("Memcpy"):
        return "peer_copy"
    symbol = _symbol(kernel_name)
    if _CCL.search(symbol):
        found = _NCCL_OP.search(symbol)
        return normal_op(found.group(1)) if found else "nccl"
    op = normal_op(symbol)
    return op if op in _KNOWN_OPS else "unknown"


@lru_cache(maxsize=_REMEMBERED)
def expert_leg(kernel_name: str) -> str | None:
    """Return `dispatch` or `combine` if a kernel sends tokens to experts or returns their results, else None."""
    found = _EXPERT_LEG.search(_symbol(kernel_name))
    return found.group(1).lower() if found else None


def parallelism(kernel_name: str) -> str | None:
    """Return the parallelism that a communication kernel serves by its name: `ep` or `tp` (in inference), else None."""
    if expert_leg(kernel_name):
        return "ep"
    return "tp" if _TENSOR_PARALLEL.search(_symbol(kernel_name)) else None


def is_barrier(op: str) -> bool:
    """Return whether a collective is a barrier, which carries no data."""
    return op in ("barrier", "notify")


def torch_dtype(dtype: str | None) -> str | None:
    """Return torch's name (`bfloat16`) of the dtype that the profiler spells `c10::BFloat16`; None if unknown."""
    if dtype_bytes(dtype) is None:
        return None
    name = _plain(dtype or "")
    return _TORCH_DTYPES.get(name, name)


def _plain(dtype: str) -> str:
    return dtype.strip().lower().removeprefix("c10::").removeprefix("torch.")


def dtype_bytes(dtype: str | None) -> int | None:
    """Return the bytes per element of a dtype in the profiler's spelling (`c10::Half`); None if unknown."""
    if dtype is None:
        return None
    return _DTYPE_BYTES.get(_plain(dtype))
