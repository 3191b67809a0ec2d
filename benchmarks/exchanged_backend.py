"""Make torch's process groups use backend `counterpoint`, for tests that ask for gloo or NCCL: a plugin of pytest.

`torch_tests.py` loads it in pytest (`-p exchanged_backend`) and, as `sitecustomize`, in every process that a test
starts. What it does is in the variable COUNTERPOINT_EXCHANGE, a JSON object:

- `names`: backends in whose place `counterpoint` is asked for. Its communicators then take all that they can.
- `fork`: start ranks by fork, with torch imported already, in place of spawn. Not with GPUs.
- `calls`: file to which every group and every call of the backend appends a line: its test and its way.
- `results`: file to which pytest appends a line for each test that starts or ends.
- `list`: file to which pytest writes the names of all tests that would exercise a backend, and whether they use ranks
  of their class, started for its first test. It runs none then.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import distributed_c10d

c10d: Any = distributed_c10d  # its stubs lack half of it
VARIABLE = "COUNTERPOINT_EXCHANGE"
ASKED: dict[str, Any] = json.loads(os.environ.get(VARIABLE, "{}"))


def exchange(names: list[str], calls: str | None = None) -> None:
    """Give `counterpoint` to whoever asks for one of these backends, with communicators that take all they can."""
    import counterpoint.torch_backend
    from counterpoint.collectives.options import CommunicatorOptions
    from counterpoint.parallel.backend.group import CounterpointGroup
    from counterpoint.parallel.report import CallCounts

    everything = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast"), 0)
    make, construct, add = c10d._new_process_group_helper, CounterpointGroup.__init__, CallCounts.add
    signature = inspect.signature(make)

    def log(way: str) -> None:
        if calls:
            with Path(calls).open("a") as file:
                file.write(f"{os.environ.get('PYTEST_CURRENT_TEST', '')}\t{way}\n")

    @functools.wraps(make)
    def make_exchanged(*args: Any, **keywords: Any) -> Any:
        bound = signature.bind(*args, **keywords)
        if str(bound.arguments["backend"]) in names:
            bound.arguments["backend"] = dist.Backend("counterpoint")
        return make(*bound.args, **bound.kwargs)

    def take_everything(self: Any, options: Any, given: Any) -> None:
        if not isinstance(given, counterpoint.torch_backend.BackendOptions):  # None, or NCCL's
            given = counterpoint.torch_backend.BackendOptions(
                crossover_bytes=everything,
                nccl=given,
                communicator=CommunicatorOptions(timeout_s=options.timeout.total_seconds()),
            )
        construct(self, options, given)
        log("group")

    def add_and_log(self: Any, operation: str, num_bytes: int, path: Any, why: str) -> None:
        add(self, operation, num_bytes, path, why)
        log(path)

    c10d._new_process_group_helper = make_exchanged
    CounterpointGroup.__init__ = take_everything  # type: ignore[method-assign, assignment]
    CallCounts.add = add_and_log  # type: ignore[method-assign]


def fork_ranks() -> None:
    """Let tests that ask for spawned ranks have forked ones, which need not import torch again."""
    multiprocessing: Any = torch.multiprocessing
    get, start = multiprocessing.get_context, multiprocessing.set_start_method
    multiprocessing.get_context = lambda method=None: get("fork" if method == "spawn" else method)
    multiprocessing.set_start_method = lambda method, force=False: start("fork", force=True)


def _log(kind: str, **facts: Any) -> None:
    with Path(ASKED["results"]).open("a") as log:
        log.write(json.dumps({"kind": kind} | facts) + "\n")


def _bases(item: Any) -> set[str]:
    return {base.__name__ for base in inspect.getmro(item.cls)} if item.cls else set()


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Write the names of the tests, if that is asked for, and take them out."""
    if "list" in ASKED:
        threaded = {"MultiThreadedTestCase", "DTensorOpTestBase", "LocalDTensorTestBase"}  # a backend of torch's own
        found = [
            (item.nodeid, "MultiProcContinuousTest" in _bases(item)) for item in items if not _bases(item) & threaded
        ]
        Path(ASKED["list"]).write_text(json.dumps(found))
        items.clear()


def pytest_runtest_logstart(nodeid: str) -> None:
    """Note that a test starts."""
    if "results" in ASKED:
        _log("start", test=nodeid)


def pytest_runtest_logreport(report: Any) -> None:
    """Note how a part of a test ended."""
    if "results" in ASKED and (report.when == "call" or report.outcome != "passed"):
        _log("end", test=report.nodeid, outcome=report.outcome, text=report.longreprtext[-4000:])


if "names" in ASKED:
    exchange(ASKED["names"], ASKED.get("calls"))
if ASKED.get("fork"):
    fork_ranks()
