"""Machine facts: where a profile comes from, what it says of figures that are another GPU's, and what is refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from counterpoint.errors import Misconfigured
from counterpoint.machine import profile
from counterpoint.machine.profile import (
    GROUPS,
    VARIABLE,
    default_profile,
    profile_json,
    profile_of,
    read_profile,
    shipped_profile,
)

SHIPPED = Path(profile.__file__).with_name("profiles")
Change = Callable[[dict[str, Any]], object]


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., Path]:
    """Write the profile of H200, changed, to a file."""

    def write(*changes: Change) -> Path:
        content = json.loads((SHIPPED / "h200.json").read_text())
        for change in changes:
            change(content)
        path = tmp_path / "mine.json"
        path.write_text(json.dumps(content))
        return path

    return write


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_files_are_profiles(path: Path) -> None:
    assert read_profile(path).gpu.lower() == path.stem


def test_a_measured_gpu_assumes_nothing() -> None:
    h200 = shipped_profile("NVIDIA H200")
    assert (h200.note(), str(h200)) == ("", "measured on H200, 2026-11-21")


@pytest.mark.parametrize(
    ("gpu", "note"),
    [
        ("NVIDIA H100 80GB HBM3", "H100, assumed: sums, efficiency of H200"),
        ("NVIDIA A100-SXM4-80GB", "A100, assumed: sums of H200"),
        ("A800", "A800, assumed: sums of H200; efficiency of A100"),
        ("NVIDIA H20", "H20, assumed: sums, efficiency of H200"),
        ("some\x1b[31mthing", "some\\x1b[31mthing, assumed: sums, efficiency of H200"),
        (None, "this device, assumed: sums, efficiency of H200"),
    ],
)
def test_what_was_not_measured_is_said(gpu: str | None, note: str) -> None:
    found = shipped_profile(gpu).note(("sums", "efficiency"))
    assert found == f"not measured on {note} (docs/reference/profile.md)"


def test_a_file_of_ones_own_comes_first(written: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    mine = written(lambda content: content["rates"].update(copy_us=9.0))
    assert profile_of("NVIDIA H200", mine).rates.copy_us == 9.0
    monkeypatch.setenv(VARIABLE, str(mine))
    assert profile_of("NVIDIA H200").rates.copy_us == 9.0
    assert profile_of("NVIDIA H200", SHIPPED / "h200.json").rates.copy_us == 6.7


def test_groups_that_a_file_leaves_out_are_assumed(written: Callable[..., Path]) -> None:
    mine = read_profile(written(lambda content: [content.pop(each) for each in ("sums", "same_chip")], of("B200")))
    assert mine.sums == default_profile().sums
    assert mine.note() == "not measured on B200, assumed: sums of H200 (docs/reference/profile.md)"


def test_parts_that_a_file_leaves_out_are_assumed(written: Callable[..., Path]) -> None:

    def some(content: dict[str, Any]) -> None:
        content["efficiency"] = {"matmul": 0.5, "source": "mine", "date": "2026-12-01"}
        content["mechanisms"] = {"nccl": content["mechanisms"]["nccl"] | {"compute_kept": 0.5}}

    mine, shipped = read_profile(written(some, of("B200"))), shipped_profile("B200")
    assert (mine.efficiency.matmul, mine.efficiency.fp8) == (0.5, shipped.efficiency.fp8)
    assert (mine.mechanisms["nccl"].compute_kept, mine.mechanisms["zero_sm"]) == (0.5, shipped.mechanisms["zero_sm"])
    assert mine.note() == (
        "not measured on B200, assumed: mechanisms (nccl_zero_cta, nccl_capped, zero_sm, zero_sm_copied) of H200; "
        "efficiency (20 figures) of B200 as shipped (docs/reference/profile.md)"
    )


def test_what_was_shipped_for_the_same_gpu_stands_in_first(written: Callable[..., Path]) -> None:
    """Not what was measured on H200; and it is said."""
    mine = read_profile(written(lambda content: content.pop("efficiency"), of("A100")))
    assert mine.efficiency == shipped_profile("A100").efficiency
    assert str(mine) == (
        "measured on A100, 2026-11-21; not in the file, assumed: efficiency of A100 as shipped "
        "(docs/reference/profile.md)"
    )


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.json")), ids=lambda path: path.stem)
def test_a_written_profile_is_read_again(path: Path, tmp_path: Path) -> None:
    mine = msgspec.structs.replace(read_profile(path), left_out={"sums": "no GPU"})
    (tmp_path / "mine.json").write_bytes(profile_json(mine))
    assert read_profile(tmp_path / "mine.json") == mine


def test_assumed_figures_are_not_written(written: Callable[..., Path]) -> None:
    """Who reads a file takes what it holds for measured."""
    mine = read_profile(written(lambda content: content.pop("sums"), of("B200")))
    assert {"sums", "measured_on", "left_out"}.isdisjoint(json.loads(profile_json(mine)))


def test_a_profile_of_another_device_is_refused(written: Callable[..., Path]) -> None:
    """One of CPUs is taken where there is no GPU."""
    with pytest.raises(Misconfigured, match=r"mine\.json is a profile of H200, and this GPU is NVIDIA B200: give"):
        profile_of("NVIDIA B200", written())
    mine = written(of("CPU"))
    assert profile_of(None, mine).gpu == "CPU"
    with pytest.raises(Misconfigured, match=r"mine\.json is a profile of CPU, and this GPU is NVIDIA H200"):
        profile_of("NVIDIA H200", mine)


def test_the_digest_is_of_figures(written: Callable[..., Path]) -> None:
    digest = default_profile().digest
    about = {"source": "mine", "date": "2026-12-01", "time_spread": 0.1}
    same = written(of("B200"), lambda content: content["rates"].update(about))
    assert read_profile(same).digest == digest
    changes: list[Change] = [
        lambda content: content["mechanisms"]["nccl"]["hidden"].update(all_gather=0.4),
        lambda content: content["nccl"]["crossover_bytes"].update(all_gather=1),
        lambda content: content["rates"].update(signal_us=4.2),
    ]
    others = {read_profile(written(change)).digest for change in changes}
    assert (len(others), digest in others) == (len(changes), False)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: content["rates"].update(copy_us=-1), r"Expected `float` >= 0(.0)? - at `\$.rates.copy_us`"),
        (lambda content: content["rates"].update(push_gb_per_s=0), r"`float` > 0(.0)? - at `\$.rates.push_gb_per_s`"),
        (lambda content: content["rates"].update(copy_us="6"), r"Expected `float`, got `str` - at `\$.rates.copy_us`"),
        (lambda content: content["rates"].pop("copy_us"), "missing required field `copy_us`"),
        (lambda content: content["rates"].update(copy_ms=1), "unknown field `copy_ms`"),
        (lambda content: content.update(rate={}), "unknown field `rate`"),
        (lambda content: content.update(measured_on={}), "unknown field `measured_on`"),
        (lambda content: content["nccl"]["crossover_bytes"].update(a2a=1), "Invalid enum value 'a2a'"),
        (lambda content: content["chip"].update(date=""), "chip has no source or no date: give both"),
        (lambda content: content["efficiency"].update(tiles=[]), "Expected `array` of length >= 1"),
        (lambda content: content["efficiency"].pop("source"), "efficiency has no source or no date: give both"),
        (lambda content: content.update(efficiency=[]), "Expected `object`, got `array`"),
        (lambda content: content.update(mechanisms={"mine": {}}), "missing required field `compute_kept`"),
        (lambda content: content["rates"].update(time_spread=-1), r"`float` >= 0(.0)? - at `\$.rates.time_spread`"),
        (lambda content: content.update(left_out={"sums": 3}), "Expected `str`, got `int`"),
        (lambda content: content.update(left_out={"sums": "\x1b[2J"}), "characters that cannot be printed"),
        (lambda content: content.update(gpu="\u202eH200"), "characters that cannot be printed"),
        (lambda content: content["rates"].update(source="one\ntwo"), "characters that cannot be printed"),
        (lambda content: content.update(gpu=7), "Expected `str`, got `int`"),
    ],
)
def test_a_file_that_is_no_profile_is_refused(written: Callable[..., Path], change: Change, said: str) -> None:
    with pytest.raises(Misconfigured, match=f"mine.json is no profile: .*{said}") as raised:
        read_profile(written(change))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no profile: Input data was truncated"),
        (b"[1]", "is no profile: Expected `object`, got `array`"),
        (b"\xff\xfe", "is no profile: "),
        (b'{"gpu": "\x1b[2J"}', "is no profile: "),
        (b"[" * 100_000, "is no profile: "),
        (b" " * (profile.MAX_BYTES + 1), "larger than 262144 bytes"),
        (b'{"gpu": "H200", "rates": {"push_gb_per_s": 1e999}}', "is no profile: "),
    ],
    ids=["empty", "a list", "bytes", "control characters", "deep", "large", "infinite"],
)
def test_hostile_files_are_one_line(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "hostile.json"
    path.write_bytes(content)
    with pytest.raises(Misconfigured, match=said) as raised:
        read_profile(path)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("name", ["nowhere.json", ".", "a\0b"])
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(Misconfigured, match="give a profile as JSON") as raised:
        read_profile(tmp_path / name)
    assert str(raised.value).isprintable()


def test_an_empty_path_is_refused() -> None:
    """It is no way to say that there is none, and a variable that was not set ends in it."""
    with pytest.raises(Misconfigured, match="an empty path of a profile: give the path of one, or None"):
        profile_of(None, "")


@pytest.mark.parametrize("operation", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_crossovers_are_what_was_measured(operation: str) -> None:
    """Below the crossover NCCL is faster alone, or within 2 %; from it on the library is, or within 1 %."""
    at = default_profile().nccl.crossover_bytes[operation]  # type: ignore[index]
    for size, (nccl_us, own_us) in alone(operation).items():
        assert nccl_us < 1.02 * own_us if size < at else own_us < 1.01 * nccl_us, size


def alone(operation: str) -> dict[int, tuple[float, float]]:
    """Return the times by NCCL and by the fastest of the library's programs, by size."""
    results = Path(__file__).resolve().parents[3] / "results" / "collectives-alone-4xh200.json"
    times: dict[int, dict[bool, list[float]]] = {}
    for row in json.loads(results.read_text())["rows"]:
        name, size, mechanism, us = row[:4]
        if name == operation and mechanism.startswith(("nccl", "own, graph")) and mechanism != "nccl zero-CTA":
            scale = 1 << (10 if size.endswith("KiB") else 20)
            times.setdefault(int(size.split()[0]) * scale, {}).setdefault(mechanism == "nccl", []).append(float(us))
    return {size: (min(by[True]), min(by[False])) for size, by in times.items()}


def of(gpu: str) -> Change:
    return lambda content: content.update(gpu=gpu)


def test_every_group_is_in_the_default() -> None:
    assert set(GROUPS) <= json.loads((SHIPPED / "h200.json").read_text()).keys()
