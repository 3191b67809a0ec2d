"""Small trainings by torch's own means, of which tests compare the losses and gradients of two process groups."""

import warnings
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torch.distributed.tensor import DTensor

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


def whole(tensor: Any) -> Tensor:
    """Return a copy of all of a tensor or DTensor, of no elements for None."""
    if tensor is None:
        return torch.zeros(0)
    part: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return part.detach().clone()


def largest_difference(found: dict[str, Tensor], expected: dict[str, Tensor], least: float = 0.0) -> float:
    """Return the largest error of any tensor, relative to the largest element that it should have, but to `least`."""
    assert found.keys() == expected.keys()
    pairs = [(found[name], one) for name, one in expected.items() if one.numel() or found[name].numel()]
    return max(float((one - other).abs().max() / other.abs().max().clamp(min=least)) for one, other in pairs)


def pretrained(
    kind: str, folder: str, spread: dict[str, Any], drawn: str, sizes: dict[str, Any], **options: Any
) -> Any:
    """Return a small model of `transformers` with equal weights on all ranks, spread by its own plan.

    Args:
        kind: Its name before `Config` and `ForCausalLM`.
        folder: Where rank 0 saves it.
        spread: The keywords of `DistributedConfig`.
        drawn: How the names of parameters end that would be equal or zero otherwise.
        sizes: The keywords of its configuration.
        options: Those of `from_pretrained`.
    """
    import transformers
    from transformers.distributed import DistributedConfig

    model_type = getattr(transformers, f"{kind}ForCausalLM")
    if dist.get_rank() == 0:
        torch.manual_seed(3)
        model = model_type(getattr(transformers, f"{kind}Config")(**sizes, num_hidden_layers=2, use_cache=False))
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(drawn):
                    parameter.normal_()
        model.save_pretrained(folder)
    dist.barrier()
    return model_type.from_pretrained(folder, distributed_config=DistributedConfig(**spread), **options)


def language_trained(model: Any, seed: int, lengths: Sequence[int], vocabulary: int = 128) -> dict[str, Tensor]:
    """Return losses and gradients of steps on texts of these lengths, and the loss of an evaluation after them."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    numbers, found = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    model.train()
    for step, length in enumerate(lengths):
        text = torch.randint(vocabulary, (2, length), generator=numbers)
        loss = model(input_ids=text, labels=text).loss
        loss.backward()
        found[f"{step} loss"] = whole(loss)
        found |= {f"{step} {name}": whole(parameter.grad) for name, parameter in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        found["evaluated"] = whole(model(input_ids=text, labels=text).loss)
    return found
