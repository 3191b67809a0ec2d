"""Record tensor-parallel decoder layers with sequence parallelism, forward and backward, Llama-3-70B shapes.

Every layer gathers the sequence before its first matmul and scatters the sum after its last, twice. In the forward
pass the collectives wait in line with the matmuls that need them; in the backward pass they may run beside the matmul
of the weight gradient (`--in-line` turns that off).

    torchrun --nproc-per-node 8 examples/record_tensor_parallel.py --out traces/tensor-parallel
    torchrun --nproc-per-node 2 examples/record_tensor_parallel.py --out traces/tp-gloo --device cpu --tiny
"""

from __future__ import annotations

from typing import Any

import recording
import torch
import torch.distributed as dist
import torch.nn.functional as F
from llama import Shape
from torch import Tensor, nn

LLAMA_70B = Shape(layers=4, hidden=8192, ffn=28672, heads=64, kv_heads=8)
TINY = Shape(layers=2, hidden=128, ffn=256, heads=8, kv_heads=8)


def gather_rows(x: Tensor, *, async_op: bool = False) -> tuple[Tensor, dist.Work | None]:
    """[rows / n, columns] of every rank -> [rows, columns]."""
    whole = x.new_empty(x.shape[0] * dist.get_world_size(), x.shape[1])
    return whole, dist.all_gather_into_tensor(whole, x.contiguous(), async_op=async_op)


def scatter_rows(x: Tensor, *, async_op: bool = False) -> tuple[Tensor, dist.Work | None]:
    """[rows, columns] of every rank -> the sum's own [rows / n, columns]."""
    own = x.new_empty(x.shape[0] // dist.get_world_size(), x.shape[1])
    return own, dist.reduce_scatter_tensor(own, x.contiguous(), async_op=async_op)


class GatherMatmul(torch.autograd.Function):
    """all_gather(x) @ weight.T; backward: the gradient of x is scattered while that of the weight is computed."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, overlap: bool) -> Tensor:
        whole, _ = gather_rows(x)
        ctx.save_for_backward(whole, weight)
        ctx.overlap = overlap
        return whole @ weight.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        whole, weight = ctx.saved_tensors
        (grad,) = grads
        grad_x, work = scatter_rows(grad @ weight, async_op=ctx.overlap)
        grad_weight = grad.t() @ whole
        if work is not None:
            work.wait()
        return grad_x, grad_weight, None


class MatmulScatter(torch.autograd.Function):
    """reduce_scatter(x @ weight.T); backward: the gradient is gathered, then both matmuls run."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        own, _ = scatter_rows(x @ weight.t())
        return own

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        grad, _ = gather_rows(grads[0])
        return grad @ weight, grad.t() @ x


class Layer(nn.Module):
    """This rank's heads and its part of the feed-forward; activations are split by rows outside of the pairs."""

    def __init__(self, shape: Shape, *, overlap: bool) -> None:
        super().__init__()
        ranks = dist.get_world_size()
        self.shape, self.ranks, self.overlap = shape, ranks, overlap
        heads = (shape.heads + 2 * shape.kv_heads) // ranks
        self.norms = nn.ModuleList(nn.RMSNorm(shape.hidden) for _ in range(2))
        self.qkv = nn.Parameter(torch.empty(heads * shape.head_dim, shape.hidden))
        self.output = nn.Parameter(torch.empty(shape.hidden, shape.hidden // ranks))
        self.gate_up = nn.Parameter(torch.empty(2 * shape.ffn // ranks, shape.hidden))
        self.down = nn.Parameter(torch.empty(shape.hidden, shape.ffn // ranks))

    def attend(self, qkv: Tensor) -> Tensor:
        """Attention of this rank's heads: [rows, (heads + 2 kv_heads) / n * head_dim] -> [rows, hidden / n]."""
        shape, rows = self.shape, qkv.shape[0]
        sizes = [part // self.ranks for part in (shape.heads, shape.kv_heads, shape.kv_heads)]
        query, key, value = qkv.view(1, rows, -1, shape.head_dim).transpose(1, 2).split(sizes, dim=1)  # type: ignore[no-untyped-call]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).reshape(rows, -1)

    def forward(self, x: Tensor) -> Tensor:
        qkv: Tensor = GatherMatmul.apply(self.norms[0](x), self.qkv, self.overlap)  # type: ignore[no-untyped-call]
        x = x + MatmulScatter.apply(self.attend(qkv), self.output)  # type: ignore[no-untyped-call]
        both: Tensor = GatherMatmul.apply(self.norms[1](x), self.gate_up, self.overlap)  # type: ignore[no-untyped-call]
        gate, up = both.chunk(2, dim=1)
        out: Tensor = x + MatmulScatter.apply(F.silu(gate) * up, self.down)  # type: ignore[no-untyped-call]
        return out


def main() -> None:
    """Parse, join the other ranks, train the layers on random activations, record."""
    parser = recording.parser(__doc__)
    parser.add_argument("--layers", type=int, default=LLAMA_70B.layers)
    parser.add_argument("--tokens", type=int, default=8192, help="of the whole group")
    parser.add_argument("--in-line", action="store_true", help="no overlap in the backward pass")
    parser.add_argument("--tiny", action="store_true", help="very small layers and 128 tokens, for CPUs")
    args = parser.parse_args()
    with recording.joined(args) as job:
        shape = TINY if args.tiny else LLAMA_70B
        layers = 2 if args.tiny else args.layers
        with job.device:
            model = nn.Sequential(*(Layer(shape, overlap=not args.in_line) for _ in range(layers))).bfloat16()
        for parameter in model.parameters():
            nn.init.ones_(parameter) if parameter.dim() == 1 else nn.init.normal_(parameter, std=0.01)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, fused=True)
        rows = (128 if args.tiny else args.tokens) // job.world_size
        x, target = (torch.randn(rows, shape.hidden, device=job.device, dtype=torch.bfloat16) for _ in range(2))

        def step(index: int) -> None:
            loss = F.mse_loss(model(x).float(), target.float())
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            loss.item()  # waits for the GPU, as a loop that logs every step does

        recording.record(step, job, planted=None)


if __name__ == "__main__":
    main()
