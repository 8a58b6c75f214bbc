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

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from poprisk._core.autodiff import ExampleLoss, take_examples
from poprisk._core.seeds import shuffled
from poprisk.errors import DataError, HyperparameterError, RunError
from poprisk.risk._controls import (
    Control,
    Deletions,
    as_many_as_needed,
    control_order,
    controlled_risk,
    deleted_outputs,
    most_controls,
    moved_by,
)
from poprisk.risk._duplicates import same_group
from poprisk.risk._error import corrected_risk_error, example_losses_of, unseen_mistake
from poprisk.risk._influence.exclusion_sweep import ExcludedOutputs, excluded_outputs
from poprisk.risk._influence.label_sensitivity import corrected_displacement
from poprisk.risk._influence.linearized_run import LinearizedRun
from poprisk.risk._influence.matrix import evaluation_model
from poprisk.risk._influence.sensitivity import Unrolled, as_unrolled
from poprisk.risk._verdict import (
    DOUBTFUL_BEND,
    DOUBTFUL_SENSITIVITY,
    FEWEST_CONTROLS,
    FEWEST_DISTINCT,
    FIRST_CONTROLS,
    SMOOTH_BEND,
    Checked,
    Found,
    RiskEstimate,
    enough_controls,
    judge_controlled,
    judge_predictions,
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
    """Number of directions or queries through the run, and of trainings of the controls."""
    note: str = ""
    """What was held fixed instead of differentiated."""
    held: int = 0
    """Number of examples that no step trained on, because they were held back; they are their own prediction."""
    distinct: int = 0
    """Number of training examples with different inputs."""
    control: Control | None = None
    """Real deletions of some of the examples; None if there are none, and the risk is unchecked."""
    obstacle: str = ""
    """Why no deletion could be trained."""
    first_loss: float = math.nan
    """Loss before training; NaN for another loss than the one that was trained."""

    @property
    def excluded_outputs(self) -> Float[Tensor, "m p"]:
        """Outputs without the example."""
        return self.outputs + self.displacement

    @property
    def risk(self) -> RiskEstimate:
        r"""Leave-one-out risk: the training loss, corrected by what the sampled examples lose without themselves.

        .. math:: \frac1n \sum_i \ell_i(u_i) + \frac1m \sum_{i \in M} \bigl(\ell_i(u_i + \Delta_i) - \ell_i(u_i)\bigr)

        The second mean is corrected by real deletions: :func:`poprisk.risk._controls.corrected_gap`.
        """
        return self._judged()[0]

    @property
    def predictions(self) -> RiskEstimate:
        """``risk``, but valid only where the predictions have it without a correction: the verdict on single ones."""
        risk, checked, _ = self._judged()
        return judge_predictions(risk, checked)

    def _judged(self) -> tuple[RiskEstimate, Checked, bool]:
        """The risk, what its controls say, and whether more of them would not make it much more certain."""
        n, training = len(self.training_losses), self.training_losses.mean().item()
        gap, control = (self.losses - self.own_losses).mean().item(), self.control
        losses, smooth = (self.training_losses, self.own_losses, self.losses), False
        if control is None:
            value, uncertain, moved = training + gap, math.nan, 0.0
            error = corrected_risk_error(*losses, self.mistake)
        else:
            smooth = self.method == "corrected" or self.doubt.median().item() <= SMOOTH_BEND
            value, error, uncertain, moved = controlled_risk(*losses, control, self.mistake, smooth=smooth)
        copies = math.sqrt(n / self.distinct) if self.distinct else 1.0
        checked = Checked(
            controls=0 if control is None else len(control.rows),
            change=value - training - gap,
            error=uncertain * copies,
            moved=moved if smooth else 0.0,
            distinct=self.distinct or n,
            obstacle=self.obstacle,
        )
        notes = (*((self.note,) if self.note else ()), *(() if control is None else control.notes))
        total = copies * (error if control is None else math.hypot(error, uncertain))
        distinct = min(len(self.examples), checked.distinct)
        target = trained_on(n - 1 - self.held, n)
        about = ("exclusion", target, training, self.cost, distinct, n, notes, self.first_loss)
        found = Found(value, total, *about)
        return judge_controlled(found, checked), checked, enough_controls(value, error, uncertain)


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
            got = chosen.reshape(-1).tolist()[:8]
            raise DataError(f"examples must be different indices from 0 to {n - 1}, at least one, got {got}")
        return chosen
    count = min(n, most or n) if examples is None else examples
    if not 1 <= count <= n:
        raise DataError(f"examples must be between 1 and the {n} training examples, got {count}")
    if count == n:
        return torch.arange(n)
    return shuffled(n, seed, "examples")[:count]


def exclusion(
    run: Run | Unrolled,
    examples: int | Int[Tensor, "m"] | None = None,
    *,
    method: ExclusionMethod = "linearized",
    loss: str | ExampleLoss | None = None,
    mass_preserving: bool = True,
    controls: int | None = None,
    seed: int = 0,
) -> Exclusion:
    """The predictions of a run for its own examples, had it not seen them.

    An example is left out together with those of the same inputs. Predictions farther from the model's own than
    anything it has learned are shortened to that distance, and marked as doubtful.

    Args:
        run: The recorded run, or an :class:`Unrolled` of it.
        examples: Indices of the examples, or a number of them to draw at random; default: all.
        method: "linearized" carries the absence through the run; "corrected" uses label sensitivities.
        loss: Ψ, for ``losses``; default: the loss that was trained.
        mass_preserving: Whether the weights of the other examples grow to n/(n - 1); for "linearized" only.
        controls: Number of the examples to leave out in a real training, on which the verdict of ``risk`` rests; 0
            trains nothing, and ``risk`` is not valid. Default: 16, and up to half of the examples as long as that makes
            the risk more certain. A training costs half of what the exclusion of an example costs.
        seed: Seed for the random draw of the examples and of the controls.

    Raises:
        RunError: the run allows no exact analysis.
        DataError: an example that does not exist.
    """
    check_controls(controls)
    unrolled = as_unrolled(run)
    chosen, groups = choose_examples(unrolled.num_examples, examples, seed), excluded_together(unrolled.groups)
    if method == "linearized":
        found = excluded_outputs(unrolled, chosen, mass_preserving=mass_preserving, groups=groups)
        predicted = exclusion_at(unrolled, found, unrolled.stop, loss=loss)
        if len(found.examples) < len(chosen):
            early = f"{len(found.examples)} of {len(chosen)} examples were followed, because the time ended"
            predicted = replace(predicted, note="; ".join(each for each in (predicted.note, early) if each))
            chosen = found.examples
    else:
        outputs, moved, radius = corrected_displacement(unrolled, chosen, groups)
        flat = outputs.reshape(len(outputs), -1)
        found = ExcludedOutputs(chosen, flat, moved, moved, tuple(outputs.shape[1:]))
        predicted = exclusion_at(unrolled, found, unrolled.stop, loss=loss, radius=radius)
    if controls == 0:
        return predicted
    if unrolled.start or unrolled.gate == "frozen":
        return replace(predicted, obstacle="a part of the run is held fixed, which a training cannot repeat")
    deletions = deletions_of(unrolled, chosen, groups, seed, renormalize=mass_preserving)
    deletions.follow(unrolled.run, [unrolled.stop])
    return controlled(unrolled, predicted, deletions, unrolled.stop, controls, seed, loss=loss)


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
    farthest = _farthest(unrolled, found)
    tangent, displaced = (_shortened(moved, farthest) for moved in (found.tangent, found.displaced))
    at = [found.outputs, found.outputs + tangent, found.outputs + displaced]
    own, losses, actual = (example_losses_of(model.loss, found.shaped(u), targets) for u in at)
    training = model.per_example_losses(unrolled.weights(k), unrolled.inputs, unrolled.targets).double()
    doubt, limit = (found.bend, DOUBTFUL_BEND) if radius is None else (radius, DOUBTFUL_SENSITIVITY)
    return Exclusion(
        examples=found.examples,
        outputs=found.outputs,
        displacement=tangent,
        doubt=doubt,
        doubtful=~((doubt <= limit) & losses.isfinite() & (found.tangent.norm(dim=1) <= farthest)),
        losses=losses,
        actual_losses=actual if radius is None else None,
        own_losses=own,
        training_losses=training,
        mistake=unseen_mistake(model.loss, found.shaped(at[1]), targets, n),
        method="linearized" if radius is None else "corrected",
        cost=float(len(own) if radius is None else found.outputs.numel()),
        note=unrolled.note,
        held=0 if unrolled.run.kept is None else len(unrolled.run.kept.held),
        distinct=int(unrolled.groups.max()) + 1,
        first_loss=float(unrolled.run.losses[0]) if loss is None else math.nan,
    )


def check_budget(retrain_budget: int) -> None:
    """Refuse a negative number of trainings; a HyperparameterError."""
    if retrain_budget < 0:
        raise HyperparameterError(f"retrain_budget must be a number of trainings, 0 or more, got {retrain_budget}")


def check_controls(controls: int | None) -> None:
    """Refuse what is not a number of trainings.

    Raises:
        HyperparameterError: ``controls`` is negative, or so few that they give no error.
    """
    if controls is not None and (controls < 0 or 0 < controls < FEWEST_CONTROLS):
        raise HyperparameterError(
            f"controls must be None, 0 or a number of trainings of at least {FEWEST_CONTROLS}, got {controls!r}"
        )


def excluded_together(groups: Int[Tensor, "n"]) -> Int[Tensor, "n"]:
    """The group that each example is left out with: its duplicates, unless most inputs come several times."""
    return groups if int(groups.max()) + 1 >= max(2, FEWEST_DISTINCT * len(groups)) else torch.arange(len(groups))


def deletions_of(
    unrolled: LinearizedRun, chosen: Int[Tensor, "m"], groups: Int[Tensor, "n"], seed: int, *, renormalize: bool = True
) -> Deletions:
    """The real deletions that may become controls, in their order."""
    order = control_order(chosen, unrolled.num_examples, seed)
    return Deletions(same_group(groups, chosen[order]), renormalize=renormalize)


def controlled(
    unrolled: LinearizedRun,
    predicted: Exclusion,
    deletions: Deletions,
    k: int,
    controls: int | None,
    seed: int,
    *,
    loss: str | ExampleLoss | None = None,
) -> Exclusion:
    """The exclusion before step k with controls: as many as are asked for, or as make the risk more certain."""
    m, order = len(predicted.examples), control_order(predicted.examples, unrolled.num_examples, seed)
    first, most = (FIRST_CONTROLS, most_controls(m)) if controls is None else (controls, min(controls, m))

    def with_controls(count: int) -> Exclusion:
        control = _control(unrolled, predicted, deletions, k, order[:count], loss)
        return replace(predicted, control=control, cost=predicted.cost + count)

    try:
        return as_many_as_needed(with_controls, lambda found: found._judged()[2], first, most)
    except RunError as error:
        return replace(predicted, obstacle=str(error))


def _control(
    unrolled: LinearizedRun,
    predicted: Exclusion,
    deletions: Deletions,
    k: int,
    rows: Int[Tensor, "k"],
    loss: str | ExampleLoss | None,
) -> Control:
    run, model, examples = unrolled.run, evaluation_model(unrolled, loss), predicted.examples[rows]
    weights, _, notes = deletions.weights(run, k, len(rows))
    outputs = deleted_outputs(run, examples, weights, ()).to(unrolled.dtype)
    losses = example_losses_of(model.loss, outputs, unrolled.targets[examples])
    moved = moved_by(run, weights, run.weights(k), model.loss)
    return Control(rows.to(losses.device), losses, moved, notes)


def _farthest(unrolled: LinearizedRun, found: ExcludedOutputs) -> float:
    """Twice what the outputs of the examples have moved in training, and twice as far as they are apart."""
    inputs = take_examples(unrolled.inputs, found.examples.to(unrolled.device))
    first = (
        unrolled.model_at(unrolled.start)
        .batch_outputs(unrolled.weights(unrolled.start), inputs)
        .reshape(found.outputs.shape)
    )
    learned = (found.outputs - first).norm(dim=1).max() + (found.outputs - found.outputs.mean(0)).norm(dim=1).max()
    return 2 * float(learned)


def _shortened(moved: Float[Tensor, "m p"], farthest: float) -> Float[Tensor, "m p"]:
    """Displacements of at most this length; none where a number is not finite."""
    length = moved.norm(dim=1, keepdim=True)
    return torch.where(length.isfinite(), moved * (farthest / length).clamp(max=1), 0.0)


def exclusion_risk(
    run: Run | Unrolled,
    examples: int | Int[Tensor, "m"] | None = None,
    *,
    method: ExclusionMethod = "linearized",
    loss: str | ExampleLoss | None = None,
    controls: int | None = None,
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
        controls: Number of the examples that are left out in a real training, as a check; see :func:`exclusion`.
        seed: Seed for the random draw.

    Returns:
        The risk with its standard error and verdict; the cost is in directions through the run and trainings.
    """
    unrolled = as_unrolled(run)
    chosen = choose_examples(unrolled.num_examples, examples, seed, most=MOST_EXAMPLES)
    return exclusion(unrolled, chosen, method=method, loss=loss, controls=controls, seed=seed).risk
