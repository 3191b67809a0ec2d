"""Run FSDP2, DDP (`ddp.py`), tensor (`tensor/`) or expert parallelism (`expert/`) with collectives that overlap.

    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    overlapped = overlap(model)

From then on every FSDP2 module gathers its parameters and scatters its gradients through a `Communicator`: by copy
engines and stream memory operations, which no resident kernel can hold up. Nothing else changes: not the values, not
the optimizer, not the checkpoints. `print(overlapped)` says what was done; `overlapped.restore()` takes it back.

`overlap(model, tuned="counterpoint.toml")` follows the choices of `counterpoint tune` (`follow_tuning.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, overload

from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.parallel.fsdp.modules import ShardedModule, sharded_modules
from counterpoint.parallel.options import DdpOptions, OverlapOptions
from counterpoint.parallel.report import Report, together
from counterpoint.records.tuning import Tuned

if TYPE_CHECKING:
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel

    from counterpoint.parallel.ddp import OverlappedDdp
    from counterpoint.parallel.expert.modules import OverlappedExpertParallel
    from counterpoint.parallel.follow_tuning import FollowedTuning
    from counterpoint.parallel.fsdp.module_choice import OverlappedShards
    from counterpoint.parallel.tensor.modules import OverlappedTensorParallel


@overload
def overlap(  # type: ignore[overload-overlap]
    model: DistributedDataParallel, *, options: DdpOptions | None = None, tuned: Tuned | str | Path | None = None
) -> OverlappedDdp: ...


@overload
def overlap(
    model: nn.Module, *, options: OverlapOptions | None = None, tuned: Tuned | str | Path | None = None
) -> Overlap: ...


def overlap(
    model: nn.Module,
    *,
    options: OverlapOptions | DdpOptions | None = None,
    tuned: Tuned | str | Path | None = None,
) -> Overlap | OverlappedDdp:
    """Make the collectives of an FSDP2, DDP, tensor-parallel or expert-parallel model overlap. All ranks call this.

    Call it after the last `fully_shard`, or right after making a `DistributedDataParallel`. It takes every FSDP2 module
    of `model`, or the buckets of a `DistributedDataParallel`; every linear layer of torch's `parallelize_module`, or of
    a `tp_plan` of `transformers`; and the experts of an `ep_plan` of `transformers`. A model of several kinds is taken
    as all of them.

    Parameters may still be on the meta device. HSDP's all-reduce between replicas stays with torch, as does everything
    of modules that have one rank or are larger than `options.limit_bytes`: the report says so.

    Args:
        model: `fully_shard` or `parallelize_module` was called on it, or on parts of it; or a
            `DistributedDataParallel`; or `transformers` has made it with a `tp_plan` or `ep_size`.
        options: options of FSDP2; `DdpOptions` for DDP; None: the defaults.
        tuned: what `counterpoint tune` chose, or its file, equal on all ranks; calls for which it has no choice run by
            built-in rules. `off`: none; None: the file that the variable COUNTERPOINT_TUNED names.

    Returns:
        A handle that reports, and puts torch's collectives back: an `Overlap`, for DDP an `OverlappedDdp`. The model
        works without it: it need not be kept.

    Raises:
        Unsupported: one rank alone, or nothing that could be replaced. As well CPU offload, ranks that cannot share
            memory, or a torch without the hooks.
        Misconfigured: no module of FSDP2, tensor or expert parallelism, FSDP1, other collectives set before, a second
            call, options of another kind, or a tuning that cannot be read or is not the same on all ranks.
    """
    from torch.nn.parallel import DistributedDataParallel

    from counterpoint.parallel.ddp import OverlappedDdp

    if isinstance(model, DistributedDataParallel):
        if not isinstance(options, DdpOptions | None):
            raise Misconfigured(f"options of type {type(options).__name__} for DDP: give counterpoint.ddp.DdpOptions")
        return OverlappedDdp(model, options, tuned)
    if not isinstance(options, OverlapOptions | None):
        raise Misconfigured(f"options of type {type(options).__name__} for a model that is no DDP: give OverlapOptions")
    return _overlap_modules(model, options or OverlapOptions(), tuned)


def _overlap_modules(model: nn.Module, options: OverlapOptions, tuned: Tuned | str | Path | None) -> Overlap:
    """Replace the collectives of each kind of parallelism in a model; if one cannot be replaced, undo all."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    from counterpoint.parallel.expert.modules import OverlappedExpertParallel, expert_groups
    from counterpoint.parallel.follow_tuning import follow_together
    from counterpoint.parallel.fsdp.module_choice import OverlappedShards
    from counterpoint.parallel.tensor.modules import OverlappedTensorParallel

    is_sharded = any(isinstance(module, FSDPModule | FullyShardedDataParallel) for module in model.modules())
    modules = sharded_modules(model) if is_sharded else ()
    with ExitStack() as undo:
        tensor = OverlappedTensorParallel(model, options.tensor_parallel)
        undo.callback(tensor.restore)
        groups = [group for module in modules for group in (*module.groups, *module.replicating)]
        groups += [*tensor.groups, *expert_groups(model)]
        device_type = _device_type(model, modules)
        tuning = follow_together(tuned, groups, device_type=device_type)
        expert = OverlappedExpertParallel(model, options.expert_parallel, tuning)
        undo.callback(expert.restore)
        tensor.follow(tuning)
        if tuning is not None:
            tuning.limit_gemms(undo, device_type)
        if tensor.is_empty and expert.is_empty and not modules:
            sharded_modules(model)  # raises, as the model has no parallelism of any kind
        shards = OverlappedShards(model, modules, options, tuning)
        undo.callback(shards.restore)
        parts = [part for part in (shards, tensor, expert) if not part.is_empty]
        if not any(part.has_effect for part in parts):
            raise Unsupported(f"nothing to overlap: {parts[0].first_left()}")
        return Overlap(shards, tensor, expert, tuning=tuning, undo=undo.pop_all())


class Overlap:
    """Reports the replaced collectives; `restore`, or the end of a `with` block, puts torch's own back."""

    def __init__(
        self,
        shards: OverlappedShards,
        tensor: OverlappedTensorParallel,
        expert: OverlappedExpertParallel,
        *,
        tuning: FollowedTuning | None,
        undo: ExitStack,
    ) -> None:
        self._shards, self._parts = shards, (shards, tensor, expert)
        self._tuning, self._undo = tuning, undo

    def __enter__(self) -> Overlap:
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def __str__(self) -> str:
        return str(self.report())

    def report(self) -> Report:
        """Return a report: the FSDP2 modules with their traffic so far, and the tensor and expert parallel modules."""
        reports = [part.report() for part in self._parts]
        return Report(
            modules=tuple(row for report in reports for row in report.modules),
            calls=together(row for report in reports for row in report.calls),
            tuned=str(self._tuning or ""),
            notes=tuple(note for report in reports for note in report.notes),
        )

    def check(self) -> None:
        """Raise the error that ended communication, if any; its text names the failed ranks.

        The next step raises it, too. On GPUs the host runs ahead: call it after a wait for the GPU (`loss.item()`)
        where a step that a peer has left must not be trusted, such as before a checkpoint.
        """
        for part in self._parts:
            part.check()

    def reset_iter_state(self) -> None:
        """Discard a forward or backward pass that an exception ended, so that the step can begin anew.

        All ranks call it, and set gradients to zero after it. Gradients that are not reduced yet are lost, those of
        earlier micro-batches, too. After an exception in a backward pass each forward pass raises until this is called.
        """
        self._shards.reset_iter_state()

    def restore(self) -> None:
        """Put torch's own collectives back, and leave the communicators. All ranks call this between two steps."""
        self._undo.close()


def _device_type(model: nn.Module, modules: Sequence[ShardedModule]) -> str:
    """Return the type of device that a model runs on, cuda or cpu; its parameters may still be on the meta device."""
    import torch

    if modules:
        return modules[0].device.type
    first = next(model.parameters(), None)
    if first is None or first.device.type == "meta":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return first.device.type
