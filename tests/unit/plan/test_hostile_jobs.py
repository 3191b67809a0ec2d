"""Whatever stands in a job's file or behind a flag: a finite prediction, or one line that says what is allowed."""

from __future__ import annotations

import copy
import math
import os
import tomllib
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import msgspec
import pytest

from counterpoint.cli import main
from counterpoint.errors import Misconfigured
from counterpoint.plan.answer import answer
from counterpoint.plan.job.cluster import ClusterGpu, Level
from counterpoint.plan.job.fields import JobRecord
from counterpoint.plan.job.job import ClusterTable, OverlapTable, Ranks, Run, TrainingSoftware, parse_job, read_tables
from counterpoint.plan.job.model import Experts, LatentAttention, Model
from counterpoint.plan.job.parallel import Compression, Parallel, Training

TABLES = tomllib.loads("""
model = { layers = 4, hidden = 256, heads = 4, vocab = 1000, experts = { count = 4, per_token = 2, width = 512 } }
training = { sequence = 128, global_batch = 8 }
parallel = { dp = 2, tp = 2, pp = 2 }
cluster.gpu = { name = "mine", tflops = { bf16 = 100.0 }, sms = 50, memory_gib = 16, memory_gb_per_s = 900 }
cluster.levels = [
    { name = "pcie", kind = "pcie", size = 4, gb_per_s = 25, latency_us = 2 },
    { name = "net", kind = "network", size = 8, gb_per_s = 25, latency_us = 2 },
]
compression = { method = "topk" }
overlap = { mechanism = "zero_sm" }
ranks = { slow = 1.5 }
run = { steps = 100, gpu_mtbf_hours = 1e5 }
software = { name = "Megatron" }
""")
MLA = {"kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32}
PLACES: dict[type[JobRecord], tuple[str | int, ...]] = {
    Model: ("model",), Experts: ("model", "experts"), LatentAttention: ("model", "mla"), Training: ("training",),
    Parallel: ("parallel",), OverlapTable: ("overlap",), ClusterTable: ("cluster",), ClusterGpu: ("cluster", "gpu"),
    Level: ("cluster", "levels", 1), Compression: ("compression",), Ranks: ("ranks",), Run: ("run",),
    TrainingSoftware: ("software",),
}  # fmt: skip
NUMBERS: list[Any] = [math.nan, math.inf, -math.inf, -1, -0.5, 0, 1, 3, 0.5, 2**31, 2**63, 10**4000, 1e300, 5e-324]
OTHERS: list[Any] = [True, "", "x", "\x1b[2J", "x" * 100_000, [], [[1]], {}, {"x": {"y": 1}}, date(2020, 1, 1)]


def fields() -> Iterator[tuple[type[JobRecord], str]]:
    for record in PLACES:
        for name in record.__struct_fields__:
            yield record, name


def with_value(record: type[JobRecord], name: str, value: object) -> dict[str, Any]:
    tables: Any = copy.deepcopy(TABLES)
    if record is LatentAttention:
        tables["model"]["mla"] = MLA.copy()
    place = tables
    for key in PLACES[record]:
        place = place[key]
    place[name] = value
    return dict(tables)


def is_finite(found: object) -> bool:
    """Whether every number of a prediction is finite and none is negative."""
    if isinstance(found, dict | list):
        return all(map(is_finite, found.values() if isinstance(found, dict) else found))
    return not isinstance(found, int | float) or 0 <= found < math.inf


def test_every_record_of_a_job_is_looked_at() -> None:
    assert set(PLACES) == set(JobRecord.__subclasses__())


@pytest.mark.parametrize(("record", "name"), list(fields()), ids=lambda each: getattr(each, "__name__", each))
def test_a_field_is_finite_or_refused(record: type[JobRecord], name: str) -> None:
    for value in NUMBERS + OTHERS:
        try:
            found = answer(parse_job(with_value(record, name, value)))
        except Misconfigured as error:
            line = str(error)
            assert line.isprintable()
            assert len(line) < 600
            assert name in line, (value, line)
        else:
            assert is_finite(msgspec.to_builtins(found)), value
            assert found.step_us > 0


EXAMPLE = Path(__file__).parents[3] / "examples" / "plan" / "llama3-70b-64-gpus.toml"
WHOLE = EXAMPLE.read_bytes()
FILES = {
    "empty": b"",
    "utf-16": WHOLE.decode().encode("utf-16"),
    "latin-1": b"# \xff\n" + WHOLE,
    "nul": WHOLE + b"\0",
    "arrays in each other": b"a = " + b"[" * 1_900,
    "tables in each other": b"[model" + b".a" * 900 + b"]\nb = 1\n",
    "a key of thousands of parts": b".".join([b"a"] * 30_000) + b" = 1\n",
    "many such keys": b"\n".join(b"a" + str(k).encode() + b".a" * 900 + b" = 1" for k in range(60)),
    "a field twice": WHOLE + b"\n[model]\n",
    "10 MB": WHOLE + b"#" * 10_000_000,
    "a number of thousands of digits": WHOLE.replace(b"dp = 8", b"dp = " + b"9" * 1_990),
    "a long hexadecimal number": WHOLE.replace(b"dp = 8", b"dp = 0x" + b"f" * 1_900),
    "a date": WHOLE.replace(b"dp = 8", b"dp = 2020-01-01"),
    "escape in a name": WHOLE.replace(b'"llama3-70b"', b'"\\u001b[2J"'),
    "escape in a field": WHOLE + b'["\\u001b[2J\\n"]\n',
    "an array for a table": b"model = []\n",
}


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> tuple[str, str]:
    """Return standard output and standard error of `counterpoint plan`, which exits with 2."""
    monkeypatch.setattr("sys.argv", ["counterpoint", "plan", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    return said.out, said.err


@pytest.mark.parametrize("content", FILES.values(), ids=FILES.keys())
def test_a_hostile_file_is_one_line(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "job.toml").write_bytes(content)
    out, error = run(capsys, monkeypatch, tmp_path / "job.toml")
    assert (out, error[-1:], error[:-1].isprintable()) == ("", "\n", True)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    """Editors of one system write it."""
    (tmp_path / "job.toml").write_bytes(b"\xef\xbb\xbf" + WHOLE)
    assert read_tables(tmp_path / "job.toml") == read_tables(EXAMPLE)


def test_what_is_no_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe.toml")
    (tmp_path / "loop.toml").symlink_to(tmp_path / "loop.toml")
    for path in (tmp_path, tmp_path / "pipe.toml", tmp_path / "loop.toml", "/dev/zero", "\x1b[2J.toml", "\udcff"):
        out, error = run(capsys, monkeypatch, path)
        assert (out, error[:-1].isprintable()) == ("", True)


FLAGS = """--nodes 0|--nodes nan|--nodes 1e9|--nodes 99999999999999999999|--nodes x|--nodes []|--nodes true
--weak-nodes inf|--gpu {}|--gpu 3|--network []|--mechanism {a=1}|--nodes 4 --weak-nodes 4|--bogus|--nodes
--set parallel.tp|--set parallel=3|--set parallel.tp.x=3|--set x.y=3|--set tp=4|--gpu H200 --set cluster.gpu=H100
--set parallel.schedule=foo|--set parallel.pp=1000|--set training.sequence=9000000000000000000|--set cluster.gpu.sms=0
--set ranks.jitter=nan|--set ranks.jitter=1e300|--set ranks.slow=inf|--set cluster.nic_gbit=nan
--set cluster.nic_gbit=1e300|--set cluster.nic_gbit=1e-300|--set cluster.nics=1.5|--set cluster.nics=BEYOND
--set cluster.failed_nics=8|--set cluster.oversubscription=nan|--set training.global_batch=7
--set training.global_batch=1e300|--set training.global_batch=true|--set training.micro_batch=999999999
--set parallel.bucket_bytes=inf|--set parallel.bucket_bytes=BEYOND|--set training.precision=true
--set training.recompute=[]|--set compression.method=gzip|--set compression.keep=nan|--set compression.rank=0
--set training.local_steps=nan|--set training.asynchronous=maybe|--set run.tokens=nan|--set run.tokens=1e300
--set cluster.machine=/dev/zero|--set cluster.clock_ghz=inf|--set cluster.power_watts=1
--set parallel.tp=2 --set parallel.tp=4|--sweep nodes|--sweep nodes=,|--sweep nodes=1,x|--sweep x=1
--sweep parallel.tp=nan|--explain x|--explain step --search|--json /|--html /nowhere/x|--hosts n[1-8]|--recorded-on x
--top 3|--gpus 8""".replace("\n", "|").replace("BEYOND", "9" * 400)


@pytest.mark.parametrize("flags", FLAGS.split("|"))
def test_a_hostile_flag_is_one_line(
    flags: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Numbers that are none, of another type, too large, too small; flags without what they need, or against others."""
    out, error = run(capsys, monkeypatch, EXAMPLE, *flags.split())
    assert (out, error[-1:], error[:-1].isprintable()) == ("", "\n", True)
    assert error.startswith("counterpoint: ")
