"""What lies between the matmuls of an expert; the kernels: tests/process/parallel."""

import pytest
import torch
from torch.nn import functional

from counterpoint.errors import Misconfigured
from counterpoint.parallel.expert.layers import swiglu

OFFSETS = torch.tensor([3, 3, 10], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_it_is_rounded_once(dtype: torch.dtype) -> None:
    """silu(gate) * up in float32, or in float64 of float64, of rows that are used."""
    gate_up = torch.randn(14, 12).to(dtype)
    wide = gate_up if dtype == torch.float64 else gate_up.float()
    expected = (functional.silu(wide[:, :6]) * wide[:, 6:]).to(dtype)
    assert torch.equal(swiglu(gate_up, OFFSETS)[:10], expected[:10])
    assert torch.equal(swiglu(gate_up.t().contiguous().t(), OFFSETS)[:10], expected[:10])


def test_its_derivative_is_that_of_torch() -> None:
    """Also where gate is so large or so small that its sigmoid is 0 or 1."""
    gate_up = (torch.randn(10, 8, dtype=torch.float64) * 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda rows: swiglu(rows, OFFSETS), (gate_up,))
    steep = torch.tensor([[-200.0, 200.0, 0.0, 2.0, 3.0, 4.0]] * 10, requires_grad=True)
    (got,) = torch.autograd.grad(swiglu(steep, OFFSETS).sum(), steep)
    (wanted,) = torch.autograd.grad((functional.silu(steep[:, :3]) * steep[:, 3:]).sum(), steep)
    torch.testing.assert_close(got, wanted)


def test_what_it_refuses() -> None:
    for gate_up, offsets in (
        (torch.zeros(4, 5), OFFSETS),
        (torch.zeros(4), OFFSETS),
        (torch.zeros(4, 6), OFFSETS.long()),
        (torch.zeros(4, 6), OFFSETS[:0]),
    ):
        with pytest.raises(Misconfigured, match="give"):
            swiglu(gate_up, offsets)
