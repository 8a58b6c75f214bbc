"""The estimates of population risk that the honesty study compares: the library's, and those that others use."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from inspect import signature
from types import MappingProxyType
from typing import Any, get_args, get_type_hints
from unittest.mock import patch

import torch
from torch import Tensor

from poprisk.errors import PopRiskError
from poprisk.risk import RiskEstimate, _exclusion, _first_order, _risk, population_risk
from poprisk.runs import Run, train
from poprisk_lab.paper.risk_honesty.baselines import kernel_gcv_risk, takeuchi_risk
from poprisk_lab.paper.risk_honesty.stopping import is_watched, watch
from poprisk_lab.paper.risk_honesty.task import Setting, Truth, final_module

Answer = RiskEstimate | Truth | float | dict[str, Any]
BUDGET = 10
"""Number of trainings allowed where trainings are allowed."""
JUDGED = ("exclusion", "first_order", "leverage", "leverage_alone", "held_back", "k_fold", "auto", "auto10")
"""Methods that say whether they are valid; "leverage_alone" is leverage without real deletions."""
_ARGUMENTS = signature(_exclusion.exclusion)
STOPPING = "stopping"
"""Name of the line with what rules for stopping looked at; it is no estimate."""
_HELD_OUT = 0.2
_LARGEST_KERNEL = 1500
"""Largest number of outputs on the training set for which a tangent kernel is decomposed."""
_NO_KERNEL = ("batchnorm", "cnn_batchnorm", "dropout", "gru", "transformer")
"""Models for which derivatives by the example do not exist or cannot be had from ``torch.func``."""


@dataclass(frozen=True)
class Method:
    """How an estimate is made."""

    name: str
    estimate: Callable[[Setting, Run], Answer]
    defined: Callable[[Setting], bool] = lambda _: True


def available() -> dict[str, Method]:
    """Every method that this version of the library has, by name; a method that is not there yet is left out."""
    known = get_args(get_type_hints(population_risk)["method"])
    made = [
        Method("auto", lambda _, run: population_risk(run)),
        Method("auto10", lambda _, run: population_risk(run, retrain_budget=BUDGET)),
        Method("k_fold", lambda _, run: population_risk(run, "k_fold", retrain_budget=BUDGET)),
        Method("holdout", _held_out),
        Method("gcv", _kernel_gcv, lambda setting: setting.loss == "squared" and _small(setting)),
        Method(STOPPING, _stopping, is_watched),
        Method("takeuchi", _takeuchi, lambda setting: setting.loss in ("squared", "cross_entropy") and _small(setting)),
    ]
    if "leverage" in known:
        made.insert(0, Method("leverage_alone", lambda _, run: population_risk(run, "leverage", controls=0)))
    for name in JUDGED:
        if name in known and name not in ("auto", "k_fold"):
            call = _first_order_risk if name == "first_order" else _named(name)
            made.append(Method(name, call, _has_block if name == "held_back" else lambda _: True))
    return {method.name: method for method in made}


def as_row(found: Answer) -> dict[str, Any]:
    """An answer as JSON values; numbers that are not finite become None."""
    if isinstance(found, dict):
        return found
    if isinstance(found, RiskEstimate):
        about = {"valid": bool(found.valid), "reason": found.reason, "target": found.target, "by": found.method}
        numbers = {"value": found.value, "standard_error": found.standard_error, "training_loss": found.training_loss}
        return {**{name: finite(x) for name, x in numbers.items()}, **about}
    if isinstance(found, Truth):
        return {"value": finite(found.value), "standard_error": finite(found.error), "valid": True}
    return {"value": finite(found), "standard_error": None, "valid": True}


def finite(x: Any) -> float | None:
    """The number; None for one that is not finite.

    >>> finite(float("inf")), finite(2)
    (None, 2.0)
    """
    return None if x is None or not math.isfinite(float(x)) else float(x)


@contextmanager
def remembered(stored: Mapping[str, Mapping[str, Any]] = MappingProxyType({})) -> Iterator[None]:
    """Let every estimate be made once for a run, however many methods use it: the answers are those of single calls.

    Args:
        stored: Answers of the run that were made before, by method; they are not made again.
    """
    shared = _once(_exclusion.exclusion, _exclusion_key)
    roads = tuple(replace(road, estimate=_once(_known(road, stored), _question_key(road))) for road in _risk.ROADS)
    with (
        patch.object(_exclusion, "exclusion", shared),
        patch.object(_first_order, "exclusion", shared),
        patch.object(_risk, "ROADS", roads),
    ):
        yield


def _once(function: Callable[..., Any], key: Callable[..., Any]) -> Callable[..., Any]:
    """The function with its answers and its errors kept by key."""
    known: dict[Any, Any] = {}

    def answer(*arguments: Any, **options: Any) -> Any:
        which = key(*arguments, **options)
        if which not in known:
            try:
                known[which] = function(*arguments, **options)
            except PopRiskError as error:
                known[which] = error
        if isinstance(known[which], PopRiskError):
            raise known[which]
        return known[which]

    return answer


def _known(road: _risk.Road, stored: Mapping[str, Mapping[str, Any]]) -> Callable[[_risk.Question], RiskEstimate]:
    """The stored answer of a method where its own call would give it; else the estimate is made."""
    usual = "kept" if road.method == "held_back" else "last"

    def answer(question: _risk.Question) -> RiskEstimate:
        row = stored.get(_alone(road, question))
        if row is None or row.get("by") != road.method or question.weights != usual:
            return road.estimate(question)
        numbers = (row.get(k) for k in ("value", "standard_error", "training_loss"))
        value, error, loss = (math.nan if x is None else x for x in numbers)
        about = {"target": row["target"], "method": row["by"], "training_loss": loss}
        return RiskEstimate(value, error, row["valid"], row["reason"], **about)

    return answer


def _alone(road: _risk.Road, question: _risk.Question) -> str:
    """The name of the row with this answer."""
    alone = road.method == "leverage" and _risk.leverage_controls(question) == 0
    return "leverage_alone" if alone else road.method


def _question_key(road: _risk.Road) -> Callable[[_risk.Question], Any]:
    def key(question: _risk.Question) -> Any:
        budget = question.retrain_budget if road.trainings else 0
        return id(question.run), question.weights, budget, question.controls, _alone(road, question)

    return key


def _exclusion_key(*arguments: Any, **options: Any) -> Any:
    """The run and every other argument, whether it was given or not."""
    bound = _ARGUMENTS.bind(*arguments, **options)
    bound.apply_defaults()
    run = bound.arguments.pop("run")
    rest = ((name, x.tolist() if isinstance(x, Tensor) else x) for name, x in bound.arguments.items())
    return id(getattr(run, "run", run)), getattr(run, "stop", None), repr(list(rest))


def _first_order_risk(_: Setting, run: Run) -> RiskEstimate:
    """First order, where exclusion is valid: elsewhere it is not valid by its own rule, and is not computed."""
    checked = population_risk(run, "exclusion")
    if checked.valid:
        return population_risk(run, "first_order")
    reason = f"exclusion, which checks the first order, is not valid: {checked.reason}"
    return RiskEstimate(math.nan, math.nan, False, reason, method="first_order")


def _named(name: Any) -> Callable[[Setting, Run], RiskEstimate]:
    return lambda _, run: population_risk(run, name)


def _has_block(setting: Setting) -> bool:
    return setting.hold_back > 0


def _small(setting: Setting) -> bool:
    outputs = setting.classes if setting.loss == "cross_entropy" else 1
    return setting.n * outputs <= _LARGEST_KERNEL and setting.model not in _NO_KERNEL


def _without_fifth(setting: Setting, run: Run) -> tuple[Run, Tensor]:
    """The same training without a fifth of the examples, and their indices: what most people do."""
    n = run.num_examples
    order = torch.randperm(n, generator=torch.Generator().manual_seed(setting.seed))
    held, kept = order.split([round(_HELD_OUT * n), n - round(_HELD_OUT * n)])
    rest, _ = run.problem.held_back(kept, held)
    again = train(
        rest,
        setting.make_optimizer,
        setting.steps,
        batch_size=min(setting.batch, len(rest)),
        seed=setting.seed,
        schedule=setting.schedule,
        dtype=setting.dtype,
        progress=False,
    )
    return again, held


def _held_out(setting: Setting, run: Run) -> Truth:
    again, held = _without_fifth(setting, run)
    return setting.risk_on(final_module(again), held)


def _stopping(setting: Setting, run: Run) -> dict[str, Any]:
    return watch(setting, run, _without_fifth(setting, run))


def _kernel_gcv(_: Setting, run: Run) -> float:
    model = run.model(torch.float64)
    inputs, targets = run.problem.batch(dtype=torch.float64)
    return kernel_gcv_risk(model, run.weights(run.num_steps).double(), run.weights(0).double(), inputs, targets)


def _takeuchi(_: Setting, run: Run) -> float:
    inputs, targets = run.problem.batch(dtype=torch.float64)
    return takeuchi_risk(run.model(torch.float64), run.weights(run.num_steps).double(), inputs, targets)
