"""Run matmuls of tensor parallelism that do not wait for their communication. Public as `counterpoint.tensor_parallel`.

- `operations.py`: `torch.ops.counterpoint`, with fake tensors and derivatives.
- `group.py`: runs them for one process group, each call as `plans.py` planned its shape, and counts which way it went.
- `overlapped.py`: pieces beside the communication; `matmul.py`: one of them.
- `flagged.py`: binds one matmul that polls for its rows, and counts what may leave; `flagged_kernels.py`: in Triton.
- `linear.py`: linear layers of these operations; `modules.py`: puts them under a model that `recognised.py` finds to be
  tensor parallel; `styles.py`: into a plan of `parallelize_module`; `torchtitan.py`: into layers of torchtitan.
- `compiled.py`: the one line for torch.compile; `graphs.py` fuses inductor's graphs, whose nodes `nodes.py` reads.
"""

import importlib
from typing import TYPE_CHECKING, Any

from counterpoint.parallel.tensor import operations

if TYPE_CHECKING:
    from counterpoint.parallel.options import TensorOptions
    from counterpoint.parallel.tensor.compiled import fuse_compiled
    from counterpoint.parallel.tensor.styles import Colwise, Rowwise

__all__ = ["Colwise", "Rowwise", "TensorOptions", "fuse_compiled", "operations"]

_MODULES = {
    "Colwise": "tensor.styles",
    "Rowwise": "tensor.styles",
    "TensorOptions": "options",
    "fuse_compiled": "tensor.compiled",
}


def __getattr__(name: str) -> Any:  # some import much: inductor, DTensor
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"counterpoint.parallel.{_MODULES[name]}"), name)
