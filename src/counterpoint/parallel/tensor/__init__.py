"""Run matmuls of tensor parallelism that do not wait for their communication. Public as `counterpoint.tensor_parallel`.

- `operations.py`: `torch.ops.counterpoint`, with fake tensors and derivatives.
- `group.py`: runs them for one process group, each call as `plans.py` planned its shape, and counts which way it went.
- `overlapped.py`: pieces beside the communication; `matmul.py`: one of them; `sums.py`: sums of the ranks' products.
- `flagged.py`: binds one matmul that polls for its rows, and counts what may leave; `flagged_kernels.py`: in Triton.
- `compiled.py`: the one line for torch.compile; `graphs.py` fuses inductor's graphs, whose nodes `nodes.py` reads.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from counterpoint.parallel.tensor.compiled import fuse_compiled

__all__ = ["fuse_compiled"]


def __getattr__(name: str) -> Any:
    if name != "fuse_compiled":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("counterpoint.parallel.tensor.compiled").fuse_compiled  # it imports inductor
