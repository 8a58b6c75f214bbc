r"""Exclusion: what each example's prediction would be had the run not seen it, without training again.

The run without the example, each of its steps linearized about the recorded one, is carried forward for many examples:

.. math:: \dot g = \textstyle\sum_{j \in B} \sigma_j \nabla^2\ell_j\, \dot w
   - \sigma_i \big(\nabla\ell_i + \nabla^2\ell_i\, \dot w\big)

The example's own curvature is removed with it, so that the response of its residual to its absence is followed step by
step. This is exact for linear models under squared loss, at every stopping time and for every batch order. It takes one
forward direction per example, and its error is of second order in :math:`w_{-i} - w`, not in the example's weight: the
first order in that weight (:mod:`poprisk.risk._first_order`) is proportional to the residuals that the example had
along the run, and vanishes when the example is fitted.

``method="corrected"`` predicts the displacement by label sensitivities instead
(:mod:`poprisk.risk._influence.label_sensitivity`).
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from poprisk._core.autodiff import ExampleLoss
from poprisk.errors import DataError, HyperparameterError
from poprisk.risk._error import corrected_risk_error, example_losses_of, unseen_mistake
from poprisk.risk._influence.exclusion_sweep import ExcludedOutputs, excluded_outputs
from poprisk.risk._influence.label_sensitivity import corrected_displacement
from poprisk.risk._influence.linearized_run import LinearizedRun
from poprisk.risk._influence.matrix import evaluation_model
from poprisk.risk._influence.sensitivity import Unrolled, as_unrolled
from poprisk.risk._verdict import (
    DOUBTFUL_BEND,
    DOUBTFUL_SENSITIVITY,
    LOST_BEND,
    Found,
    RiskEstimate,
    judge_corrected,
    judge_exclusion,
    trained_on,
)
from poprisk.runs import Run

ExclusionMethod = Literal["linearized", "corrected"]

MOST_EXAMPLES = 256
"""Number of examples that a risk by exclusion or to first order uses by default, where there are more."""


@dataclass(frozen=True)
class Exclusion:
    """The prediction for each example by a model trained without it."""

    examples: Int[Tensor, "m"]
    outputs: Float[Tensor, "m p"]
    """Outputs of the run's model."""
    displacement: Float[Tensor, "m p"]
    r"""Predicted change of the outputs, :math:`\Delta_i^{ex}`."""
    doubt: Float[Tensor, "m"]
    """Relative difference of linearized and actual displacement; for "corrected" the spectral radius of HΛ."""
    doubtful: Bool[Tensor, "m"]
    """Whether ``doubt`` is over its limit, or the loss is not finite."""
    losses: Float[Tensor, "m"]
    """Loss of each example at its prediction without it."""
    actual_losses: Float[Tensor, "m"] | None
    """The same for the network at the displaced weights, not linearized; None for "corrected"."""
    own_losses: Float[Tensor, "m"]
    """Loss of each example under the run's model."""
    training_losses: Float[Tensor, "n"]
    """Loss of every training example under the run's model."""
    mistake: float
    """Contribution of one unseen mistake to the mean; see :func:`poprisk.risk._error.unseen_mistake`."""
    method: ExclusionMethod
    cost: float
    """Number of directions or queries through the run."""
    note: str = ""
    """What was held fixed instead of differentiated."""
    held: int = 0
    """Number of examples that no step trained on, because they were held back; they are their own prediction."""

    @property
    def excluded_outputs(self) -> Float[Tensor, "m p"]:
        """Outputs without the example."""
        return self.outputs + self.displacement

    @property
    def risk(self) -> RiskEstimate:
        r"""Leave-one-out risk: the training loss, corrected by what the sampled examples lose without themselves.

        .. math:: \frac1n \sum_i \ell_i(u_i) + \frac1m \sum_{i \in M} \bigl(\ell_i(u_i + \Delta_i) - \ell_i(u_i)\bigr)
        """
        n, m = len(self.training_losses), len(self.examples)
        training = self.training_losses.mean().item()
        value = training + (self.losses - self.own_losses).mean().item()
        error = corrected_risk_error(self.training_losses, self.own_losses, self.losses, self.mistake)
        notes = (self.note,) if self.note else ()
        found = Found(value, error, "exclusion", trained_on(n - 1 - self.held, n), training, self.cost, m, n, notes)
        if self.actual_losses is None:
            return judge_corrected(found, self.doubtful.double().mean().item())
        actual = training + (self.actual_losses - self.own_losses).mean().item()
        return judge_exclusion(found, actual, (self.doubt > LOST_BEND).double().mean().item())


def choose_examples(
    n: int, examples: int | Int[Tensor, "m"] | None, seed: int, *, most: int | None = None
) -> Int[Tensor, "m"]:
    """Examples by index, or a number of them drawn at random; by default all of them, up to ``most``.

    Raises:
        DataError: an example that does not exist or comes twice, or a number out of range.

    >>> choose_examples(3, None, seed=0), len(choose_examples(300, None, seed=0, most=20))
    (tensor([0, 1, 2]), 20)
    """
    if isinstance(examples, Tensor):
        chosen = examples.cpu()
        whole = chosen.dim() == 1 and len(chosen) and not chosen.is_floating_point() and chosen.dtype != torch.bool
        if not whole or int(chosen.min()) < 0 or int(chosen.max()) >= n or len(chosen.unique()) != len(chosen):
            raise DataError(
                f"examples must be different indices from 0 to {n - 1}, at least one, got {chosen.tolist()[:8]}"
            )
        return chosen
    count = min(n, most or n) if examples is None else examples
    if not 1 <= count <= n:
        raise DataError(f"examples must be between 1 and the {n} training examples, got {count}")
    if count == n:
        return torch.arange(n)
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed))[:count]


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
        run: The recorded run, or an :class:`Unrolled` of it.
        examples: Indices of the examples, or a number of them to draw at random; default: all.
        method: "linearized" carries the absence through the run; "corrected" uses label sensitivities.
        loss: Ψ, for ``losses``; default: the loss that was trained.
        mass_preserving: Whether the weights of the other examples grow to n/(n - 1); for "linearized" only.
        seed: Seed for the random draw.

    Raises:
        RunError: the run allows no exact analysis.
        DataError: an example that does not exist.
    """
    if method not in ("linearized", "corrected"):
        raise HyperparameterError(f'method must be "linearized" or "corrected", got {method!r}')
    unrolled = as_unrolled(run)
    chosen = choose_examples(unrolled.num_examples, examples, seed)
    if method == "linearized":
        return exclusion_at(
            unrolled, excluded_outputs(unrolled, chosen, mass_preserving=mass_preserving), unrolled.stop, loss=loss
        )
    outputs, moved, radius = corrected_displacement(unrolled, chosen)
    flat = outputs.reshape(len(outputs), -1)
    found = ExcludedOutputs(chosen, flat, moved, moved, tuple(outputs.shape[1:]))
    return exclusion_at(unrolled, found, unrolled.stop, loss=loss, radius=radius)


def exclusion_at(
    unrolled: LinearizedRun,
    found: ExcludedOutputs,
    k: int,
    *,
    loss: str | ExampleLoss | None = None,
    radius: Float[Tensor, "m"] | None = None,
) -> Exclusion:
    """Exclusion at the weights before step k, from the outputs of a sweep; with ``radius`` from label sensitivities."""
    n, targets = unrolled.num_examples, unrolled.targets[found.examples]
    model = evaluation_model(unrolled, loss)
    displaced = [found.outputs, found.outputs + found.tangent, found.outputs + found.displaced]
    own, losses, actual = (example_losses_of(model.loss, found.shaped(u), targets) for u in displaced)
    training = model.per_example_losses(unrolled.weights(k), unrolled.inputs, unrolled.targets).double()
    doubt, limit = (found.bend, DOUBTFUL_BEND) if radius is None else (radius, DOUBTFUL_SENSITIVITY)
    return Exclusion(
        examples=found.examples,
        outputs=found.outputs,
        displacement=found.tangent,
        doubt=doubt,
        doubtful=~((doubt <= limit) & losses.isfinite()),
        losses=losses,
        actual_losses=actual if radius is None else None,
        own_losses=own,
        training_losses=training,
        mistake=unseen_mistake(model.loss, found.shaped(displaced[1]), targets, n),
        method="linearized" if radius is None else "corrected",
        cost=float(len(own) if radius is None else found.outputs.numel()),
        note=unrolled.note,
        held=0 if unrolled.run.kept is None else len(unrolled.run.kept.held),
    )


def exclusion_risk(
    run: Run | Unrolled,
    examples: int | Int[Tensor, "m"] | None = None,
    *,
    method: ExclusionMethod = "linearized",
    loss: str | ExampleLoss | None = None,
    seed: int = 0,
) -> RiskEstimate:
    r"""The leave-one-out risk :math:`\mathcal L_{ex}` of a model trained on n - 1 examples, predicted from one run.

    .. math:: \mathcal L_{ex}^\Psi = \frac1n \sum_i \Psi_{Z_i}\big(e_i(T) + \Delta_i^{ex}(T)\big)

    :func:`~poprisk.risk.population_risk` with ``method="exclusion"`` returns the same estimate.

    Args:
        run: The recorded run, or an :class:`Unrolled` of it.
        examples: Indices of the examples, or a number of them to draw at random; default: all, up to 256.
        method: How the displacement is predicted; see :func:`exclusion`.
        loss: Ψ; default: the loss that was trained.
        seed: Seed for the random draw.

    Returns:
        The risk with its standard error and verdict; the cost is in directions through the run.
    """
    unrolled = as_unrolled(run)
    chosen = choose_examples(unrolled.num_examples, examples, seed, most=MOST_EXAMPLES)
    return exclusion(unrolled, chosen, method=method, loss=loss).risk
