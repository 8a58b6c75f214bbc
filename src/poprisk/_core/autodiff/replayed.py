r"""A function of tensors that is called again and again, captured once as a CUDA graph and replayed.

Derivatives of a small network under ``vmap`` are hundreds of short operations, each of which passes through layers of
Python and dispatch: that takes longer than the arithmetic. Calls with the same shapes differ only in their numbers, so
that the operations of one serve all.
"""

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
# They load what a capture must find loaded, and the last is a rehearsal; what is called twice is not worth a capture.
_PLAIN_CALLS = 2


class Replayed(Generic[T]):
    """The function, replayed from the third call with the same shapes on; the first two run it as it is.

    What a replay returns is overwritten by the next call. A function that cannot be captured (it waits for the GPU, or
    moves data to the host) is called as it is; the second call finds that out, so that no capture has to fail for it.

    Args:
        function: Of tensors only; everything else that it reads must stay in place and unchanged.
        capture: Whether graphs are captured, which needs a GPU. Without, the function is called on still copies of its
            arguments all the same.
        only: Which calls are replayed; default: all.

    >>> double = Replayed(lambda x: 2 * x, capture=False)
    >>> [float(double(torch.tensor(float(i)))) for i in range(4)]
    [0.0, 2.0, 4.0, 6.0]
    """

    def __init__(
        self,
        function: Callable[..., T],
        *,
        capture: bool,
        only: Callable[[tuple[Tensor, ...]], bool] = lambda arguments: True,
    ) -> None:
        self._function, self._capture, self._only = function, capture, only
        self._calls: dict[Hashable, int] = {}
        self._captured: dict[Hashable, tuple[tuple[Tensor, ...], torch.cuda.CUDAGraph | None, T | None]] = {}
        self.refused: str | None = None
        """Why the function could not be captured, if it was tried."""

    def __call__(self, *arguments: Tensor) -> T:
        """What the function gives for these arguments."""
        form = tuple((tuple(x.shape), x.dtype) for x in arguments)
        if self.refused is not None or not self._only(arguments):
            return self._function(*arguments)
        self._calls[form] = self._calls.get(form, 0) + 1
        if self._calls[form] <= _PLAIN_CALLS:
            rehearsed = self._capture and self._calls[form] == _PLAIN_CALLS
            return self._rehearsal(arguments) if rehearsed else self._function(*arguments)
        if form not in self._captured:
            still = tuple(x.clone(memory_format=torch.contiguous_format) for x in arguments)
            graph, result = self._record(still) if self._capture else (None, None)
            if self.refused is not None:
                return self._function(*arguments)
            self._captured[form] = (still, graph, result)
        still, graph, result = self._captured[form]
        for target, source in zip(still, arguments, strict=True):
            target.copy_(source)
        if graph is None or result is None:
            return self._function(*still)
        graph.replay()
        return result

    def _rehearsal(self, arguments: tuple[Tensor, ...]) -> T:
        try:
            with no_waiting():
                return self._function(*arguments)
        except RuntimeError as error:
            result = self._function(*arguments)  # raises again what has nothing to do with waiting
            self.refused = str(error)
            return result

    def _record(self, still: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph | None, T | None]:
        try:
            return capture_graph(lambda: self._function(*still))
        except RuntimeError as error:
            self.refused = str(error)
            return None, None


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
