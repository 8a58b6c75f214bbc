"""What a run did with its labels: how much of them it worked off, how strongly, and what that did to the test loss."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.func import vmap
from torch.utils.flop_counter import FlopCounterMode

from poprisk._core.autodiff import FlatModel, Inputs, take_examples
from poprisk.errors import DataError
from poprisk.operators import (
    PROBES,
    REPEATED,
    Evaluation,
    ProbedOperators,
    RunPath,
    evaluation_model,
    loss_terms,
    loss_weights,
    probe_operators,
)
from poprisk.risk import AuditTable
from poprisk.runs import Run

ALLOWANCE = 5
"""The readings fill four sections, and may take so many times the budget of one."""
FEWEST_STEPS = 20
# Multiplications per second, seconds per weight and column, and per step: of a CPU core, and of a GPU.
_SPEEDS = {"cpu": (8e10, 8e-9, 2e-2), "cuda": (1e13, 1e-11, 1e-1)}
# Measured on a core of an EPYC, and on an H200; convolutions on a GPU run in TF32.
_OF_CONVOLUTIONS = {"cpu": 0.25, "cuda": 1.25}
"""Speed of convolutions relative to that of products."""
_MEMORY = {"cpu": 3 * 2**30, "cuda": 16 * 2**30}
_LABELS, _CLEAN, _NOISE, _SOURCE = "all labels", "clean labels", "label noise", "weight decay and momentum"
_REST = "rest of the steps"


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
    allowed, T, d = ALLOWANCE * budget, run.num_steps, run.num_weights
    lengths = [k for k in (1, 2, 4, 8, 16, 32, 64) if k < longest_stretch(run)] + [longest_stretch(run)]
    each = step_seconds(run, lengths)
    stretch, seconds = next(
        ((k, s) for k, s in zip(lengths, each, strict=True) if T * s <= allowed), (lengths[-1], each[-1])
    )
    memory = _MEMORY.get(run.problem.device.type, _MEMORY["cpu"])
    count = min(T, int(allowed / seconds), memory // (8 * d))
    count = max(count, min(T, FEWEST_STEPS))
    return Plan(T - count, stretch, count * seconds, T * seconds)


def longest_stretch(run: Run) -> int:
    """An epoch, or the whole run if that is shorter."""
    return max(1, min(round(run.num_examples / len(run.batch(0))), run.num_steps))


def step_seconds(run: Run, lengths: list[int]) -> list[float]:
    """Estimated seconds for each step of the readings, by the length of the stretches."""
    device = run.problem.device.type
    speed, per_weight, overhead = _SPEEDS.get(device, _SPEEDS["cpu"])
    model, n, b, d = evaluation_model(run), run.num_examples, len(run.batch(0)), run.num_weights
    flops, fixed = forward_cost(run, model)
    columns, again = PROBES + 6, REPEATED + 4  # with the source, and the averages that are formed
    found = []
    for stretch in lengths:
        products = 0.0
        for count, length in ((columns, stretch), (again, 2 * stretch)):
            calls, rows = 1 + (length > 1), n / length
            blocks = calls + rows / (model.chunk_size or n)
            products += count * (flops * (b * calls + rows) + fixed * blocks)
        found.append(2 * products / speed + per_weight * d * (columns + again) + overhead)
    return found


def forward_seconds(run: Run, model: FlatModel) -> float:
    """Estimated seconds of a forward pass of one example, among many."""
    speed, _, _ = _SPEEDS.get(run.problem.device.type, _SPEEDS["cpu"])
    return forward_cost(run, model)[0] / speed


def forward_cost(run: Run, model: FlatModel) -> tuple[float, float]:
    """Multiplications of a forward pass, as many as take its time: for one example, and for the call itself."""
    of_convolutions = _OF_CONVOLUTIONS.get(run.problem.device.type, _OF_CONVOLUTIONS["cpu"])
    counts = []
    for k in (1, 2):
        inputs, _ = run.problem.batch(torch.zeros(k, dtype=torch.long), dtype=model.weights.dtype)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.module(*inputs) if isinstance(inputs, tuple) else model.module(inputs)
        by_name = counter.get_flop_counts()["Global"]
        counts.append(sum(c / (of_convolutions if "conv" in str(name) else 1) for name, c in by_name.items()))
    one, two = counts
    return max(two - one, 2 * run.num_weights), max(2 * one - two, 0)


def readings(
    run: Run,
    plan: Plan,
    evaluation: Evaluation,
    clean: Tensor | None,
    test: tuple[Inputs, Tensor] | None,
    table: AuditTable | None,
) -> Readings:
    """Follow the labels through the planned steps.

    Args:
        run: The run.
        plan: From :func:`plan_readings`.
        evaluation: What is analyzed of its steps, in single precision.
        clean: Targets without noise, if they are known.
        test: Test inputs and their targets, as they are to be compared with the outputs.
        table: The audit, whose suggestions stand in for clean targets that are not known.

    Raises:
        RunError: The run cannot be analyzed exactly.
    """
    model, (inputs, targets) = evaluation.model, run.problem.batch(dtype=torch.float32)
    queries = None if test is None else test[0]
    path = RunPath.read(evaluation.trajectory, model, inputs, targets, queries, start=plan.start)
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
        terms, losses, predicted, measured = _test_side(
            path, found, list(parts), test[1], _REST if evaluation.note else _SOURCE
        )
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
        return "audit", None if table is None else table.cleaned_targets(table.is_suspect).to(targets)
    except DataError:
        return "", None


def _parts(path: RunPath, run: Run, wanted: Tensor | None) -> tuple[dict[str, Float[Tensor, "N"]], int]:
    """The output gradient, split into that of the clean labels and that of the noise; held-back examples have none."""
    trained = run.trained.to(path.targets.device)
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
    path: RunPath, found: ProbedOperators, names: list[str], targets: Tensor, source: str
) -> tuple[dict[str, list[float]], list[float], list[float], list[float]]:
    before, after = path.test_outputs(0).double(), path.test_outputs(-1).double()
    shape = path.model.batch_outputs(path.weights[0], take_examples(_present(path), slice(0, 1))).shape[1:]
    ends = before.reshape(-1, *shape), after.reshape(-1, *shape)
    targets = targets.double() if targets.is_floating_point() else targets
    weights = loss_weights(path.model.loss, ends[0], ends[1], targets)
    moved = {name: -found.test[:, j] for j, name in enumerate(names)} | {source: found.source}
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
