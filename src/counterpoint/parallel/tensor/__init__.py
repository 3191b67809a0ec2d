"""Run matmuls of tensor parallelism while their communication runs. Public as `counterpoint.tensor_parallel`.

- `operations.py`: `torch.ops.counterpoint`, with fake tensors and derivatives.
- `group.py`: runs them for one process group, each call as `plans.py` planned its shape, and counts calls by path.
- `overlapped.py`: matmuls in pieces beside the communication.
- `linear.py`: linear layers of these operations, and torchtitan's; `modules.py`: puts them under a model that
  `parallel_styles.py` finds to be tensor parallel, or into a plan of `parallelize_module`.
- `compiled.py`: `fuse_compiled`, for torch.compile; `fx_fusion.py` rewrites inductor's graphs, whose nodes
  `fx_nodes.py` reads.
"""

import importlib
from typing import TYPE_CHECKING, Any

from counterpoint.parallel.tensor import operations

if TYPE_CHECKING:
    from counterpoint.parallel.options import TensorOptions
    from counterpoint.parallel.tensor.compiled import fuse_compiled
    from counterpoint.parallel.tensor.modules import Colwise, Rowwise

__all__ = ["Colwise", "Rowwise", "TensorOptions", "fuse_compiled", "operations"]

_MODULES = {
    "Colwise": "tensor.modules",
    "Rowwise": "tensor.modules",
    "TensorOptions": "options",
    "fuse_compiled": "tensor.compiled",
}


def __getattr__(name: str) -> Any:  # some import much: inductor, DTensor
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"counterpoint.parallel.{_MODULES[name]}"), name)
