"""Processes of a worker, one for each GPU, or several under --ranks-per-gpu: started together, none left behind."""

import faulthandler
import os
import shlex
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

import counterpoint
from counterpoint.rehearsed import rank_variables, visible_devices

Seen = list[dict[str, dict[str, str]]]
"""For each rank, by scenario, what came of each case."""
NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def ranks_per_gpu() -> int:
    return int(os.environ.get("COUNTERPOINT_TEST_RANKS_PER_GPU", "1"))


def are_shared() -> bool:
    return ranks_per_gpu() > 1


def world_size_here() -> int:
    """Ranks that fit on all GPUs of this machine, up to 8."""
    import torch

    return min(torch.cuda.device_count() * ranks_per_gpu(), 8)


def free_bytes(device: Any) -> int:
    """Free memory of a GPU; where ranks share it, less than nothing by what torch holds for this one."""
    import torch

    return -torch.cuda.memory_reserved(device) if are_shared() else torch.cuda.mem_get_info(device)[0]


def torchrun(ranks: int, script: str, *arguments: str) -> list[str]:
    """The command that runs a script on so many ranks, in a rehearsal if they share GPUs."""
    words = ["--standalone", "--nproc-per-node", str(ranks), script, *arguments]
    if are_shared():
        return [sys.executable, "-m", "counterpoint", "rehearse", shlex.join(["torchrun", *words])]
    return [sys.executable, "-m", "torch.distributed.run", *words]


def place_of(rank: int, world_size: int) -> dict[str, str]:
    if not are_shared():
        return {"LOCAL_RANK": str(rank)}
    import torch

    gpus = visible_devices(torch.cuda.device_count())
    return rank_variables(rank, ranks_per_host=world_size, gpus=gpus)


@dataclass(frozen=True, kw_only=True)
class Ended:
    codes: list[int]
    logs: list[str]

    def well(self) -> None:
        assert self.codes == [0] * len(self.codes), "\n".join(log[-3000:] for log in self.logs)


def run_ranks(
    worker: Path, *arguments: str | Path, folder: Path, world_size: int, timeout_s: float, paths: Sequence[Path] = (),
    environment: Mapping[str, str] | None = None,
) -> Ended:  # fmt: skip
    """Runs `worker` with RANK, LOCAL_RANK and WORLD_SIZE set; fails the test if a rank has not ended in time."""
    found = [Path(counterpoint.__file__).parents[1], *paths]
    shared = os.environ | NO_MULTICAST | dict(environment or {})
    shared["PYTHONPATH"] = os.pathsep.join([*map(str, found), os.environ.get("PYTHONPATH", "")])
    logs = [folder / f"{'_'.join([worker.stem, *_words(arguments)])}{rank}.log" for rank in range(world_size)]
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            mine = {"RANK": str(rank), "WORLD_SIZE": str(world_size), **place_of(rank, world_size)}
            with log.open("wb") as out:
                command = [sys.executable, str(worker), *map(str, arguments)]
                workers.append(subprocess.Popen(command, env=shared | mine, stdout=out, stderr=out))
        codes = [process.wait(timeout_s) for process in workers]
    except subprocess.TimeoutExpired:
        pytest.fail("hangs:\n" + "\n".join(log.read_text()[-1500:] for log in logs))
    finally:
        for process in workers:
            process.kill()
            process.wait()
    return Ended(codes=codes, logs=[log.read_text() for log in logs])


def _words(arguments: Sequence[str | Path]) -> list[str]:
    """Those that tell two runs in one folder apart."""
    return [argument.replace(" ", "_") for argument in arguments if isinstance(argument, str)]


def own_gpu() -> Any:
    import torch

    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def run_scenarios(
    folder: Path, scenarios: Mapping[str, Callable[[], dict[str, str]]], *, by_default: bool = False,
    with_nccl: bool = True, each_s: float | None = None,
) -> None:  # fmt: skip
    """Runs all scenarios of a worker, on ranks by `run_ranks`; one that takes longer than `each_s` ends the process."""
    import torch
    import torch.distributed as dist

    rank, world_size, device = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), own_gpu()
    torch.cuda.set_device(device)
    if by_default:
        torch.set_default_device(device)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if with_nccl else "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank,
        world_size=world_size, timeout=timedelta(seconds=60), device_id=device if with_nccl else None,
    )  # fmt: skip
    found: dict[str, dict[str, str]] = {}
    for name, scenario in scenarios.items():
        started = time.monotonic()
        print(f"{name}: begins", flush=True)
        if each_s is not None:
            faulthandler.dump_traceback_later(each_s, exit=True)
        try:
            found[name] = scenario()
        except BaseException:
            traceback.print_exc()
            os._exit(1)  # the end of the interpreter may wait for peers
        faulthandler.cancel_dump_traceback_later()
        if rank == 0:
            print(f"{name}: {time.monotonic() - started:.1f} s, {found[name]}", flush=True)
        (folder / f"found{rank}.json").write_bytes(msgspec.json.encode(found))


def scenario_results(
    worker: Path, folder: Path, *arguments: str, timeout_s: float, environment: Mapping[str, str] | None = None,
    killed: int | None = None, multiple_of: int = 1,
) -> Seen:  # fmt: skip
    """Returns what the scenarios of a worker found, by rank; rank `killed` has to end by SIGKILL and is left out."""
    world_size, root = world_size_here() // multiple_of * multiple_of, Path(__file__).parents[2]
    ended = run_ranks(
        worker, folder, *arguments, folder=folder, world_size=world_size, timeout_s=timeout_s,
        paths=[root, root / "benchmarks"], environment=environment,
    )  # fmt: skip
    if killed is None:
        ended.well()
    assert ended.codes == [-signal.SIGKILL if rank == killed else 0 for rank in range(world_size)], ended.logs
    print(ended.logs[0])
    kind, lived = dict[str, dict[str, str]], [rank for rank in range(world_size) if rank != killed]
    return [msgspec.json.decode((folder / f"found{rank}.json").read_bytes(), type=kind) for rank in lived]


def of(seen: Seen, scenario: str, what: str) -> set[str]:
    """Return what all ranks found."""
    return {rank[scenario][what] for rank in seen}
