"""Compute what a report shows: every section within the time budget, and the reason for each one that is missing.

A section is computed if its estimated time on one CPU core is within the budget. Only the risk trains again: a
few deletions where that is quick, folds where ``retrain`` allows. Reading the gate replays the recorded steps once.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from poprisk._core.progress import Progress, limits
from poprisk._core.text import first_line
from poprisk.errors import DataError, HyperparameterError, PopRiskError, RunError, UntrustedError
from poprisk.report._analysis.contents import Contents, example_contents
from poprisk.report._analysis.curves import (
    HeldBackCurve,
    KernelCurve,
    LossCurves,
    Memorization,
    held_back_curve,
    kernel_curve,
    loss_curves,
    memorization,
)
from poprisk.report._analysis.gates import GateCurve, gate_curve, has_gate
from poprisk.report._analysis.kept import KeptAnalysis
from poprisk.report._analysis.neighbours import SUSPECTS, Neighbours, neighbours
from poprisk.report._analysis.operators import CleanTargets, WindowFacts, too_expensive, window_facts, window_seconds
from poprisk.risk import (
    BUDGET,
    FEWEST_FOLDS,
    MOST_EXAMPLES,
    AuditTable,
    Part,
    Reading,
    RiskEstimate,
    RiskMeter,
    audit,
    choose_moments,
    controls_work,
    exact_obstacle,
    has_changing_buffers,
    leverage_work,
    population_risk,
)
from poprisk.risk import seconds as exact_seconds
from poprisk.runs import Run, as_run

PARTS = ("examples", "curves", "risk", "memorization", "gates", "operators", "kernel", "neighbours")
"""Parts of an analysis, in the order in which they are computed."""
_PER_SECOND = 2e10
"""Approximate multiplications per second of a CPU core."""
_STEP_OVERHEAD = 1e-2
_PER_DIRECTION = 12
_FEWEST_RISK_EXAMPLES = 32
_READINGS = 12
MOST_CONTENTS = 20_000
"""Maximum number of examples whose contents are shown; a browser is slow with more."""

Found = TypeVar("Found")


@dataclass(eq=False)
class Analysis:
    """Everything :func:`analyze` found out about a run; for each part that is None, ``left_out`` says why."""

    run: Run
    budget: float
    """Time budget per part, in seconds on one CPU core."""
    retrain: int = 0
    """Number of trainings allowed for the risk."""
    curves: LossCurves | None = None
    """Training and test loss along the run."""
    readings: list[Reading] | None = None
    """Estimates of the population risk along the run, for the weights of each step."""
    risk: RiskEstimate | None = None
    """Estimated population risk of the kept weights, if examples were held back, otherwise that at the last step: the
    same as ``population_risk(run, retrain_budget=retrain)``, unless the time budget allows fewer examples."""
    memorization: Memorization | None = None
    """Share of the drop in training loss that does not carry over to new data."""
    gates: GateCurve | None = None
    """How far the optimizer's gate was open."""
    window: WindowFacts | None = None
    """Signal channel, reservoir, test displacement, drift and diffusion."""
    kernel: KernelCurve | None = None
    """Drift of the tangent kernel."""
    table: AuditTable | None = None
    """The audit: one row per training example."""
    neighbours: dict[int, Neighbours] | None = None
    """For the most suspicious examples: the training examples that influenced their loss most."""
    contents: Contents | None = None
    """Pictures or texts of the examples, where the run cannot be opened with them again; kept with the analysis."""
    left_out: dict[str, str] = field(default_factory=dict)
    """For each missing part: why it is missing, and how to get it."""

    def __repr__(self) -> str:
        found = [name for name, value in list(vars(self).items())[3:-1] if value is not None]
        missing = [f"left out: {part} ({reason})" for part, reason in self.left_out.items()]
        return "\n".join([f"<Analysis of {self.run!r}>", f"found: {', '.join(found) or 'nothing'}", *missing])

    @property
    def last_risk(self) -> RiskEstimate | None:
        """Estimated population risk of the weights at the last step: the last of ``readings``."""
        return self.readings[-1].risk if self.readings else None

    @property
    def held_back(self) -> HeldBackCurve | None:
        """Loss of the held-back examples along the run, and the moment that was kept; None if none were held back."""
        return held_back_curve(self.run)


def analyze(
    run: Run | str | Path,
    *,
    budget: float | None = None,
    retrain: int | None = None,
    clean: CleanTargets | None = None,
    kept: KeptAnalysis | None = None,
    parts: Sequence[str] = PARTS,
    memory: int | str | None = None,
    progress: bool | Callable[[str], None] = True,
) -> Analysis:
    r"""Analyze a recorded run within a time budget: what it learned, what it memorized, which labels look wrong.

    Args:
        run: The run, or the path of its directory. If its problem is not available, only the recorded losses can be
            shown.
        budget: Approximate time, in seconds on one CPU core, that each part may take; ``"operators"``, which fills four
            sections, 5 times that. More expensive parts are left out; ``Analysis.left_out`` says how long each takes.
            Default: that of ``kept``, otherwise 30.
        retrain: Number of trainings that may be spent on the risk if the run alone does not determine it: 0, or at
            least 3 (K-fold). These trainings do not count towards the budget. Default: that of ``kept``, otherwise 0.
        clean: Targets without label noise, if known, to split the test error (squared loss only).
        kept: Storage for finished parts, made with the same options: parts found there are used, others are added.
            Default: none, but the analysis of a run on disk that cannot be opened with its problem again (one of a
            loop of your own or of a trainer) is kept in its directory, with pictures or texts of its examples, so
            that ``poprisk report``, ``audit`` and ``compare``, and this function with the path, show it.
        parts: Names of the parts to compute; others are used if they are kept. Default: all.
        memory: Bytes that the process may use, or "2 GB": work is done in smaller pieces. None sets no limit.
        progress: Whether to show progress, or a function that is called with the name of each part before it is
            computed.

    Returns:
        The analysis. :func:`~poprisk.report.write_report` writes it as an HTML page.

    Raises:
        HyperparameterError: ``budget`` is not a positive number of seconds, ``retrain`` is 1, 2 or negative, or there
            is no such part.
        RunError: The run has no steps.
        DataError: The clean targets do not match the problem.

    >>> import torch
    >>> from poprisk import Problem, analyze, train
    >>> problem = Problem(torch.nn.Linear, "squared", torch.eye(4).repeat(4, 1), torch.ones(16, 1),
    ...                   arguments={"in_features": 4, "out_features": 1})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=0.2), steps=9, progress=False)
    >>> found = analyze(run, progress=False)
    >>> found.curves.steps[-1], found.left_out["gates"]
    (9, 'the optimizer has no gate; train with PopRiskAdamW')
    """
    check_options(BUDGET if budget is None else budget, retrain or 0)
    if unknown := [part for part in parts if part not in PARTS]:
        raise HyperparameterError(f"parts must be among {', '.join(PARTS)}, got {unknown[0]!r}: give only these")
    run = as_run(run)
    if not isinstance(clean, CleanTargets | None):
        raise DataError(f"clean must be CleanTargets, got {type(clean).__name__}: pass CleanTargets.load(path)")
    if not run.num_steps:
        raise RunError("the run has no steps, so there is nothing to analyze: train it first")
    if kept is None and run.path is not None and not (_has_problem(run) and can_rebuild(run)):
        kept = KeptAnalysis.of(run, budget, retrain, clean, writes=_has_problem(run))
    budget = budget or (BUDGET if kept is None else kept.budget)
    retrain = (0 if kept is None else kept.retrain) if retrain is None else retrain
    check_options(budget, retrain)
    keeps: dict[str, Any] = {"keeps": "the finished parts", "lower": "a smaller budget"}
    with limits("analysis", memory=memory, progress=progress is True, **keeps), _announced(progress) as began:
        return _Work(run, clean, kept, parts, began, Analysis(run, budget, retrain)).done()


@contextmanager
def _announced(progress: bool | Callable[[str], None]) -> Iterator[Callable[[str], None]]:
    """What to call before each part."""
    if callable(progress):
        yield progress
        return
    with Progress("analysis", len(PARTS), counted="{done} of {total} parts", shown=progress) as bar:
        # Parts differ too much to tell the time left.
        yield lambda part: bar.update(PARTS.index(part), doing=part, worked=False)


def check_options(budget: float, retrain: int) -> None:
    """Check the options of an analysis; a HyperparameterError if one is not as it must be."""
    if not 0 < budget < math.inf:
        raise HyperparameterError(f"budget must be a positive number of seconds, got {budget!r}")
    if retrain and not retrain >= FEWEST_FOLDS:
        raise HyperparameterError(f"retrain must be 0, or at least {FEWEST_FOLDS} trainings, got {retrain!r}")


WITHOUT_PROBLEM = (
    "this was recorded in a program of your own, and only that program has the examples and the model; call "
    "poprisk.analyze(run) at its end, which keeps the analysis with the run, or pass --problem script.py:function, a "
    "function that returns the problem"
)


def can_rebuild(run: Run) -> bool:
    """Whether the record of a run names the function that makes its problem."""
    problem = run.manifest["problem"]
    return problem is not None and problem["source"] is not None and problem["source"]["path"] is not None


def _has_problem(run: Run) -> bool:
    try:
        return run.problem is not None
    except RunError:
        return False


@dataclass
class _Work:
    """Computes the parts one after another."""

    run: Run
    clean: CleanTargets | None
    kept: KeptAnalysis | None
    parts: Sequence[str]
    progress: Callable[[str], None]
    found: Analysis
    missing: str = ""
    """Why nothing can be computed, if the problem is not available; parts that were kept are shown."""

    def done(self) -> Analysis:
        run, found = self.run, self.found
        if run.kept is not None:
            found.risk = population_risk(run, "held_back")
        try:
            if self.clean is not None:
                self.clean.check(run.problem)
            run.module()  # before a part is kept as missing: the next script may build the model that was recorded
        except UntrustedError as error:
            self.missing = str(error)
        except RunError as error:
            self.missing = str(error) if can_rebuild(run) or _has_problem(run) else WITHOUT_PROBLEM
        found.table = self._part("examples", _free, self._audit)
        if not can_rebuild(run):
            found.contents = self._contents()
        found.curves = self._part("curves", _free, lambda: loss_curves(run, found.table))
        found.readings = self._part("risk", _free, self._readings)
        found.risk = self._kept_risk(found.risk) if found.risk else found.last_risk
        found.memorization = self._memorization()
        found.gates = self._part("gates", self._gate_seconds, lambda: gate_curve(run))
        found.window = self._part(
            "operators",
            lambda: window_seconds(run, self.found.budget),
            lambda: window_facts(run, self.clean, found.table, self.found.budget),
        )
        if found.window is not None and found.window.dense is not None and found.table is not None:
            found.table = found.table.with_groups(found.window.dense.groups)
        found.kernel = self._part("kernel", _free, lambda: kernel_curve(run, self.found.budget))
        found.neighbours = self._part("neighbours", self._neighbour_seconds, lambda: neighbours(run, found.table))
        return found

    def _part(self, name: str, seconds: Callable[[], float], compute: Callable[[], Found]) -> Found | None:
        """The kept value of a part, or the computed one; None, with a reason in ``left_out``, if there is neither."""
        part = None if self.kept is None else self.kept.get(name)
        if part is None and self.missing:
            part = Part(None, self.missing)
        elif part is None and name not in self.parts:
            how = "poprisk analyze RUN" if can_rebuild(self.run) else "poprisk.analyze(run), where it was trained,"
            part = Part(None, f"not computed; {how} computes and keeps it")
        elif part is None:
            part = self._computed(name, seconds, compute)
        if part.reason is not None:
            self.found.left_out[name] = part.reason
        return part.value

    def _computed(self, name: str, seconds: Callable[[], float], compute: Callable[[], Found]) -> Part:
        try:
            needed = seconds()
            if needed <= self.found.budget:
                self.progress(name)
                part = Part(compute())
            else:
                part = Part(None, too_expensive(needed, self.found.budget))
        except KeyboardInterrupt:
            if self.kept is not None:
                raise
            self.missing = "interrupted before it was computed; analyze the run again"
            part = Part(None, self.missing)
        except PopRiskError as error:
            part = Part(None, first_line(error))
        except RuntimeError as error:  # from PyTorch: an operation without the derivatives needed, or out of memory
            return Part(None, first_line(error))  # not kept: it may succeed next time
        if self.kept is not None:
            self.kept.put(name, part)
        return part

    def _neighbour_seconds(self) -> float:
        if (obstacle := exact_obstacle(self.run)) is not None:
            raise RunError(f"this run cannot be analyzed exactly: {obstacle}")
        return self._risk_seconds(SUSPECTS)

    def _memorization(self) -> Memorization | None:
        found = self.found
        if found.curves is None or found.readings is not None or ("risk" in self.parts and not self.missing):
            return self._part("memorization", _free, lambda: memorization(found.curves, found.last_risk))
        try:  # from the test set alone; not kept, as the risk may be computed later
            return memorization(found.curves, None)
        except DataError as error:
            found.left_out["memorization"] = first_line(error)
            return None

    def _kept_risk(self, held: RiskEstimate) -> RiskEstimate:
        """The risk of the kept weights: from the examples that were held back, or by folds where these are allowed."""
        if not self.found.retrain:
            return held
        part = None if self.kept is None else self.kept.get("kept_risk")
        if part is not None:
            return part.value
        if self.missing or "risk" not in self.parts:
            return held
        found = population_risk(self.run, retrain_budget=self.found.retrain)
        if self.kept is not None:
            self.kept.put("kept_risk", Part(found))
        return found

    def _contents(self) -> Contents | None:
        """The contents of the examples, kept because only this process has them; None if they are not needed."""
        part = None if self.kept is None else self.kept.get("contents")
        if part is not None:
            return part.value
        if self.kept is None or self.missing or self.found.table is None:
            return None
        contents = example_contents(self.run.problem, self.found.table.order().tolist()[:MOST_CONTENTS])
        self.kept.put("contents", Part(contents))
        return contents

    def _audit(self) -> AuditTable:
        needed = exact_seconds(self.run)
        if needed <= self.found.budget and exact_obstacle(self.run) is None:
            try:
                return audit(self.run, tier="exact")
            except RunError:
                pass  # tier "auto" computes the other columns and says why these are missing
        return audit(self.run, tier="any" if needed > self.found.budget else "auto")

    def _risk_seconds(self, examples: int) -> float:
        run = self.run
        directions = min(examples, run.num_examples)
        directions += directions / 4  # their controls
        multiplications = _PER_DIRECTION * directions * run.num_steps * len(run.batch(0)) * run.num_weights
        return multiplications / _PER_SECOND + run.num_steps * _STEP_OVERHEAD

    def _gate_seconds(self) -> float:
        run = self.run
        if not has_gate(run):
            raise DataError("the optimizer has no gate; train with PopRiskAdamW")
        return run.num_steps * (6 * len(run.batch(0)) * run.num_weights / _PER_SECOND + _STEP_OVERHEAD)

    def _no_leverage(self) -> list[str]:
        try:
            work = _READINGS * leverage_work(self.run) + controls_work(self.run)
            fits = work / _PER_SECOND <= self.found.budget
        except (RunError, RuntimeError):
            fits = False
        return [] if fits else ["leverage"]

    def _readings(self) -> list[Reading]:
        """The risk along the run, without exclusion if that is not possible or would take too long."""
        run, examples = self.run, MOST_EXAMPLES
        while examples > _FEWEST_RISK_EXAMPLES and self._risk_seconds(examples) > self.found.budget:
            examples //= 2
        enough = examples >= min(MOST_EXAMPLES, run.num_examples)  # as many as without a budget
        obstacle, needed = exact_obstacle(run), self._risk_seconds(examples)
        missing = None if obstacle is None else f"this run cannot be analyzed exactly: {obstacle}"
        missing = missing or (too_expensive(needed, self.found.budget) if needed > self.found.budget else None)
        meter = RiskMeter(
            retrain_budget=self.found.retrain,
            examples=None if enough else examples,
            without=(*(["exclusion"] if missing else []), *self._no_leverage()),
        )
        steps = choose_moments(run, _READINGS) if has_changing_buffers(run) else _READINGS
        try:
            readings = meter.read(run, steps).readings
        except RunError as error:
            raise RunError(missing or str(error)) from None
        if missing or enough:
            return readings
        note = f"{examples} examples used for the budget of {self.found.budget:g} s, by default {MOST_EXAMPLES}"
        return [replace(r, risk=replace(r.risk, reason=f"{r.risk.reason}; {note}")) for r in readings]


def _free() -> float:
    return 0.0
