r"""Executing a run again from its checkpoints, and comparing the weights."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from poprisk._core.seeds import seeded, step_generator, step_seed
from poprisk.errors import PopRiskError, RunError
from poprisk.runs import _checkpoint as checkpoint
from poprisk.runs._gradients import add_gradients
from poprisk.runs._layout import layout_of
from poprisk.runs._problem import Problem
from poprisk.runs._recorder import Recorder
from poprisk.runs._run import Run
from poprisk.runs._segment import SegmentReader

_OURS = "poprisk.PopRiskAdamW"
_OF_MOTION = {torch.float32: 1e-5, torch.float64: 1e-12}
"""How far another kernel of PopRiskAdamW may lead, relative to the distance that the weights have moved."""

_MOST_THREADS = 256
"""A manifest that names more is not followed: a system may end a process that starts too many."""


@dataclass(frozen=True)
class Replay:
    """A run that was executed again."""

    run: Run
    """The replayed steps, dense and in memory; its step 0 is the first replayed step."""
    deviations: dict[int, float]
    r"""For each recorded step k, :math:`\|w'_k - w_k\| / \|w_k\|`; exactly 0 if all bits agree."""

    @property
    def exact(self) -> bool:
        """Whether all recorded weights were reproduced bit by bit."""
        return all(deviation == 0 for deviation in self.deviations.values())


def replay(run: Run, *, start: int = 0, stop: int | None = None, tolerate: bool = False) -> Replay:
    """Execute a run again: same weights, batches, factors and options, with the problem's examples and loss.

    The replay starts at a checkpoint and continues from its own weights; they are compared with the recorded ones (at
    each step of a dense run, at each checkpoint of a sparse run). The last bits depend on processor and versions, which
    are listed in ``run.manifest``, and on the number of threads, which is set to the recorded one meanwhile. Your own
    loop is reproduced bit by bit only if ``problem.batch_loss`` computes the loss as the loop does.

    Args:
        run: A run with a problem.
        start: First step to execute; one of ``run.checkpoints``.
        stop: Step to stop at; default: the end of the run.
        tolerate: Whether to continue if the weights deviate, and report by how much. Default: raise an error, except
            for PopRiskAdamW at the level of rounding: its kernels round differently, and not every machine has each.

    Raises:
        RunError: the weights deviate, or the run cannot be executed again (no problem, unseeded random numbers).

    >>> from poprisk.runs import Problem, train
    >>> problem = Problem(torch.nn.Linear, "squared", torch.eye(2), torch.ones(2, 1),
    ...                   arguments={"in_features": 2, "out_features": 1})
    >>> run = train(problem, torch.optim.Adam, steps=6, batch_size=1, every=3, progress=False)
    >>> replay(run).deviations
    {3: 0.0, 6: 0.0}
    """
    stop = run.num_steps if stop is None else stop
    if start not in run.checkpoints or not start < stop <= run.num_steps:
        raise RunError(
            f"start must be one of run.checkpoints ({run.checkpoints}) and stop lie in start + 1 … {run.num_steps}, "
            f"got start={start}, stop={stop}"
        )
    recorded = set(range(stop + 1)) if run.is_dense else set(run.checkpoints)
    deviations: dict[int, float] = {}

    def compare(k: int, weights: Callable[[], Tensor]) -> None:
        if k not in recorded:
            return
        deviations[k] = _deviation(weights(), run.weights(k))
        if deviations[k] != 0 and not tolerate and not _is_rounding(run, start, k, deviations[k]):
            raise RunError(
                f"the replayed weights deviate from the recorded ones at step {k} by {deviations[k]:.1e} (relative): "
                f"{_why(run)}; tolerate=True continues and reports the deviation"
            )

    with _recorded_threads(run):
        return Replay(_execute(run, start, stop, compare), deviations)


@contextmanager
def _recorded_threads(run: Run) -> Iterator[None]:
    """As many threads as the run was recorded with: sums are split among them, and round accordingly."""
    before, recorded = torch.get_num_threads(), run.manifest["numerics"].get("threads")
    known = type(recorded) is int and 1 <= recorded <= _MOST_THREADS
    if known and recorded != before:
        torch.set_num_threads(recorded)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


def replay_segment(run: Run, start: int, stop: int, *, tolerate: bool) -> SegmentReader:
    """The steps between two checkpoints, as in a dense recording."""
    dense = replay(run, start=start, stop=stop, tolerate=tolerate).run
    reader = dense.recorded(0)
    reader.start, reader.stop = start, stop
    return reader


Run._replay_segment = staticmethod(replay_segment)


def _execute(run: Run, start: int, stop: int, compare: Callable[[int, Callable[[], Tensor]], None]) -> Run:
    problem = run.problem
    module, optimizer, seeds_forward = _rebuild(run, problem, start)
    manifest, steps = run.manifest, stop - start
    layout, parameters = layout_of(module, optimizer)
    recorder = Recorder(None, module, optimizer, problem=problem, verify_steps=0, segment_steps=steps, steps=steps)
    with recorder:
        for k in range(start, stop):
            reader = run.recorded(k)
            factor, loss_scale = reader.factor(k)
            for group, options in zip(optimizer.param_groups, options_of(run, k), strict=True):
                checkpoint.set_options(group, options)
            parts = reader.parts(k)
            with recorder.step([i for i, _ in parts], weights=_weights(parts), loss_scale=loss_scale) as step:
                optimizer.zero_grad()
                generator = step_generator(manifest["seed"], k)
                with seeded(step_seed(manifest["seed"], k) if seeds_forward else None):
                    step.loss = add_gradients(problem, module, parts, generator=generator, loss_scale=loss_scale)
                if factor != 1.0:
                    for p in parameters:
                        if p.grad is not None:
                            p.grad.mul_(factor)
                optimizer.step()
            compare(k + 1, lambda: layout.flatten(parameters).cpu())
    return recorder.run


def _rebuild(run: Run, problem: Problem, start: int) -> tuple[nn.Module, Optimizer, bool]:
    manifest = run.manifest
    training = manifest["training"]
    seeds_forward = isinstance(training, dict) and bool(training.get("seeded_forward"))
    hindered = [o for o in run.obstacles if not o.startswith("the weights are") and not seeds_forward]
    if hindered:
        raise RunError(f"the run cannot be executed again: {hindered[0]}")
    if manifest["augmentation"] == "seeded" and problem.augment is None:
        raise RunError(
            f"inputs were augmented in the run, but problem {problem.name!r} has no augment: pass the one that was used"
        )
    return *rebuilt(run, run.checkpoint(start), start), seeds_forward


def rebuilt(
    run: Run, tensors: Mapping[str, Tensor], k: int, dtype: torch.dtype | None = None
) -> tuple[nn.Module, Optimizer]:
    """Module and optimizer before step k, with these weights, buffers and states in the form of a checkpoint."""
    module, options = run.module(dtype), options_of(run, k)
    parameters = [p for p in module.parameters() if p.requires_grad]
    try:
        optimizer = checkpoint.rebuild_optimizer(run.manifest["optimizer"]["name"], options, run.layout, parameters)
        checkpoint.restore(tensors, run.layout, module, parameters, optimizer, options)
    except PopRiskError:
        raise
    except (TypeError, ValueError, KeyError, RuntimeError) as error:
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RunError(f"the recorded optimizer cannot be rebuilt ({why}): restore the run from a copy") from None
    return module, optimizer


def options_of(run: Run, k: int) -> list[dict[str, Any]]:
    """The options of a step, with ``fused=None`` as it was meant: without the C kernel in earlier recordings."""
    options: list[dict[str, Any]] = [dict(group) for group in run.options(k)]
    numerics: Mapping[str, Any] = run.manifest["numerics"]
    if run.manifest["optimizer"]["name"] == _OURS and numerics["device"] == "cpu":
        for group in options:
            if group.get("fused") is None and not numerics.get("fused_by_default"):
                group["fused"] = False
    return options


def _weights(parts: list[tuple[Tensor, Tensor | None]]) -> list[Tensor | None] | None:
    return None if all(w is None for _, w in parts) else [w for _, w in parts]


def _deviation(here: Tensor, recorded: Tensor) -> float:
    if torch.equal(here.view(torch.uint8), recorded.view(torch.uint8)):
        return 0.0
    size, difference = recorded.double().norm().item(), (here.double() - recorded.double()).norm().item()
    deviation = difference / size if size else difference
    return deviation if math.isfinite(deviation) and deviation > 0 else math.inf


def _is_rounding(run: Run, start: int, k: int, deviation: float) -> bool:
    """Whether another kernel of PopRiskAdamW explains the deviation: roundings of the weights and of their steps."""
    share = _OF_MOTION.get(run.layout.dtype)
    if run.manifest["optimizer"]["name"] != _OURS or share is None:
        return False
    now, before = run.weights(k).double(), run.weights(start).double()
    eps, size = torch.finfo(run.layout.dtype).eps, now.norm().item()
    return deviation * (size or 1.0) <= eps * size + share * (now - before).norm().item()


def _why(run: Run) -> str:
    """Differences of numerics and versions that may explain a deviation."""
    from poprisk.runs._manifest import numerics

    there, here = run.manifest["numerics"], numerics(run.problem.device)
    different = [
        f"{key} was {there.get(key)}, is {here[key]}"
        for key in here
        if key != "torch_seed" and there.get(key) != here[key]
    ]
    version = run.manifest["environment"]["torch"]
    if version != torch.__version__:
        different.append(f"torch was {version}, is {torch.__version__}")
    return "; ".join(different) or (
        "the problem's model or loss may differ from the recorded one, or the loop may not have computed the loss as "
        "problem.batch_loss does"
    )
