"""Occupancy shaping on a GPU: every way in changes how many blocks live on an SM, told by the SMs themselves.

The kernel used here writes down on which SM each of its blocks ran, and from when to when. CUPTI serves one subscriber
per process, so that everything interposed runs in a process of its own: this file, started as a script.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

try:
    import torch
    import triton
    import triton.language as tl
    from triton.language.extra import cuda as tl_cuda
except ImportError:  # collected without them, and skipped
    torch = triton = tl = None  # type: ignore[assignment]

THREADS, NUM_BLOCKS, LIFE_NS = 128, 132 * 16, 20_000
pytestmark = [
    pytest.mark.gpu(1),
    pytest.mark.filterwarnings("ignore:Warning. Profiler clears events:UserWarning"),  # torch 2.11's of any profile()
]

SOURCE = """
extern "C" __global__ void __launch_bounds__(128) live(long long* log, long long life_ns) {
    long long start, now;
    unsigned sm;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    asm volatile("mov.u32 %0, %smid;" : "=r"(sm));
    do { asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)); } while (now - start < life_ns);
    if (threadIdx.x == 0) { log[blockIdx.x * 3] = sm; log[blockIdx.x * 3 + 1] = start; log[blockIdx.x * 3 + 2] = now; }
}
"""

if triton is not None:

    @triton.jit
    def live_triton(log, life_ns):  # type: ignore[no-untyped-def]
        block = tl.program_id(0)
        start = tl_cuda.globaltimer()
        now = start
        while now - start < life_ns:
            now = tl_cuda.globaltimer()
        tl.store(log + block * 3, tl_cuda.smid().to(tl.int64))
        tl.store(log + block * 3 + 1, start)
        tl.store(log + block * 3 + 2, now)


def most_at_once(run: Callable[[Any], None]) -> int:
    """The most blocks that lived on one SM at once, while `run` filled a log of (SM, start, end)."""
    log = torch.zeros(NUM_BLOCKS, 3, dtype=torch.int64, device="cuda")
    torch.cuda.synchronize()
    run(log)
    torch.cuda.synchronize()
    changes: dict[int, list[tuple[int, int]]] = {}
    for sm, start, end in log.tolist():
        changes.setdefault(sm, []).extend([(start, 1), (end, -1)])
    most = 0
    for events in changes.values():
        alive = 0
        for _, change in sorted(events):
            alive += change
            most = max(most, alive)
    return most


def compiled() -> Any:
    from cuda.bindings import nvrtc

    from counterpoint.controls.control import call_driver

    torch.zeros(1, device="cuda")  # the context
    major, minor = torch.cuda.get_device_capability()
    _, program = nvrtc.nvrtcCreateProgram(SOURCE.encode(), b"live.cu", 0, [], [])
    (status,) = nvrtc.nvrtcCompileProgram(program, 1, [f"--gpu-architecture=sm_{major}{minor}".encode()])
    assert int(status) == 0, status
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = b" " * size
    nvrtc.nvrtcGetCUBIN(program, cubin)
    return call_driver("cuModuleGetFunction", call_driver("cuModuleLoadData", cubin), b"live")


def launch(function: Any, log: Any, smem: int = 0) -> None:
    import ctypes

    from counterpoint.controls.control import call_driver

    arguments = ((log.data_ptr(), LIFE_NS), (ctypes.c_void_p, ctypes.c_longlong))
    stream = torch.cuda.current_stream().cuda_stream
    call_driver("cuLaunchKernel", function, NUM_BLOCKS, 1, 1, THREADS, 1, 1, smem, stream, arguments, 0)


def occupancy(function: Any, smem: int) -> int:
    from counterpoint.controls.control import call_driver

    return int(call_driver("cuOccupancyMaxActiveBlocksPerMultiprocessor", function, THREADS, smem))


@pytest.fixture(scope="module")
def function() -> Any:
    return compiled()


def shaper(blocks_per_sm: int) -> Any:
    from counterpoint.controls.occupancy import OccupancyShaping, Shaper

    return Shaper(OccupancyShaping(blocks_per_sm=blocks_per_sm))


def test_the_most_of_one_block_is_the_drivers_own(function: Any) -> None:
    """An SM's shared memory less the reserve is the opt-in limit of this device."""
    from cuda.bindings import driver

    from counterpoint.controls.control import call_driver
    from counterpoint.controls.occupancy import device_limits

    optin = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    assert device_limits().most_smem_per_block == call_driver(
        "cuDeviceGetAttribute", optin, call_driver("cuCtxGetDevice")
    )


def test_the_least_bytes_are_the_drivers_own(function: Any) -> None:
    """For every number of blocks: the bytes give it, and 128 bytes less give one more, by the driver's calculator."""
    for wanted in range(1, 12):
        smem = shaper(wanted).dynamic_smem(int(function), threads=THREADS)
        assert (occupancy(function, smem), occupancy(function, smem - 128)) == (wanted, wanted + 1)


def test_a_launch_through_cuda_bindings_is_shaped(function: Any) -> None:
    smem = shaper(3).dynamic_smem(int(function), threads=THREADS)
    shaped = most_at_once(lambda log: launch(function, log, smem))
    assert (shaped, most_at_once(lambda log: launch(function, log)) > 3) == (3, True)


@pytest.mark.needs("cuda-core")
def test_a_launch_through_cuda_core_is_shaped() -> None:
    """The shaper's copy of a LaunchConfig leaves three blocks on an SM, and the rest of it as it was."""
    from cuda import core

    device = core.Device(torch.cuda.current_device())
    device.set_current()
    options = core.ProgramOptions(arch=f"sm_{device.arch}")
    kernel = core.Program(SOURCE, "c++", options=options).compile("cubin").get_kernel("live")
    stock = core.LaunchConfig(grid=NUM_BLOCKS, block=THREADS)
    config = shaper(3).launch_config(stock, kernel)
    stream = device.create_stream()
    shaped = most_at_once(lambda log: core.launch(stream, config, kernel, log.data_ptr(), LIFE_NS))
    assert (shaped, config.grid, config.block) == (3, stock.grid, stock.block)


def test_a_triton_kernel_is_shaped() -> None:
    from counterpoint.controls.occupancy import OccupancyShaping

    def run(log: Any) -> None:
        live_triton[(NUM_BLOCKS,)](log, LIFE_NS, num_warps=4)

    before = most_at_once(run)
    with OccupancyShaping(blocks_per_sm=3).launches():
        inside = most_at_once(run)
    assert (before > 3, inside, most_at_once(run) == before) == (True, 3, True)


def test_only_the_compute_side_is_shaped() -> None:
    from counterpoint.controls.control import Lanes
    from counterpoint.controls.occupancy import OccupancyShaping

    log: list[Any] = []

    def run() -> None:
        live_triton[(NUM_BLOCKS,)](log[0], LIFE_NS, num_warps=4)

    def counted(side: Callable[[], None]) -> int:
        def into(fresh: Any) -> None:
            log[:] = [fresh]
            side()

        return most_at_once(into)

    stream = torch.cuda.current_stream()
    lanes = Lanes(compute_stream=stream, comm_stream=stream, compute=run, comm=run)
    with OccupancyShaping(blocks_per_sm=2).apply(lanes) as shaped:
        assert (counted(shaped.compute), counted(shaped.comm) > 2) == (2, True)


@pytest.fixture(scope="module")
def interposed() -> dict[str, Any]:
    done = subprocess.run([sys.executable, __file__], capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def watch_interposed() -> dict[str, Any]:
    """Everything that needs CUPTI to itself, in one go."""
    from counterpoint.controls.launch_hooks import shaped_launches
    from counterpoint.controls.occupancy import OccupancyShaping
    from counterpoint.errors import CounterpointError

    function = compiled()
    facts: dict[str, Any] = {"before": most_at_once(lambda log: launch(function, log))}
    with OccupancyShaping(blocks_per_sm=3, kernels="live", interpose=True).launches():
        facts["by_value"] = most_at_once(lambda log: launch(function, log))
        facts["by_reference"], facts["config_after"] = by_reference(function)
    facts["after"] = most_at_once(lambda log: launch(function, log))

    x = torch.randn(1 << 26, device="cuda")
    stock = microseconds(lambda: torch.add(x, 1.0))
    with OccupancyShaping(blocks_per_sm=1, kernels="elementwise", interpose=True).launches() as shaper:
        facts["elementwise_slower"] = microseconds(lambda: torch.add(x, 1.0)) / stock
        facts["elementwise"] = [[each.blocks_before, each.blocks_after] for each in shaper.shapes]

    a = torch.randn(4096, 4096, device="cuda")
    expected = a @ a
    with OccupancyShaping(blocks_per_sm=1, interpose=True).launches() as shaper:
        (a[:1024, :1024] @ a[:1024, :1024]).sum().item()
        facts["fp32_same"] = torch.equal(a @ a, expected)
        facts["gemms"] = [[each.kernel.name, each.blocks_after, each.refused] for each in shaper.shapes]
        b = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        (b @ b).sum().item()
        facts["bf16"] = [each.refused for each in shaper.shapes if "nvjet" in each.kernel.name]

    facts["threads_alive"], facts["threads_met"] = many_threads()
    try:
        with shaped_launches(Failing()):
            x.add_(1.0)
    except CounterpointError as error:
        facts["failure"] = str(error)
    facts["went_on"] = torch.isfinite(x).all().item()
    return facts


class Failing:
    active = True

    def dynamic_smem(self, handle: int, **asked: object) -> int:
        from counterpoint.errors import Unsupported

        raise Unsupported("planted")


def by_reference(function: Any) -> tuple[int, int]:
    """The same through cuLaunchKernelEx: blocks on an SM, and what the caller's structure holds afterwards."""
    import ctypes

    from cuda.bindings import driver

    from counterpoint.controls.control import call_driver

    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = NUM_BLOCKS, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
    config.hStream = torch.cuda.current_stream().cuda_stream

    def run(log: Any) -> None:
        arguments = ((log.data_ptr(), LIFE_NS), (ctypes.c_void_p, ctypes.c_longlong))
        call_driver("cuLaunchKernelEx", config, function, arguments, 0)

    return most_at_once(run), int(config.sharedMemBytes)


def many_threads() -> tuple[int, int]:
    """Three threads with their own backward passes under the hook: how many hang, and how many kernels were met."""
    import threading

    from counterpoint.controls.occupancy import OccupancyShaping

    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(10))).to("cuda")

    def work() -> None:
        for _ in range(30):
            model(torch.randn(8, 64, device="cuda")).sum().backward()

    with OccupancyShaping(blocks_per_sm=1, interpose=True).launches() as shaper:
        threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        torch.cuda.synchronize()
        return sum(thread.is_alive() for thread in threads), len(shaper.shapes)


def microseconds(work: Callable[[], object]) -> float:
    """The median of five, queued behind a spin."""
    times = []
    for _ in range(6):
        torch.cuda._sleep(1_000_000)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return float(sorted(times[1:])[2])


def test_arguments_are_shaped_by_value_and_by_reference(interposed: dict[str, Any]) -> None:
    """What the caller's structure held is put back."""
    assert (interposed["by_value"], interposed["before"] > 3, interposed["after"] > 3) == (3, True, True)
    assert (interposed["by_reference"], interposed["config_after"]) == (3, 0)


def test_kernels_of_torch_and_cublas_are_shaped(interposed: dict[str, Any]) -> None:
    """An element-wise kernel with one block per SM cannot fill the memory: it takes twice as long at least.

    Of fp32 GEMMs, which have several blocks per SM, one at least is left with one; it computes the same.
    """
    assert interposed["elementwise_slower"] > 2.0, interposed["elementwise"]
    assert any(after == 1 and refused is None and "gemm" in name for name, after, refused in interposed["gemms"])
    assert interposed["fp32_same"]


def test_a_persistent_gemm_is_refused_with_what_to_do(interposed: dict[str, Any]) -> None:
    """Hopper's bf16 GEMM is launched in clusters or has one block per SM: it stays, and the text says why."""
    assert interposed["bf16"]
    assert all("cluster" in reason or "gemm_sms" in reason for reason in interposed["bf16"])


def test_threads_do_not_hang_under_the_hook_and_its_failure_is_raised_on_exit(interposed: dict[str, Any]) -> None:
    assert (interposed["threads_alive"], interposed["threads_met"] > 0) == (0, True)
    assert (interposed["failure"], interposed["went_on"]) == ("planted", True)


def test_verify_tells_a_shaped_kernel_from_one_that_was_not() -> None:
    """What the profiler saw proves the control, and the same launch without it is a no-op."""
    from counterpoint.controls.observe import observe
    from counterpoint.controls.occupancy import OccupancyShaping
    from counterpoint.records.measurement import Observation

    log = torch.zeros(NUM_BLOCKS, 3, dtype=torch.int64, device="cuda")

    def run() -> None:
        live_triton[(NUM_BLOCKS,)](log, LIFE_NS, num_warps=4)

    control = OccupancyShaping(blocks_per_sm=3)
    without = observe(run, device=log.device)
    with control.launches():
        inside = observe(run, device=log.device)
    proofs = [control.verify(Observation(compute=seen, compute_without=without)) for seen in (inside, without)]
    assert [proof.took_effect for proof in proofs] == [True, False], [proof.seen for proof in proofs]


def test_the_hook_says_that_a_profiler_has_cupti() -> None:
    """After torch.profiler has run in this process, interposing is refused and the text names it."""
    from counterpoint.controls.observe import observe
    from counterpoint.controls.occupancy import OccupancyShaping
    from counterpoint.errors import Unsupported

    x = torch.zeros(8, device="cuda")
    observe(lambda: (x.add_(1.0), None)[1], device=x.device)
    with (
        pytest.raises(Unsupported, match=r"torch\.profiler once it has run"),
        OccupancyShaping(blocks_per_sm=3, interpose=True).launches(),
    ):
        pass


if __name__ == "__main__":
    print(json.dumps(watch_interposed()))
