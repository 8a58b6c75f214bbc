"""Train again on all examples, the held-back ones included, for as many passes as the held-back examples chose."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from poprisk._core.store import pack, unpack
from poprisk.errors import RunError
from poprisk.optim import TailAverage
from poprisk.runs._held_back import HeldBack, Kept
from poprisk.runs._recorder import Recorder
from poprisk.runs._run import Run, as_run
from poprisk.runs._storage import Content
from poprisk.runs._training import train


def refit(
    run: Run | str | Path,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
    *,
    path: str | Path | None = None,
    schedule: Callable[[int], float] | None = None,
    resume: bool = False,
    progress: bool | Callable[[int, Tensor], None] = True,
) -> Run:
    """Train again on all examples for the length that the held-back ones chose, and end with the same average.

    The number of passes over the data is that of the kept weights: with 5% held back, 340 steps become 358. Batch size,
    clipping, seed and precision are those of the first training.

    Args:
        run: A finished run of ``train(…, hold_back=…)``, or its directory.
        optimizer: As in the first training; see :func:`~poprisk.train`.
        path: Directory for the second run; None keeps it in memory.
        schedule: As in the first training; it is stretched to the new number of steps.
        resume: Continue the run in ``path``; a finished run is only opened.
        progress: As for :func:`~poprisk.train`.

    Returns:
        The second run. ``kept.weights`` are the final weights. No examples are left to measure them, so that
        ``kept.risk`` is the estimate of the first training, and its target says so.

    Raises:
        RunError: the run held nothing back, is not finished, or was not made by ``train``.

    >>> from functools import partial
    >>> from poprisk import Problem, refit, train
    >>> problem = Problem(nn.Linear, "squared", torch.randn(40, 2), torch.randn(40, 1),
    ...                   arguments={"in_features": 2, "out_features": 1})
    >>> sgd = partial(torch.optim.SGD, lr=0.1)
    >>> run = train(problem, sgd, 30, batch_size=10, hold_back=0.25, progress=False)
    >>> final = refit(run, sgd, progress=False)
    >>> final.num_steps == refit_steps(run), final.kept.risk.value == run.kept.risk.value
    (True, True)
    """
    run = as_run(run)
    steps, recipe = refit_steps(run), run.manifest["training"]
    assert run.kept is not None
    ratio = run.kept.risk.step / steps
    return train(
        run.problem,
        optimizer,
        steps,
        hold_back=_Average(run, steps),
        batch_size=recipe["batch_size"],
        seed=run.manifest["seed"],
        path=path,
        every=run.manifest["every"],
        accumulate=recipe["accumulate"],
        clip_norm=recipe["clip_norm"],
        schedule=None if schedule is None else lambda k: schedule(int(k * ratio)),
        dtype=run.layout.dtype,
        resume=resume,
        progress=progress,
    )


def refit_steps(run: Run) -> int:
    """The number of steps on all examples that are as many passes as those that led to the kept weights.

    Raises:
        RunError: the run held nothing back, is not finished, or was not made by ``train``.
    """
    recipe, kept = run.manifest["training"], run.kept
    if kept is None or not len(kept.held) or not isinstance(recipe, dict) or "batch_size" not in recipe:
        raise RunError(
            "refit needs a finished run of train(…, hold_back=0.05): this one has no kept weights of its own"
        )
    return max(1, round(kept.risk.step * run.num_examples / (run.num_examples - len(kept.held))))


class _Average(HeldBack):
    """Follows the second training: all examples, and the average of the kept weights at its end."""

    def __init__(self, first: Run, steps: int) -> None:
        assert first.kept is not None
        self._kept: Kept = first.kept
        self._average: TailAverage | None = None
        self.train, self.held = torch.arange(first.num_examples), torch.empty(0, dtype=torch.long)
        n, before = first.num_examples, first.num_examples - len(first.kept.held)
        risk, tail = first.kept.risk, first.kept.risk.tail
        self.settings = {"refit": {"step": risk.step, "of": first.num_steps, "tail": tail, "examples": before}}
        self._target = (
            f"the kept weights of the first training, on {before} of the {n} examples (step {risk.step} of "
            f"{first.num_steps}); the weights of this training, on all of them, are not measured"
        )
        self._risk = replace(risk, step=steps, reason=f"{risk.reason} of the first training")

    def follow(self, module: nn.Module, optimizer: Optimizer) -> None:
        tail = self._kept.risk.tail
        self._average = None if tail is None else TailAverage(module, optimizer, tail)

    def count(self, examples: int) -> None:
        """Nothing is measured."""

    def state(self) -> Content:
        form, tensors = pack(None if self._average is None else self._average.state_dict())
        return tensors, form

    def restore(self, content: Content) -> None:
        state: Any = unpack(content[1], content[0], ())
        if self._average is not None:
            self._average.load_state_dict(state)

    def finish(self, recorder: Recorder) -> None:
        recorder.flush()
        if self._average is not None:
            self._average.close()
            self._average.copy_to_model()
        recorder.kept_writer.store(self._risk, (), self._target)
