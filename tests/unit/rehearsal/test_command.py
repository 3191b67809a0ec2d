"""What can be rehearsed: how many ranks a command names, and whether the GPUs here have room for them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import pytest

from counterpoint.errors import Misconfigured, Unsupported
from counterpoint.records.rehearsal import RankReport
from counterpoint.rehearsal import api
from counterpoint.rehearsal.rank import TASK_VARIABLE, RehearsalTask
from counterpoint.tuning.script_launch import REHEARSED, RunCommand, parse_command

GIB = 1 << 30


def ranks_of(command: str) -> int:
    return api._ranks_of(parse_command(command, "rehearse"))


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("torchrun --nproc-per-node 4 train.py", 4),
        ("torchrun --nproc-per-node=4 train.py --nproc-per-node 8", 4),
        ("torchrun --nproc_per_node=4 train.py", 4),
        ("torchrun --nproc_per_node 64 -m train --lr 1", 64),
        ("torchrun --standalone --nproc-per-node 2 train.py", 2),
        ("torchrun --nnodes 1 --nproc-per-node 2 train.py", 2),
        ("torchrun --nnodes=1:1 --rdzv-endpoint host:0 --nproc-per-node 2 train.py", 2),
        ("torchrun --nproc-per-node 4 --nproc-per-node 8 train.py", 8),
        ("NCCL_DEBUG=INFO torchrun -t 3 --nproc-per-node 2 train.py", 2),
        ("python -m torch.distributed.run --nproc-per-node 8 train.py", 8),
        ("python3.12 -u -m torch.distributed.run --standalone --nproc-per-node=8 -m train", 8),
    ],
)
def test_how_many_ranks_a_command_starts(command: str, ranks: int) -> None:
    """In each way that torchrun takes; options of the script do not count."""
    assert ranks_of(command) == ranks


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("torchrun train.py", "--nproc-per-node is missing"),
        ("torchrun train.py --nproc-per-node 4", "--nproc-per-node is missing"),
        ("python train.py", "--nproc-per-node is missing"),
        ("torchrun --nproc-per-node gpu train.py", "--nproc-per-node gpu"),
        ("torchrun --nproc-per-node=auto train.py", "--nproc-per-node auto"),
        ("torchrun --nproc-per-node 1 train.py", "N from 2 to 64"),
        ("torchrun --nproc-per-node 65 train.py", "N from 2 to 64"),
        ("torchrun --nproc-per-node=-2 train.py", "N from 2 to 64"),
        ("torchrun --nproc-per-node ² train.py", "N from 2 to 64"),
        ("torchrun --nnodes 2 --nproc-per-node 4 train.py", "--nnodes 2: leave it out"),
        ("torchrun --nnodes=1:4 --nproc-per-node 4 train.py", "--nnodes 1:4: leave it out"),
    ],
)
def test_a_command_without_a_number_of_ranks_is_refused(command: str, said: str) -> None:
    with pytest.raises(Misconfigured) as caught:
        ranks_of(command)
    assert said in str(caught.value)


@pytest.mark.parametrize("hosts", [0, -1, 3, 8])
def test_hosts_have_equal_parts_of_the_ranks(hosts: int) -> None:
    with pytest.raises(Misconfigured, match=f"--hosts {hosts}: 4 ranks cannot be divided"):
        api.rehearse("torchrun --nproc-per-node 4 train.py", device="cpu", hosts=hosts)


def test_a_time_of_nothing_is_refused() -> None:
    """Before a process is started; `nan`, too, after which no rank would ever hang."""
    for seconds in (0.0, -3.0, float("nan")):
        with pytest.raises(Misconfigured, match="must be more than 0"):
            api.rehearse("torchrun --nproc-per-node 4 train.py", device="cpu", timeout_s=seconds)


def gpus(monkeypatch: pytest.MonkeyPatch, *free: int) -> None:
    """This machine has GPUs with so many bytes free."""
    monkeypatch.setattr(api, "visible_gpus", lambda: ("NVIDIA H200",) * len(free))
    monkeypatch.setattr(api, "free_bytes", lambda index: free[index])


def test_gpus_are_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are ranks at most; none on CPUs, whatever there is."""
    gpus(monkeypatch, 8 * GIB, 8 * GIB, 0)
    assert api._gpus(None, 2) == ("NVIDIA H200",) * 2
    assert api._gpus("cpu", 2) == ()
    with pytest.raises(Misconfigured, match="--device tpu: choose cuda or cpu"):
        api._gpus("tpu", 2)


def test_gpus_without_room_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each for the ranks that it gets: three of five on the first, two on the second."""
    gpus(monkeypatch, 3 * GIB, 2 * GIB)
    assert len(api._gpus("cuda", 5)) == 2
    gpus(monkeypatch, 3 * GIB, 2 * GIB - 1)
    with pytest.raises(Unsupported, match=r"GPU 1 \(NVIDIA H200\) has 2.0 GiB free, and 2 ranks take 1 GiB each"):
        api._gpus(None, 5)


def no_driver() -> NoReturn:
    raise Unsupported("no CUDA driver")


@pytest.mark.parametrize("found", [no_driver, lambda: ()])
@pytest.mark.parametrize("device", [None, "cuda"])
def test_no_gpu_is_told(
    monkeypatch: pytest.MonkeyPatch, found: Callable[[], tuple[str, ...]], device: str | None
) -> None:
    monkeypatch.setattr(api, "visible_gpus", found)
    with pytest.raises(Unsupported, match="no GPU here; --device cpu"):
        api._gpus(device, 2)


def test_what_ranks_leave_is_read(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """They get the task and what the user set; a rank without a report is missing, and all that they print is shown."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")

    def run_ranks(run: RunCommand, program: str, **given: Any) -> None:
        task = msgspec.json.decode(Path(given["variables"][TASK_VARIABLE]).read_bytes(), type=RehearsalTask)
        folder = Path(task.folder)
        assert (folder, task.world_size, task.ranks_per_host, task.gpus) == (given["folder"], 4, 2, ())
        assert (given["variables"]["OMP_NUM_THREADS"], given["variables"]["A"]) == ("3", "b")
        assert (str(run), program) == ("torchrun --nproc-per-node 4 train.py", REHEARSED)
        (folder / "reports").mkdir()
        for rank in (0, 1, 3):
            report = RankReport(rank=rank, steps=5 - rank, peak_bytes=0, reports={}, calls={}, members={})
            (folder / f"reports/rank{rank}.json").write_bytes(msgspec.json.encode(report))
        (folder / "script.log").write_bytes(b"loss 1.0")
        assert given["progress"]() == (0, 8)  # no rank has ended a step
        (folder / "script.log").write_bytes(b"loss 1.0, 0.5")

    monkeypatch.setattr(api, "run_ranks", run_ranks)
    found = api.rehearse("A=b torchrun --nproc-per-node 4 train.py", device="cpu", hosts=2, echo=True)
    assert (found.steps, found.missing_ranks, found.hosts, found.device) == (2, (2,), 2, "cpu")
    assert capfdbinary.readouterr().out == b"loss 1.0, 0.5"
