"""Cut recorded traces down to some of their steps, so that a sample is small: every kept event stays byte for byte.

An event stays if it starts between the begin of the first kept step and the end of the last one on this rank's host;
the recorders wait for the GPU at the end of a step, so its GPU work ends inside. Metadata always stays.

    python examples/keep_steps.py traces/fsdp-healthy samples/fsdp-healthy --first 5 --last 5
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

EVENTS = '"traceEvents": [\n'
BETWEEN = "\n  },\n  {\n"
AFTER = "\n  }\n  ],"


def split(trace: str) -> tuple[str, list[str], str]:
    """The text before the events, the text of each event without its braces, and the text after them."""
    begin = trace.index(EVENTS) + len(EVENTS) + len("  {\n")
    end = trace.rindex(AFTER)
    return trace[:begin], trace[begin:end].split(BETWEEN), trace[end:]


def window(events: list[dict[str, Any]], first: int, last: int) -> tuple[float, float]:
    """Begin and end of the kept steps on the host, in the trace's microseconds."""
    begin, end = None, None
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"] == f"ProfilerStep#{first}":
            begin = event["ts"]
        if event.get("cat") == "user_annotation" and event["name"] == f"ProfilerStep#{last}":
            end = event["ts"] + event["dur"]
    if begin is None or end is None:
        raise SystemExit(f"ProfilerStep#{first} to ProfilerStep#{last}: not all of them are in the trace")
    return begin, end


def cut(trace: str, first: int, last: int) -> str:
    """The trace with the chosen steps only."""
    before, texts, after = split(trace)
    events: list[dict[str, Any]] = [json.loads("{" + text + "}") for text in texts]
    begin, end = window(events, first, last)
    kept = [
        text
        for text, event in zip(texts, events, strict=True)
        if event["ph"] in ("M", "i") or event.get("cat") == "Trace" or begin <= event["ts"] <= end
    ]
    return before + BETWEEN.join(kept) + after


def main() -> None:
    """Cut every rank of a recorded set, and say in its provenance that it was cut."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--first", type=int, required=True, help="number of the first ProfilerStep to keep")
    parser.add_argument("--last", type=int, required=True)
    args = parser.parse_args()

    args.target.mkdir(parents=True, exist_ok=True)
    for path in sorted(args.source.glob("rank*.json.gz")):
        text = cut(gzip.decompress(path.read_bytes()).decode(), args.first, args.last)
        (args.target / path.name).write_bytes(gzip.compress(text.encode(), compresslevel=9, mtime=0))
    facts = json.loads((args.source / "provenance.json").read_text())
    steps = [f"ProfilerStep#{index}" for index in range(args.first, args.last + 1)]
    positions = [facts["steps"].index(step) for step in steps]
    host_step_ms = {rank: [values[at] for at in positions] for rank, values in facts["host_step_ms"].items()}
    cut_by = f"python examples/keep_steps.py --first {args.first} --last {args.last}"
    facts |= {"steps": steps, "recorded_steps": facts["steps"], "cut_by": cut_by, "host_step_ms": host_step_ms}
    (args.target / "provenance.json").write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
