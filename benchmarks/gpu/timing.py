"""Times of a device, by its own events."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

FLUSHED_BYTES = 2**28  # more than any cache has
_CYCLES_PER_SECOND = 2e9  # of the fastest GPUs


def device_times(run: Callable[[], Any], device: torch.device, seconds: float) -> list[float]:
    """The seconds that each of several calls took on the device, without its waits for the host.

    Args:
        run: The call, made before so that it is compiled.
        device: Where it runs; on a CPU the time is that of the call.
        seconds: How long to go on, about.
    """
    start = time.perf_counter()
    run()
    enqueued = time.perf_counter() - start
    if device.type == "cpu":
        return [enqueued]
    torch.cuda.synchronize(device)
    rounds = int(min(max(seconds / (time.perf_counter() - start), 5), 200))
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device)
    events = []
    for _ in range(rounds):
        flushed.zero_()  # so that nothing is in the caches
        # The device sleeps until the host has enqueued the whole call.
        torch.cuda._sleep(int(2 * enqueued * _CYCLES_PER_SECOND))
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in events]
