"""The page of a diagnosis as text: its data, its size, its colours."""

import json
import re
from pathlib import Path

import msgspec
import pytest

from counterpoint.records.diagnosis import Diagnosis, TimelineLane
from counterpoint.rendering.diagnosis_html import write_html
from tests.support import example_diagnosis as example


def page(folder: Path, diagnosis: Diagnosis, lanes: list[TimelineLane]) -> str:
    write_html(folder / "report.html", diagnosis, lanes)
    return (folder / "report.html").read_text("utf-8")


def test_embedded_data_is_json_that_cannot_end_its_element(
    tmp_path: Path, hostile: tuple[Diagnosis, list[TimelineLane]]
) -> None:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page(tmp_path, *hostile), re.DOTALL)
    assert found is not None
    assert "<" not in found.group(1)
    assert json.loads(found.group(1))["labels"][0].startswith("<script>alert(1)</script>\\x1b[31m")


def test_name_with_a_lone_surrogate_is_written(tmp_path: Path, training: Diagnosis) -> None:
    assert "\\udc80" in page(tmp_path, msgspec.structs.replace(training, verdict="\udc80"), [])


def test_page_is_small_besides_its_spans(tmp_path: Path, training: Diagnosis) -> None:
    """Sixteen bytes a span, and a quarter of a megabyte."""
    lanes = example.lanes(10_000)
    spans = sum(len(lane.start_us) for lane in lanes)
    assert len(page(tmp_path, training, lanes).encode()) < 16 * spans + 250_000


def test_long_list_of_collectives_is_cut_and_says_so(tmp_path: Path, training: Diagnosis) -> None:
    many = training.collectives * 10
    text = page(tmp_path, msgspec.structs.replace(training, collectives=many), [])
    assert "The 300 most exposed of 480 collectives" in text


def test_many_ranks_have_their_waits_summed_up(tmp_path: Path, training: Diagnosis) -> None:
    ranks = tuple(range(32))
    text = page(tmp_path, msgspec.structs.replace(training, ranks=ranks, world_size=32), [])
    assert "longest wait" in text
    assert "wait 31" not in text


def test_a_page_of_100k_spans_stays_below_two_megabytes(tmp_path: Path, training: Diagnosis) -> None:
    write_html(tmp_path / "report.html", training, example.lanes(100_000))
    assert (tmp_path / "report.html").stat().st_size < 2e6


def luminance(colour: str) -> float:
    """WCAG 2 relative luminance of `#rgb` or `#rrggbb`."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


PARTS = ["compute", "overlapped", "transfer", "wait", "memcpy", "idle"]
ON_PAPER = [(text, back) for text in ("ink", "soft", "accent", "high", "medium", "low") for back in ("paper", "panel")]


@pytest.fixture(scope="module")
def schemes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """The colours of the page by name, light and dark."""
    text = page(tmp_path_factory.mktemp("page"), example.training(), example.lanes())
    roots = re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]+);", root)) for root in roots]


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(("text_colour", "background"), ON_PAPER + [(f"on-{part}", part) for part in PARTS])
def test_text_has_the_contrast_of_wcag_aa(
    schemes: list[dict[str, str]], scheme: int, text_colour: str, background: str
) -> None:
    low, high = sorted(luminance(schemes[scheme][name]) for name in (text_colour, background))
    assert (high + 0.05) / (low + 0.05) >= 4.5
