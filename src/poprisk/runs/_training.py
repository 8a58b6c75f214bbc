"""Train a problem and record the run, without a training loop of your own."""

import math
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.optim import Optimizer

from poprisk._core.progress import training_progress
from poprisk._core.seeds import seeded, step_generator, step_seed
from poprisk.errors import DataError, HyperparameterError, RunError
from poprisk.runs._first_look import check_takes
from poprisk.runs._formats import whole
from poprisk.runs._gradients import add_gradients, randomness_of
from poprisk.runs._held_back import HeldBack
from poprisk.runs._problem import Problem
from poprisk.runs._recorder import Recorder
from poprisk.runs._run import Run


def train(
    problem: Problem,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    steps: int,
    *,
    batch_size: int | None = None,
    seed: int = 0,
    path: str | Path | None = None,
    every: int = 1,
    accumulate: int = 1,
    clip_norm: float | None = None,
    schedule: Callable[[int], float] | None = None,
    dtype: torch.dtype | None = None,
    segment_steps: int | None = None,
    resume: bool = False,
    hold_back: float | HeldBack | None = None,
    tail: float | Sequence[float] | None = 0.2,
    progress: bool | Callable[[int, Tensor], None] = True,
) -> Run:
    """Train a problem's model and record the run.

    Examples are drawn in epochs, each in a random order given by the seed; an incomplete last batch is dropped. All
    random numbers are determined by (seed, step), so a run that was killed and resumed gives the same bits as one that
    was not interrupted. SIGTERM ends the training between two steps, like Ctrl-C; a kill loses at most 30 seconds.

    Args:
        problem: The problem to train, on the device of its examples.
        optimizer: Function that builds the optimizer from the model's parameters: ``torch.optim.Adam``, or
            ``functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)``.
        steps: Total number of steps, including those of a resumed run.
        batch_size: Number of examples per step; None uses all of them.
        seed: Seed for batches, augmentation and dropout; the initial weights use ``problem.seed``.
        path: Directory for the run; None keeps the run in memory.
        every: Number of steps between checkpoints; 1 records weights and linearization of every step.
        accumulate: Number of micro-batches per step, of equal size.
        clip_norm: Maximum norm of the gradients; None does not clip.
        schedule: Function that returns the factor of the learning rates in step k = 0, 1, …
        dtype: Data type of the weights; default: that of ``problem.make_model``.
        segment_steps: Number of steps per file of a dense run.
        resume: Continue the run in ``path``; a finished run is only opened.
        hold_back: Share of the examples, e.g. 0.05, that no step trains on: averaged weights are measured on them along
            the run, and the best are stored beside it as ``run.kept``, with an estimate of their risk. See
            :class:`~poprisk.KeepBest`. They remain examples of the problem: analyses of the run treat them as training
            examples without influence.
        tail: With ``hold_back``, the share of the steps that the averaged weights cover, or several of them to choose
            among; None measures the weights themselves.
        progress: Whether to show progress on stderr, or a function called with (steps so far, loss) after each step.

    Returns:
        The run, with this problem.

    Raises:
        HyperparameterError: a number is out of range, or ``accumulate`` does not divide ``batch_size``.
        DataError: the problem is none, the optimizer is no function, or the model does not fit the examples.
        RunError: the directory holds another run.

    >>> from functools import partial
    >>> problem = Problem(nn.Linear, "squared", torch.eye(4), torch.ones(4, 1),
    ...                   arguments={"in_features": 4, "out_features": 1})
    >>> run = train(problem, partial(torch.optim.SGD, lr=0.5), 20, batch_size=2, progress=False)
    >>> sorted(torch.cat([run.batch(0), run.batch(1)]).tolist())  # an epoch
    [0, 1, 2, 3]
    """
    _check_parts(problem, optimizer, schedule, clip_norm)
    held = hold_back
    if held is not None and not isinstance(held, HeldBack):
        held = HeldBack(problem, held, seed, tail)
    examples = len(problem) if held is None else len(held.train)
    steps = whole("steps must be a whole number, at least 1", steps, 1)
    batch_size, accumulate = _parts_of(examples, examples if batch_size is None else batch_size, accumulate)
    if resume and path is None:
        raise RunError("resume=True needs path=, the directory of the run to continue")
    module = problem.module(dtype)
    problem.check_fits(module)
    trainable = [p for p in module.parameters() if p.requires_grad]
    made, base = _made(optimizer, trainable)
    seeds_forward = randomness_of(module) is not None
    set_up: dict[str, Any] = {"batch_size": batch_size, "accumulate": accumulate, "clip_norm": clip_norm}
    set_up["seeded_forward"] = seeds_forward
    if held is not None:
        set_up |= held.settings
    recorder = Recorder(
        path,
        module,
        made,
        problem=problem,
        every=every,
        steps=steps,
        seed=seed,
        segment_steps=segment_steps,
        resume=resume,
        training=set_up,
    )
    start = recorder.num_steps
    if held is not None:
        _follow(held, recorder, module, made)
    shown = nullcontext(progress) if callable(progress) else training_progress(problem.name, start, steps, progress)
    with _termination() as is_over, recorder, shown as report:  # a signal while the last steps are written waits, too
        for k in range(start, steps):
            if schedule is not None:
                _set_rates(made, base, schedule(k))
            drawn = draw_batch(examples, batch_size, seed, k)
            if held is not None:
                drawn = held.train[drawn]
                held.count(batch_size)
            parts = drawn.to(problem.device).chunk(accumulate)
            with recorder.step(list(parts)) as step:
                made.zero_grad()
                with seeded(step_seed(seed, k) if seeds_forward else None):
                    pairs = [(part, None) for part in parts]
                    step.loss = add_gradients(problem, module, pairs, generator=step_generator(seed, k))
                if clip_norm is not None:
                    nn.utils.clip_grad_norm_(trainable, clip_norm)
                made.step()
            report(k + 1, step.loss)
            if is_over() and k + 1 < steps:
                raise KeyboardInterrupt
        if held is not None and (start < steps or recorder.writer.read_beside("kept") is None):
            held.finish(recorder)
    return recorder.run


@contextmanager
def _termination() -> Iterator[Callable[[], bool]]:
    """Whether the process was asked to end (SIGTERM, Ctrl-C), so that the training stops between two steps.

    A second Ctrl-C interrupts immediately. KeyboardInterrupt is raised in the end if nobody raised it before.
    """
    asked: list[int] = []

    def ask(number: int, _: Any) -> None:
        if asked and number == signal.SIGINT:
            raise KeyboardInterrupt
        asked.append(number)

    usual: dict[int, Any] = {signal.SIGTERM: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    main = threading.current_thread() is threading.main_thread()
    ours = [each for each, handler in usual.items() if main and signal.getsignal(each) is handler]
    for each in ours:
        signal.signal(each, ask)
    try:
        yield lambda: bool(asked)
    finally:
        for each in ours:
            signal.signal(each, usual[each])
    if asked:
        raise KeyboardInterrupt


def _follow(held: HeldBack, recorder: Recorder, module: nn.Module, optimizer: Optimizer) -> None:
    """Measure along the run, and write the state with each of its segments; a resumed run goes on from there."""
    held.follow(module, optimizer)
    recorder.kept_writer.held = held.held
    state = recorder.writer.read_beside("held_back")
    if state is not None:
        held.restore(state)
    recorder.writer.beside = held.state


def draw_batch(examples: int, batch_size: int, seed: int, step: int) -> Int[Tensor, "b"]:
    """The indices of one step's batch, independent of earlier calls; a full batch is in order.

    Raises:
        DataError: the batch is empty or larger than the data.

    >>> draw_batch(4, 4, seed=0, step=7)
    tensor([0, 1, 2, 3])
    """
    if not 1 <= batch_size <= examples:
        raise DataError(f"batch_size must lie between 1 and the {examples} training examples, got {batch_size}")
    if batch_size == examples:
        return torch.arange(examples)
    epoch, place = divmod(step, examples // batch_size)
    return _epoch(examples, seed, epoch)[place * batch_size : (place + 1) * batch_size]


@lru_cache(maxsize=1)
def _epoch(examples: int, seed: int, epoch: int) -> Int[Tensor, "examples"]:
    return torch.randperm(examples, generator=step_generator(seed, -1 - epoch))


def _set_rates(optimizer: Optimizer, base: list[float], factor: Any) -> None:
    if not isinstance(factor, Real | Tensor) or not 0 <= (rate := float(factor)) < math.inf:
        raise HyperparameterError(f"schedule must return a finite factor, at least 0, got {factor!r}: return a number")
    for group, lr in zip(optimizer.param_groups, base, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr * rate)
        else:
            group["lr"] = lr * rate


def _made(optimizer: Callable[..., Any], trainable: list[nn.Parameter]) -> tuple[Optimizer, list[float]]:
    """The optimizer and the learning rates of its groups."""
    made = optimizer(trainable)
    if not isinstance(made, Optimizer):
        raise HyperparameterError(f"optimizer must return a torch optimizer, got {type(made).__name__}: return one")
    base = [float(group["lr"]) for group in made.param_groups]
    if not all(map(math.isfinite, base)):
        raise HyperparameterError(f"the optimizer's learning rates must be finite, got {base}: pass a finite lr")
    return made, base


def _parts_of(examples: int, batch_size: Any, accumulate: Any) -> tuple[int, int]:
    """The sizes of a batch and the number of its parts."""
    batch_size = whole(f"batch_size must lie between 1 and the {examples} training examples", batch_size, 1, examples)
    accumulate = whole(must := f"accumulate must divide batch_size={batch_size}", accumulate, 1)
    if batch_size % accumulate:
        raise HyperparameterError(f"{must}, got {accumulate}")
    return batch_size, accumulate


def _check_parts(problem: Any, optimizer: Any, schedule: Any, clip_norm: Any) -> None:
    if not isinstance(problem, Problem):
        got = type(problem).__name__
        raise DataError(f"problem must be a Problem, got {got}: make one with Problem(model, loss, inputs, targets)")
    check_takes("optimizer", optimizer, "parameters")
    if schedule is not None:
        check_takes("schedule", schedule, "step")
    if clip_norm is not None and not (isinstance(clip_norm, int | float) and 0 < clip_norm < math.inf):
        raise HyperparameterError(f"clip_norm must be a positive number, got {clip_norm!r}: use None not to clip")
