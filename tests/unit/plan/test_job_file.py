"""A job from TOML, and what is said of one that cannot be."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from counterpoint.errors import Misconfigured
from counterpoint.plan.job.job import Job, parse_job, read_tables

WHOLE = """
[model]
name = "llama3-8b"
[training]
sequence = 4096
global_batch = 64
[parallel]
dp = 8
tp = 2
zero = 3
[cluster]
gpu = "H200"
network = "h200-ndr-400"
[overlap]
mechanism = "zero_sm"
[compression]
method = "powersgd"
rank = 8
"""


def job(text: str) -> Job:
    return parse_job(tomllib.loads(text))


def changed(old: str, new: str) -> str:
    assert old in WHOLE
    return WHOLE.replace(old, new)


def test_names_become_records() -> None:
    read = job(WHOLE)
    assert (read.model.layers, read.cluster.gpu.name, read.cluster.num_gpus) == (32, "H200", 16)
    assert read.mechanism == "zero_sm"
    assert read.compression is not None
    assert read.compression.rank == 8


def test_widths_and_levels_can_be_written_out() -> None:
    read = job("""
model = { layers = 4, hidden = 256, heads = 4, vocab = 1000, experts = { count = 4, per_token = 2, width = 512 } }
training = { sequence = 128, global_batch = 8 }
[cluster]
gpu = { name = "mine", tflops = { bf16 = 100.0 }, sms = 50, memory_gib = 16, memory_gb_per_s = 900 }
[[cluster.levels]]
name = "pcie"
kind = "pcie"
size = 4
gb_per_s = 25
latency_us = 2
""")
    assert read.model.experts is not None
    assert (read.model.experts.count, read.cluster.gpu.name, read.cluster.levels[0].gb_per_s) == (4, "mine", 25.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (changed('name = "llama3-8b"', 'name = "llama9"'), 'model "llama9" is not known; did you mean llama'),
        (changed("dp = 8", "dpp = 8"), "parallel.dpp is not known: give pp, dp, or another of tp"),
        (changed("[overlap]", "[overlapp]"), "overlapp is not known: give overlap, or another of model, training"),
        (changed("dp = 8", 'dp = "eight"'), 'parallel.dp = "eight": give a whole number from 1 to 1,048,576'),
        (changed("dp = 8", "dp = 0"), "parallel.dp = 0: give a whole number from 1 to 1,048,576"),
        (changed("dp = 8", "dp = -8"), "parallel.dp = -8: give a whole number from 1"),
        (changed("tp = 2", "tp = 3"), "parallel.tp = 3 does not divide model.heads = 32"),
        (changed("global_batch = 64", "global_batch = 60"), "does not divide training.global_batch = 60"),
        (changed('"H200"', '"H300"'), "known are A100, A100-40"),
        (changed('network = "h200-ndr-400"', ""), "give either network, a name, or levels"),
        (changed('"h200-ndr-400"', '"token-ring"'), "token-ring"),
        (changed('gpu = "H200"', 'gpu = "H200"\ngpus = 8'), "16 ranks on 8 GPUs"),
        (changed('gpu = "H200"', 'gpu = "H200"\ngpus = 8.5'), "cluster.gpus = 8.5: give a whole number from 1"),
        (changed("rank = 8", "rank = 0"), "compression.rank = 0"),
        (
            changed('method = "powersgd"', 'method = "gzip"'),
            'compression.method = "gzip": give one of powersgd, quantized, randomk, topk',
        ),
        (changed("zero = 3", "zero = 4"), "parallel.zero = 4: give one of 0, 1, 2, 3"),
        (
            changed("dp = 8", 'dp = 8\nexpert_exchange = "push"'),
            'parallel.expert_exchange = "push": give one of all_to_all, by_node, gather, slabs',
        ),
        ('model = "llama3-8b"', "there is no table [training]"),
        (
            changed('[model]\nname = "llama3-8b"', "[model]\nlayers = 3"),
            "model.hidden is missing: give a whole number from 1",
        ),
        (changed('"zero_sm"', '"magic"'), "mechanism = 'magic': known are nccl"),
        (changed('"zero_sm"', "3"), "overlap.mechanism = 3: give a string of 1 to 80 characters"),
    ],
)
def test_what_cannot_be_is_named(text: str, said: str) -> None:
    with pytest.raises(Misconfigured) as raised:
        job(text)
    assert said in str(raised.value)


def test_an_error_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_text("[model\n")
    with pytest.raises(Misconfigured, match=r"job\.toml: not TOML: .*line 1"):
        read_tables(path)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a = " + b"[" * 100_000, b"#" * ((1 << 20) + 1)])
def test_a_hostile_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    with pytest.raises(Misconfigured, match=r"job\.toml"):
        read_tables(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="No such file or directory; give a job as TOML"):
        read_tables(tmp_path / "none.toml")


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(["model", "training", "parallel", "cluster", "overlap", "compression"]), JUNK)
def test_junk_in_a_table_is_an_error_in_words(table: str, junk: object) -> None:
    tables = tomllib.loads(WHOLE) | {table: junk}
    try:
        read = parse_job(tables)
    except Misconfigured:
        return
    assert isinstance(read, Job)
