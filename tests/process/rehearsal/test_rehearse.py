"""`counterpoint rehearse` with real ranks on CPUs: what a script does there, and how ranks that go wrong are named."""

import json
from pathlib import Path

import msgspec
import pytest

from counterpoint.records.rehearsal import Rehearsal
from tests.support.command import Ended, counterpoint

TRAINING = Path(__file__).with_name("rehearsed_training.py")
BEGIN = """
import atexit, os, subprocess, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
dist.barrier()
print("begun", flush=True)
"""
END = "\ndist.destroy_process_group()\n"


def rehearse(folder: Path, command: str, *options: str) -> Ended:
    return counterpoint("rehearse", "--device", "cpu", *options, command, folder=folder)


def rehearsed(folder: Path, body: str, *options: str, ranks: int = 2) -> Ended:
    (folder / "train.py").write_text(body)
    return rehearse(folder, f"torchrun --standalone --nproc-per-node {ranks} train.py", *options)


@pytest.fixture(scope="module", params=[1, 2])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Ended, Rehearsal]:
    """A training of four ranks on one host, and on two; what is printed, and the answer."""
    folder = tmp_path_factory.mktemp("trained")
    options = "--hosts", str(request.param), "--json", "answer.json"
    ended = rehearse(folder, f"torchrun --standalone --nproc-per-node 4 {TRAINING}", *options)
    assert (ended.returncode, ended.stderr) == (0, "")
    return request.param, ended, msgspec.json.decode((folder / "answer.json").read_bytes(), type=Rehearsal)


def test_losses_are_those_of_torch(trained: tuple[int, Ended, Rehearsal]) -> None:
    """Of FSDP2 or HSDP with `overlap`, and of DDP by the backend; sums of four numbers may round in another order."""
    [line] = [line for line in trained[1].stdout.splitlines() if line.startswith("{")]
    found = json.loads(line)
    assert len(found["fsdp"]) == 3
    for name in ("fsdp", "ddp"):
        assert found[f"{name} by counterpoint"] == pytest.approx(found[name], rel=1e-6)


def test_ranks_count_as_those_of_hosts(trained: tuple[int, Ended, Rehearsal]) -> None:
    """The backend copies within one host, and sends between two; the mesh has two ranks of each."""
    hosts, _, answer = trained
    reports = {report.name: report.text for report in answer.reports}
    assert ("hosts" in reports["CounterpointGroup"], "zero_sm" in reports["CounterpointGroup"]) == (
        hosts == 2,
        hosts == 1,
    )
    assert ("2 x 2" in reports["overlap(Sequential)"]) == (hosts == 2)
    assert (answer.hosts, answer.world_size, answer.device, answer.gpus) == (hosts, 4, "cpu", ())


def test_ranks_that_agree_are_told_once(trained: tuple[int, Ended, Rehearsal]) -> None:
    _, ended, answer = trained
    assert (answer.differences, answer.missing_ranks) == ((), ())
    assert {report.ranks for report in answer.reports} == {(0, 1, 2, 3)}
    assert answer.steps == 12
    printed, _, after = ended.stdout.partition(answer.verdict)
    assert len(printed.splitlines()) == 1  # the losses: neither launcher nor ranks warn of anything
    assert "Different between ranks: nothing." in after
    assert "CounterpointGroup on ranks 0-3:" in after


ODD = """
if rank == 0:
    inner = [
        ["-m", "counterpoint", "rehearse", "torchrun --nproc-per-node 2 train.py"],
        ["-m", "counterpoint", "tune", "--run", "torchrun --nproc-per-node 2 train.py"],
        ["-m", "counterpoint", "tune", "--machine", "--device", "cpu"],
        ["-m", "counterpoint", "measure", "quick", "--device", "cpu"],
        ["-m", "counterpoint.measurement.worker", "nowhere.json"],
    ]
    for words in inner:
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True)
        print("inner", words[2] if words[2:] else "", done.returncode, repr(done.stderr), flush=True)
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
for _ in range(3 - (rank == 2)):
    optimizer.step()
if rank == 0:
    dist.send(torch.ones(1), 1)
    dist.send(torch.ones(1), 2)
else:
    dist.recv(torch.ones(1), 0)
dist.barrier()
dist.destroy_process_group()
dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/again", rank=rank, world_size=3)
dist.barrier()
atexit.register(lambda: print("at exit", flush=True))
dist.destroy_process_group()
sys.exit(0)
"""


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> tuple[Ended, Rehearsal]:
    """Three ranks that differ, on the first of which commands are started; JSON on standard output."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / "job.py").write_text(BEGIN + ODD)
    options = "--json", "answer.json"
    ended = rehearse(folder, "python -m torch.distributed.run --standalone --nproc_per_node=3 -m job", *options)
    assert ended.returncode == 0, ended.stderr
    return ended, msgspec.json.decode((folder / "answer.json").read_bytes(), type=Rehearsal)


def test_ranks_that_differ_are_told(odd: tuple[Ended, Rehearsal]) -> None:
    """In steps, and in calls of a group, though torch was initialised again since and then all was equal."""
    steps, calls = odd[1].differences
    assert steps == "optimizer steps: 3 on ranks 0-1 and 2 on rank 2"
    assert calls.startswith("calls of torch's group 0, ranks 0-2: ")
    assert calls.endswith(" on ranks 1-2")


def test_a_script_ends_as_it_wants(odd: tuple[Ended, Rehearsal]) -> None:
    assert odd[0].stdout.count("at exit") == 3
    assert odd[1].missing_ranks == ()


def test_what_would_measure_times_is_refused(odd: tuple[Ended, Rehearsal]) -> None:
    """Inside a rank, in one sentence each, before anything is read or started."""
    inner = [line for line in odd[0].stdout.splitlines() if line.startswith("inner")]
    said = [
        "rehearse 2 'counterpoint: rehearse: this is a rank of counterpoint rehearse",
        "tune 2 'counterpoint: --run: this is a rank of counterpoint rehearse",
        "tune 2 'counterpoint: RANK=0 is set, so this already is one of several ranks",
        "measure 2 'counterpoint: RANK=0 is set, so this already is one of several ranks",
        "nowhere.json 1 'ranks of a rehearsal share a GPU, so times would be wrong: measure and tune outside",
    ]
    assert [line[6:].startswith(text) for line, text in zip(inner, said, strict=True)] == [True] * 5, inner


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("if rank == 1: raise ValueError('the shard is empty')", "rank 1 failed in step 1 of the script: ValueError: "),
        ("if rank == 1: os.kill(os.getpid(), 9)", "rank 1 was killed by SIGKILL"),
    ],
)
def test_a_rank_that_ends_the_others_is_named(tmp_path: Path, body: str, said: str) -> None:
    """In one sentence, with the log; what the ranks printed stands before it."""
    ended = rehearsed(tmp_path, f"{BEGIN}{body}\ndist.all_reduce(torch.ones(1)){END}")
    assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1), ended.stderr
    assert said in ended.stderr
    assert "begun" in ended.stdout
    assert "begun" in Path(ended.stderr.rpartition("log: ")[2].strip()).read_text()


def test_a_rank_that_hangs_is_named_with_its_place(tmp_path: Path) -> None:
    body = "def load_shard() -> None:\n    time.sleep(600)\nif rank == 1: load_shard()\ndist.all_reduce(torch.ones(1))"
    ended = rehearsed(tmp_path, f"{BEGIN}{body}{END}", "--timeout", "5", "-q")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("counterpoint: no rank printed anything or ended a step for 5 s: ")
    assert "rank 0 was in all_reduce (distributed_c10d.py:" in ended.stderr
    assert "rank 1 was in load_shard (train.py:" in ended.stderr


def test_a_script_that_refuses_to_run_is_quoted(tmp_path: Path) -> None:
    """Without the traceback that Python does not print either; `--json -` prints nothing then."""
    body = "import sys\nsys.exit('no data here: give --data')"
    ended = rehearsed(tmp_path, body, "--json", "-")
    assert (ended.returncode, ended.stdout) == (2, "")
    assert (
        "failed in step 1 of the script: RuntimeError: the script called sys.exit('no data here: give" in ended.stderr
    )
    log = Path(ended.stderr.rpartition("log: ")[2].strip()).read_text()
    assert "leaving_word" not in log


def test_json_is_all_that_is_printed(tmp_path: Path) -> None:
    body = (
        f"{BEGIN}dist.barrier()\nif rank == 1: sys.stdout.flush(); os._exit(0)\ntime.sleep(0.5)\nos.environ['A'] = '1'"
    )
    ended = rehearsed(tmp_path, body + "\nrank or os._exit(0)", "--json", "-")
    assert (ended.returncode, ended.stderr) == (0, "")
    answer = msgspec.json.decode(ended.stdout, type=Rehearsal)
    assert answer.missing_ranks == (0, 1)
    assert answer.verdict.startswith("2 of 2 ranks left no report: ")
