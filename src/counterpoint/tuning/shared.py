"""Choose one setting for pairs that share it: of a process, of a process group, of a dispatcher of tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Generic, TypeVar

from counterpoint.controls.control import Control
from counterpoint.errors import Misconfigured, printable
from counterpoint.measurement.mechanisms import Mechanism, find_mechanism
from counterpoint.pair.expert_choice import EXCHANGE_MECHANISMS
from counterpoint.pair.matmul_choice import MATMUL_MECHANISMS
from counterpoint.records.tuning import LEAVE, Tuned, TunedPair
from counterpoint.tuned.choices import EXCHANGE
from counterpoint.tuning.parts import depends

S = TypeVar("S", bound=Hashable)
GroupSettings = tuple[tuple[str, int], ...]
"""Fields of `ProcessGroupNCCL.Options` and their values, sorted: (("cga_cluster_size", 2), ("max_ctas", 8))."""


@dataclass(frozen=True, kw_only=True)
class Numbered:
    """Holds a pair, its number in the file, and the mechanism that runs it."""

    number: int  # from 1 on
    pair: TunedPair
    mechanism: Mechanism | None  # None: of matmuls that depend on communication, and of exchanges

    @property
    def runs_nccl(self) -> bool:
        """Return whether NCCL makes the calls of this independent pair, so that its settings matter."""
        return self.mechanism is not None and self.mechanism.base.startswith("nccl")

    def says(self, what: str) -> str:
        """Return a sentence about the pair: its number and choice, `what`, and which pair it is."""
        pair = self.pair
        where = f" in {' '.join(pair.where)}" if pair.where else ""
        size = f"{pair.bytes_per_rank} bytes a rank, {pair.ranks} ranks, {pair.dtype}"
        return f"pair {self.number}, {pair.mechanism}: {what} ({pair.operation}, {size}, beside {pair.compute}{where})"


def numbered(tuned: Tuned) -> tuple[Numbered, ...]:
    """Return the pairs of a file; raise Misconfigured if one has a mechanism that there is not on its device."""
    device = "cpu" if tuned.made.device == "cpu" else "cuda"
    return tuple(
        Numbered(number=number, pair=pair, mechanism=_mechanism(pair, number, device))
        for number, pair in enumerate(tuned.pair, 1)
    )


def plain(text: str, limit: int = 400) -> str:
    """Return one line of ASCII without control characters, which may stand in a comment of any language."""
    return printable(text, limit).encode("ascii", "backslashreplace").decode()[:limit]


def group_settings(mechanism: Mechanism) -> GroupSettings:
    """Return what the controls of a mechanism set in the options of a process group of NCCL."""
    config = SimpleNamespace()
    options = SimpleNamespace(config=config, is_high_priority_stream=False)
    for control in mechanism.controls:
        control.configure(options)
    high = {"is_high_priority_stream": 1} if options.is_high_priority_stream else {}
    return tuple(sorted((vars(config) | high).items()))


def outside_group(mechanism: Mechanism) -> list[str]:
    """Return the controls of a mechanism that the options of a process group cannot hold: `gemm_sms=124`, `windows`."""
    return [one.name for one in mechanism.controls if type(one).configure is Control.configure]


@dataclass(frozen=True, kw_only=True)
class Shared(Generic[S]):
    """Holds the setting that saves most in a step, over all pairs that share it."""

    setting: S
    saved_us: float  # in a step, over the pairs that were measured under it
    chosen: tuple[Numbered, ...]  # pairs that chose it themselves
    others: tuple[tuple[Numbered, float | None], ...]  # and the µs that it costs them in a step; None: not measured


def share(pairs: Sequence[Numbered], stock: S, setting_of: Callable[[Numbered, str], S | None]) -> Shared[S]:
    """Return the setting that saves most µs in a step; `stock` where no other saves any.

    Args:
        pairs: that share the setting.
        stock: the setting where nothing is chosen.
        setting_of: returns the setting by which a mechanism that was tried runs a pair; None: the mechanism has none.
    """

    def saved_us(setting: S) -> float:
        times = [(one.pair, _us_under(one, setting, stock, setting_of)) for one in pairs]
        return sum(pair.calls * (pair.stock_us - us) for pair, us in times if us is not None)

    def cost_us(one: Numbered) -> float | None:
        us = _us_under(one, best, stock, setting_of)
        return None if us is None else one.pair.calls * (us - one.pair.us)

    own = {one.number: stock if one.pair.is_left else setting_of(one, one.pair.mechanism) for one in pairs}
    wanted = dict.fromkeys([stock, *(setting for setting in own.values() if setting is not None)])
    best = max(wanted, key=lambda setting: (saved_us(setting), setting == stock))
    return Shared(
        setting=best,
        saved_us=saved_us(best),
        chosen=tuple(one for one in pairs if own[one.number] == best),
        others=tuple((one, cost_us(one)) for one in pairs if own[one.number] != best),
    )


def _us_under(one: Numbered, setting: S, stock: S, setting_of: Callable[[Numbered, str], S | None]) -> float | None:
    """Return the time of a pair under a setting: its own, stock's, or the best that was tried and is not marked."""
    if not one.pair.is_left and setting_of(one, one.pair.mechanism) == setting:
        return one.pair.us
    if setting == stock:
        return one.pair.stock_us
    tried = [each for each in one.pair.tried if each.marked is None]
    return min((each.us for each in tried if setting_of(one, each.mechanism) == setting), default=None)


def _mechanism(pair: TunedPair, number: int, device: str) -> Mechanism | None:
    named = pair.stock if pair.mechanism == LEAVE else pair.mechanism
    if depends(pair):
        allowed: tuple[str, ...] = EXCHANGE_MECHANISMS if pair.operation == EXCHANGE else MATMUL_MECHANISMS
        if named not in allowed:
            raise Misconfigured(
                f"pair {number}: {printable(named)!r} is no mechanism; choose from {', '.join(allowed)}"
            )
        return None
    try:
        return find_mechanism(named, device)
    except Misconfigured as error:
        raise Misconfigured(f"pair {number}: {error}") from None
