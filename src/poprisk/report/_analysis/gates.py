"""The gate of a recorded run over time and per parameter, read by replaying the recorded steps with its optimizer."""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.optim import Optimizer

from poprisk._core.progress import tracked
from poprisk.errors import PopRiskWarning, RunError
from poprisk.optim import PopRiskAdamW
from poprisk.runs import Run, add_gradients, rebuild_optimizer, restore, seeded, set_options, step_generator, step_seed

_MOMENTS = 40


@dataclass(frozen=True)
class GateCurve:
    """Gate diagnostics before some of the steps, with the gradient of the step to come; see ``GateDiagnostics``."""

    steps: list[int]
    overall: dict[str, list[float]]
    """Over all weights: ``active_fraction``, ``mean_gate``, ``noise_scale``, ``self_fit`` and the two rates."""
    layers: dict[str, dict[str, list[float]]]
    """The same for each parameter, by its name."""


def has_gate(run: Run) -> bool:
    """Whether the run's optimizer has a gate."""
    options = run.options(run.num_steps)
    return run.manifest["optimizer"]["name"] == "poprisk.PopRiskAdamW" and any(o.get("gate") for o in options)


def gate_curve(run: Run, moments: int = _MOMENTS) -> GateCurve:
    """Replay the recorded steps and read the optimizer's gate diagnostics at some of them.

    If every step's weights were recorded, they are restored before each step, so the diagnostics belong to the recorded
    run even if this machine rounds differently.

    Args:
        run: A run of ``PopRiskAdamW`` whose problem is available.
        moments: Maximum number of steps to read.

    Raises:
        RunError: The optimizer has no gate, or the run cannot be replayed.

    >>> from poprisk.runs import Problem, train
    >>> problem = Problem(torch.nn.Linear, "squared", torch.eye(4), torch.ones(4, 1),
    ...                   arguments={"in_features": 4, "out_features": 1})
    >>> curve = gate_curve(train(problem, PopRiskAdamW, 6, batch_size=2, progress=False), moments=3)
    >>> curve.steps, sorted(curve.layers), len(curve.overall["mean_gate"])
    ([2, 4, 5], ['bias', 'weight'], 3)
    """
    if not has_gate(run):
        raise RunError(f"only PopRiskAdamW has a gate, this run used {run.manifest['optimizer']['name']}")
    training = run.manifest["training"]
    seeds_forward = isinstance(training, dict) and bool(training.get("seeded_forward"))
    if run.obstacles and not seeds_forward:
        raise RunError(
            f"reading the gate needs a replay of the steps, and this run cannot be replayed: {run.obstacles[0]}"
        )
    again = _Again(run, seeds_forward)
    names = run.layout.names
    steps = _chosen(run.num_steps, moments)
    overall: list[dict[str, float]] = []
    layers: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for k in tracked(range(steps[-1] + 1), "replaying the steps"):
        again.prepare(k)
        if k in steps:
            overall.append(again.optimizer.overall_diagnostics().to_floats())
            for name, meters in zip(names, again.optimizer.diagnostics(), strict=True):
                layers[name].append(meters.to_floats())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PopRiskWarning)  # the training has already shown them
            again.optimizer.step()
    return GateCurve(steps, _columns(overall), {name: _columns(rows) for name, rows in layers.items()})


class _Again:
    """Module and optimizer of a run, with one group per parameter, so that each has its own diagnostics."""

    def __init__(self, run: Run, seeds_forward: bool) -> None:
        self.run, self.seeds_forward = run, seeds_forward
        self.module = run.module()
        self.parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.layout = replace(run.layout, groups=tuple(range(len(run.layout.names))))
        self.seed = run.manifest["seed"]
        optimizer = rebuild_optimizer("poprisk.PopRiskAdamW", self._options(0), self.layout, self.parameters)
        assert isinstance(optimizer, PopRiskAdamW)
        self.optimizer = optimizer

    def prepare(self, k: int) -> None:
        """Restore everything that step k started from, gradients included."""
        run, options = self.run, self._options(k)
        if k in run.checkpoints:
            kept = run.checkpoint(k)
            restore(kept, self.layout, self.module, self.parameters, self.optimizer, options)
        elif run.is_dense:
            with torch.no_grad():
                for p, piece in zip(self.parameters, run.layout.split(run.weights(k)), strict=True):
                    p.copy_(piece)
        _set(self.optimizer, options)
        self.optimizer.zero_grad()
        reader = run.recorded(k)
        factor, loss_scale = reader.factor(k)
        with seeded(step_seed(self.seed, k) if self.seeds_forward else None):
            generator = step_generator(self.seed, k)
            add_gradients(run.problem, self.module, reader.parts(k), generator=generator, loss_scale=loss_scale)
        for p in self.parameters:
            if p.grad is not None and factor != 1.0:
                p.grad.mul_(factor)

    def _options(self, k: int) -> list[dict[str, Any]]:
        groups = self.run.options(k)
        return [groups[g] for g in self.run.layout.groups]


def _set(optimizer: Optimizer, options: list[dict[str, Any]]) -> None:
    for group, saved in zip(optimizer.param_groups, options, strict=True):
        set_options(group, saved)


def _chosen(steps: int, moments: int) -> list[int]:
    """Evenly spaced steps up to the last one; before step 2 there is no variance estimate yet.

    >>> _chosen(9, 4), _chosen(1, 4)
    ([2, 4, 6, 8], [0])
    """
    first, last = min(2, steps - 1), steps - 1
    count = max(1, min(moments, last - first + 1))
    return sorted({round(last - (last - first) * j / max(count - 1, 1)) for j in range(count)})


def _columns(rows: list[dict[str, float]]) -> dict[str, list[float]]:
    return {name: [row[name] for row in rows] for name in rows[0]}
