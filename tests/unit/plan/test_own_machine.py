"""A profile of one's own, and mechanisms of single axes."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import shipped_profile
from counterpoint.plan.answer import answer
from counterpoint.plan.job.changes import build_job, swept
from counterpoint.plan.job.job import OVERLAPPED, job_toml, parse_job, read_tables
from counterpoint.plan.step.step import predict_step

TABLES: dict[str, Any] = {
    "model": {"name": "llama3-8b"},
    "training": {"sequence": 8192, "global_batch": 32},
    "parallel": {"dp": 4, "tp": 8, "zero": 3},
    "cluster": {"gpu": "H100", "network": "h100-ndr-400"},
}
MECHANISMS = tuple(shipped_profile("H100").mechanisms)


def profile(path: Path, gpu: str = "H100", matmul: float = 0.7) -> Path:
    """One that says what matmuls reach here, and has a mechanism of its own."""
    shipped = json.loads((Path(__file__).parents[3] / "src/counterpoint/machine/profiles/h200.json").read_text())
    efficiency = shipped["efficiency"] | {"matmul": matmul, "source": "my own cluster", "date": "2026-11-22"}
    own = shipped["mechanisms"]["nccl"] | {"compute_kept": 0.99, "comm_kept": 0.99, "hidden": {}}
    mechanisms = shipped["mechanisms"] | {"my_library": own}
    path.write_text(json.dumps({"gpu": gpu, "efficiency": efficiency, "mechanisms": mechanisms}))
    return path


def us(changes: dict[str, str]) -> float:
    return predict_step(build_job(TABLES, changes)).step_us


def test_ones_own_figures_count(tmp_path: Path) -> None:
    """Matmuls that reach less make the step longer, and the notes say whose figures they are."""
    path = str(profile(tmp_path / "mine.json"))
    found = answer(build_job(TABLES, {"cluster.machine": path}))
    assert found.step_us > us({}) * 1.1
    assert "GPU: my own cluster" in found.notes
    assert f"with figures of {path}, not those whose errors are stated" in found.notes


def test_a_profile_that_has_some_figures_is_enough(tmp_path: Path) -> None:
    """As `tune --machine` writes it; the notes say what is assumed."""
    efficiency = {"matmul": 0.7, "source": "my own cluster", "date": "2026-11-22"}
    (tmp_path / "mine.json").write_text(json.dumps({"gpu": "H100", "efficiency": efficiency}))
    found = answer(build_job(TABLES, {"cluster.machine": str(tmp_path / "mine.json")}))
    assert found.step_us > us({}) * 1.1
    assert any("assumed: mechanisms, efficiency (20 figures) of H200" in note for note in found.notes)


def test_ones_own_mechanism_can_be_asked_for(tmp_path: Path) -> None:
    path = str(profile(tmp_path / "mine.json"))
    assert us({"cluster.machine": path, "mechanism": "my_library"}) < us({"cluster.machine": path})
    with pytest.raises(Misconfigured, match="known are nccl"):
        us({"mechanism": "my_library"})


def test_a_jobs_file_names_a_profile_next_to_it(tmp_path: Path) -> None:
    """Relative to the file, wherever the command runs; other GPUs take none of it."""
    profile(tmp_path / "mine.json")
    (tmp_path / "job.toml").write_text(
        'model.name = "llama3-8b"\ntraining = { sequence = 8192, global_batch = 8 }\nparallel = { dp = 8 }\n'
        'cluster = { gpu = "H100", network = "nvlink-h100", machine = "mine.json" }\n'
    )
    tables = read_tables(tmp_path / "job.toml")
    assert parse_job(tables).profile.efficiency.source == "my own cluster"
    with pytest.raises(Misconfigured, match="is a profile of H100, and this GPU is A100"):
        build_job(tables, {"cluster.gpu": "A100"})


def test_a_written_job_has_its_machine_and_mechanisms(tmp_path: Path) -> None:
    """`--write-job`, read again."""
    path = str(profile(tmp_path / "mine.json"))
    job = build_job(TABLES, {"cluster.machine": path, "overlap.dp": "my_library"})
    assert parse_job(tomllib.loads(job_toml(job))) == job


@pytest.mark.parametrize("content", ["", "{", "[]", '{"gpu": "H100", "efficiency": {"matmul": NaN}}', "\0\1\2"])
def test_no_profile_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "mine.json").write_text(content)
    for name in ("mine.json", "none.json", "."):
        with pytest.raises(Misconfigured, match=r"cluster\.machine = ") as error:
            us({"cluster.machine": str(tmp_path / name)})
        assert str(error.value).isprintable()


@pytest.mark.parametrize("mechanism", [*MECHANISMS, "ideal", "serial"])
@pytest.mark.parametrize("field", ["mechanism", "overlap.mechanism", "overlap.dp", "overlap.tp"])
def test_every_mechanism_can_be_asked_for(mechanism: str, field: str) -> None:
    changed = us({field: mechanism})
    assert (changed == us({})) == (mechanism == "nccl")


def test_a_mechanism_of_every_axis_is_that_of_all() -> None:
    """The flag for all replaces those of single axes in the file, and a field beside it stands."""
    each = us({f"overlap.{axis}": "zero_sm" for axis in OVERLAPPED})
    serial = build_job(TABLES | {"overlap": {"dp": "serial"}}, {"mechanism": "zero_sm"})
    assert each == us({"mechanism": "zero_sm"}) == predict_step(serial).step_us
    assert us({"overlap.dp": "serial", "mechanism": "zero_sm"}) > each


def test_a_sweep_varies_the_mechanism_of_an_axis() -> None:
    jobs = dict(swept(TABLES, {}, "overlap.dp", ["nccl", "zero_sm", "magic"]))
    found = {name: job if isinstance(job, Misconfigured) else job.mechanism_of("dp") for name, job in jobs.items()}
    assert (found["nccl"], found["zero_sm"]) == ("nccl", "zero_sm")
    assert "mechanism = 'magic'" in str(found["magic"])


def test_axes_that_nothing_overlaps_have_no_mechanism() -> None:
    """Contexts are waited for: another mechanism would change nothing."""
    with pytest.raises(Misconfigured, match=r"overlap.cp is not known: give one of mechanism, dp, tp, ep"):
        us({"overlap.cp": "zero_sm"})
