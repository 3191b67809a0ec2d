"""Small trainings by torch's own means, of which tests compare the losses and gradients of two process groups."""

import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

CPU = torch.device("cpu")


def drawn(seed: int, *shape: int, device: torch.device = CPU) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def learned(
    model: Any, batches: Iterable[tuple[Any, ...]], *, lr: float = 0.1, accumulates: bool = False
) -> list[float]:
    """Losses of a step of SGD for each batch; `accumulates`: DDP adds up the second of three with the third."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=lr), []
    for step, batch in enumerate(batches):
        is_first_half = accumulates and step % 3 == 1
        with model.no_sync() if is_first_half else nullcontext():
            loss = model(*batch).square().mean()
            loss.backward()
        if not is_first_half:
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def pipelined(
    group: Any, schedule: str, *, width: int, rows: int, microbatches: int, device: torch.device = CPU
) -> list[float]:
    """Losses of two steps of a pipeline of torch, where this rank has the last stage, and sums of its gradients.

    A rank has two stages, but one in schedules that have no more.
    """
    kind: Any = get_schedule_class(schedule)
    rank, size, one = dist.get_rank(), dist.get_world_size(), issubclass(kind, PipelineScheduleSingle)
    last = size - 1 if one else 2 * size - 1
    numbers = (rank,) if one else (rank, last - rank) if schedule.startswith("ZBV") else (rank, rank + size)
    stages = []
    for number in numbers:
        torch.manual_seed(number)
        stages.append(
            pipelining.PipelineStage(nn.Linear(width, width).to(device), number, last + 1, device, group=group)
        )
    batch, losses = drawn(1, rows, width, device=device), list[Tensor]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's schedules of themselves
        runs = kind(stages[0] if one else stages, n_microbatches=microbatches, loss_fn=nn.functional.mse_loss)
        for _ in range(2):
            inputs = [batch] if 0 in numbers else []
            runs.step(*inputs, target=batch if last in numbers else None, losses=losses if last in numbers else None)
    sums = [p.grad.double().sum() for stage in stages for p in stage.submod.parameters() if p.grad is not None]
    assert len(sums) == 2 * len(stages)
    return [loss.item() for loss in (*losses, *sums)]
