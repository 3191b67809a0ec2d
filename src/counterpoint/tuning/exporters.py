"""Write what `tune` chose for programs without counterpoint: shell variables, Megatron's communicators, Python.

A format has lines only for what it can set. Comments name all else, so that every pair is found in every format. Names
from a tuning's file reach these texts only in comments, as one line of ASCII each.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from types import SimpleNamespace

from counterpoint.controls.control import Control
from counterpoint.controls.parse import VARIABLES
from counterpoint.errors import Misconfigured, printable
from counterpoint.measurement.mechanisms import find_mechanism
from counterpoint.records.tuning import LEAVE, Tuned, TunedPair
from counterpoint.tuned.choices import EXCHANGE, check_choices

Settings = tuple[tuple[str, int], ...]
"""Holds fields of `ProcessGroupNCCL.Options` and their values, sorted: (("cga_cluster_size", 2), ("max_ctas", 8))."""
Numbered = tuple[int, TunedPair]
"""Holds a pair's number in the tuning's file, from 1 on, and the pair."""

_VARIABLES = {  # of NCCL and torch, by the field of `ProcessGroupNCCL.Options`
    "max_ctas": VARIABLES["max_ctas"],
    "min_ctas": VARIABLES["min_ctas"],
    "cga_cluster_size": VARIABLES["cga_cluster"],
    "cta_policy": "NCCL_CTA_POLICY",
    "is_high_priority_stream": "TORCH_NCCL_HIGH_PRIORITY",
}
_MEGATRON_GROUPS = {"all_to_all": "ep", EXCHANGE: "ep", "send_recv": "pp"}  # all others: data parallel
_MEGATRON_KEYS = ("cga_cluster_size", "is_high_priority_stream", "max_ctas", "min_ctas")  # parallel_state.py reads them
_SCRIPT = '''"""Apply what `counterpoint tune` chose."""

import counterpoint


def apply(model):
    """Overlap a model, after fully_shard, DistributedDataParallel or parallelize_module; print what this returns."""
    return counterpoint.overlap(model, tuned={file})


def pg_options():
    """Return options for init_process_group(pg_options=...) and new_group(pg_options=...) with NCCL."""
    import torch.distributed as dist

    options = dist.ProcessGroupNCCL.Options()
{settings}    return options'''


def export(tuned: Tuned, form: str, file: str = "counterpoint.toml") -> str:
    """Return the choices of a tuning in another format, one of `FORMS`, with a comment for each pair.

    `file` is the path of the tuning's file, which some formats contain.

    Raises:
        Misconfigured: `form` or a pair's mechanism is unknown.
    """
    if form not in FORMS:
        raise Misconfigured(f"there is no form {printable(form)!r}; choose from: {', '.join(FORMS)}")
    check_choices(tuned)
    made = tuned.made
    nccl = f", NCCL {made.nccl}" if made.nccl else ""
    where = f"{made.world_size} x {made.gpu or made.device}, torch {made.torch}{nccl}, {made.date}"
    title = _comment(f"Choices of `counterpoint tune` for {where}.")
    return "\n".join((title, *_WRITERS[form](tuple(enumerate(tuned.pair, 1)), file))) + "\n"


def variables_of(tuned: Tuned) -> dict[str, str]:
    """Return the environment variables of NCCL and torch that apply the chosen NCCL settings to every process group."""
    return {_VARIABLES[name]: str(value) for name, value in _best(tuned.pair)}


def _env(pairs: Sequence[Numbered], file: str) -> Iterator[str]:
    """Yield shell lines that set variables; NCCL's variables apply to every process group of a process."""
    quoted = re.sub(r'(["$`}\\])', r"\\\1", file)
    yield "# counterpoint.overlap and backend counterpoint follow the file itself, pair by pair:"
    yield f'export COUNTERPOINT_TUNED="${{COUNTERPOINT_TUNED:-{quoted}}}"'
    settings = _best([pair for _, pair in pairs])
    yield "# Variables of NCCL hold for every process group:"
    yield from _comments(pairs, settings, "no variable")
    yield from (f"export {_VARIABLES[name]}={value}" for name, value in settings)


def _megatron(pairs: Sequence[Numbered], file: str) -> Iterator[str]:
    """Yield the YAML for Megatron's --nccl-communicator-config-path: NCCL's options of each process group."""
    yield "# For --nccl-communicator-config-path. A pair names no group: dp_cp (data), ep, pp go by operation."
    groups: dict[str, list[Numbered]] = {}
    for number, pair in pairs:
        groups.setdefault(_MEGATRON_GROUPS.get(pair.operation, "dp_cp"), []).append((number, pair))
    is_empty = True
    for group, members in groups.items():
        settings = _best([pair for _, pair in members])
        yield from _comments(members, settings, "no key", ("cta_policy",))
        known = [each for each in settings if each[0] in _MEGATRON_KEYS]
        if known:
            is_empty = False
            yield f"{group}:"
            yield from (f"  {name}: {'true' if name.startswith('is_') else value}" for name, value in known)
    if is_empty:
        yield "{}"


def _python(pairs: Sequence[Numbered], file: str) -> Iterator[str]:
    """Yield a Python module with two functions: one applies a tuning's file to a model, one makes group options."""
    settings = _best([pair for _, pair in pairs])
    lines = [
        f"    options.{name} = True\n" if name.startswith("is_") else f"    options.config.{name} = {value}\n"
        for name, value in settings
    ]
    yield "# `apply` follows the file itself, pair by pair; `pg_options` has the settings of NCCL:"
    yield from _comments(pairs, settings, "no option")
    yield _SCRIPT.format(file=json.dumps(file), settings="".join(lines))


def _best(pairs: Sequence[TunedPair]) -> Settings:
    """Return the NCCL settings that save most time per step, summed over all pairs measured with these settings.

    A process or group has one value of each setting; a setting that costs other pairs more than it saves is not taken.
    """
    times = [(pair, _times(pair)) for pair in pairs if _own_settings(pair) is not None]
    wanted = dict.fromkeys([(), *(_own_settings(pair) or () for pair, _ in times)])
    return max(
        wanted,
        key=lambda settings: sum(pair.calls * (pair.stock_us - us.get(settings, pair.stock_us)) for pair, us in times),
    )


def _times(pair: TunedPair) -> dict[Settings, float]:
    """Return a pair's measured µs by NCCL settings; times marked as invalid are left out."""
    found: dict[Settings, float] = {}
    for each in sorted((each for each in pair.tried if each.marked is None), key=lambda each: -each.us):
        if (settings := _tried_settings(each.mechanism)) is not None:
            found[settings] = each.us
    own = None if pair.is_left else _own_settings(pair)
    return found | {(): pair.stock_us} | ({} if own is None else {own: pair.us})


def _own_settings(pair: TunedPair) -> Settings | None:
    """Return the settings with which NCCL runs a pair; None if NCCL does not run it."""
    return _settings_of(pair.stock if pair.mechanism == LEAVE else pair.mechanism)


def _tried_settings(name: str) -> Settings | None:
    try:
        return _settings_of(name)
    except Misconfigured:  # what was tried may have names that this version does not know
        return None


@lru_cache(maxsize=4096)  # pairs try the same few mechanisms
def _settings_of(name: str) -> Settings | None:
    """Return a mechanism's settings as options of a process group; None if NCCL does not run it."""
    if not name.startswith("nccl"):
        return None
    config = SimpleNamespace()
    options = SimpleNamespace(config=config, is_high_priority_stream=False)
    for control in find_mechanism(name, "cuda").controls:
        control.configure(options)
    high = {"is_high_priority_stream": 1} if options.is_high_priority_stream else {}
    return tuple(sorted((vars(config) | high).items()))


def _comments(
    pairs: Sequence[Numbered], settings: Settings, lacks: str, unknown: tuple[str, ...] = ()
) -> Iterator[str]:
    """Yield a comment for each pair that says if it follows `settings`; `unknown`: fields that the format lacks."""
    for number, pair in pairs:
        own = _own_settings(pair)
        if own is None:
            said = ["nothing to set" if pair.is_left else f"{lacks}, counterpoint runs it"]
        else:
            us = _times(pair).get(settings)
            said = ["not measured under this" if us is None else f"this costs it {pair.calls * (us - pair.us):.1f} us"]
            if own == settings:
                said = ["follows" if settings else "as it is"]
            controls = find_mechanism(pair.mechanism, "cuda").controls if pair.mechanism != LEAVE else ()
            missing = [one.name for one in controls if type(one).configure is Control.configure]
            missing += [name for name, _ in own if name in unknown]
            said += [f"{lacks} for {', '.join(missing)}"] * bool(missing)
        where = f" in {' '.join(pair.where)}" if pair.where else ""
        size = f"{pair.bytes_per_rank} bytes a rank, {pair.ranks} ranks, {pair.dtype}"
        about = f"{pair.operation}, {size}, beside {pair.compute}{where}"
        yield _comment(f"pair {number}, {pair.mechanism}: {'; '.join(said)} ({about})")


def _comment(text: str, limit: int = 400) -> str:
    """Return one line of ASCII without control characters, for a comment in a shell script, YAML or Python."""
    return f"# {printable(text, limit).encode('ascii', 'backslashreplace').decode()[:limit]}"


_WRITERS: dict[str, Callable[[Sequence[Numbered], str], Iterator[str]]] = {
    "env": _env,
    "megatron-yaml": _megatron,
    "python": _python,
}
FORMS = tuple(_WRITERS)
"""Names all formats."""
