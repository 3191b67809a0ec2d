"""Define the options of the backend, of `overlap`, and of tensor and expert parallelism, all in one place.

Field `communicator` has the options of the communicators that they open. One set of ranks has one communicator
(`group.py`): the first user sets its options, and users with other options are refused while it is open.

| options | take effect in |
|---|---|
| `CommunicatorOptions` | every communicator |
| `BackendOptions` | `pg_options` of `init_process_group` and `new_group` |
| `OverlapOptions` | `counterpoint.overlap(model, options=...)`, but for DDP |
| `DdpOptions` | the same for DDP, and `counterpoint.ddp.HookState` |
| `TensorOptions` | `OverlapOptions.tensor_parallel`, and `tensor_group` |
| `ExpertOptions` | `OverlapOptions.expert_parallel`, and `Dispatcher` |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.errors import Misconfigured
from counterpoint.records.tuning import Tuned

if TYPE_CHECKING:
    import torch

TensorChoice = Literal["auto", "torch", "serial", "cuts"]
ExpertChoice = Literal["auto", "torch", "gather", "slabs"]
Overflow = Literal["raise", "drop", "second_round"]


@dataclass(frozen=True, kw_only=True)
class BackendOptions:
    """Holds options of the backend `counterpoint`, given as `pg_options`.

    Args:
        communicator: options of the group's communicator; None: the defaults, with the timeout of the group.
        crossover_bytes: by operation, bytes of the full array from which the communicator runs a call; other operations
            go by measurements.
        nccl: `ProcessGroupNCCL.Options` of the inner group; None: NCCL's defaults.
        ranks_per_host: number of consecutive ranks that count as a host, equal on all ranks; None: the ranks of one
            machine do.
        mailbox_bytes: bytes of device memory for the messages from each sending rank; None: NCCL sends messages.
        tuned: the choices of `counterpoint tune`, or their file: they come before the crossovers. `off`: none; None:
            the file that the variable COUNTERPOINT_TUNED names.

    Raises:
        Misconfigured: an option is out of range.
    """

    communicator: CommunicatorOptions | None = None
    crossover_bytes: Mapping[str, int] | None = None
    nccl: Any = None
    ranks_per_host: int | None = None
    mailbox_bytes: int | None = 1 << 26
    tuned: Tuned | str | Path | None = None

    def __post_init__(self) -> None:
        _refuse_mailboxes(self.communicator)
        CommunicatorOptions(mailbox_bytes=self.mailbox_bytes)  # raises if the size is not allowed
        if self.ranks_per_host is not None and self.ranks_per_host < 1:
            raise Misconfigured(f"ranks_per_host={self.ranks_per_host}: give 1 or more, or None")

    @property
    def _timeout(self) -> timedelta:
        """Return the timeout; torch's device meshes read it by this name."""
        return timedelta(seconds=(self.communicator or CommunicatorOptions()).timeout_s)


@dataclass(frozen=True, kw_only=True)
class TensorOptions:
    """Holds options of tensor-parallel matmuls.

    Args:
        communicator: options of the ranks' communicator; None: those of the open one, or the defaults.
        mechanism: `auto`: each call's fastest mechanism by prediction; else a mechanism for all calls that it can run:
            `torch` (torch's collective, and one matmul), `serial` (copy engines, and one matmul), `cuts` (a matmul in
            pieces).
        measure: time matmuls of each new `[k, n]` on the GPU in the first forward call with this size, which takes up
            to a second; False: estimate their times.

    Raises:
        Misconfigured: an option has a value that is not allowed.
    """

    communicator: CommunicatorOptions | None = None
    mechanism: TensorChoice = "auto"
    measure: bool = True

    def __post_init__(self) -> None:
        _refuse_mailboxes(self.communicator)
        _check_choice("mechanism", self.mechanism, get_args(TensorChoice))


@dataclass(frozen=True, kw_only=True)
class ExpertOptions:
    """Holds options of expert parallelism; all but `communicator` must be equal on all ranks.

    Args:
        communicator: options of the ranks' communicator; None: those of the open one, or the defaults.
        mechanism: `auto`: the fastest mechanism by prediction; else the mechanism that moves all tokens: `torch`
            (all_to_all_single, after the host waits for counts), `gather` (all ranks get all tokens), `slabs` (equally
            many rows for each rank).
        beside_us: µs that the caller's computation between the halves of a dispatch and a combine takes alone; `auto`
            predicts with it.
        overflow: what happens to expert choices that exceed the capacity: `raise` an error, at the next dispatch,
            `check` or `close` at the latest; `drop` them, as if their weights were 0, and count them; send them in a
            `second_round`. Only a `capacity_factor` can leave a choice without room.
        capacity_factor: room for this many times the rows of an even routing; None: for all rows that may come, but
            1.25 in the first round of `slabs` with a `second_round`. With `second_round` this limits the rows of one
            exchange, else the rows of a rank's experts, too.
        wire_dtype: dtype in which tokens travel to their experts, with a scale for each token; None: the
            tokens' dtype. Derivatives and results travel in their own dtype.
        pad_multiple: each expert's rows begin at a multiple of this number, as float8 matmuls need.
        equal_tokens: all ranks dispatch equally many tokens in each call. False: up to `max_tokens` each, and `gather`
            sends blocks of `max_tokens`, since no rank waits for the other ranks' numbers.
        zero_tail: also write zeros to the rows past the last offset, which takes as long as copying as many tokens.
            Grouped matmuls skip these rows; operations over all rows, such as a norm weight's derivative, need zeros.
        parts: number of parts into which `overlap` cuts a rank's tokens: communication of one part overlaps the experts
            of another; None: 2. A `Dispatcher` raises if `parts` is given.
        max_tokens: most tokens of a rank in one call of a layer; None: the most that any rank has in the first. A
            `Dispatcher`, which has an argument `max_tokens`, raises if this option is given.

    Raises:
        Misconfigured: an option has a value that is not allowed.
    """

    communicator: CommunicatorOptions | None = None
    mechanism: ExpertChoice = "auto"
    beside_us: float = 0.0
    overflow: Overflow = "second_round"
    capacity_factor: float | None = None
    wire_dtype: torch.dtype | None = None
    pad_multiple: int = 1
    equal_tokens: bool = False
    zero_tail: bool = False
    parts: int | None = None
    max_tokens: int | None = None

    def __post_init__(self) -> None:
        _refuse_mailboxes(self.communicator)
        _check_choice("mechanism", self.mechanism, get_args(ExpertChoice))
        _check_choice("overflow", self.overflow, get_args(Overflow))
        if self.capacity_factor is not None and not 0 < self.capacity_factor < math.inf:
            raise Misconfigured(f"capacity_factor={self.capacity_factor}: give a number above 0, or None")
        _check_wire("wire_dtype", self.wire_dtype, "float8_e4m3fn")
        if not 0 <= self.beside_us < math.inf:
            raise Misconfigured(f"beside_us={self.beside_us}: give 0 µs or more")
        for name in ("pad_multiple", "parts", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise Misconfigured(f"{name}={value}: give 1 or more")

    def shared(self) -> dict[str, object]:
        """Return the options that must be equal on all ranks of a dispatcher, by name."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "communicator"}


@dataclass(frozen=True, kw_only=True)
class OverlapOptions:
    """Holds options of `overlap`.

    Args:
        communicator: options of FSDP2's communicators, one for each set of ranks; None: as open, or the defaults
            with 128 MiB of staging for gradients: larger arrays are sent in slices.
        prefetch: number of modules to gather ahead, in the order of the first forward pass; None: as FSDP2 does by
            itself, or by its prefetch lists. Each costs the memory of one module.
        direct: gather parameters to where modules use them, and scatter gradients from where autograd left them, so
            that FSDP2 copies neither; False: FSDP2 copies both.
        limit_bytes: modules that gather more bytes keep torch's collectives; None: no limit. Buffers as large as the
            largest module stay in symmetric memory for good.
        tensor_parallel: options of the operations that run layers of tensor parallelism; None: options that the process
            groups have.
        expert_parallel: options of layers of experts and their dispatchers; None: the defaults on CPUs, and on GPUs,
            where nothing was measured yet, these layers are left to `transformers`. All other options apply to FSDP2.

    Raises:
        Misconfigured: an option has a value that is not allowed.
    """

    communicator: CommunicatorOptions | None = None
    prefetch: int | None = None
    direct: bool = True
    limit_bytes: int | None = None
    tensor_parallel: TensorOptions | None = None
    expert_parallel: ExpertOptions | None = None

    def __post_init__(self) -> None:
        _refuse_mailboxes(self.communicator)
        if self.prefetch is not None and self.prefetch < 1:
            raise Misconfigured(f"prefetch={self.prefetch}: give 1 or more, or None for what FSDP2 does by itself")


@dataclass(frozen=True, kw_only=True)
class DdpOptions:
    """Holds options of DDP's hook.

    Args:
        communicator: options of the ranks' communicator; None: those of the open one, or the defaults, with all of a
            bucket in one chunk.
        wire_dtype: what gradients are sent as: torch.bfloat16, or torch.float8_e4m3fn with a scale for every 256
            elements (averages return as bfloat16); None: their own dtype. Sums are always in float32 at least.

    Raises:
        Misconfigured: `wire_dtype` is another dtype.
    """

    communicator: CommunicatorOptions | None = None
    wire_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        _refuse_mailboxes(self.communicator)
        _check_wire("wire_dtype", self.wire_dtype, "bfloat16", "float8_e4m3fn")


def _refuse_mailboxes(options: CommunicatorOptions | None) -> None:
    """Raise if a communicator's options set `channels` or `mailbox_bytes`, which have no effect here.

    Raises:
        Misconfigured: `channels` or `mailbox_bytes` is given.
    """
    for name in ("channels", "mailbox_bytes") if options is not None else ():
        if getattr(options, name) != CommunicatorOptions.__dataclass_fields__[name].default:
            raise Misconfigured(
                f"communicator with {name}={getattr(options, name)}: it has no effect here; leave it out"
            )


def _check_choice(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise Misconfigured(f"{name}={value!r}: allowed are {', '.join(allowed)}")


def _check_wire(name: str, value: Any, *allowed: str) -> None:
    if value is not None and str(value) not in [f"torch.{one}" for one in allowed]:
        raise Misconfigured(f"{name}={value}: allowed are None, {', '.join(f'torch.{one}' for one in allowed)}")
