"""Rules that stop a training without estimating its risk, compared with the best moment of the same run."""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from poprisk._core.autodiff import FlatModel
from poprisk.runs import Run
from poprisk_lab.paper.risk_honesty.baselines import evidence_criterion, gradient_disparity
from poprisk_lab.paper.risk_honesty.task import Setting

MOMENTS = 12
"""Number of moments of a run, evenly spaced."""
_EXAMPLES = 200
"""Largest number of training examples whose gradients are compared."""
_UNCHANGING = ("linear", "softmax", "logistic", "relu", "gelu", "tanh", "layernorm", "cnn")
"""Models that are a function of their weights alone at every moment."""
Watched = Mapping[str, Any]


def is_watched(setting: Setting) -> bool:
    """Whether the rules are compared in this setting: long runs without a held-back block, of models they apply to."""
    return setting.regime in ("trained", "long") and setting.model in _UNCHANGING and not setting.hold_back


def watch(setting: Setting, run: Run, without: tuple[Run, torch.Tensor]) -> dict[str, Any]:
    """The true risk and what each rule looks at, at every moment.

    Args:
        setting: The setting.
        run: Its run.
        without: A run without some of the examples, and their indices.
    """
    steps = sorted({max(1, round(run.num_steps * (j + 1) / MOMENTS)) for j in range(MOMENTS)})
    inputs, targets = run.problem.batch()
    some = torch.arange(min(len(targets), _EXAMPLES))
    model = run.model()
    found: dict[str, list[float]] = {name: [] for name in ("truth", "disparity", "evidence", "changed", "held_out")}
    before = None
    for k in steps:
        module = module_at(run, k)
        found["truth"].append(setting.risk_of(module).value)
        found["held_out"].append(setting.risk_on(module_at(without[0], k), without[1]).value)
        data = run.problem.batch(some)
        found["disparity"].append(gradient_disparity(model, run.weights(k), *data, batches=min(5, len(some))))
        found["evidence"].append(_evidence(model, run, k, data))
        if setting.classes:
            with torch.no_grad():
                outputs = module(inputs)
            now = outputs.argmax(1) if outputs.shape[1] > 1 else outputs[:, 0] > 0
            found["changed"].append(0.0 if before is None else float((now != before).sum()))
            before = now
    return {"steps": steps, **found}


def _evidence(model: FlatModel, run: Run, k: int, data: Any) -> float:
    return evidence_criterion(model, run.weights(k), *data)


def module_at(run: Run, k: int) -> nn.Module:
    """The module with the weights before step k, for a module whose buffers do not change."""
    module = run.module()
    with torch.no_grad():
        for p, piece in zip(module.parameters(), run.layout.split(run.weights(k)), strict=True):
            p.copy_(piece)
    return module.eval()


RULES: dict[str, Callable[[Watched], int | None]] = {
    "no stopping": lambda seen: len(seen["truth"]) - 1,
    "evidence criterion": lambda seen: _first(e > 0 for e in seen["evidence"]),
    "gradient disparity": lambda seen: _first(b > a for a, b in pairwise(seen["disparity"])),
    "Label Wave": lambda seen: _label_wave(seen["changed"]) if seen["changed"] else None,
    "a held-out fifth": lambda seen: min(range(len(seen["held_out"])), key=seen["held_out"].__getitem__),
}
"""The index of the moment at which each rule stops; -1 for the end, None where it is not defined."""


def _label_wave(changed: Sequence[float]) -> int:
    from poprisk_lab.recipes.label_wave import chosen_epoch  # which needs more packages than the settings do

    return chosen_epoch(changed)


def _first(signs: Any) -> int:
    return next((i for i, sign in enumerate(signs) if sign), -1)


def excess(watched: Sequence[Watched]) -> dict[str, dict[str, float]]:
    """For each rule, mean and median excess of the true risk over that of the best moment, and of how many runs."""
    found = {}
    for name, rule in RULES.items():
        places = [(seen, rule(seen)) for seen in watched]
        over = [seen["truth"][i] / min(seen["truth"]) - 1 for seen, i in places if i is not None]
        if over:
            middle = float(torch.tensor(over, dtype=torch.float64).median())
            found[name] = {"runs": len(over), "mean": sum(over) / len(over), "median": middle}
    return found
