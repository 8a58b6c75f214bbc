r"""What a report of a run shows: every part that is cheap enough, and for each other part why not and how to get it.

A part is computed where its price, about so many seconds on one CPU core, is within the budget. Nothing is trained
again unless it is asked for, except that gates are read off the recorded steps taken once more.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import resolve_loss, take_examples
from poprisk.errors import DataError, HyperparameterError, PopRiskError, RunError
from poprisk.operators import kernel_drift
from poprisk.report._analysis_parts import KernelCurve, LossCurves, Memorization, Neighbours
from poprisk.report._gates import GateCurve, gate_curve, has_gate
from poprisk.report._kept_analysis import BUDGET, KeptAnalysis, Part
from poprisk.report._window import CleanTargets, WindowFacts, window_facts, window_seconds
from poprisk.risk import (
    FEWEST_FOLDS,
    AuditTable,
    Reading,
    RiskEstimate,
    RiskMeter,
    audit,
    choose_moments,
    evaluate,
    exact_obstacle,
    example_losses,
    has_changing_buffers,
    influence_on,
)
from poprisk.risk import seconds as exact_seconds
from poprisk.runs import MODULE_BUFFER, Run

PARTS = ("examples", "curves", "risk", "memorization", "gates", "operators", "kernel", "neighbours")
"""In the order in which they are computed."""
_PER_SECOND = 2e10
"""Multiplications of a CPU core in a second, about."""
_STEP_OVERHEAD = 1e-2
_PER_DIRECTION = 12
_RISK_EXAMPLES, _FEWEST_RISK_EXAMPLES = 128, 32
_READINGS = 12
_SUSPECTS, _NEIGHBOURS = 24, 3
_KERNEL_MOMENTS, _KERNEL_SIDE = 10, 512
_TEST_EXAMPLES = 10_000

Found = TypeVar("Found")


@dataclass(eq=False)
class Analysis:
    """All that was found out about a run; a part that is None has a line in ``left_out``."""

    run: Run
    budget: float
    retrain: int = 0
    curves: LossCurves | None = None
    readings: list[Reading] | None = None
    memorization: Memorization | None = None
    gates: GateCurve | None = None
    window: WindowFacts | None = None
    kernel: KernelCurve | None = None
    table: AuditTable | None = None
    neighbours: dict[int, Neighbours] | None = None
    left_out: dict[str, str] = field(default_factory=dict)
    """By the name of a part: why it is missing, and how to get it."""

    @property
    def risk(self) -> RiskEstimate | None:
        """The last reading: the risk at the end of the run."""
        return self.readings[-1].risk if self.readings else None


def analyze(
    run: Run,
    *,
    budget: float = BUDGET,
    retrain: int = 0,
    clean: CleanTargets | None = None,
    kept: KeptAnalysis | None = None,
    progress: Callable[[str], None] | None = None,
) -> Analysis:
    r"""Find out about a run what a report shows, within a budget.

    Args:
        run: The run; without its problem only the losses that were recorded can be shown.
        budget: Seconds on one CPU core, about, that each part may take; parts that are dearer are left out.
        retrain: How many trainings may be spent on the risk where the run alone cannot tell it (K-fold, at least 3);
            these have no other budget.
        clean: The targets without noise, f*(S) and f*(Q), of the training set and of ``problem.test``, where they are
            known: for the four cells of test error, under squared loss.
        kept: Where finished parts are, made with the same options: these are used, and the others put there.
        progress: Called with the name of each part before it is computed.

    Raises:
        HyperparameterError: a budget that is not a number of seconds, or 1 or 2 trainings, which are too few.
        RunError: the run has no steps.
        DataError: clean targets that do not fit.

    >>> from poprisk.runs import Problem
    >>> from poprisk.runs import train
    >>> problem = Problem(torch.nn.Linear, "squared", torch.eye(4).repeat(4, 1), torch.ones(16, 1),
    ...                   arguments={"in_features": 4, "out_features": 1})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=0.2), steps=9, progress=False)
    >>> found = analyze(run)
    >>> found.curves.steps[-1], found.left_out["gates"]
    (9, 'the optimizer has no gate: train with PopRiskAdamW')
    """
    check_options(budget, retrain)
    if not run.num_steps:
        raise RunError("the run has no steps: there is nothing to report")
    return _Work(run, budget, retrain, clean, kept, progress or (lambda _: None)).done()


def check_options(budget: float, retrain: int) -> None:
    """Refuses what no analysis can have.

    Raises:
        HyperparameterError: a budget that is not a number of seconds, or 1 or 2 trainings, which are too few.
    """
    if not (isinstance(budget, int | float) and math.isfinite(budget) and budget > 0):
        raise HyperparameterError(f"budget must be a positive number of seconds, got {budget!r}")
    if not (isinstance(retrain, int) and (retrain == 0 or retrain >= FEWEST_FOLDS)):
        raise HyperparameterError(f"retrain must be 0, or at least {FEWEST_FOLDS} trainings, got {retrain!r}")


class _Work:
    """The parts one after another."""

    def __init__(
        self,
        run: Run,
        budget: float,
        retrain: int,
        clean: CleanTargets | None,
        kept: KeptAnalysis | None,
        progress: Callable[[str], None],
    ) -> None:
        self.run, self.budget, self.retrain, self.clean = run, budget, retrain, clean
        self.kept, self.progress = kept, progress
        self.found = Analysis(run, budget, retrain)

    def done(self) -> Analysis:
        run, found = self.run, self.found
        try:
            problem = run.problem
        except RunError as error:
            how = "on the command line: --problem package.module:function or --problem script.py:function"
            found.left_out |= dict.fromkeys(PARTS, f"{error}; {how}")
            return found
        if self.clean is not None:
            self.clean.check(problem)
        found.table = self._part("examples", _free, self._audit)
        found.curves = self._part("curves", _free, lambda: loss_curves(run, found.table))
        if self.retrain:
            found.readings = self._part("risk", _free, self._readings)
        else:
            found.readings = self._exact("risk", lambda: self._risk_price(_FEWEST_RISK_EXAMPLES), self._readings)
        found.memorization = self._part("memorization", _free, lambda: memorization(found))
        found.gates = self._part("gates", self._gate_price, lambda: gate_curve(run))
        found.window = self._exact("operators", lambda: window_seconds(run), lambda: window_facts(run, self.clean))
        if found.window is not None and found.table is not None:
            found.table = found.table.with_groups(found.window.groups)
        found.kernel = self._exact("kernel", _free, lambda: kernel_curve(run, self.budget))
        found.neighbours = self._exact("neighbours", lambda: self._risk_price(_SUSPECTS), lambda: neighbours(found))
        return found

    def _part(self, name: str, price: Callable[[], float], compute: Callable[[], Found]) -> Found | None:
        """What it computes, or None and a line that says why; from what was kept where that is there."""
        part = None if self.kept is None else self.kept.get(name)
        if part is None:
            part = self._computed(name, price, compute)
        if part.reason is not None:
            self.found.left_out[name] = part.reason
        return part.value

    def _computed(self, name: str, price: Callable[[], float], compute: Callable[[], Found]) -> Part:
        try:
            seconds = price()
            if seconds <= self.budget:
                self.progress(name)
                part = Part(compute())
            else:
                part = Part(None, self._too_dear(seconds))
        except PopRiskError as error:
            part = Part(None, _first_line(error))
        except RuntimeError as error:  # of PyTorch: an operation without the derivatives it takes, or no memory
            return Part(None, _first_line(error))  # it may be otherwise the next time
        if self.kept is not None:
            self.kept.put(name, part)
        return part

    def _too_dear(self, seconds: float) -> str:
        return (
            f"would take about {_round_up(seconds)} s on one CPU core, more than the budget of {self.budget:g} s: "
            f"poprisk report RUN --budget {_round_up(seconds)}"
        )

    def _exact(self, name: str, price: Callable[[], float], compute: Callable[[], Found]) -> Found | None:
        def possible() -> float:
            obstacle = exact_obstacle(self.run)
            if obstacle is not None:
                raise RunError(f"no exact analysis of this run is possible: {obstacle}")
            return price()

        return self._part(name, possible, compute)

    def _audit(self) -> AuditTable:
        price = exact_seconds(self.run)
        if price <= self.budget and exact_obstacle(self.run) is None:
            try:
                return audit(self.run, tier="exact", progress=False)
            except RunError:
                pass  # the other columns can still be had, and auto says why not these
        return audit(self.run, tier="any" if price > self.budget else "auto", progress=False)

    def _risk_price(self, examples: int) -> float:
        run = self.run
        directions = min(examples, run.num_examples)
        multiplications = _PER_DIRECTION * directions * run.num_steps * len(run.batch(0)) * run.num_weights
        return multiplications / _PER_SECOND + run.num_steps * _STEP_OVERHEAD

    def _gate_price(self) -> float:
        run = self.run
        if not has_gate(run):
            raise DataError("the optimizer has no gate: train with PopRiskAdamW")
        return run.num_steps * (6 * len(run.batch(0)) * run.num_weights / _PER_SECOND + _STEP_OVERHEAD)

    def _readings(self) -> list[Reading]:
        run, examples = self.run, _RISK_EXAMPLES
        while examples > _FEWEST_RISK_EXAMPLES and self._risk_price(examples) > self.budget:
            examples //= 2
        linear = exact_obstacle(run) is None and self._risk_price(examples) <= self.budget
        method = "k_fold" if not linear else "auto" if self.retrain else "exclusion"
        meter = RiskMeter(method, retrain_budget=self.retrain, examples=min(examples, run.num_examples))
        return meter.read(run, _READINGS).readings


def loss_curves(run: Run, table: AuditTable | None) -> LossCurves:
    """Training loss over all examples, and test loss where the problem has a test set, along the run."""
    problem = run.problem
    start = example_losses(problem, next(evaluate(run, [0, 1])).outputs).mean().item()
    if table is not None:
        steps, train = list(table.moments), table.losses.mean(1).tolist()
    else:
        steps = choose_moments(run)
        train = [example_losses(problem, m.outputs).mean().item() for m in evaluate(run, steps)]
    steps, train = [0, *steps], [start, *train]
    if problem.test is None:
        note = "no test loss: the problem has no test set (Problem(…, test=(inputs, targets)))"
        return LossCurves(steps, train, None, None, None, (note,))
    if has_changing_buffers(run) and any(k not in run.checkpoints for k in steps):
        note = "no test loss: batch statistics were recorded at checkpoints only"
        return LossCurves(steps, train, None, None, None, (note,))
    rows = list(_tested(run, steps))
    last = rows[-1][0]
    accuracies = [a for _, a in rows if a is not None]
    return LossCurves(
        steps,
        train,
        [losses.mean().item() for losses, _ in rows],
        accuracies or None,
        last.std().item() / math.sqrt(len(last)) if len(last) > 1 else None,
    )


def _tested(run: Run, steps: list[int]) -> Iterator[tuple[Float[Tensor, "m"], float | None]]:
    """Each test example's loss, and the accuracy where targets are classes, before each of the steps."""
    problem = run.problem
    assert problem.test is not None
    rows = slice(0, _TEST_EXAMPLES)
    inputs, targets = take_examples(problem.test[0], rows), problem.test[1][rows]
    module = run.module().float().eval() if run.layout.dtype.itemsize < 4 else run.module().eval()
    parameters = [p for p in module.parameters() if p.requires_grad]
    loss = torch.func.vmap(resolve_loss(problem.loss))
    wanted = targets.double() if targets.is_floating_point() else targets
    for k in steps:
        with torch.no_grad():
            for p, piece in zip(parameters, run.layout.split(run.weights(k)), strict=True):
                p.copy_(piece)
            if k in run.checkpoints:
                kept = run.checkpoint(k)
                for name, buffer in module.named_buffers():
                    buffer.copy_(kept.get(MODULE_BUFFER + name, buffer))
            parts = [take_examples(inputs, rows) for rows in torch.arange(len(targets)).split(1024)]
            outputs = torch.cat([module(*x) if isinstance(x, tuple) else module(x) for x in parts])
        are_classes = problem.loss == "cross_entropy" and targets.dim() == 1 and outputs.dim() == 2
        right = (outputs.argmax(1) == targets).double().mean().item() if are_classes else None
        yield loss(outputs.double(), wanted).cpu(), right


def memorization(found: Analysis) -> Memorization:
    """See :class:`Memorization`; by the estimated risk where it may be believed, else by the test set.

    Raises:
        DataError: the training loss did not fall, neither is known, or the test set is plainly easier.
    """
    curves, risk = found.curves, found.risk
    if curves is None:
        raise DataError("the training loss along the run is not known")
    drop = curves.train[0] - curves.train[-1]
    if not drop > 0:
        raise DataError("the training loss did not fall, so that no share of it can be memorization")
    if risk is not None and risk.valid:
        error = float(risk.standard_error) / drop
        return Memorization(risk.gap / drop, error, "estimated population risk")
    if curves.test is None:
        why = "the risk was not computed" if risk is None else f"the risk may not be believed ({risk.reason})"
        raise DataError(f"{why}, and the problem has no test set")
    error = math.nan if curves.test_error is None else curves.test_error / drop
    share = (curves.test[-1] - curves.train[-1]) / drop
    if share < -2 * error:
        raise DataError(
            f"the test loss, {curves.test[-1]:.3g}, is below the training loss, {curves.train[-1]:.3g}: the test set "
            "is not drawn as the training set was (its labels may be cleaner), and cannot tell what was memorized"
        )
    return Memorization(share, error, "test set")


def kernel_curve(run: Run, budget: float) -> KernelCurve:
    """The drift of the tangent kernel of the first training examples, along the run."""
    model = run.model()
    inputs, _ = run.problem.batch(torch.arange(min(run.num_examples, _KERNEL_SIDE)))
    p = model.outputs(run.weights(0).to(model.weights), take_examples(inputs, slice(0, 1))).numel()
    n = max(1, min(run.num_examples, _KERNEL_SIDE // p, int((budget * 1e9 / (30 * p * run.num_weights)) ** 0.5)))
    steps = [0, *choose_moments(run, _KERNEL_MOMENTS)]
    weights = (run.weights(k).to(model.weights) for k in steps)
    found = kernel_drift(model, weights, take_examples(inputs, slice(0, n)))
    return KernelCurve(steps, found.drift.tolist(), n)


def neighbours(found: Analysis) -> dict[int, Neighbours]:
    """Of the most suspicious examples: which others did most to their loss.

    Raises:
        DataError: there is no table of examples.
    """
    if found.table is None:
        raise DataError("the examples were not audited")
    chosen = found.table.order()[: min(_SUSPECTS, max(3, int(found.table.is_suspect.sum())))]
    inputs, targets = found.run.problem.batch(chosen)
    influence = influence_on(found.run, inputs, targets).double().cpu()
    out = {}
    for row, i in zip(influence, chosen.tolist(), strict=True):
        row[i] = 0.0
        up, down = row.topk(min(_NEIGHBOURS, len(row))), (-row).topk(min(_NEIGHBOURS, len(row)))
        supports = [(j, v) for v, j in zip(up.values.tolist(), up.indices.tolist(), strict=True) if v > 0]
        opposes = [(j, -v) for v, j in zip(down.values.tolist(), down.indices.tolist(), strict=True) if v > 0]
        out[i] = Neighbours(supports, opposes)
    return out


def _free() -> float:
    return 0.0


def _round_up(seconds: float) -> int:
    """To one digit, upwards, so that a budget of it is enough.

    >>> _round_up(31.2), _round_up(4.0)
    (40, 4)
    """
    unit = 10 ** max(0, math.floor(math.log10(max(seconds, 1.0))))
    return math.ceil(seconds / unit) * unit


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__
