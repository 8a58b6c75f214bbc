r"""How drift and diffusion grow over replicate runs, against what theory says of them (Thm. ``minibatch_coherence``).

Replicates are runs from the same initialization on the same examples that differ in the order of their batches.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, take_examples
from poprisk._core.estimate import Estimate
from poprisk.errors import DataError
from poprisk.operators import Bound, DriftDiffusion, drift_diffusion
from poprisk.operators._batch_law import Sampling, batch_laws
from poprisk.operators._drift_diffusion import in_dtype_of, step_in_dtype_of, window_limits
from poprisk.operators._trajectory import Trajectory, check_run
from poprisk_lab.theory.power_law import replicate_exponent

# Allowed error of a sum over steps, in units of its rounding error.
_MARGIN = 100.0
# Standard errors by which an estimate may exceed what bounds its expectation.
_SIGMAS = 3.0


@dataclass(frozen=True, eq=False)
class FluctuationVariance:
    """The variance that one run's fluctuations bring to the test outputs, gradient by gradient."""

    traces: Float[Tensor, "steps"]
    r""":math:`\operatorname{tr}(\tilde L_k \Sigma_k^{(b)} \tilde L_k^\top)`, with the learning rate inside L."""
    ceilings: Float[Tensor, "steps"]
    r""":math:`V_k / b = \operatorname{tr}(\tilde L_k \Sigma_k \tilde L_k^\top)/b`, without the correction for drawing
    from a finite set."""

    @property
    def total(self) -> float:
        r""":math:`\sum_k \operatorname{tr}(\tilde L_k \Sigma_k^{(b)} \tilde L_k^\top)`."""
        return self.traces.sum().item()

    @property
    def ceiling(self) -> float:
        r""":math:`\eta T \bar V_T / b`."""
        return self.ceilings.sum().item()


@dataclass(frozen=True, eq=False)
class DiffusionRate:
    """What the diffusion of replicate runs amounts to, and what it should."""

    measured: Estimate
    r""":math:`\mathbb E \|\Delta_Q^{diff}\|^2`."""
    predicted: Estimate
    r""":math:`\mathbb E \sum_k \operatorname{tr}(\tilde L_k \Sigma_k^{(b)} \tilde L_k^\top)`."""
    excess: Estimate
    """Measured minus predicted, run by run: 0 within its error for a martingale."""
    correlation: Estimate
    r""":math:`\mathbb E \sum_{j \ne k} \langle x_j, x_k \rangle / \mathbb E \sum_k \|x_k\|^2` of the steps' diffusion
    x: 0 for a martingale, -1 where the steps cancel. Momentum makes it positive by itself."""
    bound: Bound
    r""":math:`\mathbb E \|\Delta_Q^{diff}\|^2 \le \eta T \bar V_T / b`. Both sides are means over the runs, so that its
    ``rounding`` has three standard errors of their difference."""


@dataclass(frozen=True, eq=False)
class GrowthExponents:
    r"""Exponents p of the root mean square norm against time, :math:`\propto T^p`."""

    drift: Estimate
    """1 while the mean gradient keeps its direction and size."""
    diffusion: Estimate
    """1/2 for batches drawn afresh at every step."""
    remainder: Estimate
    """Exponent of the curvature remainder: between 1/2 and 1, for it fluctuates about a mean, which wins in the end."""
    sizes: tuple[int, ...]
    """Numbers of steps at which the norms are fitted."""


@dataclass(frozen=True, eq=False)
class ReplicateRates:
    """What :func:`replicate_rates` finds."""

    diffusion: DiffusionRate
    growth: GrowthExponents


def replicate_rates(
    runs: Sequence[Trajectory],
    model: FlatModel,
    inputs: Inputs,
    targets: Tensor,
    test_inputs: Inputs,
    *,
    start: int = 0,
    stop: int | None = None,
    sampling: Sampling = "independent",
) -> ReplicateRates:
    r"""Split every run, and compare the splits with theory: :func:`diffusion_rate` and :func:`growth_exponents`.

    Args:
        runs: At least two with the same weights at ``start`` and batches in different orders.
        model: Network and loss as functions of flat weights.
        inputs: All n training inputs.
        targets: Their targets.
        test_inputs: Q.
        start: First step of the window.
        stop: The step after its last; the runs' end by default.
        sampling: How batches were drawn.

    Raises:
        DataError: fewer than two runs, runs that start from different weights or have different lengths, or what
            :func:`~poprisk.operators._drift_diffusion.drift_diffusion` refuses.
        RunError: no exact analysis of a run is possible.

    >>> from poprisk.operators._gradient_descent import gradient_descent
    >>> model = FlatModel(torch.nn.Linear(2, 1, bias=False).double(), "squared")
    >>> x, y = torch.eye(2, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    >>> runs = [gradient_descent(model, x, y, lr=0.01, steps=8)] * 3
    >>> rates = replicate_rates(runs, model, x, y, x)  # full batches: nothing fluctuates
    >>> rates.diffusion.predicted.value, round(rates.growth.drift.value, 1)
    (0.0, 1.0)
    """
    if len(runs) > 1 and any(not torch.equal(run.weights(start), runs[0].weights(start)) for run in runs[1:]):
        raise DataError("replicates must start from the same weights: train with one initialization, other batch seeds")
    data = (model, inputs, targets, test_inputs)
    splits = [drift_diffusion(run, *data, start=start, stop=stop, sampling=sampling) for run in runs]
    variances = [fluctuation_variance(run, *data, start=start, stop=stop, sampling=sampling) for run in runs]
    return ReplicateRates(diffusion_rate(splits, variances), growth_exponents(splits))


def fluctuation_variance(
    trajectory: Trajectory,
    model: FlatModel,
    inputs: Inputs,
    targets: Tensor,
    test_inputs: Inputs,
    *,
    start: int = 0,
    stop: int | None = None,
    sampling: Sampling = "independent",
) -> FluctuationVariance:
    r"""The predicted variance of the diffusion along one run, from the gradients of all examples.

    .. math::
       \mathbb E \|\Delta_Q^{diff}\|^2 = \sum_k \mathbb E \operatorname{tr}(L_k \Sigma_k^{(b)} L_k^\top)
       \le \frac{\eta T}b \bar V_T, \qquad \Sigma_k^{(b)} = \frac{n-b}{b(n-1)} \Sigma_k

    with :math:`L_k = J_Q(w_k) M_k` (η inside M) and the covariance of drawing without replacement
    (Eq. ``finite_pop_cov``) or as ``sampling`` says. Momentum carries a fluctuation into later steps,

    .. math:: \tilde L_j = \kappa_j N_j + b_j J_Q(w_j) M_j, \qquad N_j = a_j J_Q(w_j) M_j + \beta_{j+1} N_{j+1}

    which is used in place of L; then, and with a preconditioner that knows the batch, the equality is no theorem (see
    :func:`~poprisk.operators._drift_diffusion.drift_diffusion`).

    Costs a test Jacobian [M, d] and the gradients [n, d] at every step.

    Args:
        trajectory: The run.
        model: Network and loss as functions of flat weights.
        inputs: All n training inputs.
        targets: Their targets.
        test_inputs: Q.
        start: First step of the window.
        stop: The step after its last; the run's end by default.
        sampling: How batches were drawn.

    Raises:
        DataError: an empty window, another number of examples than recorded, or batches that contradict ``sampling``.
        RunError: no exact analysis is possible, or inputs were augmented.
        HyperparameterError: an unknown way of sampling.

    >>> from poprisk.operators._gradient_descent import RecordedSteps
    >>> from poprisk.runs._step import AffineStep
    >>> model = FlatModel(torch.nn.Linear(1, 1, bias=False), "squared")
    >>> x, y, w = torch.ones(3, 1), torch.tensor([[0.0], [1.0], [2.0]]), torch.zeros(1)
    >>> step = AffineStep(torch.tensor([1]), torch.tensor([3.0]), torch.tensor([0.5]))
    >>> run = RecordedSteps([w, w + 0.5], [step], [w, w])
    >>> variance = fluctuation_variance(run, model, x, y, x[:1])  # L = 1/2, gradients 0, -1, -2 of variance 2/3, b = 1
    >>> round(variance.total * 6, 5)
    1.0
    """
    check_run(trajectory, targets)
    start, stop = window_limits(trajectory, start, stop)
    laws = batch_laws(trajectory, targets.shape[0], start=start, stop=stop, sampling=sampling)
    traces, ceilings = [], []
    later: Tensor | None = None
    for k in range(stop - 1, start - 1, -1):
        law, step = laws[k - start], step_in_dtype_of(model, trajectory.step(k))
        w = in_dtype_of(model, trajectory.weights(k))
        J_M = model.output_jacobian(w, test_inputs).flatten(0, 1) * step.preconditioner
        N = step.buffer_share * J_M
        N = N if later is None else N + later
        L = step.new_gradient * N + step.direct_share * J_M
        later = step.momentum * N
        pool = law.pool.to(w.device)
        G = model.per_example_gradients(w, take_examples(inputs, pool), targets[pool])
        spread = ((G - G.mean(0)) @ L.T).square().sum().item() / len(pool)
        traces.append(law.covariance_factor * spread)
        ceilings.append(law.covariance_ceiling * spread)
    return FluctuationVariance(
        torch.tensor(traces[::-1], dtype=torch.float64), torch.tensor(ceilings[::-1], dtype=torch.float64)
    )


def diffusion_rate(splits: Sequence[DriftDiffusion], variances: Sequence[FluctuationVariance]) -> DiffusionRate:
    r"""The diffusion of replicate runs against its predicted variance and the bound, Thm. ``minibatch_coherence``.

    Whether it is a martingale depends on ``sampling``: with the full training gradient as mean, batches dealt out in
    epochs have increments that are negatively correlated and a diffusion below the prediction (``excess`` and
    ``correlation`` measure it); with ``sampling="epochs"`` in both arguments the prediction is exact for them, too.

    Args:
        splits: :func:`~poprisk.operators._drift_diffusion.drift_diffusion` of each run.
        variances: :func:`fluctuation_variance` of the same runs with the same sampling.

    Raises:
        DataError: fewer than two runs, or lists that do not fit.

    >>> steps = torch.tensor([[[1.0], [1.0]], [[1.0], [-1.0]]])
    >>> zero = torch.zeros(2, 1)
    >>> splits = [DriftDiffusion(zero, x, zero, zero, x.sum(0)) for x in steps]
    >>> rate = diffusion_rate(splits, [FluctuationVariance(torch.ones(2), torch.full((2,), 1.5))] * 2)
    >>> rate.measured.value, rate.predicted.value, rate.correlation.value, rate.bound.holds
    (2.0, 2.0, 0.0, True)
    """
    _check_replicates(splits)
    if len(splits) != len(variances):
        raise DataError(f"every run needs a split and a variance, got {len(splits)} and {len(variances)}")
    if any(len(s.diffusion_steps) != len(v.traces) for s, v in zip(splits, variances, strict=True)):
        raise DataError("splits and variances must be of the same steps of the same runs: compute them on one window")
    squares = torch.tensor([s.diffusion.double().square().sum().item() for s in splits], dtype=torch.float64)
    own = torch.tensor([s.diffusion_steps.double().square().sum().item() for s in splits], dtype=torch.float64)
    predicted = torch.tensor([v.total for v in variances], dtype=torch.float64)
    ceilings = torch.tensor([v.ceiling for v in variances], dtype=torch.float64)
    measured, ceiling = _mean(squares), ceilings.mean().item()
    by_chance = _SIGMAS * float(_mean(squares - ceilings).standard_error)
    rounding = by_chance + _MARGIN * torch.finfo(torch.float64).eps * ceiling
    return DiffusionRate(
        measured=measured,
        predicted=_mean(predicted),
        excess=_mean(squares - predicted),
        correlation=_ratio(squares - own, own),
        bound=Bound("diffusion", "eq:scale_separation", "discrete", float(measured.value), ceiling, rounding),
    )


def growth_exponents(
    splits: Sequence[DriftDiffusion],
    *,
    first: int | None = None,
    points: int = 8,
    resamples: int = 200,
    generator: torch.Generator | None = None,
) -> GrowthExponents:
    r"""Fitted exponents of drift and diffusion in time, Eq. ``scale_separation``: 1 and 1/2.

    The root mean square norms over the runs, after numbers of steps in geometric progression, on logarithmic scales;
    errors by a bootstrap over runs. Prefixes of one run are not independent, so residuals say nothing.

    Args:
        splits: One split per replicate, all with the same number of steps.
        first: Smallest number of steps to fit; an eighth of all by default.
        points: Number of points to fit.
        resamples: Number of bootstrap samples.
        generator: Generator for the bootstrap; by default one with a fixed seed.

    Raises:
        DataError: fewer than two runs, runs of different lengths, or too few steps for a line.

    Differs from the paper: the remainder has an exponent as well. The fluctuations bend the outputs by
    :math:`\frac12 \operatorname{tr}(\nabla^2 U_Q M \Sigma^{(b)} M)` per step in the mean, which adds up like drift, to
    the order of ηT/b. The last sentence of the theorem, that a noise channel's test displacement is
    :math:`O(T/\sqrt n + \sqrt{\eta T/b})`, holds for drift and diffusion only: with :math:`U = w^2` and gradients ±1 of
    mean 0 the displacement is :math:`N\eta^2 = \eta T` in the mean.

    >>> zero, line = torch.zeros(16, 1), torch.ones(16, 1)
    >>> splits = [DriftDiffusion(line, line, zero, line, 3 * line.sum(0)) for _ in range(3)]
    >>> round(growth_exponents(splits).drift.value, 6)
    1.0
    """
    _check_replicates(splits)
    lengths = {len(s.drift_steps) for s in splits}
    last = max(lengths)
    first = max(1, last // 8) if first is None else first
    if len(lengths) > 1 or not 1 <= first < last or points < 2:
        raise DataError(
            f"exponents need runs of one length with 1 ≤ first < steps and at least 2 points, got lengths "
            f"{sorted(lengths)}, first={first} and points={points}"
        )
    ratio = (last / first) ** (1 / (points - 1))
    sizes = tuple(sorted({round(first * ratio**i) for i in range(points)}))
    at = torch.tensor(sizes) - 1

    def exponent(name: str) -> Estimate:
        paths = torch.stack([getattr(s, name).double().cumsum(0).cpu()[at] for s in splits])
        return replicate_exponent(sizes, paths.square().sum(-1), resamples=resamples, generator=generator)

    return GrowthExponents(
        drift=exponent("drift_steps"),
        diffusion=exponent("diffusion_steps"),
        remainder=exponent("remainder_steps"),
        sizes=sizes,
    )


def _check_replicates(splits: Sequence[DriftDiffusion]) -> None:
    if len(splits) < 2:
        raise DataError(f"a rate over replicates needs at least 2 runs, got {len(splits)}: train with other seeds")


def _mean(values: Tensor) -> Estimate:
    return Estimate(values.mean().item(), values.std().item() / math.sqrt(len(values)), cost=len(values))


def _ratio(above: Tensor, below: Tensor) -> Estimate:
    """The ratio of two means, with the first-order error of a ratio."""
    scale = below.mean().item()
    if not scale > 0:
        return Estimate(math.nan, math.nan, valid=False, reason="nothing fluctuated")
    ratio = above.mean().item() / scale
    left_over = above - ratio * below
    return Estimate(ratio, left_over.std().item() / (math.sqrt(len(above)) * scale), cost=len(above))
