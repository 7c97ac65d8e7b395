"""Launching an op in a test, and looking at what it launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

Result = TypeVar("Result")


def replayed(call: Callable[[], Result]) -> Result:
    """What `call` returns, captured into a graph that was replayed once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    graph.replay()
    torch.cuda.synchronize()
    return result


def captured(work: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """`work`, warmed up beside the stream, as a graph that was not replayed yet, and what its replays write."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    return graph, result


def launches_of(call: Callable[[], object]) -> list[str]:
    """The names of what runs on the GPU for the second `call`: kernels, copies and fills."""
    call()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.profiler.DeviceType.CUDA]
