"""Write what `tune` chose in the formats of other programs: variables, NCCL's tuner, Megatron, torchtitan, Python.

A form has lines only for what it can set. All else is a comment, so that every pair is found in every form. Names of a
file reach these texts in comments alone, as one line of ASCII each.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

from counterpoint.controls.parse import VARIABLES
from counterpoint.errors import Misconfigured, printable
from counterpoint.measurement.mechanisms import find_mechanism
from counterpoint.records.tuning import Tuned
from counterpoint.tuned.choices import EXCHANGE
from counterpoint.tuning.shared import (
    GroupSettings,
    Numbered,
    Shared,
    group_settings,
    numbered,
    outside_group,
    plain,
    share,
)

_VARIABLES = {  # of NCCL and torch, by the field of `ProcessGroupNCCL.Options`
    "max_ctas": VARIABLES["max_ctas"],
    "min_ctas": VARIABLES["min_ctas"],
    "cga_cluster_size": VARIABLES["cga_cluster"],
    "cta_policy": "NCCL_CTA_POLICY",
    "is_high_priority_stream": "TORCH_NCCL_HIGH_PRIORITY",
}
_TUNER_NAMES = {  # of NCCL's plugins/tuner/example
    "all_gather": "allgather",
    "reduce_scatter": "reducescatter",
    "all_reduce": "allreduce",
    "broadcast": "broadcast",
    "reduce": "reduce",
}
_TUNER_LINE = 240  # characters: the plugin reads 255 bytes, and takes what is longer for another line
_ABOUT_TUNER = (
    "For NCCL's plugins/tuner/example: NCCL_TUNER_PLUGIN, NCCL_TUNER_CONFIG_FILE. Bytes are of the full array.",
    "The format has no 'any' algorithm: ring and simple are what NCCL takes for large arrays within a host.",
    "Set *nChannels = 0 in pluginGetCollInfo before you build it: its 1 holds for all calls without a row.",
    "collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff",
)
_REACH = 2  # a row counts up to so many times what was measured, and down to that part of it
_MEGATRON_GROUPS = {"all_to_all": "ep", EXCHANGE: "ep", "send_recv": "pp"}  # all others: data parallel
_MEGATRON_KEYS = ("cga_cluster_size", "is_high_priority_stream", "max_ctas", "min_ctas")  # parallel_state.py reads them
_OVERRIDES = {"all_gather_matmul": "column_parallel_linear", "matmul_reduce_scatter": "row_parallel_linear"}
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
    """Return what was chosen in another format, with a comment for each pair.

    Args:
        tuned: what `tune` chose.
        form: one of `FORMS`.
        file: where it is, which some forms name.

    Raises:
        Misconfigured: there is no such form, or a pair has a mechanism that there is not.
    """
    if form not in FORMS:
        raise Misconfigured(f"there is no form {printable(form)!r}; choose from: {', '.join(FORMS)}")
    pairs = numbered(tuned)
    made = tuned.made
    nccl = f", NCCL {made.nccl}" if made.nccl else ""
    where = plain(f"{made.world_size} x {made.gpu or made.device}, torch {made.torch}{nccl}, {made.date}")
    title = f"Choices of `counterpoint tune` for {where}."
    return "\n".join(_WRITERS[form](title, pairs, file)) + "\n"


def variables_of(tuned: Tuned) -> dict[str, str]:
    """Return the variables of NCCL and torch that apply choices of NCCL's settings to every process group."""
    shared = _of_nccl(numbered(tuned))
    return {} if shared is None else {_VARIABLES[name]: str(value) for name, value in shared.setting}


def _env(title: str, pairs: Sequence[Numbered], file: str) -> Iterator[str]:
    """Yield lines of shell that set variables; those of NCCL hold for every process group of a process."""
    shared = _of_nccl(pairs)
    yield f"# {title}"
    yield "# counterpoint.overlap and backend counterpoint follow the file itself, pair by pair:"
    yield _follow(file)
    yield from _comments(_left_out(pairs, "no variable"))
    if shared is None:
        return
    yield "# Variables of NCCL hold for every process group:"
    yield from _comments(_reasons(shared))
    yield from (f"export {_VARIABLES[name]}={value}" for name, value in shared.setting)


def _tuner_csv(title: str, pairs: Sequence[Numbered], file: str) -> Iterator[str]:
    """Yield rows for NCCL's example tuner: a size that several pairs have goes by the setting that saves most."""
    left_out = _left_out(pairs, "nothing that a tuner can choose", tuple(_VARIABLES.keys() - {"max_ctas"}))
    yield from _comments([title, *_ABOUT_TUNER, *left_out], _TUNER_LINE)
    classes: dict[tuple[str, int], dict[int, list[Numbered]]] = {}
    for one in pairs:
        if one.mechanism is not None:
            sizes = classes.setdefault((one.pair.operation, one.pair.ranks), {})
            sizes.setdefault(one.pair.bytes_per_rank * one.pair.ranks, []).append(one)
    for (operation, ranks), by_size in classes.items():
        for size, (low, high) in zip(sorted(by_size), _ranges(sorted(by_size)), strict=True):
            shared = _of_nccl(by_size[size])
            if shared is None:
                continue
            yield from _comments(_reasons(shared), _TUNER_LINE)
            channels = dict(shared.setting).get("max_ctas")
            if channels is not None and operation in _TUNER_NAMES:
                yield f"{_TUNER_NAMES[operation]},{low},{high},ring,simple,{channels},-1,{ranks},-1,-1"


def _ranges(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return, for sorted sizes, from where to where each counts: half-way to its neighbours, and not beyond twice."""
    middles = [math.isqrt(a * b) for a, b in itertools.pairwise(sizes)]
    lows, highs = [0, *(middle + 1 for middle in middles)], [*middles, sizes[-1] * _REACH]
    return [
        (max(low, size // _REACH), min(high, size * _REACH)) for size, low, high in zip(sizes, lows, highs, strict=True)
    ]


def _megatron(title: str, pairs: Sequence[Numbered], file: str) -> Iterator[str]:
    """Yield the YAML of Megatron's --nccl-communicator-config-path: options of NCCL for each process group."""
    yield f"# {title}"
    yield "# For --nccl-communicator-config-path. A pair names no group: dp_cp (data), ep, pp go by operation."
    yield from _comments(_left_out(pairs, "no key of this file", ("cta_policy",)))
    groups: dict[str, list[Numbered]] = {}
    for one in pairs:
        groups.setdefault(_MEGATRON_GROUPS.get(one.pair.operation, "dp_cp"), []).append(one)
    written = False
    for group, members in groups.items():
        shared = _of_nccl(members)
        settings = [] if shared is None else [each for each in shared.setting if each[0] in _MEGATRON_KEYS]
        yield from _comments([] if shared is None else _reasons(shared))
        if settings:
            written = True
            yield f"{group}:"
            yield from (f"  {name}: {'true' if name.startswith('is_') else value}" for name, value in settings)
    if not written:
        yield "{}"


def _torchtitan(title: str, pairs: Sequence[Numbered], file: str) -> Iterator[str]:
    """Yield a Bash array of torchtitan's arguments: ./run_train.sh "${overrides[@]}"."""
    names: dict[str, None] = {}
    for one in pairs:
        if one.pair.operation in _OVERRIDES and not one.pair.is_left:
            names[f"counterpoint.torchtitan.{_OVERRIDES[one.pair.operation]}"] = None
    exchanges = [one for one in pairs if one.pair.operation == EXCHANGE]
    shared = share(exchanges, "torch", lambda one, mechanism: mechanism)
    if exchanges and shared.setting != "torch":
        options = json.dumps({"mechanism": shared.setting})
        names[f"counterpoint.torchtitan.token_dispatcher={options}"] = None
    yield f"# {title}"
    yield '# Source this file in Bash, then: ./run_train.sh "${overrides[@]}"'
    yield from _comments(one.says(_by_torchtitan(one)) for one in pairs)
    yield from _comments([] if all(one.pair.is_left for one in exchanges) else _reasons(shared))
    yield _follow(file)
    yield "overrides=("
    if names:
        yield "  --override.imports"
        yield from (f"  {shlex.quote(name)}" for name in names)
    yield ")"


def _by_torchtitan(one: Numbered) -> str:
    operation = one.pair.operation
    if one.pair.is_left:
        return "left to torch"
    if operation in _OVERRIDES:
        return f"the override {_OVERRIDES[operation]}, which follows COUNTERPOINT_TUNED"
    if operation == EXCHANGE:
        return "the override token_dispatcher, one mechanism for all layers"
    return "no override: call counterpoint.overlap(model, tuned=...) after parallelize, or see the form env"


def _python(title: str, pairs: Sequence[Numbered], file: str) -> Iterator[str]:
    """Yield a module with two functions: one applies the file to a model, one makes options of process groups."""
    shared = _of_nccl(pairs)
    settings = list(_comments(_reasons(shared))) if shared else []
    for name, value in shared.setting if shared else ():
        is_high = name == "is_high_priority_stream"
        settings.append(f"options.{name} = True" if is_high else f"options.config.{name} = {value}")
    yield from _comments([title, *(one.says("follows the file") for one in pairs)])
    yield _SCRIPT.format(file=json.dumps(file), settings="".join(f"    {line}\n" for line in settings))


def _follow(file: str) -> str:
    """Return the line of shell that names the file, where the variable names none yet."""
    quoted = re.sub(r'(["$`}\\])', r"\\\1", file)
    return f'export COUNTERPOINT_TUNED="${{COUNTERPOINT_TUNED:-{quoted}}}"'


def _of_nccl(pairs: Sequence[Numbered]) -> Shared[GroupSettings] | None:
    """Return the settings of NCCL that save most over pairs whose calls it makes; None: it makes none."""
    by_nccl = [one for one in pairs if one.runs_nccl]
    return share(by_nccl, (), lambda one, mechanism: _settings_of(mechanism)) if by_nccl else None


@lru_cache(maxsize=4096)  # pairs try the same few mechanisms
def _settings_of(name: str) -> GroupSettings | None:
    """Return what a mechanism sets in the options of a process group; None: it is not NCCL's."""
    try:
        mechanism = find_mechanism(name, "cuda")
    except Misconfigured:  # what was tried may have names that this version does not know
        return None
    return group_settings(mechanism) if mechanism.base.startswith("nccl") else None


def _left_out(pairs: Iterable[Numbered], why: str, unknown: tuple[str, ...] = ()) -> Iterator[str]:
    """Yield a sentence for each pair of which something cannot be said in a form; `unknown` are fields it lacks."""
    for one in pairs:
        if one.mechanism is None or not one.runs_nccl:
            yield one.says("nothing to set" if one.pair.is_left else f"{why}, counterpoint runs it")
            continue
        fields = (name for name, _ in group_settings(one.mechanism) if name in unknown)
        if missing := [*outside_group(one.mechanism), *fields]:
            yield one.says(f"{why} for {', '.join(missing)}")


def _reasons(shared: Shared[GroupSettings] | Shared[str]) -> Iterator[str]:
    """Yield which pairs chose the setting that follows, and what it costs those that chose another."""
    for one in shared.chosen:
        yield one.says("follows" if shared.setting else "as it is")
    for one, cost_us in shared.others:
        yield one.says("not measured under this" if cost_us is None else f"this costs it {cost_us:.1f} us a step")
    if shared.saved_us > 0:
        yield f"together {shared.saved_us:.1f} us a step less than stock"


def _comments(lines: Iterable[str], limit: int = 400) -> Iterator[str]:
    return (f"# {plain(line, limit)}" for line in lines)


_WRITERS: dict[str, Callable[[str, Sequence[Numbered], str], Iterator[str]]] = {
    "env": _env,
    "nccl-tuner-csv": _tuner_csv,
    "megatron-yaml": _megatron,
    "torchtitan": _torchtitan,
    "python": _python,
}
FORMS = tuple(_WRITERS)
"""The names of all forms."""
