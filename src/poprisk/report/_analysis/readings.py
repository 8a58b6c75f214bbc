"""What a run did with its labels: how much of them it worked off, how strongly, and what that did to the test loss."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import vmap
from torch.utils.flop_counter import FlopCounterMode

from poprisk._core.autodiff import Inputs, take_examples
from poprisk.errors import DataError
from poprisk.operators import PROBES, REPEATED, ProbedOperators, RunPath, loss_terms, loss_weights, probe_operators
from poprisk.risk import AuditTable
from poprisk.runs import Run

ALLOWANCE = 5
"""The readings fill four sections, and may take so many times the budget of one."""
FEWEST_STEPS = 20
_PER_SECOND, _PER_WEIGHT, _PER_STEP = 8e10, 8e-9, 2e-2
_MEMORY = 3 * 2**30
_LABELS, _CLEAN, _NOISE, _SOURCE = "all labels", "clean labels", "label noise", "weight decay and momentum"


@dataclass(frozen=True)
class Readings:
    """What the steps ``start`` … ``stop`` did with the labels; pairs are a value and half of its 95% interval."""

    start: int
    stop: int
    stretch: int
    """Steps that were followed at a time."""
    budget_for_all: float
    """Budget per section that would be enough for the whole run, in seconds."""
    known: str
    """Where the clean labels come from: "given", "audit", or nothing."""
    wrong: int
    """Number of examples whose label differs from the clean one."""
    steps: list[int]
    left: dict[str, list[list[float]]]
    """For each part of the labels, at each of ``steps``: the share of its gradient that was not worked off yet."""
    dissipated: dict[str, list[float]]
    """Share of each part in the loss that was dissipated, to first order."""
    directions: list[float]
    """Number of directions that share the dissipation, and at least how many."""
    terms: dict[str, list[float]] | None
    """What each part did to the mean test loss."""
    losses: list[float]
    """Mean test loss at both ends."""
    predicted: list[float] | None
    measured: list[float] | None


@dataclass(frozen=True)
class Plan:
    """Which steps are read, and how."""

    start: int
    stretch: int
    seconds: float
    seconds_for_all: float


def plan_readings(run: Run, budget: float) -> Plan:
    """The last steps of a run that can be read within the budget, all of them if possible, in the shortest stretches.

    Raises:
        RunError: The run's problem is not available.
    """
    allowed, T = ALLOWANCE * budget, run.num_steps
    first, _ = run.problem.batch(torch.arange(1))
    model, n, b, d = run.model(), run.num_examples, len(run.batch(0)), run.num_weights
    with FlopCounterMode(display=False) as counter:
        model.batch_outputs(model.weights, first)
    flops = max(counter.get_total_flops(), 2 * d)
    columns, again = PROBES + 6, REPEATED + 4  # with the source, and the averages that are formed

    def per_step(stretch: int) -> float:
        fine, coarse = (b * (1 + (length > 1)) + n / length for length in (stretch, 2 * stretch))
        products = 2 * flops * (columns * fine + again * coarse) / _PER_SECOND
        return products + _PER_WEIGHT * d * (columns + again) + _PER_STEP

    longest = max(1, min(round(n / b), T))
    lengths = [k for k in (1, 2, 4, 8, 16, 32, 64) if k < longest] + [longest]
    stretch = next((k for k in lengths if T * per_step(k) <= allowed), longest)
    seconds = per_step(stretch)
    count = min(T, int(allowed / seconds), _MEMORY // (8 * d))
    count = max(count, min(T, FEWEST_STEPS))
    return Plan(T - count, stretch, count * seconds, T * seconds)


def readings(
    run: Run, plan: Plan, clean: Tensor | None, test: tuple[Inputs, Tensor] | None, table: AuditTable | None
) -> Readings:
    """Follow the labels through the planned steps.

    Args:
        run: The run.
        plan: From :func:`plan_readings`.
        clean: Targets without noise, if they are known.
        test: Test inputs and their targets, as they are to be compared with the outputs.
        table: The audit, whose suggestions stand in for clean targets that are not known.

    Raises:
        RunError: The run cannot be analyzed exactly.
    """
    model, (inputs, targets) = run.model(torch.float32), run.problem.batch(dtype=torch.float32)
    queries = None if test is None else test[0]
    path = RunPath.read(run, model, inputs, targets, queries, start=plan.start)
    known, wanted = _clean_targets(targets, clean, table)
    parts, wrong = _parts(path, run, wanted)
    found = probe_operators(path, torch.stack(list(parts.values()), dim=1), plan.stretch)
    pair = lambda values, errors: {  # noqa: E731
        name: [v, e] for name, v, e in zip(parts, values.tolist(), errors.tolist(), strict=True)
    }
    left = {
        name: torch.stack([found.left[:, j], found.left_error[:, j]], dim=1).tolist() for j, name in enumerate(parts)
    }
    terms = losses = predicted = measured = None
    if test is not None:
        terms, losses, predicted, measured = _test_side(path, found, list(parts), test[1])
    return Readings(
        start=plan.start,
        stop=run.num_steps,
        stretch=plan.stretch,
        budget_for_all=plan.seconds_for_all / ALLOWANCE,
        known=known if wrong else "",
        wrong=wrong,
        steps=[plan.start + k for k in found.steps],
        left=left,
        dissipated=pair(found.dissipated, found.dissipated_error),
        directions=[found.directions, found.directions_least],
        terms=terms,
        losses=losses or [],
        predicted=predicted,
        measured=measured,
    )


def _clean_targets(targets: Tensor, clean: Tensor | None, table: AuditTable | None) -> tuple[str, Tensor | None]:
    if clean is not None:
        return "given", clean.to(targets)
    try:
        return "audit", None if table is None else table.cleaned_targets().to(targets)
    except DataError:
        return "", None


def _parts(path: RunPath, run: Run, wanted: Tensor | None) -> tuple[dict[str, Float[Tensor, "N"]], int]:
    """The output gradient, split into that of the clean labels and that of the noise; held-back examples have none."""
    trained = torch.ones(len(path.targets), dtype=torch.bool)
    if run.kept is not None:
        trained[run.kept.held] = False
    only = lambda g: (g.reshape(len(trained), -1) * trained[:, None].to(g)).reshape(-1)  # noqa: E731
    g = only(path.output_gradient)
    if wanted is None:
        return {_LABELS: g}, 0
    wrong = int(((wanted != path.targets).reshape(len(trained), -1).any(1) & trained).sum())
    if not wrong:
        return {_LABELS: g}, 0
    clean = only(path.gradient_for(wanted))
    return {_CLEAN: clean, _NOISE: g - clean}, wrong


def _test_side(
    path: RunPath, found: ProbedOperators, names: list[str], targets: Tensor
) -> tuple[dict[str, list[float]], list[float], list[float], list[float]]:
    before, after = path.test_outputs(0).double(), path.test_outputs(-1).double()
    shape = path.model.batch_outputs(path.weights[0], take_examples(_present(path), slice(0, 1))).shape[1:]
    ends = before.reshape(-1, *shape), after.reshape(-1, *shape)
    targets = targets.double() if targets.is_floating_point() else targets
    weights = loss_weights(path.model.loss, ends[0], ends[1], targets)
    moved = {name: -found.test[:, j] for j, name in enumerate(names)} | {_SOURCE: found.source}
    change = {name: found.test_change[:, j] for j, name in enumerate(names)}
    errors = loss_terms(weights, change)
    terms = {name: [v, abs(errors.get(name, 0.0))] for name, v in loss_terms(weights, moved).items()}
    score = vmap(path.model.loss)
    losses = [score(end, targets).mean().item() for end in ends]
    predicted = sum(moved.values(), torch.zeros_like(found.source))
    return terms, losses, predicted.tolist(), (after - before).reshape(-1).tolist()


def _present(path: RunPath) -> Inputs:
    assert path.test_inputs is not None
    return path.test_inputs
