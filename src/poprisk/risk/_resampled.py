"""Train without some of the examples and evaluate the models on them: held-out losses, and the risk they estimate."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TypedDict

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk._core.autodiff import Inputs, resolve_loss, slices, take_examples
from poprisk.errors import DataError
from poprisk.risk._duplicates import duplicate_groups
from poprisk.risk._error import inflated_error, unseen_mistake
from poprisk.risk._fold_checks import MOST_MEMBERS, FoldChecks, compared, probe_inputs, twin_share
from poprisk.risk._moments import buffers_at
from poprisk.risk._retraining.members import Buffers, Members
from poprisk.risk._retraining.one_by_one import module_outputs
from poprisk.risk._retraining.retrain import example_losses, member_outputs, retrain
from poprisk.risk._verdict import Found, RiskEstimate, judge_retraining, trained_on
from poprisk.runs import Run

_CHECKED = 500
"""Approximate number of training examples on which fold models are compared with the run's model."""
_FEW = 2**22
"""Number of outputs kept at a time, where most of them are not needed."""


class RetrainOptions(TypedDict, total=False):
    """Options passed on to :func:`poprisk.risk.retrain`."""

    dtype: torch.dtype | None
    memory: int
    progress: bool | None
    folder: str | Path | None


@dataclass(frozen=True)
class Trained:
    """Models trained without some of the examples."""

    weights: Float[Tensor, "members d"]
    own_weights: Float[Tensor, "d"]
    """Weights of the run itself, in the same precision."""
    notes: tuple[str, ...]
    """What was taken over from the recorded run instead of trained again."""
    trainings: float
    buffers: Buffers | None = None
    """Buffers of each model, and of the run itself at the end, where they were trained one after another."""


@dataclass(frozen=True)
class Resampled:
    """Training examples evaluated by models that were trained without them.

    Row e is example ``example[e]`` under training ``member[e]``.
    """

    method: str
    target: str
    """The models whose risk is estimated, e.g. "a model trained on 9 of the 10 examples"."""
    risk: RiskEstimate
    """The mean held-out loss; its cost is the number of trainings."""
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
    """Last weights of each training."""
    run: Run = field(repr=False)
    own_weights: Float[Tensor, "d"] = field(repr=False)
    """Weights of the run itself."""
    notes: tuple[str, ...] = ()
    is_partition: bool = False
    """Whether every example was held out exactly once, as in K-fold."""
    extrapolated: RiskEstimate | None = None
    """The risk of a model trained on all n examples, from nested cross-validation."""
    buffers: Buffers | None = field(default=None, repr=False)
    """Buffers of each training, and at the end of the run itself, where they were trained one after another."""

    @property
    def trainings(self) -> float:
        """Number of trainings that it took."""
        return self.risk.cost

    @cached_property
    def bias_corrected(self) -> RiskEstimate:
        r"""K-fold's risk corrected from n(1 - 1/K) to all n examples (Burman 1989), computed on first access.

        The models without a fold lose more on the whole training set than the run's own model does; to first order
        that difference is the effect of the missing examples. It takes all models' outputs for all training examples.

        .. math:: L_n = L_{cv} + \frac1n \sum_i \ell_i(w_T) - \frac1K \sum_f \frac1n \sum_i \ell_i(w^{(-f)})

        After nested cross-validation it is the straight line through the risks at n(1 - 2/K) and n(1 - 1/K) examples.

        Raises:
            DataError: the trainings do not leave out every example once.
        """
        if self.extrapolated is not None:
            return self.extrapolated
        if not self.is_partition:
            raise DataError(f"only K-fold can be corrected to all examples, got {self.method}: use k_fold")
        inputs, targets = self.run.problem.inputs, self.run.problem.targets
        last = None if self.buffers is None else self.buffers[-1:]
        outputs = member_outputs(self.run, self.own_weights.unsqueeze(0), inputs, buffers=last)[0]
        own = losses_of(self.run, outputs, targets)
        price = self.member_losses(inputs, targets).double().mean() - own.double().mean()
        return self.corrected(float(self.risk.value) - float(price), "to first order in the missing fold")

    def corrected(self, value: float, how: str) -> RiskEstimate:
        """A risk of the model trained on all examples, with the error and the verdict of the held-out losses."""
        n, risk = self.run.num_examples, self.risk
        error, about = float(risk.standard_error), (risk.training_loss, risk.cost, len(self.example.unique()), n)
        target, first = f"a model trained on all {n} examples", float(self.run.losses[0])
        return judge_retraining(Found(value, error, risk.method, target, *about, (how,), first))

    @property
    def gap(self) -> float:
        """Mean held-out loss minus mean training loss of the same examples."""
        return float((self.losses - self.own_losses).double().mean())

    def member_outputs(self, inputs: Inputs) -> Float[Tensor, "members b *out"]:
        """Every training's outputs for other inputs, e.g. a test set."""
        return member_outputs(self.run, self.weights, inputs, buffers=self.buffers and self.buffers[:-1])

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


def resample(
    run: Run, method: str, held: list[Tensor], renormalize: bool, options: RetrainOptions, *, partition: bool = False
) -> Resampled:
    """Train once without each of the holdouts, and evaluate each model on its holdout."""
    trained = train_members(run, members_without(run.num_examples, held, renormalize=renormalize), options)
    return held_out_result(run, method, held, trained, partition=partition)


def holdout_weights(
    n: int, held_out: Sequence[int] | Tensor, *, renormalize: bool = True, dtype: torch.dtype = torch.float64
) -> Float[Tensor, "n"]:
    r"""Example weights :math:`\alpha^{(-I)}` of Prop. ``common_first_variation``: 0 on I, n/(n-k) elsewhere.

    Args:
        n: Number of examples.
        held_out: I, the k positions left out.
        renormalize: Give the weight of those left out to the others, as the paper does. False leaves the others at 1,
            which is removal at fixed batches.
        dtype: Data type of the weights.

    Raises:
        DataError: a position is out of range or comes twice, or nothing would be left.

    >>> holdout_weights(4, [0, 2])
    tensor([0., 2., 0., 2.], dtype=torch.float64)
    """
    index = torch.as_tensor(held_out, dtype=torch.long).reshape(-1)
    k = len(index)
    if k and not (int(index.min()) >= 0 and int(index.max()) < n):
        raise DataError(f"held_out must be among the examples 0 … {n - 1}, got {index.tolist()}")
    if len(index.unique()) != k or k >= n:
        raise DataError(f"held_out must be at most {n - 1} different examples of {n}, got {k}: leave some to train on")
    alpha = torch.full((n,), n / (n - k) if renormalize else 1.0, dtype=dtype)
    alpha[index.to(alpha.device)] = 0.0
    return alpha


def members_without(n: int, held: list[Tensor], *, renormalize: bool = True) -> Members:
    """One training without each of the holdouts."""
    return Members(torch.stack([holdout_weights(n, index, renormalize=renormalize) for index in held]))


def train_members(run: Run, members: Members, options: RetrainOptions) -> Trained:
    """The members' last weights, and those of the run: trained again too, where another precision is asked for."""
    again = options.get("dtype") not in (None, run.layout.dtype)
    if again:
        members = _with_the_run(run, members)
    found = retrain(run, members, **options)
    own = found.weights[-1] if again else run.weights(run.num_steps).to(found.weights)
    buffers = found.buffers.get(found.step)
    if buffers is not None and not again:
        buffers = (*buffers, buffers_at(run, run.num_steps))
    return Trained(found.weights[: len(found.weights) - again], own, found.notes, found.trainings, buffers)


def held_out_result(
    run: Run, method: str, held: list[Tensor], trained: Trained, *, target: str | None = None, partition: bool = False
) -> Resampled:
    """Evaluate models on the examples they were trained without.

    Args:
        run: What was recorded.
        method: How the holdouts were chosen, in words.
        held: The examples that each model was trained without.
        trained: The models.
        target: The models whose risk this is; default: trained on the examples that are left.
        partition: Whether every example is held out once; then rows are in the order of the examples.
    """
    n, buffers = run.num_examples, trained.buffers
    last = None if buffers is None else buffers[-1:]
    own = member_outputs(run, trained.own_weights.unsqueeze(0), run.problem.inputs, buffers=last)[0]
    own_losses = losses_of(run, own, run.problem.targets)
    member = torch.cat([torch.full((len(index),), k) for k, index in enumerate(held)])
    example, outputs = torch.cat(held), _held_out(run, trained.weights, held, buffers and buffers[:-1])
    if partition:
        order = example.argsort()
        member, example, outputs = member[order], example[order], outputs[order.to(outputs.device)]
    losses = losses_of(run, outputs, run.problem.targets[example])
    units = _units(run, example) if partition else example
    distinct = len(units.unique())
    mistake = mistake_of(run, outputs, example) if distinct else 0.0
    groups = member.to(losses.device) if partition else None
    seen = own_losses[example]
    error = inflated_error(losses, units.to(losses.device), seen, groups, mistake) if distinct else math.nan
    value = float(losses.double().mean())
    kind = "k_fold" if partition else method
    fitted = own_losses[run.trained.to(own_losses.device)]
    about = (float(fitted.double().mean()), trained.trainings, distinct, n, trained.notes, float(run.losses[0]))
    checks = _checks(run, held, trained, own_losses, partition)
    error = math.hypot(error, checks.lag)
    found = Found(value, error, kind, _target(run, held) if target is None else target, *about)
    risk = judge_retraining(found, checks)
    displacement, weights = outputs - own[example], (trained.weights, run, trained.own_weights)
    fields = (risk, example, member, outputs, losses, seen, displacement, *weights, trained.notes, partition)
    return Resampled(method, found.target, *fields, buffers=buffers)


def _units(run: Run, example: Tensor) -> Tensor:
    """What counts once in an error: examples with equal inputs together, unless all are equal."""
    groups = duplicate_groups(run.problem.inputs)
    return groups[example] if int(groups.max()) else example


def _target(run: Run, held: list[Tensor]) -> str:
    """The models whose risk it is."""
    trained = run.trained
    sizes = [int(trained.sum()) - int(trained[index].sum()) for index in held]
    return trained_on((min(sizes), max(sizes)), run.num_examples)


def _checks(run: Run, held: list[Tensor], trained: Trained, own_losses: Tensor, partition: bool) -> FoldChecks:
    """What speaks against the held-out losses as the risk of the run's model."""
    problem, buffers = run.problem, trained.buffers
    left_out = (~run.trained).repeat(len(held), 1)
    for k, index in enumerate(held):
        left_out[k, index] = True
    member = torch.cat([torch.full((len(index),), k) for k, index in enumerate(held)])
    twins = twin_share(problem.inputs, torch.cat(held), left_out, member)
    if not partition:
        return FoldChecks(twins=twins)
    some = slice(0, MOST_MEMBERS)
    probes, weights = probe_inputs(problem.inputs), torch.cat([trained.own_weights[None], trained.weights[some]])
    last = None if buffers is None else (buffers[-1], *buffers[:-1][some])
    outputs = member_outputs(run, weights, probes, buffers=last)
    rows = torch.arange(0, run.num_examples, max(1, run.num_examples // _CHECKED))
    there = take_examples(problem.inputs, rows.to(problem.device))
    fitted = member_outputs(run, trained.weights[some], there, buffers=buffers and buffers[:-1][some])
    losses = member_losses_of(run, fitted, problem.targets[rows.to(problem.device)]).double().cpu()
    kept = ~left_out[some][:, rows]
    own = own_losses[rows.to(own_losses.device)].double().cpu().expand_as(losses)
    return FoldChecks(*compared(outputs[0], outputs[1:]), losses[kept].mean().item(), own[kept].mean().item(), twins)


def mistake_of(run: Run, outputs: Float[Tensor, "evaluations *out"], example: Int[Tensor, "evaluations"]) -> float:
    """What one unseen mistake among the held-out examples would add to their mean loss."""
    targets = run.problem.targets[example].to(outputs.device)
    targets = targets.to(outputs.dtype) if targets.is_floating_point() else targets
    return unseen_mistake(resolve_loss(run.problem.loss), outputs, targets, len(example.unique()))


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


def _with_the_run(run: Run, members: Members) -> Members:
    ones = torch.cat([members.weights, torch.ones_like(members.weights[:1])])
    index = members.index_map
    if index is not None:
        index = torch.cat([index, torch.arange(run.num_examples, device=index.device).unsqueeze(0)])
    return Members(ones, index_map=index, pool=members.pool)


def _held_out(
    run: Run, weights: Tensor, held: list[Tensor], buffers: Buffers | None
) -> Float[Tensor, "evaluations *out"]:
    """Each model's outputs for the examples it was trained without: computed alone, or picked from all if most are."""
    problem, widest = run.problem, max(len(index) for index in held)
    inputs = problem.inputs
    if buffers is not None:
        each = [take_examples(inputs, index.to(problem.device)) for index in held]
        return torch.cat(module_outputs(run, list(weights), buffers, each, weights.dtype))
    if widest * len(held) > 4 * len(problem):
        found = []
        for rows in slices(len(held), max(1, _FEW // len(problem))):
            outputs = member_outputs(run, weights[rows], inputs)
            found += [outputs[k, index.to(outputs.device)] for k, index in enumerate(held[rows])]
        return torch.cat(found)
    if not widest:
        return member_outputs(run, weights[:1], take_examples(inputs, slice(0, 1)))[0, :0]
    padded = torch.nn.utils.rnn.pad_sequence(list(held), batch_first=True)
    real = torch.arange(widest) < torch.tensor([len(index) for index in held]).unsqueeze(1)
    own = take_examples(inputs, padded.to(problem.device))
    return member_outputs(run, weights, own, own=True)[real.to(weights.device)]
