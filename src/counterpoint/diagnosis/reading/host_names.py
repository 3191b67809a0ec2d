"""Recognise by name what a host range does: allocate, start up, compile, capture a graph, wait, load input, copy."""

from __future__ import annotations

import re
from functools import lru_cache

ALLOCATION = re.compile(
    r"^(cuda|hip)(Malloc|Free|HostAlloc|HostFree|HostRegister|Mem(Pool|Create|Map|Unmap|Release|SetAccess))"
    r"|^cuMem(Alloc|Create|Map|Unmap|Release|SetAccess|Free|AddressReserve|HostAlloc)"
)
START_UP = re.compile(  # CUDA starts, and libraries and kernels are loaded
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
GARBAGE_COLLECTION = re.compile(r"\bgc\b.*collect|^gc\.|python gc|garbage", re.I)
PROFILER = re.compile(
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
COPY = re.compile(r"^(cuda|hip)Memcpy(?!.*Peer)|^cuMemcpy(?!Peer)|^hipMemcpyWithStream")


@lru_cache(maxsize=1 << 13)
def says(name: str, *patterns: re.Pattern[str]) -> bool:
    """Return whether one of the patterns is found in a name; remembered, as the ranks of a job share their names."""
    return any(pattern.search(name) for pattern in patterns)
