"""Carry tokens to their experts and back beside the experts' matmuls. Public as `counterpoint.expert_parallel`.

- `dispatcher.py`: `Dispatcher`, for users, which decides which way calls go; `halves.py`: its derivatives.
- `options.py`: its options and sizes; `mechanism.py`: what one way to move tokens does.
- `all_to_all.py`: torch's all_to_all_single, the reference; `gathering.py`: all tokens to all ranks.
- `slabs.py`: equally many rows to each rank. What ranks send, and tell each other of it, is in `packing.py`, with its
  kernel in `packing_kernels.py`.
- `permute.py`: between the order of tokens and that of this rank's experts; `permute_kernels.py`: in Triton.
- `layers.py`: experts as grouped matmuls, and a layer of them in parts; `activation.py`: between the matmuls;
  `activation_kernels.py`: in Triton.
- `modules.py`: puts them under a model of `transformers` that `recognised.py` finds to be expert parallel;
  `torchtitan.py`: under torchtitan's dispatcher.
"""

from counterpoint.parallel.expert.activation import swiglu
from counterpoint.parallel.expert.dispatcher import Dispatcher, Handle
from counterpoint.parallel.expert.layers import (
    ExpertWeights,
    LocalExperts,
    delayed,
    grouped_matmul,
    overlapped_moe,
)
from counterpoint.parallel.options import ExpertChoice, ExpertOptions

__all__ = [
    "Dispatcher",
    "ExpertChoice",
    "ExpertOptions",
    "ExpertWeights",
    "Handle",
    "LocalExperts",
    "delayed",
    "grouped_matmul",
    "overlapped_moe",
    "swiglu",
]
