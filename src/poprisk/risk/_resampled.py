"""What a resampling found: held-out outputs and losses, how far they moved, and the risk they estimate."""

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk._core.autodiff import Inputs
from poprisk._core.estimate import Estimate
from poprisk.errors import DataError
from poprisk.risk._retraining.retrain import example_losses, member_outputs
from poprisk.runs import Run


@dataclass(frozen=True)
class Resampled:
    """Examples as models saw them that were trained without them.

    Row e is example ``example[e]`` under training ``member[e]``.
    """

    method: str
    target: str
    """Whose risk is estimated, e.g. "a learner on 9 of 10 points"."""
    risk: Estimate
    """The mean held-out loss; its cost is in trainings."""
    example: Int[Tensor, "evaluations"]
    member: Int[Tensor, "evaluations"]
    outputs: Float[Tensor, "evaluations *out"]
    """Held-out outputs."""
    losses: Float[Tensor, "evaluations"]
    """Held-out losses."""
    own_losses: Float[Tensor, "evaluations"]
    """Losses of the same examples under the model of the run."""
    displacement: Float[Tensor, "evaluations *out"]
    r"""Held-out outputs minus those of the run's model: :math:`\Delta_i^{ex}` where one example is left out."""
    weights: Float[Tensor, "members d"]
    """Where each training ended."""
    run: Run = field(repr=False)
    own_weights: Float[Tensor, "d"] = field(repr=False)
    """Where the run itself ended."""
    notes: tuple[str, ...] = ()
    is_partition: bool = False
    """Whether every example was held out exactly once, as in K-fold."""
    extrapolated: Estimate | None = None
    """The risk of a learner on all n points, where nested cross-validation gave one."""

    @property
    def trainings(self) -> float:
        """What it cost."""
        return self.risk.cost

    @cached_property
    def bias_corrected(self) -> Estimate:
        r"""K-fold's risk carried over from n(1 - 1/K) points to all n (Burman 1989), computed when it is asked for.

        What the models without a fold lose on the whole training set, against what the run's own model does, is the
        first-order price of the missing points. It takes every model's outputs for every training example.

        .. math:: L_n = L_{cv} + \frac1n \sum_i \ell_i(w_T) - \frac1K \sum_f \frac1n \sum_i \ell_i(w^{(-f)})

        After nested cross-validation it is the straight line through the risks at n(1 - 2/K) and n(1 - 1/K) points.

        Raises:
            DataError: the trainings do not leave out every example once.
        """
        if self.extrapolated is not None:
            return self.extrapolated
        if not self.is_partition:
            raise DataError(f"only K-fold can be carried over to all points, got {self.method}: use k_fold")
        inputs, targets = self.run.problem.inputs, self.run.problem.targets
        own = losses_of(self.run, member_outputs(self.run, self.own_weights.unsqueeze(0), inputs)[0], targets)
        price = self.member_losses(inputs, targets).double().mean() - own.double().mean()
        value, risk = float(self.risk.value) - float(price), self.risk
        about = (
            f"the risk of a learner on all {self.run.num_examples} points, to first order in what a fold is missed by"
        )
        if not risk.valid:
            return Estimate(value, float("nan"), valid=False, reason=risk.reason, cost=risk.cost)
        return finite_estimate(value, float(risk.standard_error), about, risk.cost)

    @property
    def gap(self) -> float:
        """Mean held-out loss minus mean training loss of the same examples."""
        return float((self.losses - self.own_losses).double().mean())

    def member_outputs(self, inputs: Inputs) -> Float[Tensor, "members b *out"]:
        """Every training's outputs for other inputs, e.g. a test set."""
        return member_outputs(self.run, self.weights, inputs)

    def member_losses(self, inputs: Inputs, targets: Tensor) -> Float[Tensor, "members b"]:
        """Every training's losses on other examples."""
        return member_losses_of(self.run, self.member_outputs(inputs), targets)


def losses_of(run: Run, outputs: Float[Tensor, "rows *out"], targets: Tensor) -> Float[Tensor, "rows"]:
    """The loss of each row of outputs, under the run's problem."""
    labels = targets.to(outputs.device)
    return example_losses(run.problem, outputs, labels.to(outputs.dtype) if labels.is_floating_point() else labels)


def member_losses_of(run: Run, outputs: Float[Tensor, "members b *out"], targets: Tensor) -> Float[Tensor, "members b"]:
    """The losses of outputs that several members gave for the same targets."""
    repeated = targets.unsqueeze(0).expand(len(outputs), *targets.shape)
    return losses_of(run, outputs.flatten(0, 1), repeated.flatten(0, 1)).unflatten(0, outputs.shape[:2])


def finite_estimate(value: float, error: float, about: str, cost: float) -> Estimate:
    """An estimate that is valid where its numbers are finite."""
    finite = torch.tensor([value, error]).isfinite().all()
    if not bool(finite):
        return Estimate(value, abs(error), valid=False, reason=f"{about}: a training diverged", cost=cost)
    return Estimate(value, error, reason=about, cost=cost)


def picked(found: Resampled, rows: Tensor) -> Resampled:
    """Some rows of a result; booleans or positions."""
    there = rows.to(found.losses.device)
    return replace(
        found,
        example=found.example[rows],
        member=found.member[rows],
        outputs=found.outputs[there],
        losses=found.losses[there],
        own_losses=found.own_losses[there],
        displacement=found.displacement[there],
    )


def by_example(found: Resampled) -> Resampled:
    """The rows in the order of their examples."""
    return picked(found, found.example.argsort())
