"""Define the collectives: for each a row of `OPERATIONS` and a function that makes its `Call`; `plan` makes programs.

A new collective needs a row here and a program (in `direct.py`, `reductions.py`, or a file of its own). Proof, clock,
tuning, executors, crossovers, `Communicator.call` and `measure` read everything specific to it from its row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, TypeAlias

from counterpoint.collectives.program import direct, reductions
from counterpoint.collectives.program.calls import BlockLayout, Call, Own, Sizes, make_call, parts
from counterpoint.collectives.program.steps import Program, Tuning, merge_batches
from counterpoint.errors import Misconfigured
from counterpoint.machine.profile import Profile

ProgramBuilder: TypeAlias = Callable[[Call, int, Tuning], Program]
EvenSizes: TypeAlias = Callable[[int, int, int], Sizes]
Argument = Literal["output", "input", "op", "root"]
Means = Literal["torch", "programs", "nccl_copies"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """Holds everything that is specific to one collective."""

    layout: BlockLayout  # where blocks lie, and which ranks send to which
    program: ProgramBuilder  # builds the program of one rank
    sizes: EvenSizes  # returns `Sizes` of even blocks, given the number of ranks, bytes of the full array and root
    tuning: frozenset[Literal["relay_bytes", "staging_bytes"]] = frozenset()
    """Names the fields of `Tuning` that its program uses, besides chunks, arrivals and turns."""
    same_output: bool = True  # all ranks have an output at the same place; False: they tell each other where
    arguments: tuple[Argument, ...] = ("output", "input")  # arguments of `Communicator.call` and torch's function
    torch_names: tuple[str, ...] = ()  # functions of torch.distributed, newest first; none: torch sends by blocks
    measured_by: frozenset[Means] = frozenset()  # how `measure` can run it: torch, programs, NCCL's copy engines


def find_operation(name: str) -> Operation:
    """Return the row of a collective; raise `Misconfigured` if there is none of that name."""
    if name not in OPERATIONS:
        raise Misconfigured(f"there is no collective {name!r}; choose from: {', '.join(OPERATIONS)}")
    return OPERATIONS[name]


def has_equal_outputs(call: Call) -> bool:
    """Return whether outputs must lie at the same place in every rank's symmetric memory, as peers write into them."""
    return call.layout.writes_outputs and OPERATIONS[call.operation].same_output


def crossovers(profile: Profile, given: Mapping[str, int] | None = None) -> dict[str, int]:
    """Return for each operation of `BY_TORCH` the bytes of the full array below which torch runs the operation.

    The full array is as nccl-tests count it. Operations that `given` lacks have the profile's size, or 0.

    Raises:
        Misconfigured: `given` has another operation, or a size below 0.
    """
    given = given or {}
    unknown = [f"{name}={size}" for name, size in given.items() if name not in BY_TORCH or size < 0]
    if unknown:
        raise Misconfigured(f"crossover_bytes {', '.join(unknown)}: give 0 or more for {', '.join(BY_TORCH)}")
    measured = dict[str, int](profile.nccl.crossover_bytes.items())
    return {name: given.get(name, measured.get(name, 0)) for name in BY_TORCH}


def measured_by(means: Means) -> tuple[str, ...]:
    """Return the names of the collectives that `measure` can run by `means`, such as "torch"."""
    return tuple(name for name, row in OPERATIONS.items() if means in row.measured_by)


def even_call(name: str, world_size: int, num_bytes: int, *, root: int = 0, own: Own | None = None) -> Call:
    """Return a call of the collective `name` on blocks of equal size; raise `Misconfigured` if that is impossible.

    `num_bytes` is the size of the full array, as nccl-tests counts: the largest tensor of a rank. `own` is as in
    `Call`; None: the first that the collective allows.
    """
    row = find_operation(name)
    sizes = row.sizes(world_size, num_bytes, root)
    rooted = root if "root" in row.arguments else None
    return make_call(row.layout, sizes, root=rooted, own=own or row.layout.own[0])


def all_gather(world_size: int, shard_bytes: int | Sequence[int], *, own: Own = "in_place") -> Call:
    """Return the call that sends every rank's shard to all ranks; in place, the input is a block of the output."""
    shards = _per_rank(world_size, shard_bytes)
    return make_call(OPERATIONS["all_gather"].layout, [[shard] * world_size for shard in shards], own=own)


def all_to_all(splits: Sizes, *, own: Own = "copy") -> Call:
    """Return the call that sends `splits[s][t]` bytes of rank s to rank t, in blocks of any sizes."""
    return make_call(OPERATIONS["all_to_all"].layout, splits, own=own)


def reduce_scatter(world_size: int, shard_bytes: int | Sequence[int]) -> Call:
    """Return the call that combines shard t of every rank's input on rank t, without copying rank t's own shard."""
    shards = _per_rank(world_size, shard_bytes)
    return make_call(OPERATIONS["reduce_scatter"].layout, [shards] * world_size, own="consumer")


def all_reduce(world_size: int, num_bytes: int, *, own: Own = "in_place") -> Call:
    """Return the call that combines every rank's input on every rank: a reduce_scatter of shards and an all_gather.

    `own` says where input is: `in_place` in output, else in a buffer of its own; no own block is ever copied.
    """
    where: Own = "in_place" if own == "in_place" else "consumer"
    return make_call(OPERATIONS["all_reduce"].layout, _shards_to_all(world_size, num_bytes, 0), own=where)


def broadcast(world_size: int, num_bytes: int, *, root: int = 0) -> Call:
    """Return the call that copies the output of `root` to the output of every rank; it is always in place."""
    return make_call(
        OPERATIONS["broadcast"].layout, _array_of_root(world_size, num_bytes, root), root=root, own="in_place"
    )


def scatter(world_size: int, shard_bytes: int | Sequence[int], *, root: int = 0, own: Own = "copy") -> Call:
    """Return the call that sends block t of the root's input to rank t; in place, the root's output is in its input."""
    shards, nothing = _per_rank(world_size, shard_bytes), [0] * world_size
    sizes = [shards if source == root else nothing for source in range(world_size)]
    return make_call(OPERATIONS["scatter"].layout, sizes, root=root, own=own)


def gather(world_size: int, shard_bytes: int | Sequence[int], *, root: int = 0, own: Own = "copy") -> Call:
    """Return the call that sends every rank's shard to `root`; in place, the root's input is in its output."""
    shards = _per_rank(world_size, shard_bytes)
    sizes = [[shard if target == root else 0 for target in range(world_size)] for shard in shards]
    return make_call(OPERATIONS["gather"].layout, sizes, root=root, own=own)


def send_recv(splits: Sizes, *, own: Own = "copy") -> Call:
    """Return a call that sends `splits[s][t]` bytes of rank s to rank t; ranks without bytes take no part."""
    return make_call(OPERATIONS["send_recv"].layout, splits, own=own)


def barrier(world_size: int) -> Call:
    """Return the call that ends on a rank only after every rank has begun it."""
    return make_call(OPERATIONS["barrier"].layout, _nothing(world_size, 0, 0), own="in_place")


def _per_rank(world_size: int, shard_bytes: int | Sequence[int]) -> list[int]:
    shards = [shard_bytes] * world_size if isinstance(shard_bytes, int) else list(shard_bytes)
    if len(shards) != world_size:
        raise Misconfigured(f"{len(shards)} shards for {world_size} ranks: give one size, or one for each rank")
    return shards


def _blocks_to_all(world_size: int, num_bytes: int, root: int) -> Sizes:
    return [[num_bytes // max(1, world_size)] * world_size] * world_size


def _shards_to_all(world_size: int, num_bytes: int, root: int) -> Sizes:
    return [[size for _, size in parts(num_bytes, world_size)]] * world_size


def _array_of_root(world_size: int, num_bytes: int, root: int) -> Sizes:
    return [[num_bytes if source == root else 0] * world_size for source in range(world_size)]


def _blocks_of_root(world_size: int, num_bytes: int, root: int) -> Sizes:
    return _array_of_root(world_size, num_bytes // max(1, world_size), root)


def _blocks_to_root(world_size: int, num_bytes: int, root: int) -> Sizes:
    block = num_bytes // max(1, world_size)
    return [[block if target == root else 0 for target in range(world_size)]] * world_size


def _array_to_next(world_size: int, num_bytes: int, root: int) -> Sizes:
    ranks = range(world_size)
    return [[num_bytes if target == (source + 1) % world_size else 0 for target in ranks] for source in ranks]


def _nothing(world_size: int, num_bytes: int, root: int) -> Sizes:
    return [[0] * world_size] * world_size


_ROWS = (
    Operation(
        layout=BlockLayout(
            name="all_gather", input="block", output="blocks", own=("in_place", "copy", "consumer"), all_send=True
        ),
        program=direct.exchange,
        sizes=_blocks_to_all,
        torch_names=("all_gather_single", "all_gather_into_tensor"),
        measured_by=frozenset({"torch", "programs", "nccl_copies"}),
    ),
    Operation(
        layout=BlockLayout(
            name="reduce_scatter", input="blocks", output="shard", own=("consumer",), all_send=True
        ),
        program=reductions.reduce_scatter,
        sizes=_blocks_to_all,
        tuning=frozenset({"staging_bytes"}),
        arguments=("output", "input", "op"),
        torch_names=("reduce_scatter_single", "reduce_scatter_tensor"),
        measured_by=frozenset({"torch", "programs"}),
    ),
    Operation(
        layout=BlockLayout(
            name="all_reduce", input="blocks", output="array", own=("in_place", "consumer"), all_send=True
        ),
        program=reductions.all_reduce,
        sizes=_shards_to_all,
        arguments=("output", "op"),
        torch_names=("all_reduce",),
        measured_by=frozenset({"torch", "programs"}),
    ),
    Operation(
        layout=BlockLayout(
            name="all_to_all", input="blocks", output="blocks", own=("copy", "consumer"), all_send=True
        ),
        program=direct.exchange,
        sizes=_blocks_to_all,
        torch_names=("all_to_all_single",),
        measured_by=frozenset({"torch", "programs", "nccl_copies"}),
    ),
    Operation(
        layout=BlockLayout(name="broadcast", input="block", output="blocks", own=("in_place",)),
        program=direct.broadcast,
        sizes=_array_of_root,
        tuning=frozenset({"relay_bytes"}),
        arguments=("output", "root"),
        torch_names=("broadcast",),
        measured_by=frozenset({"torch", "programs", "nccl_copies"}),
    ),
    Operation(
        layout=BlockLayout(name="scatter", input="blocks", output="blocks", own=("copy", "in_place", "consumer")),
        program=direct.exchange,
        sizes=_blocks_of_root,
        arguments=("output", "input", "root"),
    ),
    Operation(
        layout=BlockLayout(name="gather", input="block", output="blocks", own=("copy", "in_place", "consumer")),
        program=direct.exchange,
        sizes=_blocks_to_root,
        same_output=False,
        arguments=("output", "input", "root"),
    ),
    Operation(
        layout=BlockLayout(name="send_recv", input="blocks", output="blocks", own=("copy", "consumer")),
        program=direct.exchange,
        sizes=_array_to_next,
        same_output=False,
        measured_by=frozenset({"torch"}),
    ),
    Operation(
        layout=BlockLayout(
            name="barrier", input="blocks", output="blocks", own=("in_place",), all_send=True, has_data=False
        ),
        program=direct.barrier,
        sizes=_nothing,
        arguments=(),
        torch_names=("barrier",),
    ),
)  # fmt: skip
OPERATIONS: dict[str, Operation] = {row.layout.name: row for row in _ROWS}
"""Maps the names of collectives to their rows."""
BY_TORCH = tuple(name for name, row in OPERATIONS.items() if {"torch", "programs"} <= row.measured_by)
"""Names the collectives that `measure` runs both by torch and by programs, so that a profile may have a crossover."""

DEFAULT = Tuning()


@lru_cache(maxsize=4096)
def plan(call: Call, rank: int, tuning: Tuning = DEFAULT) -> Program:
    """Return the program of `rank` for `call`, from a cache: equal arguments give one object.

    Raises:
        Misconfigured: `rank` is not in the group, or `staging_bytes` is set for an operation without slices.
    """
    if not 0 <= rank < call.world_size:
        raise Misconfigured(f"rank {rank} of a group of {call.world_size}: allowed are 0 to {call.world_size - 1}")
    row = OPERATIONS[call.operation]
    if tuning.staging_bytes is not None and "staging_bytes" not in row.tuning:
        raise Misconfigured(
            f"{call.operation} with staging_bytes={tuning.staging_bytes}: only "
            f"{', '.join(name for name, row in OPERATIONS.items() if 'staging_bytes' in row.tuning)} has slices"
        )
    made = row.program(call, rank, tuning)
    release, steps, finish = map(merge_batches, (made.release, made.steps, made.finish))
    return replace(made, release=release, steps=steps, finish=finish)


def plan_all(call: Call, tuning: Tuning = DEFAULT) -> tuple[Program, ...]:
    """Return the programs of all ranks for `call`: the checker and the simulation need all of them."""
    return tuple(plan(call, rank, tuning) for rank in range(call.world_size))


@lru_cache(maxsize=1024)
def most_staging_bytes(call: Call, tuning: Tuning) -> int:
    """Return the largest staging size of any rank, in bytes; if the call is sliced, for its first (largest) slice."""
    if tuning.staging_bytes is not None and call.world_size > 1:
        call, tuning = reductions.slice_of(call, tuning.staging_bytes), replace(tuning, staging_bytes=None)
    return max(program.staging_bytes for program in plan_all(call, tuning)) if call.reduces else 0
