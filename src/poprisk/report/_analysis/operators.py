"""The operators of a whole recorded run: spectra, test displacement, drift and diffusion, error cells, groups."""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from time import process_time
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import Inputs, take_examples
from poprisk.errors import DataError
from poprisk.operators import (
    Coupling,
    DriftDiffusion,
    Evaluation,
    Operators,
    Sampling,
    Window,
    dissipation_channels,
    drift_diffusion,
    error_cells,
    evaluation_model,
    evaluation_of,
)
from poprisk.report._analysis.readings import ALLOWANCE, Readings, forward_seconds, plan_readings, readings
from poprisk.risk import AuditTable, cast_inputs
from poprisk.runs import Problem, Run
from poprisk.theory import ExampleGroups, euclidean_metric, example_groups, signal_directions

MOST_OUTPUTS = 2000
"""Largest number of training outputs (examples times outputs, np) for which the operators are formed as matrices."""
QUERIES = 50
"""Number of test inputs that the operators are evaluated on."""
_LEAST_SAMPLE = 64
_BACKWARD = 4  # forward passes that take as long as the output gradient and the product with it
NO_TEST = "the problem has no test set; pass one with Problem(…, test=(inputs, targets))"
_SHARE, _MOST_GROUPS = 0.9, 8
_PER_SECOND, _STEP_OVERHEAD = 5e9, 2e-2
_MEMORY = 2**30
_PILOT = 0.3  # seconds after which a pilot takes no more examples
_SPREADS = 3  # one draw of the spread of two samples, often of few large coordinates, stands for its size


@dataclass(frozen=True, eq=False)
class CleanTargets:
    """The targets without label noise, f*, if they are known."""

    train: Float[Tensor, "n *p"]
    test: Float[Tensor, "m *p"]
    """Targets at the inputs of ``problem.test``."""

    @classmethod
    def load(cls, path: str | Path) -> "CleanTargets":
        """Load from a NumPy archive with the arrays ``train`` and ``test``.

        Raises:
            DataError: The file is not such an archive.
            OSError: The file cannot be read.
        """
        import numpy as np

        try:
            with np.load(path, allow_pickle=False) as archive:
                arrays = {name: torch.as_tensor(archive[name]).double() for name in ("train", "test")}
        except (KeyError, ValueError, TypeError, zipfile.BadZipFile, AttributeError) as error:
            raise DataError(
                f"{path} must be a .npz file with the arrays train and test, got {error}: write it with numpy.savez"
            ) from None
        return cls(**arrays)

    def check(self, problem: Problem) -> None:
        """Check that the targets match a problem.

        Raises:
            DataError: The shapes differ from the problem's targets, or there is no test set.
        """
        if problem.test is None:
            raise DataError(
                "clean targets need a problem with a test set: pass one with Problem(…, test=(inputs, targets))"
            )
        for name, given, wanted in (("train", self.train, problem.targets), ("test", self.test, problem.test[1])):
            if given.shape != wanted.shape:
                raise DataError(f"clean {name} targets must be of shape {list(wanted.shape)}, got {list(given.shape)}")


@dataclass(frozen=True)
class DriftCurve:
    """How far mean gradients, batch noise, sources and curvature had moved the test outputs by each step (norms)."""

    steps: list[int]
    parts: dict[str, list[float]]
    sampling: str
    closure: float
    errors: dict[str, list[float]] | None = None
    """Half of a 95% interval of each, where mean gradients were estimated from samples."""
    sample: int = 0
    """Examples in each of the two samples from which a step's mean gradient was estimated."""


@dataclass(frozen=True, eq=False)
class WindowFacts:
    """Results from the operators of a run; what concerns test outputs is None if the problem has no test set."""

    outputs: int
    """Number of directions: examples times outputs, np."""
    queries: int
    """Number of test inputs used."""
    readings: Readings
    """What the run did with its labels."""
    drift: DriftCurve | None
    predicted: list[float] | None
    """Test displacement predicted by the operators, -G g + source."""
    displacement: list[float] | None
    """Test displacement measured on the network."""
    notes: tuple[str, ...]
    dense: "DenseFacts | None" = None
    """What needs the operators as matrices; None for larger runs."""
    form: str = ""
    """In which form the network was analyzed, if not as the steps saw it."""


@dataclass(frozen=True, eq=False)
class DenseFacts:
    """Results from the operators of a run as matrices."""

    dissipation: list[float]
    """Eigenvalues of W, largest first, those below rounding included."""
    cutoff: float
    """Directions with eigenvalues up to this belong to the reservoir."""
    rank: int
    """Rank of the signal channel."""
    visibility: list[float] | None
    r"""Eigenvalues of :math:`\Gamma_Q`, largest first."""
    cells: dict[str, float] | None
    """Terms of the mean squared test error; they add up to it."""
    groups: ExampleGroups
    directions: int
    """Number of directions that define the groups: those that hold 90% of the dissipation, at most eight."""
    directions_share: float
    """Share of the dissipation that they hold."""


def window_seconds(run: Run, budget: float) -> float:
    """Seconds of the budget that the sections need: more than there are only if a few steps already take longer.

    Raises:
        RunError: The run's problem is not available.
    """
    plan = plan_readings(run, budget)
    return plan.seconds / ALLOWANCE if plan.seconds > ALLOWANCE * budget else 0.0


def too_expensive(seconds: float, budget: float) -> str:
    """What a part would take, and the budget that is enough for it."""
    unit = 10 ** (len(str(int(seconds))) - 1)
    needed = int(-(-seconds // unit)) * unit
    over = f"the budget of {budget:g} s; use budget={needed}, or poprisk report RUN --budget {needed}"
    return f"would take about {needed} s on one CPU core, over {over}"


def window_facts(
    run: Run, clean: CleanTargets | None = None, table: AuditTable | None = None, budget: float = 30.0
) -> WindowFacts:
    """Read the operators of a run: as matrices where these are small, in any case along its labels.

    Args:
        run: A run whose problem is available.
        clean: Targets without noise, to split the test error.
        table: The audit, whose suggestions stand in for targets without noise.
        budget: Seconds on one CPU core for each of the four sections; a long run is read from a later step.

    Raises:
        RunError: The run cannot be analyzed exactly.

    >>> from poprisk.runs import train
    >>> problem = Problem(torch.nn.Linear, "squared", torch.eye(2), torch.ones(2, 1),
    ...                   arguments={"in_features": 2, "out_features": 1}, test=(torch.ones(1, 2), torch.ones(1, 1)))
    >>> run = train(problem, lambda params: torch.optim.SGD(params, lr=0.1), steps=3, progress=False)
    >>> facts = window_facts(run, CleanTargets(torch.ones(2, 1), torch.ones(1, 1)))
    >>> facts.dense.rank, abs(facts.predicted[0] - facts.displacement[0]) < 1e-6
    (2, True)
    """
    test = run.problem.test
    queries = None if test is None else take_examples(test[0], slice(0, QUERIES))
    plan = plan_readings(run, budget)
    pair = None
    if test is not None and queries is not None:
        pair = cast_inputs(queries, torch.float32), (test[1] if clean is None else clean.test.to(test[1]))[:QUERIES]
    evaluation = evaluation_of(run, torch.float32, start=plan.start)
    found = readings(run, plan, evaluation, None if clean is None else clean.train, pair, table)
    seconds, notes = _dense_seconds(run, budget), () if test is not None else (NO_TEST,)
    if budget < seconds < float("inf"):
        notes = (*notes, f"the spectra {too_expensive(seconds, budget)}")
    return WindowFacts(
        outputs=run.num_examples * _outputs(run),
        queries=0 if test is None else min(QUERIES, len(test[1])),
        readings=found,
        drift=None if queries is None else drift_curve(run, evaluation, queries, plan.start, budget),
        predicted=found.predicted,
        displacement=found.measured,
        notes=notes,
        dense=_dense_facts(run, queries, clean) if seconds <= budget else None,
        form=evaluation.note,
    )


def _dense_seconds(run: Run, budget: float) -> float:
    """Estimated seconds on one CPU core to form the operators; infinite if they are too large."""
    n, d, batch = run.num_examples, run.num_weights, len(run.batch(0))
    N = n * _outputs(run)
    if N > MOST_OUTPUTS or 8 * N * (5 * d + 8 * N) > _MEMORY:
        return float("inf")
    sweeps = 8 * N * (2 * n + 2 * batch + QUERIES) * d
    factor = 4 * N * N * (min(N, run.num_steps * d) + d)
    products = run.num_steps * ((sweeps + factor) / _PER_SECOND + _STEP_OVERHEAD)
    return products if products > budget else products + _pilot_seconds(run, budget - products)


def _pilot_seconds(run: Run, budget: float) -> float:
    """Seconds on one CPU core to form the Jacobians, from those of more and more examples of the first step."""
    inputs, n, count = run.problem.batch(dtype=torch.float64)[0], run.num_examples, 1
    window = Window.of_run(run, stop=1, test_inputs=take_examples(inputs, slice(0, 1)), dense=False)
    rows = run.num_steps * (window.steps[0].nodes * (n + QUERIES * bool(run.problem.test)) + len(run.batch(0)))
    while True:
        begun = process_time()
        window.model.output_jacobian(window.model.weights, take_examples(inputs, slice(0, count))).sum().item()
        taken = process_time() - begun
        if taken * rows <= budget * count or taken > _PILOT or count == n:
            return taken * rows / count
        count = min(4 * count, n)


def _dense_facts(run: Run, queries: Inputs | None, clean: CleanTargets | None) -> DenseFacts:
    inputs = None if queries is None else cast_inputs(queries, torch.float64)
    window = Window.of_run(run, test_inputs=inputs)
    ops = window.dense_operators()
    channels = dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer)
    squared = clean is not None and inputs is not None and run.problem.loss == "squared"
    groups, directions, share = _groups(ops, window)
    return DenseFacts(
        dissipation=channels.spectrum.roots.square().tolist(),
        cutoff=channels.cutoff,
        rank=channels.rank,
        visibility=None if inputs is None else channels.visibility_spectrum.tolist(),
        cells=_cells(run, window, Coupling(channels), ops, clean) if squared and clean is not None else None,
        groups=groups,
        directions=directions,
        directions_share=share,
    )


def _outputs(run: Run) -> int:
    model = evaluation_model(run)
    first, _ = run.problem.batch(torch.arange(1), dtype=model.weights.dtype)
    return model.outputs(model.weights, first).numel()


def _groups(ops: Operators, window: Window) -> tuple[ExampleGroups, int, float]:
    N = window.num_outputs
    directions = signal_directions(ops.factor, euclidean_metric(N, dtype=ops.factor.dtype))
    shares = directions.values.cumsum(0) / directions.values.sum()
    r = max(1, min(_MOST_GROUPS, int((shares < _SHARE).sum()) + 1, directions.rank))
    p = N // window.num_examples
    return example_groups(directions, r, p, gradient=ops.output_gradient), r, shares[r - 1].item()


def drift_curve(run: Run, evaluation: Evaluation, queries: Inputs, start: int, budget: float) -> DriftCurve | None:
    """Use the first sampling scheme that is consistent with the recorded batches; None if none is."""
    inputs, targets = run.problem.batch(dtype=torch.float32)
    given, model = cast_inputs(queries, torch.float32), evaluation.model
    seconds = _BACKWARD * forward_seconds(run, model)
    sample = max(_LEAST_SAMPLE, int(budget / (2 * seconds * (run.num_steps - start))))
    for sampling in ("epochs", *(s for s in get_args(Sampling) if s != "epochs")):
        options = {"sampling": sampling, "start": start, "sample": sample}
        try:
            found = drift_diffusion(evaluation.trajectory, model, inputs, targets, given, **options)  # type: ignore[arg-type]
        except DataError:
            continue
        steps = list(range(start + 1, run.num_steps + 1))
        norms, errors = _norms(found)
        return DriftCurve(steps, norms, sampling, found.closure, errors, sample)
    return None


def _norms(found: DriftDiffusion) -> tuple[dict[str, list[float]], dict[str, list[float]] | None]:
    """Norms of the parts up to each step; the random error of sampled means is taken off, and returned beside them."""
    parts = {
        "drift": found.drift_steps,
        "diffusion": found.diffusion_steps,
        "weight decay and initial momentum": found.source_steps,
        "curvature": found.remainder_steps,
    }
    squares = {name: steps.cumsum(0).square().sum(1) for name, steps in parts.items()}
    if found.spread_steps is None:
        return {name: value.sqrt().tolist() for name, value in squares.items()}, None
    noise = found.spread_steps.cumsum(0).square().sum(1)
    random = ("drift", "diffusion")
    for name in random:
        squares[name] = (squares[name] - noise).clamp(min=0)
    errors = {name: (_SPREADS * noise.sqrt() if name in random else 0 * noise).tolist() for name in parts}
    return {name: value.sqrt().tolist() for name, value in squares.items()}, errors


def _cells(run: Run, window: Window, coupling: Coupling, ops: Operators, clean: CleanTargets) -> dict[str, float]:
    inputs = window.test_inputs
    assert inputs is not None
    before = window.model.outputs(run.weights(0).to(window.model.weights), inputs)
    flat = lambda x: x.to(window.model.weights).reshape(-1)  # noqa: E731
    cells = error_cells(
        coupling,
        train_outputs=window.start_outputs.reshape(-1),
        test_outputs=before.reshape(-1),
        targets=flat(window.targets),
        clean_train=flat(clean.train),
        clean_test=flat(clean.test[: len(before)]),
        num_examples=window.num_examples,
        test_source=ops.sources.test,
    )
    return cells.shares(len(before))
