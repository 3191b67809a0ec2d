"""Where steps begin and end: by ProfilerStep, by the program's ranges, by optimizers, by repetition, or not at all."""

import pytest

from counterpoint.diagnosis.reading.steps import StepWindows, find_steps
from counterpoint.trace.timeline import HostKind
from tests.support.job_builder import Host, Op, Rank, comm, host, job, op, rank, timeline


def found(r: Rank) -> StepWindows:
    return find_steps(timeline(r))


def windows(r: Rank) -> list[tuple[float, float]]:
    steps = found(r)
    return list(zip(steps.start.tolist(), steps.end.tolist(), strict=True))


@pytest.mark.parametrize(
    ("ops", "steps", "expected"),
    [
        # the GPU works for the steps 0-50 and 50-100 of the host until 90 and 130: windows follow one another
        ([op("a", 20, 90, launch=10.0), op("b", 90, 130, launch=60.0)], [(0, 50), (50, 100)], [(0, 90), (90, 130)]),
        # nothing runs after 30, the host returns at 50
        ([op("a", 20, 30, launch=10.0)], [(0, 50)], [(0, 50)]),
        # time between ranges of the profiler belongs to the step before
        ([op("a", at + 20, at + 30) for at in (0, 100, 200)], [(0, 60), (100, 160), (200, 260)],
         [(0, 100), (100, 200), (200, 260)]),
        # the GPU was busy with earlier work for 5 ms: a profiler's step begins where it says nevertheless
        ([op("a", 5_000, 5_400, launch=10.0), op("b", 5_400, 5_900, launch=20.0)], [(0, 100)], [(0, 5_900)]),
    ],
)  # fmt: skip
def test_what_ends_later_ends_the_step(
    ops: list[Op], steps: list[tuple[float, float]], expected: list[tuple[float, float]]
) -> None:
    assert windows(rank(*ops, steps=steps)) == expected


def layered(steps: int, layers: int, *, warm_up: int = 0, pause: float = 50.0) -> Rank:
    """Steps of equal layers (two kernels and a collective each), an optimizer at the end, and a pause between steps."""
    ops: list[Op] = [op("warm_up", 10.0 * i, 10.0 * i + 5) for i in range(warm_up)]
    at = 10.0 * warm_up
    for _ in range(steps):
        for _ in range(layers):
            ops += [op("matmul", at, at + 40), op("add", at + 40, at + 50), comm("all_reduce", at + 30, at + 60)]
            at += 60
        ops.append(op("adam", at, at + 30))
        at += 30 + pause
    return rank(*ops, steps=())


@pytest.mark.parametrize(("steps", "layers", "warm_up"), [(2, 4, 0), (3, 2, 0), (5, 8, 0), (12, 3, 0), (4, 24, 2)])
def test_repeated_layers_are_not_steps(steps: int, layers: int, warm_up: int) -> None:
    """A step is what holds the optimizer too; operations before the first step leave as many whole steps."""
    steps_of = found(layered(steps, layers, warm_up=warm_up))
    assert (steps_of.found_by, len(steps_of.names)) == ("repetition", steps)


def test_repeated_steps_follow_one_another() -> None:
    """Three steps of 4 x 60 + 30 µs, 50 µs apart: each ends with its own last kernel."""
    assert windows(layered(3, 4)) == [(0.0, 270.0), (270.0, 590.0), (590.0, 910.0)]


def test_work_that_does_not_repeat_is_one_step() -> None:
    """Ten different kernels."""
    r = rank(*[op(f"kernel_{i}", 10.0 * i, 10.0 * i + 8) for i in range(10)], steps=())
    assert (found(r).found_by, windows(r)) == ("whole", [(0.0, 98.0)])


def inference(layers: int, *, graph: bool = False, wait: bool = False, forwards: int = 1) -> Rank:
    """Forward passes: an embedding, equal layers, a head and a sampler; by a launch each, or one for all."""
    parts: list[Op | Host] = []
    at = 100.0
    for _ in range(forwards):
        begun = at
        layer = ["qkv", "attention", "out", "elementwise_kernel<gpu_kernel_impl<[lambda(int)]>>", "down"]
        for name in ("embedding", *layer * layers, "head", "sample"):
            parts.append(op(name, at, at + 40, launch=begun - 20 if graph else None))
            at += 45
        if wait:
            parts.append(host("cudaStreamSynchronize", at - 10, at + 5))
    return rank(*parts, steps=())


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("layers", [4, 12, 36])
def test_the_layers_of_one_forward_are_no_steps(layers: int, graph: bool) -> None:
    """What stands before and after them is in none of them; a graph launches all of them at once."""
    assert found(inference(layers, graph=graph)).found_by == "whole"


@pytest.mark.parametrize("graph", [False, True])
def test_forwards_that_repeat_are_steps(graph: bool) -> None:
    assert len(windows(inference(12, graph=graph, wait=True, forwards=5))) == 5


def test_layers_between_the_waits_of_the_host() -> None:
    """Three iterations of 40 layers of 4 kernels, with nothing else in them: the host waits after each."""
    parts: list[Op | Host] = []
    for n in range(3):
        for k in range(161):
            at = 10_000.0 * n + 50 * k
            parts.append(op("matmul" if k % 4 == 0 else "add", at, at + 40, launch=at - 10))
        parts.append(host("cudaDeviceSynchronize", 10_000.0 * n + 8_010, 10_000.0 * n + 8_050))
    r = rank(*parts, steps=())
    assert windows(r) == [(0.0, 8_040.0), (8_040.0, 18_040.0), (18_040.0, 28_040.0)]


def test_the_first_step_of_repetition_begins_as_long_before_its_kernels_as_others() -> None:
    """The host was recorded for 30 of the 50 µs of pause that come before the others."""
    r = layered(3, 4)
    assert windows(rank(*r.ops, host("aten::copy_", -30, -25), steps=()))[0] == (-30.0, 270.0)
    assert windows(rank(*r.ops, host("aten::copy_", -900, -25), steps=()))[0] == (-50.0, 270.0)


def looped(names: list[str], *, inner: str | None = None, pause: float = 10.0, thread: int = 0) -> Rank:
    """A range for each name, 100 µs apart, that launches two kernels which run on after it; `inner` ranges in them."""
    parts: list[Op | Host] = []
    at = 0.0
    for name in names:
        parts.append(host(name, at, at + 100, HostKind.ANNOTATION, thread=thread))
        if inner is not None:
            parts += [host(inner, at + 2 + 48 * n, at + 48 + 48 * n, HostKind.ANNOTATION) for n in range(2)]
        parts += [op("a", at + 30, at + 60, launch=at + 10, thread=thread)]
        parts += [op("b", at + 60, at + 105, launch=at + 60, thread=thread)]
        at += 100 + pause
    return rank(*parts, steps=())


@pytest.mark.parametrize(
    "names",
    [
        ["iteration 7", "iteration 8", "iteration 9"], ["step_10", "step_11", "step_12"],
        ["execute_context_1(8_8)_generation_0(0)", "execute_context_0(0)_generation_32(32)",
         "execute_context_0(0)_generation_33(33)"],
        ["step[EXTEND bs=1 toks=99]", "step[DECODE bs=2]", "step[DECODE bs=3]"], ["epoch 0 step 1", "epoch 0 step 2",
                                                                                "epoch 1 step 0"],
    ],
)  # fmt: skip
def test_numbered_ranges_of_the_program_are_steps(names: list[str]) -> None:
    """They carry its names, and end with what they launched."""
    steps = found(looped(names, inner="aten_part"))
    assert (steps.found_by, steps.names) == ("annotation", tuple(names))
    assert steps.end.tolist() == [110.0, 220.0, 325.0]


def test_one_named_range_around_the_work_is_a_step() -> None:
    """A recording of a single execution."""
    assert found(looped(["execute_context_1(8_8)_generation_0(0)"])).names == (
        "execute_context_1(8_8)_generation_0(0)",
    )


@pytest.mark.parametrize("name", ["train_step", "Train Step", "training_batch", "my loop"])
def test_ranges_of_one_name_are_numbered(name: str) -> None:
    """So that the same step is found on every rank; a name that says nothing counts if it comes again and again."""
    assert found(looped([name] * 3)).names == tuple(f"{name} #{n}" for n in range(3))


@pytest.mark.parametrize(
    "name",
    ["## forward ##", "backward", "layer 1", "DistributedDataParallel.forward", "nccl:all_reduce", "warmup_step",
     "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "## Call CompiledFxGraph fx ##", "mlp", "epoch 3",
     "capture_32_DECODE", "gradient_bucket_1", "[param|x|0|0|0|measure|forward]"],
)  # fmt: skip
def test_parts_of_steps_are_no_steps(name: str) -> None:
    assert found(looped([name] * 3)).found_by != "annotation"


def test_the_outermost_level_that_repeats() -> None:
    """A step of a batch inside an iteration is not one of the iteration; a range around all of them is not one."""
    r = looped(["iteration 1", "iteration 2", "iteration 3"], inner="micro step")
    around = host("training step loop", -5, 400, HostKind.ANNOTATION)
    assert found(rank(*r.ops, *r.hosts, around, steps=())).names == ("iteration 1", "iteration 2", "iteration 3")


def test_what_lies_between_ranges_belongs_to_the_step_before() -> None:
    """Unless it is longer than many steps, as a server waits for requests: a note says that."""
    assert windows(looped(["step 0", "step 1"], pause=40)) == [(0.0, 140.0), (140.0, 245.0)]
    apart = found(looped(["step 0", "step 1"], pause=4000))
    assert [*apart.start, *apart.end] == [0.0, 4100.0, 105.0, 4205.0]
    assert apart.notes == (
        "4.0 of 4.2 ms of the recording are not counted: 4.0 between the steps (longest: 4.0 after step 0)",
    )


def test_a_range_far_shorter_than_the_work_that_it_launches() -> None:
    """The host is 20 µs in the range, a graph runs for 300, and the host comes again after 500: a step takes 500."""
    parts: list[Op | Host] = []
    for at in (0.0, 500.0, 1000.0, 1500.0):
        parts += [host(f"execute_context_{at:.0f}", at, at + 20, HostKind.ANNOTATION)]
        parts += [op("graph", at + 30, at + 330, launch=at + 10)]
    steps = found(rank(*parts, steps=()))
    assert (steps.end - steps.start).tolist() == [500.0, 500.0, 500.0, 330.0]


@pytest.mark.parametrize("pause", [500.0, 4000.0])
def test_pauses_that_come_after_every_range_belong_to_steps(pause: float) -> None:
    """However long, they are what the steps wait for."""
    steps = found(looped(["step 0", "step 1", "step 2", "step 3"], pause=pause))
    assert (steps.end - steps.start).tolist() == [100.0 + pause] * 3 + [105.0]


def test_steps_that_were_not_recorded_leave_time_to_none() -> None:
    ops = [op("a", at + 20, at + 30) for at in (0.0, 100.0)]
    ranges = [host(f"ProfilerStep#{n}", at, at + 60, HostKind.ANNOTATION) for n, at in ((3, 0.0), (7, 100.0))]
    assert windows(rank(*ops, *ranges, steps=())) == [(0.0, 60.0), (100.0, 160.0)]


def test_the_profiler_s_ranges_as_operations() -> None:
    """Kineto called them so in 2021."""
    ranges = [host(f"ProfilerStep#{n}", 100.0 * n, 100.0 * n + 100, HostKind.OP) for n in range(2)]
    r = rank(op("a", 20, 40), op("a", 120, 140), *ranges, steps=())
    assert (found(r).found_by, windows(r)) == ("profiler", [(0.0, 100.0), (100.0, 200.0)])


def test_ranges_that_touch_follow_one_another() -> None:
    """Their ends are rounded, and seem to lie after the next begin."""
    parts: list[Op | Host] = []
    for n in range(6):
        parts.append(host(f"iteration {n}", 100.0 * n, 100.0 * n + 100.0 + 0.001 * (n % 2), HostKind.ANNOTATION))
        parts.append(op("a", 100.0 * n + 20, 100.0 * n + 80))
    assert len(windows(rank(*parts, steps=()))) == 6


def ranged(*ranges: tuple[str, float, float]) -> Rank:
    """Ranges of these names, one after the other or inside one another, and a kernel every 50 µs."""
    until = max(end for _, _, end in ranges)
    ops = [op(f"k{n}", 50.0 * n + 20, 50.0 * n + 60) for n in range(int(until / 50))]
    return rank(*ops, *[host(name, start, end, HostKind.ANNOTATION) for name, start, end in ranges], steps=())


def test_ranges_with_the_name_of_the_range_around_them_are_its_parts() -> None:
    """However alike they are; those of another name are steps."""
    alike = [(start, start + 900) for start in (50, 1000, 2000)]
    assert found(ranged(("predict 0", 0, 3000), *[(f"predict 0 {n}", *at) for n, at in enumerate(alike)])).names == (
        "whole trace",
    )
    assert len(windows(ranged(("all of it", 0, 3000), *[(f"predict 0 {n}", *at) for n, at in enumerate(alike)]))) == 3


def test_a_stream_that_was_busy_with_what_was_not_recorded() -> None:
    """Another stream ran at once; the first operation of the one that works waits for 8 ms, though nothing runs."""
    rows = [op("fill", 20, 30, launch=10.0, stream=9), op("gemm", 8010, 9000, launch=100.0)]
    steps = found(rank(*rows, host("execute_context_1", 0, 500, HostKind.ANNOTATION), steps=()))
    assert (steps.start[0], steps.end[0]) == (8010.0, 9000.0)
    assert "busy with earlier work" in steps.notes[0]
    late = op("Memcpy DtoH", 12_000, 12_100, launch=9_500.0, stream=11)  # the step does not begin with its last copy
    begun = host("execute_context_1", 0, 9_600, HostKind.ANNOTATION)
    assert windows(rank(*rows, late, begun, steps=())) == [(8010.0, 12_100.0)]


def test_a_first_operation_that_queued_for_what_was_not_recorded() -> None:
    """The GPU was busy with earlier work for 5 ms."""
    ops = [op("a", 5_000, 5_400, launch=10.0), op("b", 5_400, 5_900, launch=20.0)]
    begun = host("execute_model", 0, 100, HostKind.ANNOTATION)
    assert windows(rank(*ops, begun, steps=())) == [(5_000.0, 5_900.0)]


def optimized(steps: int, *, twice: bool = False) -> Rank:
    """Steps whose kernels differ from one to the next, each with an optimizer's range at its end."""
    parts: list[Op | Host] = []
    for n in range(steps):
        at = 1000.0 * n
        parts += [op(f"k{n}_{i}", at + 100 * i + 20, at + 100 * i + 90) for i in range(8)]
        parts.append(host("Optimizer.step#AdamW.step", at + 800, at + 900, HostKind.ANNOTATION))
        parts.append(host("Optimizer.step#AdamW.step", at + 810, at + 850, HostKind.ANNOTATION))
        if twice:
            parts.append(host("Optimizer.step#AdamW.step", at + 905, at + 950, HostKind.ANNOTATION))
    return rank(*parts, steps=())


@pytest.mark.parametrize("twice", [False, True])
def test_steps_end_with_their_optimizer(twice: bool) -> None:
    """Also where it is wrapped in another, or two follow one another."""
    steps = found(optimized(4, twice=twice))
    assert (steps.found_by, len(steps.names)) == ("optimizer", 4)
    assert steps.end.tolist() == [950.0 + 1000 * n if twice else 900.0 + 1000 * n for n in range(4)]


@pytest.mark.parametrize(
    ("hosts", "said"),
    [
        ([host("capture_32_FULL", 100, 800)], "graph capture"),
        ([host("CUDAGraphNode.record (dynamo_timed)", 100, 800)], "graph capture"),
        ([host("cudaFree", 100, 800)], "start-up"),
        ([host("compile_fx.codegen (dynamo_timed)", 100, 800)], "compilation"),
        ([host("triton/compiler/compiler.py(226): compile", 100, 800)], "compilation"),
        # a capture reaches from its begin to its end
        ([host("cudaStreamBeginCapture", 100, 102), host("cudaStreamEndCapture", 795, 800)], "graph capture"),
    ],
)
def test_set_up_in_a_recording_is_named(hosts: list[Host], said: str) -> None:
    """A whole trace of it is not sold as a step without saying so."""
    (note,) = found(rank(op("a", 50, 60), op("b", 900, 950), *hosts, steps=())).notes
    assert said in note
    assert "0.7 of 0.9 ms" in note
    assert hosts[-1].name in note


def test_a_step_that_compiles_is_left_out() -> None:
    """Where others do not; a note says so, and the diagnosis has it."""
    steps = ((0.0, 1000.0), (1000.0, 1300.0), (1300.0, 1600.0))
    ops = [op("a", at + 220, at + 250) for at in (700.0, 1000.0, 1300.0)]
    compiled = host("compile_fx.codegen (dynamo_timed)", 10, 800, HostKind.OP)
    r = rank(*ops, compiled, steps=steps)
    assert found(r).names == ("ProfilerStep#1", "ProfilerStep#2")
    assert [note for note in job(r).notes if "1 of 3 steps are left out" in note]


def test_a_first_step_that_starts_up_is_left_out() -> None:
    """CUDA starts once; memory that is freed in a later step is a trouble of the program, and counts."""
    steps = tuple((1000.0 * n, 1000.0 * (n + 1)) for n in range(4))
    ops = [op("a", at + 920, at + 950) for at, _ in steps]
    frees = [host("cudaFree", at, at + 800) for at, _ in steps]
    first, third, every = (found(rank(*ops, *calls, steps=steps)) for calls in (frees[:1], frees[2:3], frees))
    assert (first.names, first.left_out) == (tuple(f"ProfilerStep#{n}" for n in (1, 2, 3)), ("ProfilerStep#0",))
    assert (len(third.names), third.notes) == (4, ())
    assert every.notes == ()


def test_ranks_that_leave_out_other_steps_share_the_rest() -> None:
    """One rank compiles in the first step, the other does not: both have the second and the third."""
    parts: list[Op | Host] = []
    for n, name in enumerate(["step 0", "step 1", "step 2"]):
        parts += [host(name, 1000.0 * n, 1000.0 * n + 1000, HostKind.ANNOTATION)]
        parts += [op("a", 1000.0 * n + 920, 1000.0 * n + 950)]
    compiled = host("compile_fx.codegen (dynamo_timed)", 10, 800, HostKind.OP)
    assert job(rank(*parts, steps=()), rank(*parts, compiled, steps=())).step_names == ("step 1", "step 2")


CAPTURED = layered(12, 3)


@pytest.mark.parametrize(
    "r",
    [
        # ten small repeats of layers beside one long kernel
        rank(*[op(f"k{n % 4}", 10.0 * n, 10.0 * n + 5) for n in range(40)], op("long", 500, 9000), steps=()),
        # ranges of a logger, which launch nothing
        rank(op("a", 20, 60), op("b", 60, 90), *(
            host(f"log step {n}", 1000.0 + 10 * n, 1005.0 + 10 * n, HostKind.ANNOTATION) for n in range(5)), steps=()),
        # parts of one call, which differ a hundredfold, whatever they are called
        ranged(("predict 0", 0, 5), ("predict 1", 5, 20_000), ("predict 2", 20_000, 20_400)),
        # many short ranges around a long one, which launches nearly all the work
        ranged(("predict", 0, 20_000), *[("predict", 20_000.0 + 50 * n, 20_030.0 + 50 * n) for n in range(9)]),
        # one kind of operator, as tools name them, in a fiftieth of the recording
        rank(*(op("conv", 100.0 * n + 20, 100.0 * n + 80, launch=100.0 * n + 10) for n in range(4)), *(
            host(f"conv2d {n}", 100.0 * n, 100.0 * n + 90, HostKind.ANNOTATION) for n in range(4)),
            host("cudaDeviceSynchronize", 400, 20_000), steps=()),
        # one step of many layers and one optimizer: nothing repeats as a whole
        layered(1, 8),
        # one optimizer's step: there is nothing to count from
        optimized(1),
        # layers that are captured, not run
        rank(*CAPTURED.ops, host("capture_8192_PIECEWISE", -10, 5000, HostKind.ANNOTATION), steps=()),
    ],
    ids=["small repeats", "logger", "unequal parts", "short ranges", "operators", "one step of layers", "one optimizer",
         "captured"],
)  # fmt: skip
def test_what_is_no_steps_is_one_whole(r: Rank) -> None:
    assert found(r).found_by == "whole"


def test_tasks_of_several_threads_are_no_steps() -> None:
    """Alike on two threads, they run beside one another."""
    first, second = looped(["task"] * 3), looped(["task"] * 3, thread=1)
    assert found(rank(*first.ops, *first.hosts, *second.hosts, steps=())).found_by != "annotation"
