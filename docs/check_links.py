"""Check every relative link and anchor of the Markdown pages: `make docs`. Links to other sites are not followed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"!?\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)|(?:src|href)=\"([^\"]+)\"")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
ANCHOR = re.compile(r"<a (?:id|name)=\"([^\"]+)\"")
ELSEWHERE = re.compile(r"^(?:[a-z]+:|//)")


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("samples/**/*.md")])


def anchors(page: Path) -> set[str]:
    """What `#...` may name on this page, spelled as GitHub does; a repeated heading gets -1, -2, ..."""
    text = FENCE.sub("", page.read_text())
    found: set[str] = set(ANCHOR.findall(text))
    for heading in HEADING.findall(text):
        words = re.sub(r"!?\[([^\]]*)\]\([^)]*\)|`", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        again = 0
        while (name := f"{slug}-{again}" if again else slug) in found:
            again += 1
        found.add(name)
    return found


def broken(page: Path) -> list[str]:
    """The links of this page that lead nowhere, each with its line."""
    text = page.read_text()
    for pattern in (FENCE, CODE):  # blank code out, keep the lines
        text = pattern.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    wrong = []
    for match in LINK.finditer(text):
        link = match[1] or match[2]
        if ELSEWHERE.match(link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        missing = not target.exists() or not target.is_relative_to(ROOT)
        if missing or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            line = text.count("\n", 0, match.start()) + 1
            wrong.append(f"{page.relative_to(ROOT)}:{line}: {link} {'is missing' if missing else 'has no such anchor'}")
    return wrong


if __name__ == "__main__":
    problems = [problem for page in pages() for problem in broken(page)]
    print("\n".join(problems) or f"links and anchors of {len(pages())} pages hold")
    sys.exit(bool(problems))
