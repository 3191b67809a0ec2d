"""One rank of test_expert.py: dispatchers of expert parallelism on GPUs, beside torch's all_to_all_single.

python expert_worker.py FOLDER [SCENARIO ...]    with RANK and WORLD_SIZE; writes FOLDER/found<rank>.json
"""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from counterpoint.collectives.options import CommunicatorOptions
from counterpoint.parallel.expert import Dispatcher, ExpertChoice, ExpertOptions, LocalExperts, overlapped_moe
from tests.support.gpu_ranks import run_scenarios
from tests.support.routing import ROUTINGS, routing

Found = dict[str, str]
MECHANISMS: tuple[ExpertChoice, ...] = ("gather", "slabs")
EXPERTS, TOP_K, TOKENS, HIDDEN = 16, 4, 2048, 1024
EACH_S = 90.0  # of a scenario
STARTED = time.monotonic()
TRIP = "one trip"  # the profiler itself waits behind it
SYNCS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")


def dispatcher(mechanism: ExpertChoice, *, equal_tokens: bool = False) -> Dispatcher:
    options = ExpertOptions(
        mechanism=mechanism, equal_tokens=equal_tokens, communicator=CommunicatorOptions(timeout_s=60)
    )
    return Dispatcher(experts=EXPERTS, top_k=TOP_K, max_tokens=TOKENS, hidden=HIDDEN, options=options)


def given(seed: int, kind: str, tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(1000 * seed + dist.get_rank())
    x = torch.randn(tokens, HIDDEN, device="cuda", dtype=dtype)
    ids = routing(kind, tokens, TOP_K, EXPERTS, seed + dist.get_rank()).cuda()
    return x, ids, torch.rand(tokens, TOP_K, device="cuda")


def trip(made: Dispatcher, x: Tensor, ids: Tensor, weights: Tensor) -> list[Tensor]:
    """Rows of this rank's experts, which double them, the sums, and the derivatives of tokens and weights."""
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    rows, offsets, handle = made.dispatch(x, ids, weights)
    y = made.combine(rows * 2, handle)
    y.backward(torch.sin(torch.arange(y.numel(), device="cuda").view_as(y)).to(y.dtype))
    assert x.grad is not None
    assert weights.grad is not None
    return [rows.detach(), offsets, y.detach(), x.grad, weights.grad]


def say(*what: object) -> None:
    """Tells who waits where this rank is."""
    print(f"{time.monotonic() - STARTED:6.1f} s:", *what, flush=True)


def beside_torch() -> Found:
    """Every routing by every mechanism: what differs from all_to_all_single by more than twice its error.

    The first routing of a mechanism compiles its kernels. Only the reference runs in float32, too.
    """
    found: Found = {}
    reference = dispatcher("torch")
    for mechanism in MECHANISMS:
        made = dispatcher(mechanism)
        for number, kind in enumerate(ROUTINGS):
            say(mechanism, kind)
            x, ids, weights = given(number, kind, TOKENS - 112 * dist.get_rank() * (number % 2), torch.bfloat16)
            ours, theirs = trip(made, x, ids, weights), trip(reference, x, ids, weights)
            end = int(theirs[1][-1])
            same = torch.equal(ours[1], theirs[1]) and torch.equal(ours[0][:end], theirs[0][:end])
            exact = trip(reference, x.float(), ids, weights)
            errors = [
                (a.double() - c.double()).abs().max().item()
                - 2 * (b.double() - c.double()).abs().max().item()
                - 1e-5 * max(1.0, c.double().abs().max().item())
                for a, b, c in zip(ours[2:], theirs[2:], exact[2:], strict=True)
            ]
            if not same or max(errors) > 0.02:
                found[f"{mechanism} {kind}"] = f"{same=} {errors}"
        made.close()
    reference.close()
    return found


def replayed(step: Callable[[], Sequence[Tensor]], inputs: Sequence[Tensor], name: str) -> list[bool]:
    """Whether a graph of a step gives what the step does, for three other sets of inputs."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    say(name, "captures")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        results = step()
    torch.cuda.synchronize()
    equal = []
    for seed in range(3):
        with torch.no_grad():
            for old, new in zip(inputs, given(20 + seed, "distinct", TOKENS, torch.bfloat16), strict=True):
                old.copy_(new)
        say(name, "replays", seed)
        graph.replay()
        torch.cuda.synchronize()
        copies = [one.clone() for one in results]
        equal.append(all(torch.equal(*pair) for pair in zip(copies, step(), strict=True)))
    torch.cuda.synchronize()
    del graph
    return equal


def doubled(made: Dispatcher, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    rows, _, handle = made.dispatch(x, ids, weights)
    return made.combine(rows * 2, handle)


def derived(run: Callable[..., Tensor], inputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    y = run(*inputs)
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]


def captured() -> Found:
    """Graphs of a dispatch and a combine with their derivatives, and of a layer in two parts."""
    found: Found = {}
    torch.manual_seed(7)
    experts = LocalExperts(EXPERTS // dist.get_world_size(), HIDDEN, 512).to("cuda", torch.bfloat16)
    for mechanism in MECHANISMS:
        made = dispatcher(mechanism, equal_tokens=True)
        inputs = given(1, "distinct", TOKENS, torch.bfloat16)
        leaves = [inputs[0].requires_grad_(), inputs[2].requires_grad_()]
        layer = partial(overlapped_moe, experts=experts, dispatcher=made, parts=2)
        steps = {
            "call": partial(derived, partial(doubled, made), inputs, leaves),
            "layer": partial(derived, layer, inputs, [*leaves, *experts.parameters()]),
        }
        for name, step in steps.items():
            found[f"{mechanism}, {name}"] = str(replayed(step, inputs, f"{mechanism}, {name}"))
        made.close()
    return found


COPIED: Found = {}  # by mechanism: whether `profiled` saw copies to peers


def profiled() -> Found:
    found: Found = {}
    for mechanism in MECHANISMS:
        say(mechanism, "profiled")
        made = dispatcher(mechanism, equal_tokens=True)
        tokens = given(3, "distinct", TOKENS, torch.bfloat16)
        for _ in range(3):
            trip(made, *tokens)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
            with record_function(TRIP):
                trip(made, *tokens)
            torch.cuda.synchronize()
        events = recorded.events() or []
        inside = next(one.time_range for one in events if one.name == TRIP and str(one.device_type) == "DeviceType.CPU")
        behind = [one for one in events if one.name in SYNCS and one.time_range.start >= inside.end]
        names = [one.name for one in events if one not in behind]
        nccl, syncs = sum(name.startswith("nccl") for name in names), sum(name in SYNCS for name in names)
        COPIED[mechanism] = str(any("PtoP" in name for name in names))
        found[mechanism] = f"{nccl} of NCCL, {syncs} syncs"
        made.close()
    return found


SCENARIOS: dict[str, Callable[[], Found]] = {
    "beside_torch": beside_torch,
    "profiled": profiled,
    "copied": lambda: COPIED,
    "captured": captured,
}


def main(folder: Path, names: Sequence[str]) -> None:
    run_scenarios(folder, {name: SCENARIOS[name] for name in names or SCENARIOS}, by_default=False, each_s=EACH_S)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
