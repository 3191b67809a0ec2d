"""Training scripts run for `tune --run`: what they give, and in one sentence why they failed."""

import contextlib
import time
from pathlib import Path

import pytest
from msgspec.structs import replace

from counterpoint.errors import CounterpointError, Misconfigured, PeerTimeout
from counterpoint.records.tuning import Tuned, TunedPair
from counterpoint.tuned.file import read_tuned, tuned_toml
from counterpoint.tuning.from_trace import pairs_of_traces
from counterpoint.tuning.script import ScriptComparison
from counterpoint.tuning.script_launch import ScriptResult, ScriptTask, ScriptVariant, launch_script, parse_command
from tests.support.command import HANG_S, Ended, counterpoint
from tests.support.example_tuned import example_tuned
from tests.support.kineto_trace import annotation, header, launched, metadata, op, write

ROOT = Path(__file__).parents[3]
TRAIN_FSDP = f"torchrun --standalone --nproc-per-node 2 {ROOT}/examples/train_fsdp.py --device cpu --steps 500"
LOOP = """
import os, sys, time
import torch
parameter = torch.nn.Parameter(torch.zeros(1))
optimizer = torch.optim.SGD([parameter])
for step in range(1, 40):
    {}
    parameter.sum().backward()
    optimizer.step()
"""


def command(folder: Path, body: str, launcher: str = "python") -> str:
    script = folder / "train.py"
    script.write_text(LOOP.format(body))
    return f"{launcher} {script}"


def run(folder: Path, body: str, *, launcher: str = "python", timeout_s: float = HANG_S, **asked: object) -> None:
    task = replace(ScriptTask(folder=str(folder), variants=(ScriptVariant(name="stock", file=None),)), **asked)
    launch_script(parse_command(command(folder, body, launcher)), task, variables={}, timeout_s=timeout_s)


def test_a_loop_of_one_process_is_timed(tmp_path: Path) -> None:
    """Its arguments and folder are its own; it ends as soon as the rounds are done."""
    (tmp_path / "beside.py").write_text("LAST = 27")
    body = "from beside import LAST; assert __name__ == '__main__' and sys.argv[1:] == ['--lr', '1'] and step <= LAST"
    task = ScriptTask(
        folder=str(tmp_path),
        variants=(ScriptVariant(name="stock", file=None),),
        rounds=5,
        block_steps=3,
        warmup_steps=2,
    )
    found = launch_script(parse_command(f"{command(tmp_path, body)} --lr 1"), task, variables={})
    assert (found.overlap, found.device, found.world_size, len(found.blocks_us[0])) == ("never", "cpu", 1, 5)


@pytest.mark.parametrize(
    ("body", "kind", "said"),
    [
        (
            "assert step < 3, 'no data'",
            PeerTimeout,
            r"rank 0 failed in step 3 of the script: AssertionError: no data; log",
        ),
        ("if step == 4: break", Misconfigured, "the script ended after 3 optimizer steps, and 33 are needed"),
        ("if step == 3: sys.exit(5)", PeerTimeout, r"rank 0 failed in step 3 of the script: RuntimeError: .*exit\(5\)"),
        ("if step == 3: sys.exit()", Misconfigured, "ended after 2 optimizer steps"),
        ("if step == 3: os.kill(os.getpid(), 9)", PeerTimeout, "rank 0 was killed by SIGKILL .* in the script; log"),
        ("step < 3 or os._exit(0)", PeerTimeout, "ended without a step"),
    ],
)
def test_why_a_script_ended(tmp_path: Path, body: str, kind: type[CounterpointError], said: str) -> None:
    """One sentence: which rank, where, what; nothing that was measured is left."""
    with pytest.raises(kind, match=said):
        run(tmp_path, body)
    assert not (tmp_path / "result.json").exists()


@pytest.mark.parametrize("launcher", ["python", "torchrun --standalone --nproc-per-node 2"])
def test_a_script_that_hangs_is_killed(tmp_path: Path, launcher: str) -> None:
    with pytest.raises(PeerTimeout, match="no step of the script's optimizer ended for 1 s"):
        run(tmp_path, "step < 5 or time.sleep(600)", launcher=launcher, timeout_s=1.0)
    until = time.monotonic() + HANG_S
    while running_with(tmp_path) and time.monotonic() < until:  # the kernel kills ranks after their parent
        time.sleep(0.1)
    assert running_with(tmp_path) == []


def running_with(folder: Path) -> list[str]:
    lines = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            lines.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in lines if str(folder) in line]


def test_the_rank_that_was_killed_is_named(tmp_path: Path) -> None:
    body = "if step == 3 and os.environ['RANK'] == '1': os.kill(os.getpid(), 9)\n    time.sleep(0.1)"
    with pytest.raises(PeerTimeout, match="rank 1 was killed by SIGKILL"):
        run(tmp_path, body, launcher="torchrun --standalone --nproc-per-node 2")


def test_a_program_that_is_not_there(tmp_path: Path) -> None:
    task = ScriptTask(folder=str(tmp_path))
    with pytest.raises(Misconfigured, match="/nowhere/torchrun cannot be started"):
        launch_script(parse_command("/nowhere/torchrun train.py"), task, variables={})


def test_recorded_steps_have_pairs(tmp_path: Path) -> None:
    """Two ranks of FSDP2 with gloo: sizes from c10d's operations, matmuls from their inputs."""
    found = launch_script(parse_command(f"{TRAIN_FSDP} --overlap"), ScriptTask(folder=str(tmp_path)), variables={})
    assert (found.overlap, found.world_size) == ("switched", 2)
    pairs, _ = pairs_of_traces(tmp_path)
    assert {"all_gather", "reduce_scatter"} <= {pair.operation for pair in pairs}
    assert {(pair.ranks, pair.dtype) for pair in pairs} == {(2, "float32")}
    assert 393_728 in {pair.bytes_per_rank for pair in pairs}  # a layer of the tiny model


def planted(folder: Path) -> Path:
    """A file that gathers layers of the tiny model by copies, made on this machine."""
    import torch

    from counterpoint.version import VERSION

    made = replace(
        example_tuned().made, device="cpu", gpu=None, nccl=None, torch=str(torch.__version__), counterpoint=VERSION
    )
    pair = TunedPair(
        operation="all_gather", compute="gemm 256x384x128", bytes_per_rank=393_728, ranks=2, dtype="float32",
        mechanism="zero_sm", why="planted", us=1.0, sigma_us=0.1, stock="gloo", stock_us=2.0, stock_sigma_us=0.1,
    )  # fmt: skip
    path = folder / "planted.toml"
    path.write_text(tuned_toml(Tuned(seconds=1.0, profile="0", made=made, pair=(pair,))))
    return path


def test_variants_run_in_turns_in_one_process(tmp_path: Path) -> None:
    """FSDP2 is switched between torch and the choices of a file, on both ranks at the same steps."""
    variants = (ScriptVariant(name="stock", file=None), ScriptVariant(name="tuned", file=str(planted(tmp_path))))
    task = ScriptTask(folder=str(tmp_path), variants=variants, block_steps=2, rounds=5)
    found = launch_script(parse_command(f"{TRAIN_FSDP} --overlap"), task, variables={})
    assert [len(times) for times in found.blocks_us] == [5, 5]
    assert min(map(min, found.blocks_us)) > 0
    assert found.followed == {"tuned": "1 of 1 choices followed"}


def test_a_script_without_overlap_runs_each_variant_in_processes_of_its_own(tmp_path: Path) -> None:
    """Stock, tuned, tuned, stock, stock, tuned: its environment names the file, or says that there is none."""
    file = planted(tmp_path)
    run = parse_command(
        command(tmp_path, "step > 1 or print(os.environ['COUNTERPOINT_TUNED'], file=open('seen', 'a'))")
    )
    recorded = ScriptResult(overlap="never", device="cpu", world_size=1)
    compared = ScriptComparison(run, tmp_path, recorded, sets_variables=False, budget_s=0.0)
    with contextlib.chdir(tmp_path):
        variants = (ScriptVariant(name="stock", file=None), ScriptVariant(name="tuned", file=str(file)))
        times = compared.compare(variants)
    assert {name: len(each) for name, each in times.items()} == {"stock": 3, "tuned": 3}
    expected = ["off", str(file), str(file), "off", "off", str(file)]
    assert (tmp_path / "seen").read_text().split() == expected
    assert "the script never calls counterpoint.overlap" in compared.notes[0]


def tune(folder: Path, *arguments: str) -> Ended:
    return counterpoint("tune", *arguments, folder=folder)


def test_a_script_is_tuned(tmp_path: Path) -> None:
    """The example, as its users start it: pairs of its steps, each decided, and whole steps if any was chosen."""
    done = tune(tmp_path, "--run", f"{TRAIN_FSDP} --overlap", "--rounds", "5", "--budget", "5")
    assert done.returncode == 0, done.stderr
    tuned = read_tuned(tmp_path / "counterpoint.toml")
    assert {pair.operation for pair in tuned.pair} >= {"all_gather"}
    assert tuned.step is not None or "nothing to confirm" in " ".join(tuned.notes)


def test_traces_are_tuned(tmp_path: Path) -> None:
    facts = metadata("_allgather_base", nelems=(65_536, 131_072), seq=1)
    tiny = metadata("_allgather_base", nelems=(16, 32), seq=2)
    gather = "ncclDevKernel_AllGather_RING_LL(args)"
    events = [
        annotation("ProfilerStep#1", 0.0, 990.0),
        op("aten::mm", 10.0, 5.0, external=1, dims=[[64, 128], [128, 32]]),
        *launched("nvjet_tst_128x256_NTT", 11.0, 600.0, correlation=1, external=1),
        *launched(gather, 20.0, 500.0, correlation=2, external=2, stream=20, more=facts),
        *launched(gather, 600.0, 5.0, correlation=3, external=3, stream=20, more=tiny),
    ]
    write(tmp_path / "traces" / "rank0.json", events, header())
    done = tune(tmp_path, "traces", "--device", "cpu", "--rounds", "5")
    assert done.returncode == 0, done.stderr
    tuned = read_tuned(tmp_path / "counterpoint.toml")
    assert [(pair.compute, pair.bytes_per_rank, pair.first) for pair in tuned.pair] == [
        ("gemm 64x32x128", 131_072, "compute_first")
    ]
    assert any("less than 4 KiB" in note for note in tuned.notes)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "give one of SOURCE"),
        (["--run", "srun train.py"], "starts with 'srun'"),
        (["--run", "python train.py", "--nproc", "2"], "leave --nproc out"),
        (["pairs.toml", "--run", "python train.py"], "leave SOURCE out"),
    ],
)
def test_wrong_use_is_one_sentence(tmp_path: Path, arguments: list[str], said: str) -> None:
    done = tune(tmp_path, *arguments)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert said in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_script_that_fails_leaves_no_file(tmp_path: Path) -> None:
    done = tune(tmp_path, "--run", command(tmp_path, "assert step < 3, 'no data'"), "-q")
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "no data" in done.stderr
    assert Path(done.stderr.rpartition("log: ")[2].strip()).exists()
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]
