r"""What minibatches did to the test outputs: drift, diffusion, and the curvature that first order leaves out.

Every batch gradient is its mean over the draw plus a fluctuation, :math:`\hat g_k = \mu_k + \xi_k`. A recorded step is
affine in the gradients up to its own (:class:`~poprisk.runs.AffineStep`), so the two can be followed through momentum,
preconditioner and gate to the weights, and from there to the test outputs with the Jacobian at the step's start.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, take_examples
from poprisk._core.linalg import default_generator
from poprisk._core.progress import tracked
from poprisk.errors import DataError
from poprisk.operators._batch_law import BatchLaw, Sampling, batch_laws
from poprisk.operators._step_maps import scale_rows
from poprisk.operators._trajectory import Trajectory, check_run
from poprisk.runs import AffineStep


@dataclass(frozen=True, eq=False)
class DriftDiffusion:
    r"""The parts of a window's test displacement, step by step; see :func:`drift_diffusion`.

    Row k of each is what step ``start + k`` contributed.
    """

    drift_steps: Float[Tensor, "steps M"]
    diffusion_steps: Float[Tensor, "steps M"]
    source_steps: Float[Tensor, "steps M"]
    remainder_steps: Float[Tensor, "steps M"]
    displacement: Float[Tensor, "M"]
    """U_Q at the end minus U_Q at the start, by two evaluations of the network."""
    spread_steps: Float[Tensor, "steps M"] | None = None
    """Half the difference of the drifts by two independent halves of the sample, where means were sampled.

    It is the random error of ``drift_steps``, and with the other sign that of ``diffusion_steps``.
    """

    @property
    def drift(self) -> Float[Tensor, "M"]:
        r""":math:`\Delta_Q^{drift}`: what the mean gradients did."""
        return self.drift_steps.sum(0)

    @property
    def diffusion(self) -> Float[Tensor, "M"]:
        r"""What the fluctuations did, with its sign: the paper's :math:`-\Delta_Q^{diff}`."""
        return self.diffusion_steps.sum(0)

    @property
    def source(self) -> Float[Tensor, "M"]:
        """What no gradient of the window did: weight decay, and momentum carried in."""
        return self.source_steps.sum(0)

    @property
    def curvature_remainder(self) -> Float[Tensor, "M"]:
        r""":math:`\mathcal R_Q`, of second order in the steps."""
        return self.remainder_steps.sum(0)

    @property
    def closure(self) -> float:
        """How far the four parts miss the displacement, relative to their sizes: rounding for an exact record."""
        parts = (self.drift, self.diffusion, self.source, self.curvature_remainder)
        size = sum(part.norm().item() for part in parts)
        return (sum(parts) - self.displacement).norm().item() / size if size else 0.0


def drift_diffusion(
    trajectory: Trajectory,
    model: FlatModel,
    inputs: Inputs,
    targets: Tensor,
    test_inputs: Inputs,
    *,
    start: int = 0,
    stop: int | None = None,
    sampling: Sampling = "independent",
    sample: int | None = None,
    generator: torch.Generator | None = None,
) -> DriftDiffusion:
    r"""Split the test displacement of a recorded window, Eq. ``drift_diffusion_decomposition``.

    .. math::
       U_Q(w_T) - U_Q(w_s) &= \sum_k J_Q(w_k) (x_k^\mu + x_k^\xi + x_k^\sigma) + \mathcal R_Q, \qquad
       \mathcal R_Q = \sum_k (\bar J_{Q,k} - J_Q(w_k)) (w_{k+1} - w_k) \\
       v_k^\mu &= \beta v_{k-1}^\mu + \kappa \mu_k, \qquad x_k^\mu = -M_k (a v_k^\mu + b \mu_k)

    and in the same way for :math:`\xi`. The third part starts from the momentum that is carried in and has the decay:
    :math:`x_k^\sigma = -M_k (a v_k^\sigma + b \lambda^c w_k) - \lambda w_k + \sigma_k`. :math:`\bar J_Q` is the
    Jacobian averaged over the step, so :math:`\bar J_Q (w_{k+1} - w_k)` is the outputs' change, which is how the
    remainder is computed: it holds all orders above the first, and the four parts add up to rounding (``closure``).

    In what sense the diffusion is a martingale: for SGD without momentum, where :math:`J_Q(w_k) M_k` is fixed before
    the batch is drawn, exactly, if ``sampling`` is how the batches were drawn. With momentum a fluctuation is seen
    through later Jacobians, which it moved: exact for outputs linear in the weights, else up to that motion. The
    preconditioner of Adam and of a gate is recorded after the step and knows the batch, and so does a clip factor:
    there the split is an attribution along the realized run.

    Args:
        trajectory: The run.
        model: Network and loss as functions of flat weights, in float64 for exact work.
        inputs: All n training inputs, in the order of the steps' example indices.
        targets: Their targets.
        test_inputs: Q.
        start: First step of the window.
        stop: The step after its last; the run's end by default.
        sampling: How batches were drawn. ``"independent"`` and ``"replacement"`` have the full training gradient as
            mean; ``"epochs"`` has the mean over what the epoch has left.
        sample: Estimate each mean from two samples of so many examples, where the pool is larger than both; default:
            from all examples.
        generator: Source of the samples; default: one with a fixed seed.

    Raises:
        DataError: an empty window, another number of examples than recorded, or batches that contradict ``sampling``.
        RunError: no exact analysis is possible, or inputs were augmented.
        HyperparameterError: an unknown way of sampling.

    Differs from the paper: real optimizers in place of :math:`w_{k+1} = w_k - \eta M_k \hat g_k`, hence the source; the
    learning rate is inside M; the diffusion carries its minus sign, so that the parts add up; and for batches dealt out
    in epochs the conditional mean given the past is not the full gradient, which the paper does not say.

    >>> from poprisk.operators._gradient_descent import gradient_descent
    >>> model = FlatModel(torch.nn.Linear(2, 1, bias=False).double(), "squared")
    >>> x, y = torch.eye(2, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    >>> split = drift_diffusion(gradient_descent(model, x, y, lr=0.5, steps=3), model, x, y, x)
    >>> torch.allclose(split.drift, split.displacement)  # full batches do not fluctuate, a linear model does not bend
    True
    """
    check_run(trajectory, targets, stop)
    start, stop = window_limits(trajectory, start, stop)
    laws = batch_laws(trajectory, targets.shape[0], start=start, stop=stop, sampling=sampling)
    first = in_dtype_of(model, trajectory.buffer(start))
    V = torch.stack([torch.zeros_like(first)] * 2 + [first, torch.zeros_like(first)], dim=1)
    generator, sampled = generator or default_generator(torch.device("cpu")), False
    w = in_dtype_of(model, trajectory.weights(start))
    parts: list[Tensor] = []
    remainders: list[Tensor] = []
    begin = u = model.outputs(w, test_inputs).reshape(-1)
    for k, law in enumerate(tracked(laws, "drift and diffusion"), start):
        step, after = step_in_dtype_of(model, trajectory.step(k)), in_dtype_of(model, trajectory.weights(k + 1))
        if sample is None or len(law.pool) <= 2 * sample:
            mean, drawn = batch_gradients(model, w, inputs, targets, step, law)
            spread = torch.zeros_like(mean)
        else:
            mean, spread, drawn = sampled_gradients(model, w, inputs, targets, step, law, sample, generator)
            sampled = True
        E = torch.stack([mean, drawn - mean, step.coupled_decay * w, spread], dim=1)
        V = scale_rows(step.momentum, V) + scale_rows(step.new_gradient, E)
        X = -step.preconditioner[:, None] * (scale_rows(step.buffer_share, V) + scale_rows(step.direct_share, E))
        X[:, 2] += step.source - step.decay * w
        pushed = model.jvp(w, test_inputs, torch.cat([X, (after - w)[:, None]], dim=1))
        moved = model.outputs(after, test_inputs).reshape(-1)
        parts.append(pushed[:, :4].T)
        remainders.append(moved - u - pushed[:, 4])
        w, u = after, moved
    drift, diffusion, source, spread = torch.stack(parts, dim=1)
    return DriftDiffusion(drift, diffusion, source, torch.stack(remainders), u - begin, spread if sampled else None)


def batch_gradients(
    model: FlatModel, w: Float[Tensor, "d"], inputs: Inputs, targets: Tensor, step: AffineStep, law: BatchLaw
) -> tuple[Float[Tensor, "d"], Float[Tensor, "d"]]:
    r"""The mean :math:`\mu_k` that the law gives, and the gradient :math:`\hat g_k` that was drawn.

    >>> model = FlatModel(torch.nn.Linear(1, 1, bias=False), "squared")
    >>> x, y = torch.ones(2, 1), torch.tensor([[1.0], [3.0]])
    >>> step = AffineStep(torch.tensor([1]), torch.tensor([2.0]), torch.ones(1))
    >>> batch_gradients(model, torch.zeros(1), x, y, step, BatchLaw(torch.arange(2), size=1, scale=1.0))
    (tensor([-2.]), tensor([-3.]))
    """
    pool = law.pool.to(w.device)
    chosen = take_examples(inputs, pool)
    residuals = model.output_gradient(w, chosen, targets[pool])
    # The batch lies in the pool: one backward pass serves both.
    share = w.new_zeros(targets.shape[0]).index_add_(0, step.batch, step.selection / targets.shape[0])[pool]
    weights = torch.stack([torch.full_like(share, law.scale / len(pool)), share], dim=1)
    mean, drawn = model.vjp(w, chosen, (residuals[:, :, None] * weights[:, None, :]).flatten(0, 1)).T
    return mean, drawn


def sampled_gradients(
    model: FlatModel,
    w: Float[Tensor, "d"],
    inputs: Inputs,
    targets: Tensor,
    step: AffineStep,
    law: BatchLaw,
    sample: int,
    generator: torch.Generator,
) -> tuple[Float[Tensor, "d"], Float[Tensor, "d"], Float[Tensor, "d"]]:
    """The mean of the law from two disjoint samples, half their difference, and the gradient that was drawn.

    >>> model = FlatModel(torch.nn.Linear(1, 1, bias=False), "squared")
    >>> x, y = torch.ones(4, 1), torch.tensor([[1.0], [1.0], [3.0], [3.0]])
    >>> step, law = AffineStep(torch.tensor([1]), torch.tensor([4.0]), torch.ones(1)), BatchLaw(torch.arange(4), 1, 1.0)
    >>> mean, spread, drawn = sampled_gradients(model, torch.zeros(1), x, y, step, law, 2, torch.Generator())
    >>> mean, drawn  # two samples of two are all four
    (tensor([-2.]), tensor([-1.]))
    """
    chosen = law.pool[torch.randperm(len(law.pool), generator=generator)[: 2 * sample]].to(w.device)
    equal = w.new_full((sample,), law.scale / sample)
    first, second = (weighted_gradient(model, w, inputs, targets, rows, equal) for rows in chosen.split(sample))
    # Two samples without replacement out of a finite pool lie apart, and their mean lies closer to that of the pool.
    closer = (1 - 2 * sample / len(law.pool)) ** 0.5
    drawn = weighted_gradient(model, w, inputs, targets, step.batch, step.selection / targets.shape[0])
    return (first + second) / 2, closer * (first - second) / 2, drawn


def weighted_gradient(
    model: FlatModel, w: Tensor, inputs: Inputs, targets: Tensor, rows: Tensor, shares: Tensor
) -> Float[Tensor, "d"]:
    """The gradient of the losses of some examples, each times its share."""
    batch = take_examples(inputs, rows)
    return model.vjp(w, batch, (model.output_gradient(w, batch, targets[rows]) * shares[:, None]).reshape(-1))


def window_limits(trajectory: Trajectory, start: int, stop: int | None) -> tuple[int, int]:
    """First step of a window and the one after its last."""
    stop = trajectory.num_steps if stop is None else stop
    if not 0 <= start < stop <= trajectory.num_steps:
        raise DataError(
            f"a window needs 0 ≤ start < stop ≤ {trajectory.num_steps}, the run's steps, got {start} and {stop}"
        )
    return start, stop


def in_dtype_of(model: FlatModel, x: Tensor) -> Tensor:
    """A flat vector in the dtype and on the device of a model's weights."""
    like = next(iter(model.parameters.values()))
    return x.to(like.device, like.dtype)


def step_in_dtype_of(model: FlatModel, step: AffineStep) -> AffineStep:
    """A step with its tensors in the dtype and on the device of a model's weights."""
    return step_like(next(iter(model.parameters.values())), step)


def step_like(like: Tensor, step: AffineStep) -> AffineStep:
    """A step with its tensors in the dtype and on the device of another one; indices keep theirs."""
    changed = {
        name: value.to(like.device) if name == "batch" else value.to(like.device, like.dtype)
        for name, value in vars(step).items()
        if isinstance(value, Tensor)
    }
    return AffineStep(**{**vars(step), **changed})
