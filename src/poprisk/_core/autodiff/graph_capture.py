"""Capturing work as a CUDA graph so that a capture that fails leaves nothing behind, and waking the backward thread."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, TypeVar

import torch

T = TypeVar("T")


def capture_graph(work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """The work's operations as a graph, and what it returned: tensors that every replay overwrites.

    Whoever replays the graph must keep alive what it reads and writes; the graph does not.

    Raises:
        RuntimeError: the work cannot be captured. Stream, random numbers and allocator are then as they were.
    """
    graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    device, pool = torch.cuda.current_device(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool):
            result = work()
    except RuntimeError:
        torch.cuda.set_stream(before)  # a capture that fails leaves its own
        _end_capture(device, pool)
        raise
    return graph, result


@contextmanager
def no_waiting() -> Iterator[None]:
    """Inside, an operation that makes the host wait for the GPU, which no capture allows, is a ``RuntimeError``.

    Such an error costs nothing, where a capture that fails must be cleaned up after. Elsewhere it changes nothing.

    >>> with no_waiting():
    ...     torch.ones(()).item()
    1.0
    """
    if not torch.cuda.is_initialized():
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    _set_mode("error")
    try:
        yield
    finally:
        _set_mode(mode)


@cache
def wake_backward(device: torch.device) -> None:
    """Once before derivatives on a GPU are taken: lets the thread that runs backward passes there find its context.

    A first operation in it that is a matrix product finds none, and torch warns of that.
    """
    if device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        with torch.enable_grad():
            x = torch.ones((), device=device, requires_grad=True)
            torch.autograd.grad(x * 2, x)


def _end_capture(device: int, pool: Any) -> None:
    """What torch leaves out when it cannot end a capture."""
    # The default generator goes on believing that it is captured, and refuses to draw: it gets a copy of its state
    # (seed and offset), which never was.
    generator = torch.cuda.default_generators[device]
    generator.graphsafe_set_state(generator.clone_state())
    # The allocator goes on waiting for the capture's end, and frees nothing meanwhile. The pool itself stays reserved.
    with suppress(RuntimeError, AttributeError):  # torch has done this itself, or its private name has changed
        torch._C._cuda_endAllocateToPool(device, pool)


def _set_mode(mode: str | int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode(mode)
