r"""What is measured on one recorded run: spectra, predictions of the test displacement, kernel drift, bounds."""

import time
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs
from poprisk.errors import DataError
from poprisk.operators import Coupling, Operators, Window, dissipation_channels, kernel_drift
from poprisk.operators._coupling import anchored_coupling_of_jacobians
from poprisk.operators._dense import RealizedWindow
from poprisk.runs import Run
from poprisk.theory import window_bounds
from poprisk.theory.visibility_bounds import visibility_spectra


@dataclass(frozen=True)
class Prediction:
    """A prediction of the test displacement, held against what happened."""

    values: list[float]
    relative_error: float
    correlation: float


@dataclass(frozen=True)
class CheckedBound:
    """Both sides of an inequality of the theory on this run."""

    name: str
    label: str
    left: float
    right: float
    rounding: float
    holds: bool


@dataclass(frozen=True)
class CouplingRun:
    """One recorded run, measured from its first step to its last."""

    case: str
    seed: int
    train_losses: list[float]
    """At the start and at the end."""
    test_errors: list[float]
    """Mean squared error against the clean targets of the test set, at the start and at the end."""
    drift_steps: list[int]
    drift: list[float]
    r""":math:`\|K_{SS}(t) - K_{SS}(0)\| / \|K_{SS}(0)\|` in operator norm, at these steps."""
    kernel_growth: list[float]
    r""":math:`\|K_{SS}(t)\| / \|K_{SS}(0)\|`."""
    test_displacement: list[float]
    """As it happened."""
    coupled: Prediction
    transferred: Prediction
    frozen: Prediction
    sourceless_error: float
    r"""Relative error of :math:`A_\circ \Delta u_S`, the sources left out."""
    visible: list[float]
    r"""Eigenvalues of :math:`G^\top G`."""
    allowed: list[float]
    r""":math:`\|\Gamma_Q\|` times the eigenvalues of W, which bound them one by one."""
    visibility_norm: float
    allowed_cutoff: float
    """Where ``allowed`` counts as 0: what is below belongs to the reservoir."""
    reservoir_dimension: int
    reservoir_leak: float
    r""":math:`\|G P_{res}\| / \|G\|`."""
    residual_in_reservoir: list[float]
    r""":math:`\|P_{res} g\| / \|g\|` at the start and at the end."""
    relative_remainder: float
    r""":math:`\|R_\perp\| / \|C_Q\|`."""
    transfer_mismatch: float
    smallest_train_root: float
    r""":math:`\sigma_{min}(C_S)`."""
    unresolved: int
    """Directions that dissipated and moved no training output."""
    corrections: list[float]
    """For each step, the largest of the shares that the secant supplies to the two Jacobians and to the curvature."""
    most_nodes: int
    bounds: list[CheckedBound]
    processor_seconds: float
    """For the measurements; the training is short beside them."""


def measure_run(run: Run, case: str, seed: int, drift_every: int) -> CouplingRun:
    """Everything about one run whose problem has a test set.

    Args:
        run: In float64, with a problem that has a test set.
        case: What to call it.
        seed: Seed of the run.
        drift_every: Steps between looks at the kernel; the end is always looked at.

    Raises:
        DataError: the problem has no test set.
    """
    began = time.process_time()
    problem = run.problem
    if problem.test is None:
        raise DataError(
            "the coupling of a run needs a problem with a test set, got none: Problem(…, test=(inputs, targets))"
        )
    test_inputs, test_targets = problem.test
    window = Window.of_run(run, dense=True)
    model = window.model
    ops = window.dense_operators()
    coupling = Coupling(dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer))
    channels, sources, moved = coupling.channels, ops.sources, ops.test_displacement
    frozen = _frozen_predictor(model, run.weights(0), problem.inputs, test_inputs)
    happened = RealizedWindow(ops.output_gradient, ops.train_displacement, moved, sources.train, sources.test)
    bounds = [
        CheckedBound(b.name, b.label, b.left, b.right, b.rounding, b.holds)
        for b in window_bounds(coupling, happened, predictors=[frozen])
    ]
    visible, allowed = visibility_spectra(channels)
    steps = [*range(0, run.num_steps, drift_every), run.num_steps]
    drift = kernel_drift(model, (run.weights(k) for k in steps), problem.inputs)
    ends = [model.outputs(run.weights(k), test_inputs) for k in (0, run.num_steps)]
    return CouplingRun(
        case=case,
        seed=seed,
        train_losses=list(ops.losses),
        test_errors=[(outputs - test_targets).square().mean().item() for outputs in ends],
        drift_steps=steps,
        drift=_short(drift.drift),
        kernel_growth=_short(drift.norms / drift.norms[0]),
        test_displacement=moved.tolist(),
        coupled=_prediction(coupling.predict(ops.train_displacement, sources.train, sources.test), moved),
        transferred=_prediction(ops.predicted_test, moved),
        frozen=_prediction(frozen @ (ops.train_displacement - sources.train) + sources.test, moved),
        sourceless_error=_prediction(coupling.predict(ops.train_displacement), moved).relative_error,
        visible=_short(visible),
        allowed=_short(allowed),
        visibility_norm=channels.visibility_norm,
        allowed_cutoff=channels.visibility_norm * channels.cutoff,
        reservoir_dimension=len(visible) - channels.rank,
        reservoir_leak=bounds[0].left / visible[0].sqrt().item(),
        residual_in_reservoir=[_share_in_reservoir(coupling, g) for g in (ops.output_gradient, _last_gradient(ops))],
        relative_remainder=coupling.relative_remainder,
        transfer_mismatch=coupling.transfer_mismatch,
        smallest_train_root=channels.smallest_train_root,
        unresolved=channels.unresolved,
        corrections=_short(window.corrections().amax(dim=1), digits=2),
        most_nodes=max(maps.nodes for maps in window.steps),
        bounds=bounds,
        processor_seconds=round(time.process_time() - began, 2),
    )


def _frozen_predictor(
    model: FlatModel, weights: Float[Tensor, "d"], inputs: Inputs, test_inputs: Inputs
) -> Float[Tensor, "M N"]:
    """Kernel regression with the tangent kernel at these weights."""
    train, test = (model.output_jacobian(weights, x).flatten(0, 1) for x in (inputs, test_inputs))
    return anchored_coupling_of_jacobians(test, train)


def _prediction(predicted: Float[Tensor, "M"], true: Float[Tensor, "M"]) -> Prediction:
    return Prediction(
        values=predicted.tolist(),
        relative_error=((predicted - true).norm() / true.norm()).item(),
        correlation=torch.corrcoef(torch.stack([predicted, true]))[0, 1].item(),
    )


def _last_gradient(ops: Operators) -> Float[Tensor, "N"]:
    return ops.propagator @ ops.output_gradient + ops.sources.gradient


def _share_in_reservoir(coupling: Coupling, g: Float[Tensor, "N"]) -> float:
    return ((coupling.channels.reservoir @ g).norm() / g.norm()).item()


def _short(values: Tensor, digits: int = 6) -> list[float]:
    return [float(f"{x:.{digits}g}") for x in values.tolist()]
