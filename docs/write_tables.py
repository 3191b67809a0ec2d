"""Write the tables of results into README.md and the pages, and draw docs/images/ladder.svg.

python docs/write_tables.py; `--check` only compares.

A table stands between `<!-- table: NAME -->` and `<!-- end of table -->`. The function of that name writes it from rows
in results/. One rule rounds every figure: milliseconds and percents to one decimal, ratios to two, and
bandwidths and microseconds to none, by Python's formatting of the stored value.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from ladder import PICTURE, cells, divided_steps, measured_steps, picture

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKED = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
ORDERS = ("together", "comm_first", "compute_first")
COLLECTIVES = ("all_gather", "all_to_all", "reduce_scatter", "all_reduce")
BEST_STOCK = ("stock", "stock, prefetch 2", "stock, registered buffers")

Row = dict[str, Any]
TABLES: dict[str, Callable[[], list[str]]] = {}


def table(function: Callable[[], list[str]]) -> Callable[[], list[str]]:
    """Register the writer of one table under its name."""
    TABLES[function.__name__] = function
    return function


def result(name: str) -> Row:
    """Return a file of results/ as it was written, `NAME.json` or `NAME.json.gz`."""
    content = (ROOT / "results" / name).read_bytes()
    loaded: Row = json.loads(gzip.decompress(content) if name.endswith(".gz") else content)
    return loaded


def lines(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    head, *cells = (f"| {' | '.join(row)} |" for row in (columns, *rows))
    return [head, "|---" * len(columns) + "|", *cells]


def milliseconds(value: float) -> str:
    """Return a time in ms with one decimal."""
    return f"{value:,.1f}"


def ratio(value: float) -> str:
    """Return a ratio with two decimals; the sign is a minus, not a hyphen."""
    return f"{value:.2f}".replace("-", "−")


def percent(share: float) -> str:
    """Return a share in percent with one decimal."""
    return f"{100 * share:.1f} %".replace("-", "−")


def signed(share: float) -> str:
    """Return a share in percent with one decimal and its sign."""
    return f"{100 * share:+.1f} %".replace("-", "−")


def spaced(cell: str) -> str:
    """Return a cell that was stored as text, with a space before its percent sign."""
    return cell.replace("%", " %")


def short(full: list[str], columns: Sequence[int], left_out: str = "none") -> list[str]:
    """Return some columns of a full table, without the rows that contain `left_out`."""
    cells = [line.strip("|").split("|") for line in full if left_out not in line]
    return ["|" + "|".join(row[column] for column in columns) + "|" for row in cells]


# Diagnosis

_PLANTED = {
    "fsdp-host-stall": "`tokenizer.encode` for {amount:g} ms, rank {rank}",
    "fsdp-late-input": "input {amount:g} ms late, rank {rank}",
    "fsdp-slow-gpu-strong": "another process on the GPU, rank {rank}",
    "fsdp-uneven-batch": "{amount:g} × the tokens, rank {rank}",
    "fsdp-allocator": "`empty_cache()` in every layer, rank {rank}",
    "fsdp-garbage-collection": "`gc.collect()` in a step, rank {rank}",
    "fsdp-host-stall-unnamed": "host stalls {amount:g} ms in every step, rank {rank}",
    "fsdp-healthy": "nothing",
}
_CAUSES = {
    "host_stall": "host stall",
    "late_input": "late input",
    "slow_kernels": "slow kernels",
    "more_work": "more work",
}
_NAMED_DETAILS = {"tokenizer.encode": " in `tokenizer.encode`", "allocator": " in the allocator"}


@table
def planted_faults() -> list[str]:
    """Return faults that were planted, and the ranks that counterpoint and HolisticTraceAnalysis name."""
    recordings = {row["name"]: row for row in result("planted-faults.json")["rows"]}
    rows = []
    for name, words in _PLANTED.items():
        row = recordings[name]
        planted, found = row["recorded"]["planted"] or {}, row["found"]
        says, delay = "nothing", ""
        if found:
            detail = _NAMED_DETAILS.get(found[0]["detail"], "")
            says = f"**rank {found[0]['rank']}**: {_CAUSES[found[0]['cause']]}{detail}"
            delay = f"{milliseconds(found[0]['delay_ms'])} ms"
        peer = f"ranks {', '.join(map(str, row['peer']))}"
        step = f"{milliseconds(row['step_ms'])} ms"
        rows.append([words.format(**planted), step, says, delay, f"{peer} (right)" if row["peer_right"] else peer])
    return lines(["planted", "step", "counterpoint says", "delay found", "HolisticTraceAnalysis 0.6.1 suspects"], rows)


@table
def planted_faults_short() -> list[str]:
    """Return the planted faults for the README."""
    return short(planted_faults(), [0, 2, 4])


@table
def what_if() -> list[str]:
    """Return predicted steps with zero-SM collectives beside recorded ones."""
    rows = [
        [
            row["training"],
            *(milliseconds(row[name]) for name in ("stock_ms", "what_if_ms", "overlap_ms")),
            signed(row["error"]),
        ]
        for row in result("what-if-zero-sm-2xh200.json.gz")["rows"]
    ]
    return lines(["training", "stock, ms", "what-if, ms", "with `overlap`, ms", "error"], rows)


@table
def trace_load() -> list[str]:
    """Return the time and the memory of whole diagnoses."""
    rows = [
        [row["name"], f"{row['median_seconds']:.1f} s", f"{max(row['peak_mb']):,.0f} MB"]
        for row in result("trace-load.json")["rows"]
    ]
    return lines(["program, traces", "median time", "most memory"], rows)


# Pairs


def _pair_rows() -> list[Row]:
    rows: list[Row] = result("pairs-4xh200.json.gz")["rows"]
    return rows


def _serial_us(row: Row) -> float:
    us: float = row["compute_alone"]["us"] + row["best_comm_alone_us"] + row["head_start_us"]
    return us


def _hidden(rows: list[Row], mechanism: str, collective: str) -> str:
    means = []
    for order in ORDERS:
        asked = {"mechanism": mechanism, "collective": collective, "order": order}
        means.append([row["hidden"] for row in rows if asked.items() <= row.items()])
    return ", ".join(ratio(fmean(values)) for values in means) if all(means) else "–"


@table
def pairs() -> list[str]:
    """Return the mean `hidden` over 16 pairs for each mechanism and collective, by launch order."""
    rows = _pair_rows()
    mechanisms = {
        "nccl": "NCCL",
        "nccl+priority=high": "NCCL, high priority",
        "nccl_zero_cta": "NCCL, zero-CTA policy",
        "zero_sm": "**counterpoint, `zero_sm`**",
        "zero_sm+gemm_sms=fit": "**counterpoint, `zero_sm+gemm_sms=fit`**",
    }
    cells = [[words, *(_hidden(rows, name, one) for one in COLLECTIVES)] for name, words in mechanisms.items()]
    return lines(["mechanism", *COLLECTIVES], cells)


@table
def pairs_short() -> list[str]:
    """Return the mean `hidden` of pairs for the README."""
    return short(pairs(), range(5), left_out="priority")


@table
def lowest_pairs() -> list[str]:
    """Return the lowest `hidden`, the speed that the GEMM keeps, and the speed-up over serial, of each mechanism."""
    grouped: dict[str, list[Row]] = {}
    for row in _pair_rows():
        grouped.setdefault(row["mechanism"], []).append(row)
    cells = []
    for name, rows in sorted(grouped.items()):
        speedups = [math.log(_serial_us(row) / row["together"]["us"]) for row in rows]
        lowest = min(row["hidden"] for row in rows)
        kept = fmean(row["compute_kept"] for row in rows)
        cells.append([f"`{name}`", ratio(lowest), percent(kept), ratio(math.exp(fmean(speedups)))])
    return lines(["mechanism", "lowest `hidden`", "GEMM keeps, mean", "speed-up over serial"], cells)


@table
def ladder() -> list[str]:
    """Return the percent of the ideal speed-up that each step from plain NCCL to copy engines reaches."""
    return lines(["launched together", *COLLECTIVES], cells(measured_steps()))


@table
def ladder_divided() -> list[str]:
    """Return the percent of the ideal speed-up that dividing the SMs between a GEMM and NCCL reaches."""
    return lines(["launched together", *COLLECTIVES], cells(divided_steps()))


@table
def sums() -> list[str]:
    """Return how well the SMs that are left to sums are chosen."""
    kept = [0, 1, 3, 4, 5, 7, 8]
    stored = result("sum-sms.json")
    columns = ["collective", "GEMM on", "`hidden`, mean", "lowest order", "lowest pair", "regret, mean", "worst"]
    rows = [
        [row[column] for column in kept] for row in stored["rows"] if row[1] in ("by rule", "all SMs", "128", "120")
    ]
    return lines(columns, rows)


@table
def sm_split() -> list[str]:
    """Return how well the rule divides SMs between a GEMM and NCCL."""
    names = {
        "rule": "the rule",
        "rule, default calibration": "the rule, default calibration",
        "plain nccl": "plain NCCL",
        "random": "a random division",
    }
    rows = [
        [
            score["pairs"].partition(",")[0],
            names.get(score["policy"], f"`{score['policy'].removeprefix('always ')}`, always"),
            *(percent(score[name]) for name in ("hits", "mean_regret", "max_regret")),
        ]
        for score in result("budget-rule.json")["scores"]
        if score["pairs"] in ("held out, mean of orders", "unseen, mean of orders")
    ]
    return lines(["pairs", "policy", "hits", "regret, mean", "worst"], rows)


@table
def occupancy() -> list[str]:
    """Return the total time with fewer blocks on each SM and with a priority, against the pair as it is."""
    stored = result("occupancy-study.json.gz")["rows"]
    fewer = {"tile 64x64x32": 5, "tile 64x64x64": 3}
    rows = []
    for words, shaped, priority in (
        ("fewer blocks on each SM", True, False),
        ("high priority of the collective's stream", False, True),
        ("both", True, True),
    ):
        changes = [
            row["total_against_stock"]
            for row in stored
            for tile, blocks in fewer.items()
            if row["workload"].endswith(tile)
            and row["side"] == "both"
            and row["nccl_threads"] == 512
            and row["priority"] == priority
            and row["blocks_per_sm"] == (blocks if shaped else None)
        ]
        mean = math.exp(fmean(math.log1p(change) for change in changes)) - 1
        rows.append([words, str(len(changes)), signed(mean), signed(min(changes)), signed(max(changes))])
    return lines(["change", "pairs and orders", "total time, mean", "best", "worst"], rows)


@table
def alone() -> list[str]:
    """Return the times of collectives alone, by size of the full array, and their bus bandwidth at 1 GiB."""
    times = {(row[0], row[1], row[2]): row for row in result("collectives-alone-4xh200.json")["rows"]}
    mechanisms = ("nccl", "nccl zero-CTA", "own, graph, best by the clock")
    rows = []
    for size, column, words in (
        ("64 KiB", 3, "64 KiB, µs"),
        ("16 MiB", 3, "16 MiB, µs"),
        ("128 MiB", 3, "128 MiB, µs"),
        ("1024 MiB", 3, "1 GiB, µs"),
        ("1024 MiB", 4, "1 GiB, bus GB/s"),
    ):
        cells = [[times.get((one, size, name)) for name in mechanisms] for one in COLLECTIVES]
        rows.append([words, *(" / ".join(f"{float(row[column]):.0f}" for row in cell if row) for cell in cells)])
    return lines(["full array", *(f"{one}: NCCL / own" for one in COLLECTIVES)], rows)


@table
def crossovers() -> list[str]:
    """Return the sizes below which NCCL takes a call, of the profile of H200."""
    profile = json.loads((ROOT / "src" / "counterpoint" / "machine" / "profiles" / "h200.json").read_text())
    sizes = next(group["crossover_bytes"] for group in profile.values() if "crossover_bytes" in group)
    return lines(
        ["4 GPUs", *COLLECTIVES], [["NCCL takes calls below", *(f"{sizes[one] >> 20} MiB" for one in COLLECTIVES)]]
    )


# Training steps


def _fsdp_row(words: str, name: str, tokens: int) -> list[str]:
    rows = {row["variant"]: row for row in result(name)["rows"] if row["tokens"] == tokens}
    best = min(rows[variant]["ms"] for variant in BEST_STOCK)
    ours = rows["overlap"]
    times = [milliseconds(time) for time in (best, ours["ms"], rows["bound"]["ms"], rows["floor"]["ms"])]
    return [words, *times, ratio(best / ours["ms"]), percent(ours["won"]), ratio(ours["of_stock"])]


_FSDP = [
    ("2048 tokens", "fsdp-step-layers-4xh200.json", 2048),
    ("4096 tokens", "fsdp-step-layers-4xh200.json", 4096),
    ("8192 tokens", "fsdp-step-layers-4xh200.json", 8192),
    ("2048 tokens, compiled layers", "fsdp-step-compiled-4xh200.json", 2048),
    ("2048 tokens, gradients reduced in float32", "fsdp-step-float32-4xh200.json", 2048),
    ("2048 tokens, 4 layers of 70B shape", "fsdp-step-70b-4xh200.json", 2048),
    ("2048 tokens, vocabulary of 128,256", "fsdp-step-full-4xh200.json", 2048),
    ("8192 tokens, vocabulary of 128,256", "fsdp-step-full-4xh200.json", 8192),
    ("8192 tokens, vocabulary, embedding and head apart", "fsdp-step-head-4xh200.json", 8192),
    ("2 GPUs: 2048 tokens", "fsdp-step-layers-2xh200.json", 2048),
    ("2 GPUs: 4096 tokens", "fsdp-step-layers-2xh200.json", 4096),
    ("2 GPUs: 8192 tokens", "fsdp-step-layers-2xh200.json", 8192),
    ("2 GPUs: 2048 tokens, 4 layers of 70B shape", "fsdp-step-70b-2xh200.json", 2048),
]


@table
def fsdp() -> list[str]:
    """Return steps of FSDP2 with stock's collectives and with ours, in ms."""
    columns = ["ms of a step", "best stock", "`overlap`", "bound", "floor", "speed-up", "won", "peak memory of stock's"]
    return lines(columns, (_fsdp_row(*row) for row in _FSDP))


@table
def fsdp_short() -> list[str]:
    """Return the first rows of FSDP2, for the README."""
    return short(fsdp()[:7], [0, 1, 2, 5, 7])


@table
def ddp() -> list[str]:
    """Return steps of DDP, in ms."""
    cells = []
    for words, name, tokens in (
        ("1B shape in float32, 2048 tokens", "ddp-step-1b-2xh200.json", 2048),
        ("3B shape in bfloat16, 2048 tokens", "ddp-step-3b-2xh200.json", 2048),
        ("3B shape in float32, 2048 tokens", "ddp-step-3b-float32-2xh200.json", 2048),
        ("1B shape in float32, 8192 tokens", "ddp-step-1b-8192-2xh200.json", 8192),
        ("3B shape in bfloat16, 8192 tokens", "ddp-step-3b-8192-2xh200.json", 8192),
    ):
        rows = {row["variant"]: row for row in result(name)["rows"] if row["tokens"] == tokens}
        variants = ("stock", "backend", "backend registered", "overlap", "bound")
        times = [milliseconds(rows[variant]["ms"]) if variant in rows else "–" for variant in variants]
        stock, ours = rows["stock"], rows["overlap"]
        cells.append([words, *times, ratio(stock["ms"] / ours["ms"]), percent(ours["won"])])
    columns = ["ms of a step", "stock", "backend", "registered", "`overlap`", "bound", "speed-up", "won"]
    return lines(columns, cells)


@table
def pipeline() -> list[str]:
    """Return steps of a pipeline of two stages, in ms."""
    rows = result("pipeline-step-2xh200.json")["rows"]
    times = {(row["activation_mib"], row["variant"]): row["ms"] for row in rows}
    sizes = sorted({size for size, _ in times})
    columns = ["activation", "NCCL, ms", "mailboxes, ms", "speed-up"]
    pairs_of_times = [(size, times[size, "stock"], times[size, "counterpoint"]) for size in sizes]
    cells = [
        [f"{size:g} MiB", milliseconds(one), milliseconds(two), ratio(one / two)] for size, one, two in pairs_of_times
    ]
    return lines(columns, cells)


@table
def matmuls() -> list[str]:
    """Return how much longer a matmul with its collective takes than the longer of both alone."""
    over: dict[tuple[str, str], list[float]] = {}
    for block in result("tensor-2xh200.json.gz")["blocks"]:
        if block["over_longer"] is not None:
            over.setdefault((block["what"].split()[0], block["mechanism"]), []).append(block["over_longer"])
    mechanisms = ("torch", "symm_mem", "auto")
    cells = []
    for operation in ("all_gather_matmul", "matmul_reduce_scatter"):
        found = [over[operation, name] for name in mechanisms]
        means = (f"{signed(fmean(each))} ({signed(max(each))})" for each in found)
        cells.append([f"`{operation}`, {len(found[0])} shapes", *means])
    return lines(["mean (worst)", "torch", "torch's fused", "`auto`"], cells)


@table
def tensor_steps() -> list[str]:
    """Return steps of tensor-parallel models, in ms."""
    names = {
        "eager": "DTensor, eager",
        "compiled": "compiled",
        "compiled, async TP": "compiled, torch's async TP",
        "compiled, fused": "compiled, `fuse_compiled`",
        "direct, compiled": "our operations by hand, compiled",
        "stock": "stock, eager",
        "overlap": "`overlap`, eager",
    }
    models = {
        "tensor-block-2xh200.json": "block of Llama-3-70B",
        "tensor-step-transformers-2xh200.json": "4 layers of `transformers`' Llama, 8B shape",
    }
    cells = [
        [model, str(row["tokens"]), names[row["variant"]], milliseconds(row["ms"]), ratio(row["times"])]
        for file, model in models.items()
        for row in result(file)["rows"]
        if row["variant"] in names
    ]
    return lines(["model", "tokens", "run by", "ms", "speed-up"], cells)


# The planner


@table
def planner() -> list[str]:
    """Return the planner's errors on published steps of dense models."""
    columns = [
        "GPUs and precision",
        "files",
        "steps",
        "mean error of files, chosen with",
        "of steps",
        "mean error of files, checked on",
        "of steps",
    ]
    return lines(columns, [[spaced(cell) or "–" for cell in row] for row in result("plan-published.json")["classes"]])


@table
def intervals() -> list[str]:
    """Return how often an interval of 80 % covers a step of a source that it was not calibrated on."""
    rows = [row for row in result("plan-published.json")["coverage"] if row[0].startswith(("GPU", "all,", "public"))]
    rows = [[spaced(cell) for cell in row] for row in rows if int(row[1]) >= 40]
    columns = ["steps", "number", "sources", "covered", "measured above", "below", "mean width", "median width", "loss"]
    return lines(columns, rows)


@table
def collective_fits() -> list[str]:
    """Return the errors of predicted NCCL calls on H200, of fits that had not seen the rows."""
    cells = []
    for left_out in ("a third of the sizes", "2 ranks", "4 ranks", "8 ranks"):
        row = [left_out]
        for large in (True, False):
            asked = {"fit": "nvlink-h200", "left_out": left_out, "large": large}
            found = [one for one in result("collective-model.json.gz")["lines"] if asked.items() <= one.items()]
            calls = sum(one["n"] for one in found)
            means = (sum(one["n"] * one[name] for one in found) for name in ("mean", "nccl_mean"))
            row.extend(percent(total / calls) if calls else "–" for total in means)
        cells.append(row)
    columns = ["left out", "from 1 MiB, mean error", "of NCCL's own model", "below 1 MiB", "of NCCL's own model"]
    return lines(columns, cells)


def written(text: str) -> str:
    """Return a page with every marked table written anew."""
    return MARKED.sub(lambda match: match[1] + "\n".join(TABLES[match[2]]()) + "\n" + match[3], text)


if __name__ == "__main__":
    made = {page: written(page.read_text()) for page in PAGES} | {PICTURE: picture()}
    stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what results/ holds: run python docs/write_tables.py")
        sys.exit(bool(stale))
    for path in stale:
        path.write_text(made[path])
