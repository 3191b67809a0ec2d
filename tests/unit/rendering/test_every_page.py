"""What every page must do: stay small, ask for nothing, let no script run but its own, and keep names inert."""

import base64
import hashlib
import re
from html.parser import HTMLParser
from itertools import pairwise

import pytest

from tests.support.pages import PAGES

ATTRIBUTES_THAT_LOAD = {"src", "href", "srcset", "data", "poster", "action", "background"}


class Elements(HTMLParser):
    """Every element of a page, in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for each, attrs in self.found if each == tag]


@pytest.fixture(name="text", scope="module", params=list(PAGES))
def text_fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "page.html"
    PAGES[request.param](path)
    return path.read_text("utf-8")


@pytest.fixture(name="elements")
def elements_fixture(text: str) -> Elements:
    return Elements(text)


def test_the_policy_comes_first_forbids_all_and_names_the_hash_of_every_script(text: str, elements: Elements) -> None:
    """No directive reaches the network."""
    assert [tag for tag, _ in elements.found[:5]] == ["html", "head", "meta", "meta", "meta"]
    metas = elements.of("meta")
    policy = next(it["content"] or "" for it in metas if it.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; ")
    assert not re.search(r"https?:|\*|'self'|'unsafe-eval'|script-src[^;]*'unsafe-inline'", policy)
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(digests) in (1, 2)
    assert [digest for digest in digests if f"'sha256-{digest}'" not in policy] == []


def test_nothing_is_loaded(elements: Elements) -> None:
    loads = [(tag, k, v) for tag, attrs in elements.found for k, v in attrs.items() if k in ATTRIBUTES_THAT_LOAD]
    assert loads == [("a", "href", "#main")]


def test_a_hostile_name_makes_no_element_and_no_control_character(text: str, elements: Elements) -> None:
    """Nor does an attribute hold it; the scripts are ours, and one element of data."""
    scripts = text.count("<script>")
    assert [tag for tag, _ in elements.found if tag in ("img", "script")] == ["script"] * (scripts + 1)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u2028\u2029]", text)
    assert not re.search(r'="[^"]*(pwned|alert\(1\))', text)


def test_headings_descend_without_gaps(elements: Elements) -> None:
    levels = [int(tag[1]) for tag, _ in elements.found if re.fullmatch("h[1-6]", tag)]
    assert (levels[0], levels.count(1)) == (1, 1)
    assert all(later - earlier <= 1 for earlier, later in pairwise(levels))


def test_readers_of_screens_find_their_way(elements: Elements) -> None:
    """Tables have captions and scoped heads, pictures labels, and no id is given twice."""
    assert len(elements.of("caption")) == len(elements.of("table"))
    assert all("scope" in attrs for attrs in elements.of("th"))
    pictures = [attrs for _, attrs in elements.found if attrs.get("role") == "img"]
    assert all(attrs.get("aria-label") or attrs.get("aria-labelledby") for attrs in pictures)
    ids = [attrs["id"] for _, attrs in elements.found if "id" in attrs]
    assert len(ids) == len(set(ids))
    named = {attrs["aria-labelledby"] for _, attrs in elements.found if "aria-labelledby" in attrs}
    assert named <= set(ids)


def test_the_plotting_library_is_there_once_with_its_licence_where_something_is_drawn(text: str) -> None:
    """A page without a figure has a few tens of kilobytes and names no other host."""
    assert text.count("https://github.com/leeoniya/uPlot (v1.6.32)") == text.count("Copyright (c) 2022 Leon Sorokin")
    if "leeoniya" not in text:
        assert len(text) < 60_000
        assert not re.search(r"https?://", text)
    else:
        assert text.count("Copyright (c) 2022 Leon Sorokin") == 1
