"""In which dtype something is measured: its own, or that of the device."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from counterpoint.errors import Misconfigured
from counterpoint.measurement.session import Session
from counterpoint.measurement.workloads import measured_dtype


@pytest.mark.parametrize(
    ("dtype", "device", "expected"),
    [
        ("float16", "cpu", "float16"),
        ("float32", "cuda", "float32"),
        ("float8_e4m3fn", "cuda", "bfloat16"),
        (None, "cuda", "bfloat16"),
        (None, "cpu", "float32"),
    ],
)
def test_what_cannot_be_measured_in_its_dtype_has_that_of_the_device(
    dtype: str | None, device: str, expected: str
) -> None:
    assert measured_dtype(dtype, device) == expected


def test_computation_and_communication_have_a_dtype_each() -> None:
    """None goes back to that of the device."""
    session = cast(Any, SimpleNamespace(device=torch.device("cpu")))
    Session.use_dtypes(session, "bfloat16", "float16")
    assert (session.dtype, session.compute_dtype) == (torch.bfloat16, torch.float16)
    Session.use_dtypes(session)
    assert (session.dtype, session.compute_dtype) == (torch.float32, torch.float32)


def test_a_dtype_that_is_not_measured_is_refused() -> None:
    with pytest.raises(Misconfigured, match="dtype 'int7'; choose from: bfloat16, float16, float32"):
        Session.use_dtypes(cast(Any, SimpleNamespace(device=torch.device("cpu"))), "int7")
