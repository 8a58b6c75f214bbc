r"""What each example's prediction would be had the run not seen it: without training again.

Three predictions of the exclusion displacement :math:`\Delta_i^{ex} = U_{Q_i}^{S_{-i}}(T) - U_{Q_i}^S(T)` from one run:

*First order* in the example's weight (:mod:`poprisk.risk._first_order`): proportional to the residuals that the
example had along the run, so it vanishes when the example is fitted.

*Corrected*, from label sensitivities :math:`H_i = \partial u_i / \partial y_i` through the run: removing the example is
taken to be the label change that leaves it no residual at the end. With :math:`\Lambda_i` the loss curvature,

.. math:: u_{-i} = u_i + H_i r(u_{-i}), \quad r(u_{-i}) \approx r_i + \Lambda_i (u_{-i} - u_i)
   \quad\Rightarrow\quad u_{-i} = u_i + (I - H_i \Lambda_i)^{-1} H_i r_i

which is :math:`e_i/(1-h_i)` for squared loss. Exact for ridge regression at its minimum. Along a run the example's
residual changes from step to step, and one label cannot cancel them all: right early, and it blows up as h → 1.

*Linearized*: the run without the example, each of its steps linearized about the recorded one,

.. math:: \dot g = \textstyle\sum_{j \in B} \sigma_j \nabla^2\ell_j\, \dot w
   - \sigma_i \big(\nabla\ell_i + \nabla^2\ell_i\, \dot w\big)

The example's own curvature goes with it, so the response of its residual to its absence is followed step by step. This
is exact for linear models under squared loss, at every stopping time and for every batch order, and needs no inverse:
nothing blows up. It costs one forward direction per example (the corrected form: p adjoint queries), and its error is
of second order in :math:`w_{-i} - w`, not in the example's weight.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from poprisk._core.autodiff import ExampleLoss, loss_hessians, slices, take_examples
from poprisk._core.estimate import Estimate
from poprisk.errors import HyperparameterError
from poprisk.risk._examples import choose_examples
from poprisk.risk._fold_error import FEWEST
from poprisk.risk._influence.exclusion_sweep import ExclusionSweep, excluded_outputs
from poprisk.risk._influence.linear_step import StepJacobian
from poprisk.risk._influence.matrix import evaluation_model
from poprisk.risk._influence.sensitivity import Unrolled, as_unrolled
from poprisk.risk._risk_error import corrected_risk_error, example_losses_of, unseen_mistake
from poprisk.runs import Run

ExclusionMethod = Literal["linearized", "corrected"]

# A sensitivity beyond which one label change no longer stands for a removal, and a bend of the network over the
# displacement (as a share of it) beyond which its linearization no longer does.
_LARGEST_SENSITIVITY = 0.5
_LARGEST_BEND = 0.25
# The share of examples beyond these at which the mean is no longer believed.
_TOLERATED = 0.05


@dataclass(frozen=True)
class Exclusion:
    """Each example's prediction without it."""

    examples: Int[Tensor, "m"]
    outputs: Float[Tensor, "m p"]
    """With it."""
    displacement: Float[Tensor, "m p"]
    r""":math:`\\Delta_i^{ex}`, as predicted."""
    doubt: Float[Tensor, "m"]
    """How far the prediction is from where its derivation holds: spectral radius of HΛ, or bend of the network."""
    doubtful: Bool[Tensor, "m"]
    losses: Float[Tensor, "m"]
    """Each example's loss at its own excluded prediction."""
    own_losses: Float[Tensor, "m"]
    """By the model of the run."""
    mistake: float
    """What one more mistake would add to the mean; see :func:`poprisk.risk._risk_error.unseen_mistake`."""
    method: ExclusionMethod
    cost: float
    """In directions or queries through the run."""

    @property
    def excluded_outputs(self) -> Float[Tensor, "m p"]:
        """Without it."""
        return self.outputs + self.displacement


def label_sensitivities(run: Run | Unrolled, examples: Int[Tensor, "m"] | None = None) -> Float[Tensor, "m p p"]:
    r""":math:`H_i = \partial u_i(w_T) / \partial y_i`: how much of its own label each example takes over.

    The labels of all steps change together; for losses other than squared, cross-entropy and logistic a label change is
    a shift of the residual. Costs p adjoint queries per example.

    Args:
        run: Or the run made differentiable, with options of your own.
        examples: Which; default: all.

    >>> from poprisk.runs import Problem
    >>> from poprisk.runs import train
    >>> problem = Problem(torch.nn.Linear, "squared", torch.eye(3), torch.ones(3, 1),
    ...                   arguments={"in_features": 3, "out_features": 1, "bias": False})
    >>> run = train(problem, lambda p: torch.optim.SGD(p, lr=1.5), steps=2, progress=False)
    >>> label_sensitivities(run).flatten()  # 1 - (1 - lr/3)²
    tensor([0.7500, 0.7500, 0.7500])
    """
    unrolled = as_unrolled(run)
    chosen = torch.arange(unrolled.num_examples) if examples is None else examples
    p, w = unrolled.num_outputs, unrolled.last_weights
    # Every query passes each step with the outputs of its whole batch.
    by_batch = 4 * len(unrolled.run.batch(unrolled.start)) * p * unrolled.dtype.itemsize
    width = max(1, min(unrolled.columns_at_a_time(), unrolled.memory // 2 // by_batch))
    blocks = []
    for rows in slices(len(chosen), max(1, width // p)):
        own = chosen[rows]
        queries = unrolled.model.output_jacobian(w, take_examples(unrolled.inputs, own)).flatten(0, 1)  # [m p, d]
        owners = own.repeat_interleave(p)
        parts = [_own_labels(unrolled, queries[part], owners[part]) for part in slices(len(owners), width)]
        blocks.append(torch.cat(parts).view(len(own), p, p))
    return torch.cat(blocks)


def excluded_weights(
    run: Run | Unrolled, examples: Int[Tensor, "m"], *, mass_preserving: bool = True
) -> Float[Tensor, "d m"]:
    r"""The predicted change of the last weights when each example, alone, is left out of the run.

    Args:
        run: Or the run made differentiable, with options of your own.
        examples: Which.
        mass_preserving: Whether the others' weights grow by n/(n - 1), as in a mean over n - 1 examples.
    """
    unrolled = as_unrolled(run)
    parts = []
    for rows in slices(len(examples), unrolled.columns_at_a_time()):
        sweep = ExclusionSweep(unrolled, examples[rows], mass_preserving=mass_preserving)
        parts.append(sweep.at(unrolled.stop))
    return torch.cat(parts).T


def exclusion(
    run: Run | Unrolled,
    examples: int | Int[Tensor, "m"] | None = None,
    *,
    method: ExclusionMethod = "linearized",
    loss: str | ExampleLoss | None = None,
    mass_preserving: bool = True,
    seed: int = 0,
) -> Exclusion:
    """The predictions of a run for its own examples, had it not seen them.

    Args:
        run: Or the run made differentiable, with options of your own.
        examples: Which, or how many, drawn at random; default: all.
        method: How; see the module.
        loss: Ψ, for ``losses``; default: the loss that was trained.
        mass_preserving: Of the linearized way; the corrected one lets the total weight fall.
        seed: Of the draw.

    Raises:
        RunError: the run allows no exact analysis.
        DataError: an example that does not exist.
    """
    if method not in ("linearized", "corrected"):
        raise HyperparameterError(f'method must be "linearized" or "corrected", got {method!r}')
    unrolled = as_unrolled(run)
    n = unrolled.num_examples
    chosen = choose_examples(n, examples, seed)
    x, y = take_examples(unrolled.inputs, chosen), unrolled.targets[chosen]
    raw = unrolled.model.batch_outputs(unrolled.last_weights, x)
    u = raw.flatten(1) if raw.dim() > 1 else raw.unsqueeze(1)
    if method == "corrected":
        moved, doubt = _corrected(unrolled, chosen, raw, y)
        limit, cost = _LARGEST_SENSITIVITY, u.numel()
    else:
        found = excluded_outputs(unrolled, chosen, mass_preserving=mass_preserving)
        moved, doubt = found.tangent, found.bend
        limit, cost = _LARGEST_BEND, len(chosen)
    model = evaluation_model(unrolled, loss)
    at = (u + moved).view(raw.shape)
    losses, own = (example_losses_of(model.loss, outputs, y) for outputs in (at, raw))
    doubtful = ~((doubt <= limit) & losses.isfinite())
    mistake = unseen_mistake(model.loss, at, y, n)
    return Exclusion(chosen, u, moved, doubt, doubtful, losses, own, mistake, method, float(cost))


def exclusion_displacement(
    run: Run | Unrolled, examples: int | Int[Tensor, "m"] | None = None, *, method: ExclusionMethod = "linearized"
) -> Float[Tensor, "m p"]:
    r"""The predicted :math:`\Delta_i^{ex} = U_{Q_i}^{S_{-i}}(T) - U_{Q_i}^S(T)` of each example, training nothing.

    Args:
        run: Or the run made differentiable, with options of your own.
        examples: Which, or how many, drawn at random; default: all.
        method: How; see the module.
    """
    return exclusion(run, examples, method=method).displacement


def exclusion_risk(
    run: Run | Unrolled,
    examples: int | Int[Tensor, "m"] | None = None,
    *,
    method: ExclusionMethod = "linearized",
    loss: str | ExampleLoss | None = None,
    seed: int = 0,
) -> Estimate:
    r"""The leave-one-out risk :math:`\mathcal L_{ex}` predicted from one run: that of the learner on n - 1 points.

    .. math:: \mathcal L_{ex}^\Psi = \frac1n \sum_i \Psi_{Z_i}\big(e_i(T) + \Delta_i^{ex}(T)\big)

    Args:
        run: Or the run made differentiable, with options of your own.
        examples: Which, or how many, drawn at random; default: all.
        method: How the displacement is predicted; see the module.
        loss: Ψ; default: the loss that was trained.
        seed: Of the draw.

    Returns:
        The mean over the examples and its standard error; not valid where more than 1 in 20 examples is where the
        prediction's derivation does not hold. Cost in directions through the run.
    """
    return risk_of(exclusion(run, examples, method=method, loss=loss, seed=seed))


def risk_of(found: Exclusion) -> Estimate:
    """The mean loss of excluded predictions, with a verdict."""
    m = len(found.examples)
    value, share = float(found.losses.mean()), float(found.doubtful.double().mean())
    what = "the network bends over their displacement" if found.method == "linearized" else "h is too near 1"
    if not math.isfinite(value):
        return Estimate(value, math.nan, False, "excluded losses are not finite", found.cost)
    error = corrected_risk_error(found.own_losses, found.own_losses, found.losses, found.mistake)
    if m < FEWEST:
        why = f"{m} examples are too few to tell a standard error, {FEWEST} are needed"
        return Estimate(value, error, False, why, found.cost)
    if share > _TOLERATED:
        why = f"{found.method}: {what} for {100 * share:.0f}% of the examples"
        return Estimate(value, error, False, why, found.cost)
    return Estimate(value, error, True, f"{found.method} leave-one-out", found.cost)


def _own_labels(unrolled: Unrolled, queries: Float[Tensor, "q d"], owners: Int[Tensor, "q"]) -> Float[Tensor, "q p"]:
    """The derivative of each query by its owner's label alone: those by all labels, n times as many, are not kept."""
    found = queries.new_zeros(len(queries), unrolled.num_outputs)
    owners = owners.to(queries.device)

    def gather(step: StepJacobian, by_labels: Float[Tensor, "q b p"]) -> None:
        rows, places = (owners[:, None] == step.examples[None, :]).nonzero(as_tuple=True)
        found.index_add_(0, rows, by_labels[rows, places])

    unrolled.adjoint(queries.T, wrt=("initial",), on_step=gather)
    return found


def _corrected(unrolled: Unrolled, chosen: Tensor, raw: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    H = label_sensitivities(unrolled, chosen)
    x = take_examples(unrolled.inputs, chosen)
    r = unrolled.model.output_gradient(unrolled.last_weights, x, y)
    HL = H @ loss_hessians(unrolled.model.loss, raw, y)
    eye = torch.eye(HL.shape[1], dtype=HL.dtype, device=HL.device)
    doubt = torch.linalg.eigvals(HL).abs().amax(1).to(HL.dtype)
    solved = torch.linalg.solve_ex(eye - HL, (H @ r.unsqueeze(2))).result.squeeze(2)
    return solved, doubt
