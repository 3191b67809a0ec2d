"""Parse a mechanism's name, such as `nccl+max_ctas=8+gemm_sms=124`, into a base and its controls."""

from __future__ import annotations

import re
from collections.abc import Callable

from counterpoint.controls.control import Control
from counterpoint.controls.gemm_sms import GemmSmFit, GemmSmLimit
from counterpoint.controls.green_contexts import GreenContexts
from counterpoint.controls.launch_order import CommFirst
from counterpoint.controls.nccl import NcclCluster, NcclCtaPolicy, NcclCtas, NcclWindows
from counterpoint.controls.occupancy import OccupancyShaping
from counterpoint.controls.priority import StreamPriority
from counterpoint.errors import Misconfigured
from counterpoint.tuned.choices import KNOBS

_BASE = re.compile(r"[a-z][a-z0-9_]*")
Values = dict[str, str | None]
"""The value of each key of a control; None for a key that was not given."""


def parse_mechanism(name: str) -> tuple[str, tuple[Control, ...]]:
    """Return the base (such as "nccl") and the controls, in the order of application, of `base[+key[=value]]...`.

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
    asked = [(keys, build) for keys, build in _CONTROLS.items() if given.keys() & {*keys}]
    return base, tuple(build({key: given.get(key) for key in keys}) for keys, build in asked)


def _number(values: Values, key: str) -> int | None:
    """Return the value of `key` as an integer; None if it was not given."""
    value = values[key]
    try:
        return None if value is None else int(value)
    except ValueError:
        raise Misconfigured(f"{key}={value} is not a number; write {key}={KNOBS[key]}") from None


def _needed(values: Values, key: str) -> int:
    number = _number(values, key)
    assert number is not None, "the knob is built only if one of its keys is given, and this one has no other"
    return number


def _priority(values: Values) -> Control:
    word = values["priority"]
    if word in ("high", "default", "low"):
        return StreamPriority(level=word)  # type: ignore[arg-type]  # one of its words
    return StreamPriority(level=_needed(values, "priority"))


def _gemm_sms(values: Values) -> Control:
    return GemmSmFit() if values["gemm_sms"] == "fit" else GemmSmLimit(num_sms=_needed(values, "gemm_sms"))


def _order(values: Values) -> Control:
    if values["order"] != "comm_resident":
        raise Misconfigured(f"order={values['order']} is unknown; write order=comm_resident")
    return CommFirst()


_CONTROLS: dict[tuple[str, ...], Callable[[Values], Control]] = {  # by the keys that make one control
    ("priority",): _priority,  # streams first: green contexts take over the priorities of the streams they replace
    ("green",): lambda v: GreenContexts(compute_sms=_needed(v, "green")),
    ("max_ctas", "min_ctas"): lambda v: NcclCtas(max_ctas=_number(v, "max_ctas"), min_ctas=_number(v, "min_ctas")),
    ("cga_cluster",): lambda v: NcclCluster(cga_cluster=_needed(v, "cga_cluster")),
    ("cta_policy",): lambda v: NcclCtaPolicy(policy=v["cta_policy"]),  # type: ignore[arg-type]  # it refuses others
    ("windows",): lambda v: NcclWindows(),
    ("gemm_sms",): _gemm_sms,
    ("blocks_per_sm", "smem"): lambda v: OccupancyShaping(
        blocks_per_sm=_number(v, "blocks_per_sm"), smem_bytes=_number(v, "smem")
    ),
    ("order",): _order,
}

VARIABLES: dict[str, str] = {
    "max_ctas": "NCCL_MAX_CTAS",
    "min_ctas": "NCCL_MIN_CTAS",
    "cga_cluster": "NCCL_CGA_CLUSTER_SIZE",
}
"""By key, the variable of the environment that sets it to the same value for all groups of NCCL made from then on."""
