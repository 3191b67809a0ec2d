"""What ranks run to test the handle of `overlap`: taking it back, what it refuses, deaths, memory."""

import gc
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, FullyShardedDataParallel, fully_shard

from counterpoint.errors import PeerTimeout, Unsupported
from counterpoint.measurement.session import Session
from counterpoint.parallel.fsdp.modules import sharded_modules
from counterpoint.parallel.options import OverlapOptions
from counterpoint.parallel.overlap import Overlap, overlap
from tests.dist.collective_programs import ended_as_python_does
from tests.support.fsdp_training import Case, batch, differences, fsdp_modules, sharded, trained
from tests.support.ranks import PATIENT, SOON_S, error_of


def mapped_bytes(session: Session, steps: int) -> list[int]:
    """Shared memory that this process has mapped after each tenth of `steps` steps of a very small model."""
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    seen = []
    gc.collect()  # what earlier programs left in cycles
    with overlap(model, options=OverlapOptions(prefetch=1)):
        for step in range(1, steps + 1):
            model(torch.ones(1, 64)).sum().backward()
            model.zero_grad()
            if step % (steps // 10) == 0:
                lines = Path("/proc/self/maps").read_text().splitlines()
                ends = (line.split()[0].split("-") for line in lines if "/memfd:counterpoint" in line)
                seen.append(sum(int(high, 16) - int(low, 16) for low, high in ends))
    return seen


def forks(session: Session) -> bool:
    model = sharded(Case())
    with overlap(model, options=OverlapOptions(communicator=PATIENT)) as handle:
        for step in range(2):
            model(*batch(session, step)).backward()
            well = ended_as_python_does(handle)
            session.gather(0)  # every child has ended
            time.sleep(0.6 * session.rank)  # so that rank 0 looks whether the one that it waits for has closed
            handle.check()
    return well


def one_is_killed(session: Session, where: str) -> list[str]:
    """What rank 0 is told by training, and then by `check`, when rank 1 dies in the second step."""

    seen = 0

    def kill(*_: object) -> None:
        nonlocal seen
        seen += 1
        if session.rank == 1 and seen == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    def train() -> None:
        for step in range(3):
            model(*batch(session, step)).backward()

    model = sharded(Case())
    handle = overlap(model, options=OverlapOptions(communicator=PATIENT))
    if where == "forward":
        model.layers[1].register_forward_pre_hook(kill, prepend=True)
    else:
        model.layers[1].ffn.register_full_backward_hook(kill)
    told = []
    for action in (train, handle.check):
        started = time.monotonic()
        try:
            action()
        except PeerTimeout as error:
            told.append(f"{error.ranks} {'soon' if time.monotonic() - started < SOON_S else 'late'}")
    return told


def restored(session: Session) -> list[str]:
    """What differs from stock if ours are put in, taken out after a step, and put in again; who still has our hooks."""
    case = Case(options=OverlapOptions(prefetch=2))
    expected = trained(session, sharded(case), replace(case, steps=1))
    model = sharded(case)
    handle = overlap(model, options=case.options)
    handle.restore()
    handle.restore()
    again = overlap(model)
    handle.restore()  # of the first: it has nothing to say any more
    got = trained(session, model, replace(case, steps=1))
    calls = _gathers(again)
    again.restore()
    model(*batch(session, 9)).backward()
    return differences(expected, got) + [f"{calls}, then {_gathers(again)}"] * (calls != _gathers(again) or 0 in calls)


def _gathers(handle: Overlap) -> list[int]:
    return [module.moved("all_gather").calls for module in handle.report().modules if module.traffic]


def closed_by_itself(session: Session) -> bool:
    model = sharded(Case())
    overlap(model)
    return bool(model(*batch(session, 0)).isfinite())


def named(session: Session) -> list[str]:
    with overlap(sharded(Case(grouped=True))) as handle:
        return [module.name for module in handle.report().modules]


def unmanaged(session: Session) -> tuple[str, ...]:
    """What is said of parameters that no FSDP2 module has, if of two layers one is sharded."""
    model = nn.Sequential(nn.Linear(400, 400), nn.Linear(400, 400))
    fully_shard(model[0])
    with overlap(model) as handle:
        return handle.report().notes


def prefetch_lists(session: Session) -> dict[str, Any]:
    """What each module gathers ahead, by names, before and after one step, and after `restore`."""
    model = sharded(Case())
    names = {
        id(module._get_fsdp_state()): name or "(root)"
        for name, module in model.named_modules()
        if isinstance(module, FSDPModule)
    }

    def lists() -> dict[str, tuple[list[str], list[str]]]:
        states = [module._get_fsdp_state() for module in fsdp_modules(model)]
        return {
            names[id(state)]: (
                [names[id(one)] for one in state._states_to_forward_prefetch],
                [names[id(one)] for one in state._states_to_backward_prefetch],
            )
            for state in states
        }

    handle = overlap(model, options=OverlapOptions(prefetch=2))
    before = lists()
    model(*batch(session, 0)).backward()
    after, [said] = lists(), handle.report().notes
    handle.restore()
    return {"before": before, "after": after, "restored": lists(), "said": said}


def as_in_torch_2_11(session: Session) -> bool:
    """Whether a model is read the same where a module has one group of parameters by another name."""

    class Older:
        def __init__(self, state: Any) -> None:
            self._fsdp_param_group = state._fsdp_param_group

    def described(model: Any) -> list[Any]:
        return [(m.name, m.ranks, m.gather_bytes, m.shard_group) for m in sharded_modules(model)]

    model = sharded(Case())
    now = described(model)
    for module in fsdp_modules(model):
        older = Older(module._get_fsdp_state())
        module._get_fsdp_state = lambda older=older: older
    return now == described(model)


def _twice(model: Any) -> None:
    overlap(model)
    overlap(model)


def _after_symmetric(model: Any) -> None:
    for module in fsdp_modules(model):
        module.set_allocate_memory_from_process_group_for_comm(True)
    overlap(model)


def _two_prefetches(model: Any) -> None:
    model.set_modules_to_forward_prefetch([model.layers[0]])
    overlap(model, options=OverlapOptions(prefetch=1))


def _other_ranks(model: Any) -> None:
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    overlap(model)
    sharded_modules(model)[0].parameters._all_gather_comm(torch.empty(2), torch.empty(2), alone)


def _far_away(model: Any) -> None:
    gc.collect()  # models of earlier tests, which were dropped: their communicator ends with them
    with patch("counterpoint.parallel.group.Communicator", side_effect=Unsupported("different hosts")):
        overlap(model)


def _one_rank(_: Any) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")))
    overlap(model)


def _offloaded(_: Any) -> None:
    model = nn.Linear(4, 4)
    fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))
    overlap(model)


REFUSED: dict[str, Callable[[Any], object]] = {
    "before fully_shard": lambda _: overlap(nn.Linear(4, 4)),
    "FSDP1": lambda _: overlap(FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"))),
    "CPU offload": _offloaded,
    "one rank": _one_rank,
    "twice": _twice,
    "other collectives": _after_symmetric,
    "two prefetches": _two_prefetches,
    "other ranks": _other_ranks,
    "different hosts": _far_away,
    "all too large": lambda model: overlap(model, options=OverlapOptions(limit_bytes=10)),
}


def refused(session: Session, name: str) -> str:
    return error_of(lambda: REFUSED[name](sharded(Case())))
