"""Read and write profiles: files of the figures measured on one kind of machine, such as link rates.

Profiles lie in `profiles/<gpu>.json`, each group of figures with its source and date; docs/reference/profile.md
describes the groups. A file may leave out groups, and single entries of `mechanisms` and `efficiency`. What a user's
own file lacks is taken from the shipped profile of its GPU, or else the default profile, and `Profile.note` says so. A
user's own file is named by an argument or by the variable COUNTERPOINT_PROFILE.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from counterpoint.errors import Misconfigured, printable
from counterpoint.machine.gpus import find_gpu
from counterpoint.records import Record

VARIABLE = "COUNTERPOINT_PROFILE"
MAX_BYTES = 1 << 18
_FOLDER = Path(__file__).with_name("profiles")
_DEFAULT = "h200.json"

Rate = Annotated[float, Meta(gt=0, le=1e9)]
Micros = Annotated[float, Meta(ge=0, le=1e9)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Loss = Annotated[float, Meta(ge=0, lt=1)]
Size = Annotated[float, Meta(ge=0, le=1e6)]
Count = Annotated[int, Meta(ge=1, le=4096)]
NumBytes = Annotated[int, Meta(ge=0, le=1 << 50)]
Text = Annotated[str, Meta(max_length=400)]
Operation = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"]
Name = Annotated[str, Meta(min_length=1, max_length=80)]


class _Strict(Record, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Is the base class of all records of a profile; refuses unknown fields."""


class _Group(_Strict, frozen=True, kw_only=True):
    """Is the base class of a profile's groups of figures; holds where the figures come from."""

    source: Text = ""
    date: Text = ""
    # median of (p90 - p10) / median over the times that the figures are from; None: not known
    time_spread: Annotated[float, Meta(ge=0, le=1e6)] | None = None


class Rates(_Group, frozen=True, kw_only=True):
    """Holds what the steps of a collective's program cost on copy engines: rates in GB/s and times in µs."""

    push_gb_per_s: Rate  # one copy engine over the links, all GPUs at once
    link_gb_per_s: Rate  # links into one GPU, shared by all copies into that GPU
    hbm_gb_per_s: Rate  # device memory, bytes read and bytes written counted
    copy_us: Micros  # a copy, without its bytes
    kernel_us: Micros  # a reduction or local copy, without its bytes
    batch_us: Micros  # the signals and waits of one batch that need not wait
    signal_us: Micros  # until the peer sees a signal
    event_us: Micros  # until another lane of the same GPU sees an event
    call_us: Micros = 0.0  # host time of each step; 0: the host runs ahead, as with CUDA graphs
    launch_us: Micros  # before the first step and after the last one


class NcclFacts(_Group, frozen=True, kw_only=True):
    """Holds the sizes below which NCCL is faster than copy engines, and the CTAs that NCCL needs for full speed."""

    # by operation, the size of the full array (as nccl-tests count it) below which NCCL, alone, is faster or as
    # fast; 0: never
    crossover_bytes: dict[Operation, NumBytes]
    full_speed_ctas: Count  # CTAs with which NCCL about fills the links


class NcclRates(_Group, frozen=True, kw_only=True):
    """Holds latency and bus bandwidth of NCCL alone: time = latency + bytes over a GPU's links / bus bandwidth."""

    latency_us: Micros
    bus_gb_per_s: dict[Operation, Rate]  # by operation, as nccl-tests count it, of large arrays


class SumRates(_Group, frozen=True, kw_only=True):
    """Holds how fast SMs add up copied data, in GB/s, with bytes read and bytes written counted."""

    sm_gb_per_s: Rate  # rate of one SM
    memory_gb_per_s: Rate  # rate of all SMs together
    contention: Loss  # fraction of speed that a GEMM loses while copies run


class Chip(_Group, frozen=True, kw_only=True):
    """Holds how a chip's SMs are grouped and how the vendor's GEMM kernels use the SMs."""

    largest_gpc: Count  # SMs of the largest GPC
    gemm_cluster: Count  # blocks of a GEMM that form a cluster
    matmul_tile: tuple[Count, Count]  # rows and columns of the product that one block of a large bf16 GEMM works on


class Contention(_Group, frozen=True, kw_only=True):
    """Holds how much a GEMM and an NCCL collective slow each other down, measured while both run."""

    compute_loss: Loss  # fraction of speed that a GEMM loses beside the collective at full rate
    comm_loss: Loss  # fraction of speed that the collective loses beside a GEMM
    gemm_wins: Fraction  # launched together, how often the GEMM takes the SMs first on some rank
    comm_cluster: Count  # blocks of a thread block cluster of NCCL, unless `cga_cluster` sets it
    head_start_us: Micros = 100.0  # time from the first launch (GEMM or collective) to the other's launch


class Disturbance(_Group, frozen=True, kw_only=True):
    """Holds how much a GEMM and a collective by one mechanism slow each other down."""

    compute_kept: Fraction  # speed of compute beside the collective, over its speed alone
    comm_kept: Annotated[float, Meta(gt=0, le=1)]  # speed of the collective beside compute, over its speed alone
    # by operation, part of the shorter side that is hidden (pair/together.py), mean over launch orders; an operation
    # that is missing counts as the mean of those given
    hidden: dict[Name, Annotated[float, Meta(ge=-10, le=1)]]
    copies: bool = True  # whether FSDP2 copies between its buffers and parameters

    def held(self, operation: str) -> float:
        """Return which fraction of this mechanism's collectives waits for a persistent GEMM to end."""
        if not self.hidden:
            return 0.0
        hidden = self.hidden.get(operation, sum(self.hidden.values()) / len(self.hidden))
        best = 1.0 - (1.0 - self.compute_kept) / self.comm_kept
        return min(max(1.0 - hidden / best, 0.0), 1.0) if best > 0 else 1.0


class Efficiency(_Group, frozen=True, kw_only=True):
    """Holds which fraction of the data sheet's peaks compute reaches, and what launches cost."""

    matmul: Annotated[float, Meta(gt=0, le=2)]  # part of the peak that a large tile reaches with endless k
    depth: Size  # elements of k that filling and draining a tile costs
    edge: Size  # elements of a tile's edge that loading operands costs
    load: Size  # elements of a tile's edge at which it would wait for its operands, had it no sum to compute
    # rows and columns that matmuls are cut into; of two that take as long, the first
    tiles: Annotated[tuple[tuple[Count, Count], ...], Meta(min_length=1, max_length=64)]
    memory: Annotated[float, Meta(gt=0, le=2)]  # fraction of the bandwidth that streaming kernels reach
    strided: Annotated[float, Meta(gt=0, le=1)]  # fraction of `memory` that kernels reach on a transposed view
    fp8: Annotated[float, Meta(gt=0, le=1)]  # fraction of the fp8 peak that matmuls reach, over the bf16 fraction
    clock: Annotated[float, Meta(gt=0, le=1)]  # clock that training keeps under the power limit, over bursts' clock
    static: Loss  # fraction of the power limit that does not fall with the clock
    flash_forward: Annotated[float, Meta(gt=0, le=1)]  # fraction of the peak of flash attention on endless sequences
    flash_backward: Annotated[float, Meta(gt=0, le=1)]  # the same fraction in its backward pass
    flash1: Annotated[float, Meta(gt=0, le=1)]  # speed of FlashAttention 1 and 2 over the fastest version's
    flash2: Annotated[float, Meta(gt=0, le=1)]
    flash_length: Size  # keys at which flash attention reaches half of that fraction
    launch_us: Micros  # overhead of every kernel on the GPU
    host_us: Micros  # time of the host to launch one kernel of an eager layer
    host_collective_us: Micros  # time of the host to launch one collective
    host_shard_us: Micros  # time of the host for one gathering or scattering of a layer by FSDP2
    persistent: bool  # matmul kernels hold their SMs until they end, so collectives wait
    spread: Fraction  # standard deviation of a GPU's speed over the mean


class Profile(_Strict, frozen=True, kw_only=True):
    """Holds the figures of one GPU, some of which may come from measurements of another GPU."""

    gpu: Name  # name of the GPU in `gpus.py`
    same_chip: tuple[Name, ...] = ()  # unmeasured GPUs that are closest to this GPU
    rates: Rates
    nccl: NcclFacts
    nccl_rates: NcclRates
    sums: SumRates
    chip: Chip
    contention: Contention
    mechanisms: dict[Name, Disturbance]
    efficiency: Efficiency
    # by group, why it is not in the file although it was to be measured
    left_out: dict[Name, Text] = msgspec.field(default_factory=dict)
    # by group, the GPU that the figures are of; by "mechanisms.NAME" and "efficiency.FIELD" that of parts which are
    # not the group's own. Not part of a file
    measured_on: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Return a hash of all figures, 16 hexadecimal digits; the GPU, sources, dates and spreads do not change it."""
        figures = {group: _figures(msgspec.to_builtins(getattr(self, group))) for group in GROUPS}
        return blake2b(msgspec.json.encode(figures, order="deterministic"), digest_size=8).hexdigest()

    @property
    def is_of_this_chip(self) -> bool:
        """Return whether the rates were measured on this GPU or one with the same chip, not assumed from another."""
        origin = self.measured_on.get("rates", self.gpu)
        return origin in (self.gpu, _as_shipped(self.gpu)) or self.gpu in self.same_chip

    def note(self, groups: Iterable[str] = ()) -> str:
        """Return a sentence that names the `groups` (default: all) not measured on this GPU; "" if there are none.

        Single mechanisms and fields of a group that was measured are named, too.
        """
        asked, other = tuple(groups) or GROUPS, dict[str, list[str]]()
        for part, origin in self.measured_on.items():
            if origin != self.gpu and part.partition(".")[0] in asked:
                other.setdefault(origin, []).append(part)
        if not other:
            return ""
        said = "; ".join(f"{', '.join(_joined(names))} of {origin}" for origin, names in other.items())
        why = "not in the file" if list(other) == [_as_shipped(self.gpu)] else f"not measured on {self.gpu}"
        return f"{why}, assumed: {said} (docs/reference/profile.md)"

    def __str__(self) -> str:
        note = self.note()
        if note and self.measured_on.get("rates", self.gpu) != self.gpu:
            return note
        return f"measured on {self.gpu}, {self.rates.date}" + (f"; {note}" if note else "")


_ABOUT = ("source", "date", "time_spread")
_MOST_NAMES = 4  # most names that a sentence lists
_IN_PARTS = ("mechanisms", "efficiency")  # groups of which a file may have a part; other groups are complete or missing
GROUPS = ("rates", "nccl", "nccl_rates", "sums", "chip", "contention", "mechanisms", "efficiency")


def profile_of(gpu: str | None, path: str | Path | None = None) -> Profile:
    """Return the profile of a GPU: the file that `path` or COUNTERPOINT_PROFILE names, else a shipped profile.

    `gpu` is the driver's device name; None: no GPU, as on a CPU.

    Raises:
        Misconfigured: the file cannot be read, or is of another GPU.
    """
    return own_profile(gpu, path) or shipped_profile(gpu)


def own_profile(gpu: str | None, path: str | Path | None = None) -> Profile | None:
    """Return the profile that `path` or COUNTERPOINT_PROFILE names, None without either; raise as `profile_of` does."""
    if path == "":
        raise Misconfigured("an empty path of a profile: give the path of one, or None")
    named = os.environ.get(VARIABLE) if path is None else path
    if not named:
        return None
    found = read_profile(Path(named))
    if gpu is not None and _key(gpu) not in (_key(found.gpu), *map(_key, found.same_chip)):
        raise Misconfigured(
            f"{printable(str(named))} is a profile of {printable(found.gpu)}, and this GPU is {printable(gpu)}: "
            f"give a profile of it, or none (argument profile, variable {VARIABLE})"
        )
    return found


def own_profile_of_traces(gpu: str | None) -> Profile | None:
    """Return the user's own profile for a traced GPU; None if none is given, or the one given is for another GPU."""
    try:
        return own_profile(gpu)
    except Misconfigured:
        return None


def shipped_profile(gpu: str | None) -> Profile:
    """Return the shipped profile of a GPU; figures not measured on that GPU are the closest GPU's, or else H200's."""
    key = "this device" if gpu is None else _key(gpu)
    for found in _shipped():
        if key == found.gpu:
            return found
        if key in found.same_chip:
            return msgspec.structs.replace(found, gpu=key)
    return msgspec.structs.replace(default_profile(), gpu=printable(key, 80))


def read_profile(path: Path) -> Profile:
    """Return the profile in a file; raise Misconfigured, naming the field at fault, if the file holds no profile."""
    name = printable(str(path))
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise Misconfigured(f"{name}: {why}; give a profile as JSON (docs/reference/profile.md)") from None
    return parse_profile(content, name)


def parse_profile(content: bytes, name: str) -> Profile:
    """Return the profile in a file's JSON; figures that the file lacks come from its GPU's shipped profile.

    Raises:
        Misconfigured: it is no profile; the text has the `name` of the file, the field and what is allowed.
    """
    if len(content) > MAX_BYTES:
        raise Misconfigured(f"{name}: larger than {MAX_BYTES} bytes; a profile has some kilobytes")
    try:
        gpu = _NAMED.decode(content).gpu
        return _completed(content, shipped_profile(gpu), _as_shipped(gpu))
    except (msgspec.DecodeError, RecursionError) as error:
        raise Misconfigured(f"{name} is no profile: {printable(str(error))}; see docs/reference/profile.md") from None


def profile_json(profile: Profile) -> bytes:
    """Return a profile as a JSON file, with only the figures that were measured on its GPU."""
    assumed = {part for part, origin in profile.measured_on.items() if origin != profile.gpu}
    content: dict[str, Any] = {"gpu": profile.gpu}
    content |= {"same_chip": profile.same_chip} if profile.same_chip else {}
    for group in (each for each in GROUPS if each not in assumed):
        figures = msgspec.to_builtins(getattr(profile, group))
        content[group] = {name: _known(each) for name, each in figures.items() if f"{group}.{name}" not in assumed}
        content[group] = _known(content[group])
    content |= {"left_out": profile.left_out} if profile.left_out else {}
    return msgspec.json.format(msgspec.json.encode(content), indent=1) + b"\n"


@cache
def default_profile() -> Profile:
    """Return the profile of H200, whose figures are used for what was not measured on a GPU."""
    return _completed((_FOLDER / _DEFAULT).read_bytes(), None)


@cache
def _shipped() -> tuple[Profile, ...]:
    return tuple(_completed(path.read_bytes(), default_profile()) for path in sorted(_FOLDER.glob("*.json")))


class _Named(Record, frozen=True, kw_only=True):
    """Reads only the name of the GPU from a profile's file."""

    gpu: Name


# Made at import: msgspec crashes if two threads use a kind of record for the first time at once.
_NAMED, _PROFILE = msgspec.json.Decoder(_Named), msgspec.json.Decoder(Profile)


def _completed(content: bytes, default: Profile | None, own_gpu: str = "") -> Profile:
    """Return the profile in a file's JSON, with missing figures taken from `default` (None: no figure is missing).

    `own_gpu` is how the file's GPU is called where `default` has figures of it.

    Raises:
        ValidationError: it is no profile.
    """
    given: dict[str, Any] = msgspec.json.decode(content, type=dict[str, Any])
    if "measured_on" in given:
        raise msgspec.ValidationError("Object contains unknown field `measured_on`")
    lacking = {} if default is None else _lacking(given, default)
    whole = dict(given)
    for part in lacking:
        group, _, name = part.partition(".")
        figures = msgspec.to_builtins(getattr(default, group))
        whole[group] = whole[group] | {name: figures[name]} if name else figures
    found = msgspec.convert(whole, Profile)
    _check_texts(found)
    origins = {part: own_gpu if own_gpu and origin == found.gpu else origin for part, origin in lacking.items()}
    return msgspec.structs.replace(found, measured_on=dict.fromkeys(GROUPS, found.gpu) | origins)


def _lacking(given: Mapping[str, Any], default: Profile) -> dict[str, str]:
    """Return the groups and single fields that a file lacks, each with the GPU on which `default` was measured."""
    found = {}
    for group in GROUPS:
        origin, parts = default.measured_on[group], given.get(group)
        if group not in given:
            found[group] = origin
        elif group in _IN_PARTS and isinstance(parts, dict):
            names = [name for name in msgspec.to_builtins(getattr(default, group)) if name not in (*_ABOUT, *parts)]
            found |= {f"{group}.{name}": default.measured_on.get(f"{group}.{name}", origin) for name in names}
    return found


def _check_texts(found: Profile) -> None:
    """Raise ValidationError for a group without source or date, and for text with unprintable characters."""
    groups = _groups(found)
    unsourced = [group for group, facts in groups if not (facts.source and facts.date)]
    if unsourced:
        raise msgspec.ValidationError(f"{unsourced[0]} has no source or no date: give both")
    sources = [text for _, facts in groups for text in (facts.source, facts.date)]
    for text in (found.gpu, *found.same_chip, *found.mechanisms, *sources, *found.left_out, *found.left_out.values()):
        if not text.isprintable():
            raise msgspec.ValidationError(f"{text!r} has characters that cannot be printed: leave them out")


def _as_shipped(gpu: str) -> str:
    return f"{gpu} as shipped"


def _joined(parts: Iterable[str]) -> list[str]:
    """Return names of groups, each with its fields in brackets: "efficiency (depth, edge)"."""
    found: dict[str, list[str]] = {}
    for group, _, name in (part.partition(".") for part in parts):
        found.setdefault(group, []).extend([name] if name else [])
    return [
        f"{group} ({', '.join(names) if len(names) <= _MOST_NAMES else f'{len(names)} figures'})" if names else group
        for group, names in found.items()
    ]


def _known(facts: Any) -> Any:
    """Return a dict without its None values; return anything but a dict unchanged."""
    return {key: each for key, each in facts.items() if each is not None} if isinstance(facts, dict) else facts


def _groups(found: Profile) -> list[tuple[str, Any]]:
    single = [(group, getattr(found, group)) for group in GROUPS if group != "mechanisms"]
    return single + [(f"mechanisms.{name}", facts) for name, facts in found.mechanisms.items()]


def _figures(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a group without its source, date and spread."""
    return {
        name: _figures(value) if isinstance(value, dict) else value
        for name, value in facts.items()
        if name not in _ABOUT
    }


def _key(gpu: str) -> str:
    sheet = find_gpu(gpu)
    return sheet.name if sheet else gpu
