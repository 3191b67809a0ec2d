"""Name the dtypes in which a part can be measured: those of its computation and of its communication. No torch.

Matrix products of two float8 tensors need scales, and torch adds up none of them: what is in float8 is measured in the
dtype of the device.
"""

from __future__ import annotations

MEASURABLE = ("bfloat16", "float16", "float32")  # torch's names
OF_DEVICE = {"cuda": "bfloat16", "cpu": "float32"}  # of parts that ask for none


def measured_dtype(dtype: str | None, device: str) -> str:
    """Return the dtype in which an operation of `dtype` is measured on cuda or cpu."""
    return dtype if dtype in MEASURABLE else OF_DEVICE[device]
