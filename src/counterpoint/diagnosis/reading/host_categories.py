"""Put host ranges into the categories of idle time by their names: input, allocation, synchronisation and others.

`CATEGORIES` are the causes of idle time, by their numbers in a digest; a range of any other name is an OPERATION.
"""

from __future__ import annotations

import re
from functools import lru_cache

from counterpoint.records.causes import IDLE_CAUSES

CATEGORIES = tuple(IDLE_CAUSES)
_NUMBER = {name: number for number, name in enumerate(CATEGORIES)}
OPERATION, LAUNCH = _NUMBER["operation"], _NUMBER["launch"]
QUEUED, BETWEEN = _NUMBER["queued"], _NUMBER["between_kernels"]
SYNCHRONISE, COPY, START_UP = _NUMBER["synchronise"], _NUMBER["copy"], _NUMBER["start_up"]
ALLOCATOR, NO_LAUNCH, UNRECORDED = _NUMBER["allocator"], _NUMBER["no_launch_recorded"], _NUMBER["unrecorded"]
NOTHING, EARLIER_WORK = _NUMBER["nothing_recorded"], _NUMBER["earlier_work"]
GARBAGE_COLLECTION, PROFILER, PAGES = _NUMBER["garbage_collection"], _NUMBER["profiler"], _NUMBER["page_migration"]

ALLOCATION = re.compile(
    r"^(cuda|hip)(Malloc|Free|HostAlloc|HostFree|HostRegister|Mem(Pool|Create|Map|Unmap|Release|SetAccess))"
    r"|^cuMem(Alloc|Create|Map|Unmap|Release|SetAccess|Free|AddressReserve|HostAlloc)"
)
CUDA_START = re.compile(  # CUDA starts, and libraries and kernels are loaded
    r"Lazy Function Loading|Module ?Load|LibraryLoad|^(cuda|hip|cu)(Init(Device)?$|DeviceReset|CtxCreate|StreamCreate)"
    r"|^cu(dnn|blas\w*|fft)Create|^(nccl|rccl)CommInit|ncclGetUniqueId"
)
CAPTURE = re.compile(
    r"^(cuda|hip)(Stream(Begin|End)Capture|Graph(Instantiate|Destroy|GetNodes))|^capture_\d|^capture_graph"
    r"|^CUDAGraphNode\.record|torch/cuda/graphs\.py\(\d+\): (capture_begin|capture_end)"
    r"|torch/_inductor/cudagraph_trees\.py\(\d+\): record_function"
)
COMPILATION = re.compile(
    r"torch/_dynamo/(convert_frame|output_graph|symbolic_convert)\.py|torch/_inductor/(scheduler|lowering|async_compile)\.py"
    r"|torch/_inductor/(compile_fx|graph|codecache)\.py\(\d+\): _?(compile|fx_codegen|codegen)"
    r"|triton/compiler/code_generator\.py|triton/runtime/jit\.py\(\d+\): _do_compile"
    r"|triton/(backends/\w+|compiler)/compiler\.py\(\d+\): (compile|_init_handles|make_|parse)"
    r"|dynamo_timed|_compile\.compile_inner|OutputGraph\.call_user_compiler"
)
COLLECTION = re.compile(r"\bgc\b.*collect|^gc\.|python gc|garbage", re.I)
PROFILING = re.compile(
    r"^(Activity Buffer Request|Buffer Flush|Instrumentation|Resource|Command Buffer Full)$"
    r"|^(cuda|hip|roc)Profiler|^CUPTI",
    re.I,
)
INPUT = re.compile(
    r"dataloader|datapipe|__next__.*(loader|iter)|enumerate\(|pin_memory|prefetch.*batch"
    r"|next_batch|get_batch|load_batch|fetch_data|data_?loading",
    re.I,
)
SYNCHRONISATION = re.compile(
    r"synchronize|^aten::(item|_local_scalar_dense)$|^(Stream|Context|Event|Device) Sync", re.I
)
COPYING = re.compile(r"^(cuda|hip)Memcpy(?!.*Peer)|^cuMemcpy(?!Peer)|^hipMemcpyWithStream")


_PATTERNS = (
    ("allocator", (ALLOCATION,)),
    ("garbage_collection", (COLLECTION,)),
    ("start_up", (CUDA_START, CAPTURE, COMPILATION)),
    ("profiler", (PROFILING,)),
    ("late_input", (INPUT,)),
    ("synchronise", (SYNCHRONISATION,)),
    ("copy", (COPYING,)),
)


@lru_cache(maxsize=1 << 13)
def says(name: str, *patterns: re.Pattern[str]) -> bool:
    """Return whether any of the patterns occurs in a name; results are cached, since ranks share names."""
    return any(pattern.search(name) for pattern in patterns)


@lru_cache(maxsize=1 << 13)  # the ranks of a job share their names
def category_of(name: str) -> int:
    """Return the idle-time category of host ranges with this name, as an index into CATEGORIES."""
    return next((_NUMBER[c] for c, patterns in _PATTERNS if any(p.search(name) for p in patterns)), OPERATION)
