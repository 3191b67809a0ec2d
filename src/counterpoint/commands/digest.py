"""Run `counterpoint digest`: parse, call, print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from counterpoint.commands.terminal import progress, write_file, writing
from counterpoint.errors import Misconfigured

if TYPE_CHECKING:
    from counterpoint.diagnosis.reading.digest import RankDigest


def digest(
    traces: Annotated[list[str], typer.Argument(help="File, folder, glob or tar of traces, one per rank.")],
    out: Annotated[Path, typer.Option(help="Folder for the digests; it is made if it is missing.")],
    workers: Annotated[int | None, typer.Option(help="Processes that read; by default one per core.")] = None,
    max_trace_gb: Annotated[float, typer.Option(help="Most that one trace may expand to, in GiB.", min=0.001)] = 8.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary and no progress.")] = False,
) -> None:
    """Reduce traces, where they lie, to what a diagnosis needs; diagnose the digests of all ranks together."""
    from counterpoint.diagnosis.api import read_ranks
    from counterpoint.diagnosis.reading.digest import Engine
    from counterpoint.diagnosis.summary import digest_content
    from counterpoint.trace.source import Limits

    if out.exists() and not out.is_dir():
        raise Misconfigured(f"--out {out}: a file; name a folder")
    notes: list[str] = []
    limits = Limits.of_gb(max_trace_gb)
    with progress(quiet, "looking for traces") as tell:
        digests, _ = read_ranks(traces, notes, engine=Engine(workers=workers), limits=limits, progress=tell)
    names = _names(digests)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    written = 0
    for each, name in zip(digests, names, strict=True):
        content = digest_content(each)
        write_file(out / name, content)
        written += len(content)
    if not quiet:
        for note in notes:
            print(f"note: {note}")
        print(f"wrote {len(digests)} digest{'s' * (len(digests) != 1)}, {written / 1e6:.1f} MB, to {out}")


def _names(digests: list[RankDigest]) -> list[str]:
    """Return a file name for each digest; raise Misconfigured if two traces would have one name."""
    from counterpoint.diagnosis.summary import file_name

    names = [file_name(each, number) for number, each in enumerate(digests)]
    for number, name in enumerate(names):
        if name in names[:number]:
            raise Misconfigured(
                f"{digests[number].path} and {digests[names.index(name)].path} are of one rank; give one recording"
            )
    return names
