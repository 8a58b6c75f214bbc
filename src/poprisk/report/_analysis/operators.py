"""The operators of a whole recorded run: spectra, test displacement, drift and diffusion, error cells, groups."""

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import Inputs, take_examples
from poprisk.errors import DataError, HyperparameterError
from poprisk.operators import (
    Coupling,
    DriftDiffusion,
    Operators,
    Sampling,
    Window,
    dissipation_channels,
    drift_diffusion,
    error_cells,
)
from poprisk.risk import cast_inputs
from poprisk.runs import Problem, Run
from poprisk.theory import ExampleGroups, euclidean_metric, example_groups, signal_directions

MOST_OUTPUTS = 2000
"""Largest number of training outputs (examples times outputs, np) for which the operators are formed as matrices."""
QUERIES = 50
"""Number of test inputs that the operators are evaluated on."""
_SHARE, _MOST_GROUPS = 0.9, 8
_PER_SECOND, _STEP_OVERHEAD = 5e9, 2e-2
_MEMORY = 2**30


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
            raise DataError(f"{path} must be a .npz file with the arrays train and test: {error}") from None
        return cls(**arrays)

    def check(self, problem: Problem) -> None:
        """Check that the targets match a problem.

        Raises:
            DataError: The shapes differ from the problem's targets, or there is no test set.
            HyperparameterError: The loss is not the squared loss.
        """
        if problem.loss != "squared":
            raise HyperparameterError(
                f'splitting the test error needs loss="squared", this problem has {problem.loss!r}: leave clean out'
            )
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


@dataclass(frozen=True, eq=False)
class WindowFacts:
    """Results from the operators of a run; what concerns test outputs is None if the problem has no test set."""

    dissipation: list[float]
    """Eigenvalues of W, largest first, those below rounding included."""
    cutoff: float
    """Directions with eigenvalues up to this belong to the reservoir."""
    rank: int
    """Rank of the signal channel."""
    outputs: int
    """Number of directions: examples times outputs, np."""
    queries: int
    """Number of test inputs used."""
    visibility: list[float] | None
    r"""Eigenvalues of :math:`\Gamma_Q`, largest first."""
    predicted: list[float] | None
    """Test displacement predicted by the operators, -G g + source."""
    displacement: list[float] | None
    """Test displacement measured on the network."""
    drift: DriftCurve | None
    cells: dict[str, float] | None
    """Terms of the mean squared test error; they add up to it."""
    groups: ExampleGroups
    directions: int
    """Number of directions that define the groups: those that hold 90% of the dissipation, at most eight."""
    directions_share: float
    """Share of the dissipation that they hold."""
    notes: tuple[str, ...]


def window_seconds(run: Run) -> float:
    """Estimate the seconds on one CPU core to form the operators: sweeps of the identity, and a factor of W per step.

    Raises:
        RunError: The run's problem is not available.
        DataError: The run has too many outputs, or they need too much memory.
    """
    n, d, batch = run.num_examples, run.num_weights, len(run.batch(0))
    N = n * _outputs(run)
    _require_small(N, d)
    sweeps = 8 * N * (2 * n + 2 * batch + QUERIES) * d
    factor = 4 * N * N * (min(N, run.num_steps * d) + d)
    return run.num_steps * ((sweeps + factor) / _PER_SECOND + _STEP_OVERHEAD)


def window_facts(run: Run, clean: CleanTargets | None = None) -> WindowFacts:
    """Form the operators of the whole run and evaluate them.

    Args:
        run: A small run whose problem is available.
        clean: Targets without noise, to split the test error.

    Raises:
        DataError: The run has too many outputs, or they need too much memory.
        RunError: The run cannot be analyzed exactly.

    >>> from poprisk.runs import train
    >>> problem = Problem(torch.nn.Linear, "squared", torch.eye(2), torch.ones(2, 1),
    ...                   arguments={"in_features": 2, "out_features": 1}, test=(torch.ones(1, 2), torch.ones(1, 1)))
    >>> run = train(problem, lambda params: torch.optim.SGD(params, lr=0.1), steps=3, progress=False)
    >>> facts = window_facts(run, CleanTargets(torch.ones(2, 1), torch.ones(1, 1)))
    >>> facts.rank, abs(facts.predicted[0] - facts.displacement[0]) < 1e-6, round(facts.cells["signal_noise"], 12)
    (2, True, 0.0)
    """
    N = run.num_examples * _outputs(run)
    _require_small(N, run.num_weights)
    test = run.problem.test
    queries = None if test is None else cast_inputs(take_examples(test[0], slice(0, QUERIES)), torch.float64)
    window = Window.of_run(run, test_inputs=queries)
    ops = window.dense_operators()
    channels = dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer)
    has_test = queries is not None
    cells = _cells(run, window, Coupling(channels), ops, clean) if clean is not None and has_test else None
    drift = _drift(run, window, queries) if queries is not None else None
    groups, directions, share = _groups(ops, window)
    return WindowFacts(
        dissipation=channels.spectrum.roots.square().tolist(),
        cutoff=channels.cutoff,
        rank=channels.rank,
        outputs=N,
        queries=0 if test is None else min(QUERIES, len(test[1])),
        visibility=channels.visibility_spectrum.tolist() if has_test else None,
        predicted=ops.predicted_test.tolist() if has_test else None,
        displacement=ops.test_displacement.tolist() if has_test else None,
        drift=drift,
        cells=cells,
        groups=groups,
        directions=directions,
        directions_share=share,
        notes=() if has_test else ("the problem has no test set; pass one with Problem(…, test=(inputs, targets))",),
    )


def _require_small(N: int, d: int) -> None:
    leading = "use top_channels(Window.of_run(run), …) for the leading directions of a large run"
    if N > MOST_OUTPUTS:
        raise DataError(
            f"the run has np = {N} training outputs, over the limit of {MOST_OUTPUTS} for its operators; {leading}"
        )
    need = 8 * N * (5 * d + 8 * N)
    if need > _MEMORY:
        raise DataError(
            f"the operators need about {need / 2**30:.1f} GiB, over the limit of {_MEMORY / 2**30:g} GiB; {leading}"
        )


def _outputs(run: Run) -> int:
    model = run.model()
    first, _ = run.problem.batch(torch.arange(1))
    return model.outputs(model.weights, first).numel()


def _groups(ops: Operators, window: Window) -> tuple[ExampleGroups, int, float]:
    N = window.num_outputs
    directions = signal_directions(ops.factor, euclidean_metric(N, dtype=ops.factor.dtype))
    shares = directions.values.cumsum(0) / directions.values.sum()
    r = max(1, min(_MOST_GROUPS, int((shares < _SHARE).sum()) + 1, directions.rank))
    p = N // window.num_examples
    return example_groups(directions, r, p, gradient=ops.output_gradient), r, shares[r - 1].item()


def _drift(run: Run, window: Window, queries: Inputs) -> DriftCurve | None:
    """Use the first sampling scheme that is consistent with the recorded batches; None if none is."""
    for sampling in ("epochs", *(s for s in get_args(Sampling) if s != "epochs")):
        try:
            found = drift_diffusion(
                run,
                window.model,
                window.inputs,
                window.targets,
                queries,
                sampling=sampling,  # type: ignore[arg-type]
            )
        except DataError:
            continue
        return DriftCurve(list(range(1, run.num_steps + 1)), _norms(found), sampling, found.closure)
    return None


def _norms(found: DriftDiffusion) -> dict[str, list[float]]:
    parts = {
        "drift": found.drift_steps,
        "diffusion": found.diffusion_steps,
        "weight decay and initial momentum": found.source_steps,
        "curvature": found.remainder_steps,
    }
    return {name: steps.cumsum(0).norm(dim=1).tolist() for name, steps in parts.items()}


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
