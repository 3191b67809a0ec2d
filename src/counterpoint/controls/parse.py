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

_BASE = re.compile(r"[a-z][a-z0-9_]*")


@dataclass(frozen=True, kw_only=True)
class Knob:
    """Describes the keys of a mechanism's name that make one control.

    `build` gets the value of each key, None for one that was not given.
    """

    keys: dict[str, str]  # key: its allowed values, in words
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
        if key not in KEYS:
            raise Misconfigured(f"mechanism {name!r} has the unknown key {key!r}; choose from: {', '.join(KEYS)}")
        if key in given:
            raise Misconfigured(f"mechanism {name!r} sets {key} twice; give it once")
        if (KEYS[key] == "") != ("=" not in setting) or (KEYS[key] and not value):
            form = f"{key}={KEYS[key]}" if KEYS[key] else f"{key}, without a value"
            raise Misconfigured(f"mechanism {name!r}: {setting!r} is not complete; write {form}")
        given[key] = value
    controls = [
        knob.build({key: given.get(key) for key in knob.keys}) for knob in _KNOBS if knob.keys.keys() & given.keys()
    ]
    return base, tuple(controls)


def _number(values: dict[str, str | None], key: str) -> int | None:
    """Return the value of `key` as an integer; None if it was not given."""
    value = values[key]
    try:
        return None if value is None else int(value)
    except ValueError:
        raise Misconfigured(f"{key}={value} is not a number; write {key}={KEYS[key]}") from None


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


_KNOBS = (  # streams first: green contexts take over the priorities of the streams that they replace
    Knob(keys={"priority": "high|default|low|NUMBER"}, build=_priority),
    Knob(keys={"green": "COMPUTE_SMS"}, build=lambda v: GreenContexts(compute_sms=_needed(v, "green"))),
    Knob(
        keys={"max_ctas": "N", "min_ctas": "N"},
        build=lambda v: NcclCtas(max_ctas=_number(v, "max_ctas"), min_ctas=_number(v, "min_ctas")),
    ),
    Knob(keys={"cga_cluster": "N"}, build=lambda v: NcclCluster(cga_cluster=_needed(v, "cga_cluster"))),
    Knob(
        keys={"cta_policy": "default|efficiency|zero"},
        build=lambda v: NcclCtaPolicy(policy=v["cta_policy"]),  # type: ignore[arg-type]  # it refuses unknown words itself
    ),
    Knob(keys={"windows": ""}, build=lambda v: NcclWindows()),
    Knob(keys={"gemm_sms": "N|fit"}, build=_gemm_sms),
    Knob(keys={"blocks_per_sm": "N", "smem": "BYTES"}, build=_occupancy),
    Knob(keys={"order": "comm_resident"}, build=_order),
)

KEYS: dict[str, str] = {key: values for knob in _KNOBS for key, values in knob.keys.items()}
"""Every key and its allowed values in words; "" for a key without a value."""

VARIABLES: dict[str, str] = {
    "max_ctas": "NCCL_MAX_CTAS",
    "min_ctas": "NCCL_MIN_CTAS",
    "cga_cluster": "NCCL_CGA_CLUSTER_SIZE",
}
"""By key, the variable of the environment that sets it to the same value for all groups of NCCL made from then on."""
