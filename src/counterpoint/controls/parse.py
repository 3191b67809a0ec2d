"""Parse a mechanism's name, such as `nccl+max_ctas=8+gemm_sms=124`, into a base and its controls."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from counterpoint.controls.control import Control
from counterpoint.controls.gemm_sms import GemmSmFit, GemmSmLimit
from counterpoint.controls.launch_order import CommFirst
from counterpoint.controls.nccl import NcclCluster, NcclCtaPolicy, NcclCtas, NcclWindows
from counterpoint.controls.streams import GreenContexts, StreamPriority
from counterpoint.errors import Misconfigured
from counterpoint.tuned.choices import KNOBS

_BASE = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Knob:
    """Describes the keys of a mechanism's name that make one control.

    `build` gets the value of each key, None for one that was not given.
    """

    keys: tuple[str, ...]
    build: Callable[[dict[str, str | None]], Control]


def parse_mechanism(name: str) -> tuple[str, tuple[Control, ...]]:
    """Return the base ("nccl") and its controls, in the order in which to apply them, of `base[+key[=value]]...`.

    Raises:
        Misconfigured: no base, an unknown key or value, or a key given twice; the text names what is allowed.
    """
    base, *settings = name.split("+")
    if not _BASE.fullmatch(base):
        raise Misconfigured(f"mechanism {name!r} must begin with its base, as in 'nccl' or 'nccl+max_ctas=8'")
    given: dict[str, str] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key not in KNOBS:
            raise Misconfigured(f"mechanism {name!r} has the unknown key {key!r}; choose from: {', '.join(KNOBS)}")
        if key in given:
            raise Misconfigured(f"mechanism {name!r} sets {key} twice; give it once")
        if (KNOBS[key] == "") != ("=" not in setting) or (KNOBS[key] and not value):
            form = f"{key}={KNOBS[key]}" if KNOBS[key] else f"{key}, without a value"
            raise Misconfigured(f"mechanism {name!r}: {setting!r} is not complete; write {form}")
        given[key] = value
    controls = [
        knob.build({key: given.get(key) for key in knob.keys}) for knob in _CONTROLS if given.keys() & {*knob.keys}
    ]
    return base, tuple(controls)


def _number(values: dict[str, str | None], key: str) -> int | None:
    """Return the value of `key` as an integer; None if it was not given."""
    value = values[key]
    try:
        return None if value is None else int(value)
    except ValueError:
        raise Misconfigured(f"{key}={value} is not a number; write {key}={KNOBS[key]}") from None


def _needed(values: dict[str, str | None], key: str) -> int:
    number = _number(values, key)
    assert number is not None, "the knob is built only if one of its keys is given, and this one has no other"
    return number


def _priority(values: dict[str, str | None]) -> Control:
    word = values["priority"]
    if word in ("high", "default", "low"):
        return StreamPriority(level=word)  # type: ignore[arg-type]  # one of its words
    return StreamPriority(level=_needed(values, "priority"))


def _gemm_sms(values: dict[str, str | None]) -> Control:
    return GemmSmFit() if values["gemm_sms"] == "fit" else GemmSmLimit(num_sms=_needed(values, "gemm_sms"))


def _order(values: dict[str, str | None]) -> Control:
    if values["order"] != "comm_resident":
        raise Misconfigured(f"order={values['order']} is unknown; write order=comm_resident")
    return CommFirst()


def _occupancy(values: dict[str, str | None]) -> Control:
    from counterpoint.controls.occupancy import OccupancyShaping

    return OccupancyShaping(blocks_per_sm=_number(values, "blocks_per_sm"), smem_bytes=_number(values, "smem"))


_CONTROLS = (  # streams first: green contexts take over the priorities of the streams that they replace
    Knob(keys=("priority",), build=_priority),
    Knob(keys=("green",), build=lambda v: GreenContexts(compute_sms=_needed(v, "green"))),
    Knob(
        keys=("max_ctas", "min_ctas"),
        build=lambda v: NcclCtas(max_ctas=_number(v, "max_ctas"), min_ctas=_number(v, "min_ctas")),
    ),
    Knob(keys=("cga_cluster",), build=lambda v: NcclCluster(cga_cluster=_needed(v, "cga_cluster"))),
    Knob(
        keys=("cta_policy",),
        build=lambda v: NcclCtaPolicy(policy=v["cta_policy"]),  # type: ignore[arg-type]  # it refuses unknown words itself
    ),
    Knob(keys=("windows",), build=lambda v: NcclWindows()),
    Knob(keys=("gemm_sms",), build=_gemm_sms),
    Knob(keys=("blocks_per_sm", "smem"), build=_occupancy),
    Knob(keys=("order",), build=_order),
)

VARIABLES: dict[str, str] = {
    "max_ctas": "NCCL_MAX_CTAS",
    "min_ctas": "NCCL_MIN_CTAS",
    "cga_cluster": "NCCL_CGA_CLUSTER_SIZE",
}
"""By key, the variable of the environment that sets it to the same value for all groups of NCCL made from then on."""
