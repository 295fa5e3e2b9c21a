"""Duration of a call on the device, without the host's overhead.

On CUDA the calls are captured in a graph and replayed, as the engine replays its decode steps, and the best of several
tries counts. Callables get the number of the call, so that they can use more memory than a cache holds.
"""

import time
from collections.abc import Callable

import torch

Numbered = Callable[[int], object]
_WARM_CALLS = 3


def settle(device: torch.device) -> None:
    """Wait until the device has completed everything launched so far."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_per_call(call: Numbered, device: torch.device, *, calls: int = 16, tries: int = 5) -> float:
    """Return the device time per call, for calls that never wait for the device."""
    if device.type != "cuda":
        return wall_seconds_per_call(call, device, calls=1, tries=1)
    for number in range(_WARM_CALLS):
        call(number)
    settle(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(calls):
            call(number)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    best_ms = float("inf")
    for _ in range(tries):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best_ms = min(best_ms, begin.elapsed_time(end))
    return best_ms / 1e3 / calls


def wall_seconds_per_call(call: Numbered, device: torch.device, *, calls: int = 4, tries: int = 3) -> float:
    """Return the wall time per call, including the host's work, for calls that may wait for the device."""
    call(0)
    best_s = float("inf")
    for _ in range(tries):
        settle(device)
        started_s = time.perf_counter()
        for number in range(calls):
            call(number)
        settle(device)
        best_s = min(best_s, time.perf_counter() - started_s)
    return best_s / calls
