"""The page as text: self-contained, locked, escaped."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from counterpoint.records.diagnosis import Diagnosis, TimelineLane
from counterpoint.rendering.diagnosis_html import write_html
from tests.support import example_diagnosis as example

ATTRIBUTES_THAT_LOAD = {"src", "href", "srcset", "data", "poster", "action", "background"}


class Elements(HTMLParser):
    """Every element of a page, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def page(folder: Path, diagnosis: Diagnosis, lanes: list[TimelineLane]) -> str:
    write_html(folder / "report.html", diagnosis, lanes)
    return (folder / "report.html").read_text("utf-8")


@pytest.fixture
def text(tmp_path: Path, training: Diagnosis, lanes: list[TimelineLane]) -> str:
    return page(tmp_path, training, lanes)


def policy(text: str) -> str:
    metas = [attrs for tag, attrs in Elements(text).found if tag == "meta"]
    return next(attrs["content"] or "" for attrs in metas if attrs.get("http-equiv") == "Content-Security-Policy")


def test_policy_forbids_everything_by_default(text: str) -> None:
    assert policy(text).startswith("default-src 'none'; ")


def test_policy_lets_no_directive_reach_the_network(text: str) -> None:
    assert not re.search(r"https?:|\*|'self'|'unsafe-eval'|script-src[^;]*'unsafe-inline'", policy(text))


def test_policy_names_the_hash_of_every_script(text: str) -> None:
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(digests) == 2
    assert all(f"'sha256-{digest}'" in policy(text) for digest in digests)


def test_policy_stands_before_anything_that_could_load(text: str) -> None:
    tags = [tag for tag, _ in Elements(text).found]
    assert tags[: tags.index("meta") + 3] == ["html", "head", "meta", "meta", "meta"]


def test_no_element_loads_anything(text: str) -> None:
    loads = [(tag, k, v) for tag, attrs in Elements(text).found for k, v in attrs.items() if k in ATTRIBUTES_THAT_LOAD]
    assert loads == [("a", "href", "#main")]


def test_hostile_names_make_no_element(tmp_path: Path, hostile: tuple[Diagnosis, list[TimelineLane]]) -> None:
    found = Elements(page(tmp_path, *hostile)).found
    assert [tag for tag, _ in found if tag in ("img", "script")] == ["script"] * 3


def test_hostile_names_leave_no_control_characters(
    tmp_path: Path, hostile: tuple[Diagnosis, list[TimelineLane]]
) -> None:
    write_html(tmp_path / "report.html", msgspec.structs.replace(hostile[0]), [])
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u2028\u2029]", (tmp_path / "report.html").read_text("utf-8"))


def test_embedded_data_is_json_that_cannot_end_its_element(
    tmp_path: Path, hostile: tuple[Diagnosis, list[TimelineLane]]
) -> None:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page(tmp_path, *hostile), re.DOTALL)
    assert found is not None
    assert "<" not in found.group(1)
    assert json.loads(found.group(1))["labels"][0].startswith("<script>alert(1)</script>\\x1b[31m")


def test_name_with_a_lone_surrogate_is_written(tmp_path: Path, training: Diagnosis) -> None:
    assert "\\udc80" in page(tmp_path, msgspec.structs.replace(training, verdict="\udc80"), [])


def test_headings_descend_without_gaps(text: str) -> None:
    levels = [int(tag[1]) for tag, _ in Elements(text).found if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))


def test_every_table_has_a_caption_and_scoped_headers(text: str) -> None:
    found = Elements(text).found
    tags = [tag for tag, _ in found]
    assert tags.count("caption") == tags.count("table") > 0
    assert all("scope" in attrs for tag, attrs in found if tag == "th")


def test_every_picture_has_a_label(text: str) -> None:
    pictures = [attrs for _, attrs in Elements(text).found if attrs.get("role") == "img"]
    assert len(pictures) == 1
    assert all(attrs.get("aria-label") for attrs in pictures)


def test_ids_are_unique(text: str) -> None:
    ids = [attrs["id"] for _, attrs in Elements(text).found if "id" in attrs]
    assert len(ids) == len(set(ids))


def test_uplot_is_embedded_once_with_its_licence(text: str) -> None:
    assert text.count("https://github.com/leeoniya/uPlot (v1.6.32)") == 1
    assert text.count("Copyright (c) 2022 Leon Sorokin") == 1


def test_page_without_lanes_needs_no_uplot(tmp_path: Path, empty: Diagnosis) -> None:
    text = page(tmp_path, empty, [])
    assert "leeoniya" not in text
    assert len(text) < 60_000


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
