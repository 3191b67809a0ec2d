"""Record what a script does with counterpoint and with torch's process groups, for the report at the script's end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from counterpoint.parallel.backend.group import CounterpointGroup
from counterpoint.parallel.expert.dispatcher import Dispatcher
from counterpoint.records.rehearsal import RankReport
from counterpoint.tuning.script_steps import answering_overlap


class Witness:
    """Records each overlapped model, each group of backend `counterpoint`, each dispatcher, and torch's process groups.

    Args:
        rank: number of this rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self.steps = rank, 0
        self._reporting: dict[str, Any] = {}  # by name: an object with a method `report`
        self._texts: dict[str, str] = {}
        self._calls: dict[str, int] = {}
        self._ended: dict[str, int] = {}  # number of calls by group, before torch was last initialised
        self._members: dict[str, tuple[int, ...]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the objects that the `with` block makes, and their reports before groups are destroyed and at exit."""
        destroy = dist.destroy_process_group

        def destroying(group: Any = None) -> None:
            self._note()
            if group in (None, dist.group.WORLD):
                self._ended = dict(self._calls)  # a later group may have the same name
            destroy(group)

        modules: Any = (dist, dist.distributed_c10d)
        with answering_overlap(self._overlapped), self._making(CounterpointGroup), self._making(Dispatcher):
            for module in modules:
                module.destroy_process_group = destroying
            try:
                yield
                self._note()
            finally:
                for module in modules:
                    module.destroy_process_group = destroy

    def report(self) -> RankReport:
        """Return a report of all that was recorded so far."""
        peak = torch.cuda.max_memory_reserved() if torch.cuda.is_initialized() else 0
        return RankReport(
            rank=self._rank,
            steps=self.steps,
            peak_bytes=peak,
            reports={name: text for name, text in self._texts.items() if not self._is_within_another(text)},
            calls=self._calls,
            members=self._members,
        )

    def _is_within_another(self, text: str) -> bool:
        """Return whether a longer report contains this text: `overlap`'s report contains its dispatchers' reports."""
        return any(text in other and len(text) < len(other) for other in self._texts.values())

    def _overlapped(self, overlap: Callable[..., Any], model: Any, **options: Any) -> Any:
        made = overlap(model, **options)
        self._keep(f"overlap({type(model).__name__.removeprefix('FSDP')})", made)
        return made

    @contextmanager
    def _making(self, kind: Any) -> Iterator[None]:
        """Record every object of class `kind` that is made in the `with` block."""
        begin, witness = kind.__init__, self

        def beginning(made: Any, *args: Any, **keywords: Any) -> None:
            begin(made, *args, **keywords)
            witness._keep(kind.__name__, made)

        kind.__init__ = beginning
        try:
            yield
        finally:
            kind.__init__ = begin

    def _keep(self, name: str, made: Any) -> None:
        again = sum(known.partition(" #")[0] == name for known in self._reporting)
        self._reporting[f"{name} #{again + 1}" if again else name] = made

    def _note(self) -> None:
        """Save the current report of every recorded object, and each process group's number of collectives so far."""
        for name, made in self._reporting.items():
            with suppress(KeyError, RuntimeError, ValueError):  # the group is destroyed: keep its last report
                self._texts[name] = str(made.report())
        groups: Any = dist.distributed_c10d._world.pg_map if dist.is_initialized() else ()
        for group in groups:
            with suppress(RuntimeError):  # raised where no backend counts, before the first call
                name = str(group.group_name)
                self._calls[name] = self._ended.get(name, 0) + int(group._get_sequence_number_for_group())
                self._members[name] = tuple(dist.get_process_group_ranks(group))
