"""Send MoE tokens to their experts and back while experts' matmuls run. Public as `counterpoint.expert_parallel`.

- `dispatcher.py`: `Dispatcher`, for users, which decides how calls go and has their derivatives.
- `token_mechanism.py`: sizes, and what a mechanism does that moves tokens: `all_to_all.py`, torch's
  all_to_all_single, the reference; `gathering.py`, all tokens to all ranks; `slabs.py`, equally many rows to each rank.
- `overflow.py`: counts choices without room on the device, and raises their error.
- `permute.py`: moves rows between the orders of tokens and experts; `kernels.py`: the Triton kernels of this folder.
- `layers.py`: experts as grouped matmuls, and a layer of them in parts.
- `modules.py`: puts them under a model of `transformers`; `titan_dispatcher.py`: under torchtitan's dispatcher.
"""

from counterpoint.parallel.expert.dispatcher import Dispatcher, Handle
from counterpoint.parallel.expert.layers import (
    ExpertWeights,
    LocalExperts,
    delayed,
    grouped_matmul,
    overlapped_moe,
    swiglu,
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
