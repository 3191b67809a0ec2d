"""Run `counterpoint measure`: parse, call, print."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from counterpoint.commands.terminal import (
    ReaderGone,
    check_outputs,
    json_file,
    progress,
    write_file,
    write_json,
    writing,
)
from counterpoint.errors import CounterpointError, Misconfigured
from counterpoint.rendering.files import is_stream

if TYPE_CHECKING:
    from counterpoint.records.measurement import Measurement


NARROWEST = 80  # columns of a terminal; below, rich would leave out columns of a table
IN_A_FILE = 140  # what nobody folds: mechanisms with three controls keep their line


def measure(
    suite: Annotated[
        str,
        typer.Argument(
            help="quick, pairs, reductions, conccl, resource-aware, forum, budget, blocks, tensor, expert, full."
        ),
    ],
    mechanism: Annotated[
        list[str] | None, typer.Option(help="Only this mechanism, as in nccl+max_ctas=8; may be repeated.")
    ] = None,
    device: Annotated[str, typer.Option(help="cuda, or cpu: the same pairs with gloo, to try it anywhere.")] = "cuda",
    nproc: Annotated[int | None, typer.Option(help="Ranks: by default all GPUs; 2 on CPUs.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write all results as JSON, and a table next to it (.md).")] = None,
    html: Annotated[Path | None, typer.Option(help="Draw hidden by ratio and order: one self-contained page.")] = None,
    fresh: Annotated[
        bool | None,
        typer.Option(
            "--fresh/--resume", help="Discard what an interrupted run left near --out, or (by default) go on with it."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Trials of each kind per pair; the first two are dropped.")] = 12,
    timeout: Annotated[float, typer.Option(help="Seconds without a finished pair after which the run ends.")] = 120.0,
    json: Annotated[str | None, typer.Option(help="Write all results as JSON; - prints them (and only them).")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only the last line; no progress.")] = False,
) -> None:
    """How much overlap does this machine allow, by which mechanism? Needs torch, and 2 GPUs or --device cpu."""
    json_path = json_file(json)
    if fresh is not None and (out is None or is_stream(out)):
        raise Misconfigured("--fresh and --resume are about what lies next to --out; give --out an ordinary file")
    check_outputs(out, html, json_path)
    if out is not None and out.suffix == ".md":
        raise Misconfigured(
            f"--out {out} is where the table goes; name the JSON file, as in {out.with_suffix('.json')}"
        )
    table, partial = _next_to(out)
    check_outputs(table, partial)
    if html is not None and html.resolve() in {path.resolve() for path in (table, partial, table and out) if path}:
        raise Misconfigured(f"--html {html} is where --out puts its results or their table; name another file")
    if html is not None and suite in ("blocks", "tensor"):
        raise Misconfigured(f"--html draws pairs, and suite {suite!r} has none; --out writes its table")
    with _ending_cleanly(partial, fresh=bool(fresh)), progress(quiet, "starting ranks") as tell:
        from counterpoint.measurement import api

        measured = api.measure(
            suite, device=device, world_size=nproc, mechanisms=mechanism, rounds=rounds, timeout_s=timeout,
            partial=partial, fresh=bool(fresh), progress=tell,
        )  # fmt: skip
        with _adding(f"; what was measured is kept in {partial}: the same command goes on" if partial else ""):
            _write(measured, out, table, html)
            if json_path is not None:
                write_json(measured, json_path)
    if partial is not None:
        partial.unlink(missing_ok=True)  # only now: the results are safe
    with _adding(f"; the results are in {out}" if out else ""):
        if json == "-":
            write_json(measured, None)
        else:
            _print(measured, out, (out, table, html), quiet=quiet)


def _next_to(out: Path | None) -> tuple[Path | None, Path | None]:
    """Return the paths beside `--out` for the table and for partial results; None if `--out` is a device or pipe."""
    if out is None or is_stream(out):
        return None, None
    return out.with_suffix(".md"), out.with_name(out.name + ".partial.jsonl")


@contextmanager
def _adding(hint: str) -> Iterator[None]:
    """Append `hint`, which says where the results are, to an error raised inside."""
    try:
        yield
    except ReaderGone:
        raise
    except CounterpointError as error:
        raise CounterpointError(f"{error}{hint}") from None


@contextmanager
def _ending_cleanly(partial: Path | None, *, fresh: bool) -> Iterator[None]:
    """End all ranks on Ctrl-C, SIGTERM or a closed terminal, then this process with 128 + the signal's number."""

    def stop(number: int, frame: FrameType | None) -> NoReturn:
        for each in before:
            signal.signal(each, signal.SIG_IGN)  # a second one must not interrupt the killing of ranks
        raise _Stopped(number)

    asked = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: now for number in asked if (now := signal.getsignal(number)) is not signal.SIG_IGN}  # nohup
    for number in before:
        signal.signal(number, stop)
    try:
        yield
    except _Stopped as stopped:
        again = f"the same command{' without --fresh' if fresh else ''} goes on"
        kept = f"; finished pairs are kept in {partial}: {again}" if partial and partial.exists() else ""
        print(f"counterpoint: stopped by {signal.Signals(stopped.number).name}{kept}", file=sys.stderr)
        raise typer.Exit(128 + stopped.number) from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Stopped(BaseException):
    """Is raised by a signal that asks this process to end; no `except Exception` catches it."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(number)


def _write(measured: Measurement, out: Path | None, table: Path | None, html: Path | None) -> None:
    if out is not None:
        import msgspec

        text = msgspec.json.encode(measured)
        for first_key in (b'{"scenario"', b'{"what"'):  # a line for each row; in a string the quotes are escaped
            text = text.replace(first_key, b"\n" + first_key)
        write_file(out, text + b"\n")
    if table is not None:
        from counterpoint.rendering.measurement_text import markdown

        write_file(table, markdown(measured).encode())
    if html is not None:
        from counterpoint.rendering.measurement_html import write_overlap_plot

        with writing(html):
            write_overlap_plot(html, measured)


def _print(measured: Measurement, out: Path | None, wrote: Sequence[Path | None], *, quiet: bool) -> None:
    import msgspec

    from counterpoint.rendering.measurement_text import summary

    if not quiet:
        from rich.console import Console

        from counterpoint.rendering.measurement_text import render

        console = Console(soft_wrap=False)
        console.width = max(console.width, NARROWEST if console.is_terminal else IN_A_FILE)
        render(measured, console)
        for path in filter(None, wrote):
            console.print(f"wrote {path}", markup=False, highlight=False, soft_wrap=True)
    print(msgspec.json.encode(summary(measured, None if out is None else str(out))).decode(), flush=True)
