"""Check the pages: links, anchors, files that are named, and the length of README.md (`make docs`).

- Every relative link and anchor of a Markdown page leads somewhere; links to other sites are not followed.
- Every Python file, page and result that a page or a source file names exists.
- README.md has fewer than 150 lines.
"""

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
NAMED = re.compile(r"`((?:[\w-]+/)+[\w-]+\.(?:py|md|toml))`")  # in pages
CITED = re.compile(r"\b((?:docs|results)/[\w/-]+\.(?:md|py|svg|png))\b")  # in sources
README_LINES = 150
FOLDERS = ("src", "tests", "benchmarks", "examples", "docs", "results")
ELSEWHERE = re.compile(r"^(?:[a-z]+:|//)")


def pages() -> list[Path]:
    """Return the Markdown pages that people read."""
    return sorted(
        [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("samples/**/*.md"), *ROOT.glob("examples/*.md")]
    )


def anchors(page: Path) -> set[str]:
    """Return what `#...` may name on this page, spelled as GitHub does; a repeated heading gets -1, -2, ..."""
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
    """Return the links of this page that lead nowhere, each with its line."""
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


def files() -> set[str]:
    """Return the paths of all files of the repository, and every end of each that begins at a folder."""
    kept = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    parts = [path.relative_to(ROOT).parts for path in kept if path.is_file()]
    return {"/".join(path[start:]) for path in parts for start in range(len(path))}


def missing_files() -> list[str]:
    """Return the files that a page or a source file names and that do not exist, each with where it is named."""
    known = files()
    sources = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    named = [(path, name) for path in pages() for name in NAMED.findall(path.read_text())]
    cited = [(path, name) for path in sources for name in CITED.findall(path.read_text())]
    return [f"{path.relative_to(ROOT)}: {name} does not exist" for path, name in (*named, *cited) if name not in known]


def long_readme() -> list[str]:
    """Return a line if README.md is too long."""
    lines = len((ROOT / "README.md").read_text().splitlines())
    return [f"README.md: {lines} lines; fewer than {README_LINES} are allowed"] if lines >= README_LINES else []


if __name__ == "__main__":
    problems = [problem for page in pages() for problem in broken(page)]
    problems += [*missing_files(), *long_readme()]
    print("\n".join(problems) or f"links, anchors and names of {len(pages())} pages hold")
    sys.exit(bool(problems))
