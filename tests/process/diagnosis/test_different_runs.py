"""Ranks of two recordings put together are told apart from ranks of one."""

import shutil
from pathlib import Path

import pytest

from counterpoint.diagnosis.api import diagnose
from counterpoint.errors import BadTrace
from tests.support.kineto_trace import H200, annotation, header, kernel, metadata, op, param_comms, write

SAMPLES = Path(__file__).resolve().parents[3] / "samples"


def mixed(folder: Path, ranks: dict[str, list[int]]) -> Path:
    for sample, chosen in ranks.items():
        for rank in chosen:
            shutil.copy(SAMPLES / sample / f"rank{rank}.json.gz", folder)
    return folder


def test_two_runs_of_the_same_program(tmp_path: Path) -> None:
    """Their collectives have the same names and sizes, but no clock fits both."""
    with pytest.raises(BadTrace, match="ranks of different runs"):
        diagnose(mixed(tmp_path, {"fsdp-healthy": [0, 1, 2, 3], "fsdp-host-stall": [4, 5, 6, 7]}))


def test_two_programs(tmp_path: Path) -> None:
    """Their groups have the same name and ranks, but no collective in common."""
    with pytest.raises(BadTrace, match=r"rank1\.json\.gz.*none of its collectives"):
        diagnose(mixed(tmp_path, {"fsdp-healthy": [0], "tail-effect": [1]}))


def test_some_ranks_of_one_run(tmp_path: Path) -> None:
    diagnosis = diagnose(mixed(tmp_path, {"fsdp-healthy": [1, 2, 6]})).diagnosis
    assert (diagnosis.ranks, diagnosis.missing_ranks) == ((1, 2, 6), (0, 3, 4, 5, 7))


def recorded(folder: Path, *, every_us: float, on_gpus: bool) -> Path:
    """Write 30 collectives of two ranks, the second of which is slower by 1.2 %: no clock is so wrong."""
    for rank, scale in enumerate((1.0, 1.012)):
        events = []
        for n in range(30):
            at, facts = scale * n * every_us, metadata("allreduce", seq=n)
            events += [op("aten::mm", at, 100.0), param_comms(at + 150, 10.0, external=n, more=facts)]
            if on_gpus:
                events.append(kernel("ncclDevKernel_AllReduce", at + 200, 1000.0, external=n, more=facts))
            else:
                events.append(annotation("gloo:all_reduce", at + 200, 1000.0, tid=99))
        write(folder / f"rank{rank}.json", events, header(rank=rank, devices=(H200,) if on_gpus else ()))
    return folder


def test_late_threads_of_a_loaded_host_are_one_run(tmp_path: Path) -> None:
    """Their collectives end later and later, by 3.5 ms within 0.3 s: no drift of a clock."""
    diagnosis = diagnose(recorded(tmp_path, every_us=10_000.0, on_gpus=False)).diagnosis
    assert diagnosis.clock_drift_ppm == {"0": 0.0, "1": 0.0}


@pytest.mark.parametrize(("every_us", "on_gpus"), [(1_000_000.0, False), (10_000.0, True)])
def test_what_no_late_thread_explains_is_another_run(tmp_path: Path, every_us: float, *, on_gpus: bool) -> None:
    """By 0.35 s within half a minute, or on GPUs, which do not wait for a core."""
    with pytest.raises(BadTrace, match=r"ranks of different runs: its clock would have to be off by 1.* ppm"):
        diagnose(recorded(tmp_path, every_us=every_us, on_gpus=on_gpus))
