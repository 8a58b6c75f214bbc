"""Curves along a run: its losses, the share of the loss drop that was memorized, and the drift of its kernel."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from poprisk._core.autodiff import resolve_loss, take_examples
from poprisk.errors import DataError
from poprisk.operators import evaluation_model, kernel_drift
from poprisk.optim import KeptRisk
from poprisk.report._analysis.readings import forward_cost
from poprisk.risk import (
    AuditTable,
    Network,
    RiskEstimate,
    choose_moments,
    evaluate,
    example_losses,
    has_changing_buffers,
)
from poprisk.runs import MODULE_BUFFER, Problem, Run

_KERNEL_MOMENTS, _KERNEL_SIDE = 10, 512
_TEST_EXAMPLES = 10_000


@dataclass(frozen=True)
class LossCurves:
    """Losses over all examples, evaluated with the weights before some of the steps."""

    steps: list[int]
    train: list[float]
    test: list[float] | None
    """Loss on ``problem.test``."""
    test_accuracy: list[float] | None
    test_error: float | None
    """Standard error of the last test loss."""
    notes: tuple[str, ...] = ()
    kept: tuple[float, float, float | None] | None = None
    """Test loss of the kept weights, its standard error, and the accuracy; None without a test set or kept weights."""


@dataclass(frozen=True)
class HeldBackLine:
    """Mean loss of the held-back examples along the run, for weights averaged over one tail."""

    tail: float | None
    steps: list[int]
    losses: list[float]
    errors: list[float]
    """Standard errors of ``losses``."""
    accuracy: list[float] | None
    """Share of the examples that are right, if the targets are classes."""


@dataclass(frozen=True)
class HeldBackCurve:
    """What was measured on the examples that no step trained on, and what was chosen by it."""

    examples: int
    lines: list[HeldBackLine]
    risk: KeptRisk
    """The risk of the kept weights, corrected for the choice."""


@dataclass(frozen=True)
class Memorization:
    r"""The share of the drop in training loss that does not carry over to new data.

    .. math:: \frac{R(w_T) - \hat L_S(w_T)}{\hat L_S(w_0) - \hat L_S(w_T)}

    The initial weights have seen no example, so the share is 0 if nothing was memorized.
    """

    share: float
    standard_error: float
    source: str
    """Where the risk R comes from: "estimated population risk", or "test set"."""


@dataclass(frozen=True)
class KernelCurve:
    """Distance of the tangent kernel of some training examples from its initial value, relative to its norm."""

    steps: list[int]
    drift: list[float]
    examples: int


def loss_curves(run: Run, table: AuditTable | None) -> LossCurves:
    """Training loss over all examples along the run, and test loss if the problem has a test set."""
    problem = run.problem
    start = example_losses(problem, next(evaluate(run, [0, 1])).outputs).mean().item()
    if table is not None:
        steps, train = list(table.moments), table.losses.mean(1).tolist()
    else:
        steps = choose_moments(run)
        train = [example_losses(problem, m.outputs).mean().item() for m in evaluate(run, steps)]
    steps, train = [0, *steps], [start, *train]
    if problem.test is None:
        note = "no test loss: the problem has no test set; pass one with Problem(…, test=(inputs, targets))"
        return LossCurves(steps, train, None, None, None, (note,))
    rows = list(_tested(run, steps))
    last = rows[-1][0]
    accuracies = [a for _, a in rows if a is not None]
    between = has_changing_buffers(run) and any(k not in run.checkpoints for k in steps)
    note = "batch statistics were recorded at checkpoints only: between them, they are estimated from training examples"
    return LossCurves(
        steps,
        train,
        [losses.mean().item() for losses, _ in rows],
        accuracies or None,
        last.std().item() / math.sqrt(len(last)) if len(last) > 1 else None,
        (note,) if between else (),
        _kept_tested(run),
    )


def _kept_tested(run: Run) -> tuple[float, float, float | None] | None:
    if run.kept is None:
        return None
    module = run.module().eval()
    module.load_state_dict(run.kept.weights)
    losses, accuracy = scores_on_test(run.problem, module)
    return losses.mean().item(), losses.std().item() / math.sqrt(len(losses)), accuracy


def _tested(run: Run, steps: list[int]) -> Iterator[tuple[Float[Tensor, "m"], float | None]]:
    """The loss of each test example, and the accuracy if the targets are classes, before each of the steps."""
    network = Network(run, 1024)
    for k in steps:
        network.go_to(k)
        yield scores_on_test(run.problem, network.module)


@torch.no_grad()
def put_weights(run: Run, module: nn.Module, k: int) -> None:
    """Put the weights before step k into a module of the run; at checkpoints, its buffers as well."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    for p, piece in zip(parameters, run.layout.split(run.weights(k)), strict=True):
        p.copy_(piece)
    if k in run.checkpoints:
        kept = run.checkpoint(k)
        for name, buffer in module.named_buffers():
            buffer.copy_(kept.get(MODULE_BUFFER + name, buffer))


def scores_on_test(problem: Problem, module: nn.Module) -> tuple[Float[Tensor, "m"], float | None]:
    """The loss of each example of the test set, and the accuracy if its targets are classes."""
    assert problem.test is not None
    rows = slice(0, _TEST_EXAMPLES)
    inputs, targets = take_examples(problem.test[0], rows), problem.test[1][rows]
    with torch.no_grad():
        parts = [take_examples(inputs, rows) for rows in torch.arange(len(targets)).split(1024)]
        outputs = torch.cat([module(*x) if isinstance(x, tuple) else module(x) for x in parts])
    are_classes = problem.loss == "cross_entropy" and targets.dim() == 1 and outputs.dim() == 2
    right = (outputs.argmax(1) == targets).double().mean().item() if are_classes else None
    wanted = targets.double() if targets.is_floating_point() else targets
    return torch.func.vmap(resolve_loss(problem.loss))(outputs.double(), wanted).cpu(), right


def held_back_curve(run: Run) -> HeldBackCurve | None:
    """The measurements on held-back examples, and what was chosen; None if the run kept nothing."""
    kept = run.kept
    if kept is None or not kept.moments:
        return None
    count = kept.count
    lines = []
    for tail in dict.fromkeys(moment.tail for moment in kept.moments):
        own = [moment for moment in kept.moments if moment.tail == tail]
        losses = torch.stack([moment.losses for moment in own]).double()
        errors = losses.std(1) / math.sqrt(count) if count > 1 else torch.zeros(len(own))
        scores = torch.stack([moment.scores for moment in own]).double()
        counted = bool(((scores == 0) | (scores == 1)).all()) and math.isfinite(kept.risk.accuracy)
        accuracy = (1 - scores.mean(1)).tolist() if counted else None
        steps = [moment.step for moment in own]
        lines.append(HeldBackLine(tail, steps, losses.mean(1).tolist(), errors.tolist(), accuracy))
    return HeldBackCurve(count, lines, kept.risk)


def memorization(curves: LossCurves | None, risk: RiskEstimate | None) -> Memorization:
    """Compute :class:`Memorization` from the estimated risk if it is valid, otherwise from the test set.

    Raises:
        DataError: The training loss did not fall, neither source is available, or the test set is clearly easier.
    """
    if curves is None:
        raise DataError("the training loss along the run is not available")
    drop = curves.train[0] - curves.train[-1]
    if not drop > 0:
        raise DataError("the training loss did not fall, so no share of its drop can be memorization")
    if risk is not None and risk.valid:
        error = float(risk.standard_error) / drop
        return Memorization(risk.gap / drop, error, "estimated population risk")
    if curves.test is None:
        why = "the risk was not computed" if risk is None else f"the risk estimate is not valid ({risk.reason})"
        raise DataError(f"{why}, and the problem has no test set")
    error = math.nan if curves.test_error is None else curves.test_error / drop
    share = (curves.test[-1] - curves.train[-1]) / drop
    if share < -2 * error:
        raise DataError(
            f"the test loss, {curves.test[-1]:.3g}, is below the training loss, {curves.train[-1]:.3g}: the test set "
            "is not drawn from the same distribution as the training set (its labels may be cleaner), so it cannot "
            "show what was memorized"
        )
    return Memorization(share, error, "test set")


def kernel_curve(run: Run, budget: float) -> KernelCurve:
    """Drift of the tangent kernel of the first training examples along the run."""
    model = evaluation_model(run)
    inputs, _ = run.problem.batch(torch.arange(min(run.num_examples, _KERNEL_SIDE)), dtype=model.weights.dtype)
    p = model.outputs(run.weights(0).to(model.weights), take_examples(inputs, slice(0, 1))).numel()
    one, fixed = forward_cost(run, model)
    work = 30 * p * run.num_weights * (1 + fixed / one)
    n = max(1, min(run.num_examples, _KERNEL_SIDE // p, int((budget * 1e9 / work) ** 0.5)))
    steps = [0, *choose_moments(run, _KERNEL_MOMENTS)]
    weights = (run.weights(k).to(model.weights) for k in steps)
    found = kernel_drift(model, weights, take_examples(inputs, slice(0, n)))
    return KernelCurve(steps, found.drift.tolist(), n)
