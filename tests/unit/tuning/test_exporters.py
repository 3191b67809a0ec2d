"""What `tune` chose in the formats of other programs: each is read back by what reads it there."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from counterpoint.errors import Misconfigured
from counterpoint.records.tuning import LEAVE, Tried, Tuned, TunedPair
from counterpoint.tuning.exporters import FORMS, export
from tests.support.example_tuned import example_tuned, hostile_tuned, tuned_pair


def tried(**us: float) -> tuple[Tried, ...]:
    """What was tried, where `max_ctas_8` stands for the mechanism `nccl+max_ctas=8`."""
    return tuple(
        Tried(mechanism=f"nccl+max_ctas={name.rpartition('_')[2]}", us=took, sigma_us=1.0, runs=5)
        for name, took in us.items()
    )


def tuned(*pairs: TunedPair) -> Tuned:
    return replace(example_tuned(), pair=pairs)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_every_pair_and_hostile_names_in_comments_alone(form: str) -> None:
    """By its number and its choice, in a comment."""
    comments = [line.strip() for line in export(hostile_tuned(), form).splitlines() if line.strip().startswith("#")]
    for number, one in enumerate(hostile_tuned().pair, 1):
        assert any(line.startswith(f"# pair {number}, {one.mechanism}: ") for line in comments)
    # lines that begin with # and hold nothing but printable ASCII
    text = export(hostile_tuned(), form)
    assert text.isascii()
    assert all(line.isprintable() for line in text.split("\n"))
    assert "pwned" not in "\n".join(line for line in text.split("\n") if not line.lstrip().startswith("#"))


def test_what_has_no_variable_is_a_comment() -> None:
    """The windows of NCCL's copy engines, and the limit of a GEMM."""
    text = export(tuned(tuned_pair("nccl_zero_cta+gemm_sms=124")), "env")
    assert "# pair 1, nccl_zero_cta+gemm_sms=124: follows; no variable for windows, gemm_sms=124 (" in text
    assert "export NCCL_CTA_POLICY=2\n" in text


def test_pairs_that_disagree_get_what_saves_most_in_a_step() -> None:
    """20 calls that save 10 µs are worth more than one that saves 50; the other pair is named with what it loses."""
    many = tuned_pair("nccl+max_ctas=8", calls=20)
    one = tuned_pair(
        "nccl+max_ctas=16", us=50.0, bytes_per_rank=1 << 24, tried=tried(max_ctas_8=70.0, max_ctas_16=50.0)
    )
    text = export(tuned(many, one), "env")
    assert "export NCCL_MAX_CTAS=8\n" in text
    assert "# pair 2, nccl+max_ctas=16: this costs it 20.0 us (" in text


def test_a_setting_that_costs_other_pairs_more_is_not_exported() -> None:
    """Ten calls that are left would each lose 5 µs, which is more than the 10 µs that one call gains."""
    left = tuned_pair(LEAVE, us=100.0, calls=10, bytes_per_rank=1 << 24, tried=tried(max_ctas_8=105.0))
    text = export(tuned(tuned_pair("nccl+max_ctas=8"), left), "env")
    assert "NCCL_MAX_CTAS" not in text
    assert "# pair 1, nccl+max_ctas=8: this costs it 10.0 us (" in text


def test_marked_times_count_for_nothing() -> None:
    """A time under a knob that did nothing says nothing about that knob."""
    marked = replace(tried(max_ctas_8=1.0)[0], marked="24 CTAs ran")
    text = export(tuned(tuned_pair("nccl+max_ctas=8"), tuned_pair(LEAVE, calls=9, compute="x", tried=(marked,))), "env")
    assert "# pair 2, leave: not measured under this (" in text


def test_the_yaml_has_nothing_but_settings_and_a_maximum_for_a_minimum() -> None:
    """NCCL refuses it without one."""
    assert yaml.safe_load(export(tuned(tuned_pair("nccl+min_ctas=16")), "megatron-yaml")) == {
        "dp_cp": {"max_ctas": 64, "min_ctas": 16}
    }
    # megatron looks up groups in it, which None would not let it
    assert yaml.safe_load(export(tuned(tuned_pair("zero_sm")), "megatron-yaml")) == {}
    assert yaml.safe_load(export(hostile_tuned(), "megatron-yaml")) == {
        "dp_cp": {"is_high_priority_stream": True, "max_ctas": 8}
    }


def nccl_options(group: str, configs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What Megatron's `get_nccl_options` (megatron/core/parallel_state.py, August 2026) makes of such a file."""
    known = {"is_high_priority_stream", "cga_cluster_size", "max_ctas", "min_ctas", "net_name"}
    assert configs[group].keys() <= known
    return {"is_high_priority_stream": configs[group].get("is_high_priority_stream", False)} | configs[group]


def test_megatron_reads_options_by_group() -> None:
    """Gathers are of data parallelism, all-to-alls of expert parallelism; true is a boolean there."""
    alltoall = tuned_pair("nccl+priority=high", operation="all_to_all")
    read = yaml.safe_load(export(tuned(tuned_pair("nccl+max_ctas=8+cga_cluster=2"), alltoall), "megatron-yaml"))
    assert nccl_options("dp_cp", read) == {"max_ctas": 8, "cga_cluster_size": 2, "is_high_priority_stream": False}
    assert nccl_options("ep", read)["is_high_priority_stream"] is True


def test_the_python_form_sets_options_and_reads_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles, and what it runs is what was chosen."""
    import torch.distributed as dist

    import counterpoint

    asked: dict[str, Any] = {}
    monkeypatch.setattr(counterpoint, "overlap", lambda model, **options: asked.update(options) or model, raising=False)
    made = SimpleNamespace(Options=lambda: SimpleNamespace(config=SimpleNamespace()))
    monkeypatch.setattr(dist, "ProcessGroupNCCL", made, raising=False)
    text = export(hostile_tuned(), "python", 'my "best".toml')
    ast.parse(text)
    functions: dict[str, Any] = {}
    exec(compile(text, "exported.py", "exec"), functions)
    options = functions["pg_options"]()
    assert (functions["apply"]("model"), asked) == ("model", {"tuned": 'my "best".toml'})
    assert (options.config.max_ctas, options.is_high_priority_stream) == (8, True)


@pytest.mark.parametrize("form", FORMS)
def test_a_tuning_of_cpus_sets_nothing_of_nccl(form: str) -> None:
    cpu = replace(tuned(tuned_pair("zero_sm", stock="gloo")), made=replace(example_tuned().made, device="cpu"))
    assert "CTAS" not in export(cpu, form).upper().replace("NCCL_MAX_CTAS, ", "")


def test_a_form_names_what_the_machine_has() -> None:
    """Without GPUs there is no NCCL."""
    cpu = replace(example_tuned(), pair=(), made=replace(example_tuned().made, device="cpu", gpu=None, nccl=None))
    assert "NCCL None" not in export(cpu, "env")


def test_a_mechanism_or_form_that_there_is_not_is_refused() -> None:
    with pytest.raises(Misconfigured, match=r"mechanism 'rm -rf': allowed are leave, nccl, nccl_zero_cta"):
        export(tuned(tuned_pair("rm -rf")), "env")
    with pytest.raises(Misconfigured, match="mechanism '\\$\\(x\\)': allowed are leave, torch"):
        export(tuned(tuned_pair("$(x)", operation="exchange")), "env")
    with pytest.raises(Misconfigured, match="no form 'yaml'; choose from: env, megatron-yaml, python"):
        export(example_tuned(), "yaml")
