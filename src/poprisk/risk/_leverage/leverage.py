"""Population risk by leverage: corrected training losses, at one or several steps of any recorded run."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk._core.autodiff import resolve_loss
from poprisk._core.progress import Progress
from poprisk._core.seeds import shuffled
from poprisk.errors import RunError
from poprisk.risk._controls import Control, controlled_risk
from poprisk.risk._duplicates import duplicate_groups
from poprisk.risk._error import corrected_risk_error, example_losses_of, unseen_mistake
from poprisk.risk._exclusion import choose_examples, excluded_together
from poprisk.risk._leverage.absence import Absence
from poprisk.risk._leverage.pace import gate_closes, gate_shuts
from poprisk.risk._leverage.tangents import Tangent, Tangents
from poprisk.risk._verdict import (
    FEWEST_EXAMPLES,
    Checked,
    Found,
    RiskEstimate,
    enough_controls,
    judge_controlled,
    judge_leverage,
    trained_on,
)
from poprisk.runs import Run

MOST_ROWS = 1000
"""Number of outputs, examples times outputs of each, whose kernel is used at a time."""
_MOMENTS = 9
_SHUT = "a gate that is hard and not normalized, which a missing example would open"


@dataclass(frozen=True)
class Leverage:
    """The predictions for some examples by a model trained without them, at one step."""

    examples: Int[Tensor, "m"]
    step: int
    outputs: Float[Tensor, "m *out"]
    """Outputs of the run's model."""
    excluded_outputs: Float[Tensor, "m *out"]
    """Outputs without the example, followed along the run."""
    losses: Float[Tensor, "m"]
    """Loss of each example at its prediction without it, followed along the run."""
    end_losses: Float[Tensor, "m"]
    """The same by the leverages of the last moment alone."""
    half_losses: Float[Tensor, "m"]
    """``losses`` computed from half of the examples alone; NaN for the other half, and where all examples are used."""
    own_losses: Float[Tensor, "m"]
    training_losses: Float[Tensor, "n"]
    mistake: float
    distinct: int
    """Number of different inputs among the training examples."""
    first_loss: float
    """Loss at the first step."""
    cost: float
    """Number of outputs, and of trainings of the controls."""
    gated: bool = False
    """Whether the optimizer's gate opens and closes, which leverage follows in part."""
    unfollowed: str = ""
    """What else in the run leverage does not follow at all."""
    obstacle: str = ""
    """Why no deletion could be trained."""
    control: Control | None = None
    """Real deletions of some of the examples; None if there are none."""

    @property
    def risk(self) -> RiskEstimate:
        """The mean training loss, corrected by what the examples lose without themselves."""
        n, m = len(self.training_losses), len(self.examples)
        if self.control is not None:
            return self._checked(self.control)[0]
        training = self.training_losses.mean().item()
        value = training + (self.losses - self.own_losses).mean().item()
        at_end = training + (self.end_losses - self.own_losses).mean().item()
        apart = (self.half_losses - self.losses).nanmean().item()
        half = value if math.isnan(apart) and not bool(self.half_losses.isinf().any()) else value + apart
        error = corrected_risk_error(self.training_losses, self.own_losses, self.losses, self.mistake)
        error *= math.sqrt(n / self.distinct)
        about = ("leverage", trained_on(n - 1, n), training, self.cost, min(m, self.distinct), n, (), self.first_loss)
        return judge_leverage(
            Found(value, error, *about),
            at_end,
            half,
            self.distinct,
            gated=self.gated,
            unfollowed=self._without_deletions,
        )

    @property
    def _without_deletions(self) -> str:
        """Why there is no verdict without real deletions; empty if there is one."""
        what, why = self.unfollowed, self.obstacle or "use controls=16, or retrain_budget=10"
        return f"leverage does not follow {what}, and no deletion was trained to check it: {why}" if what else ""

    def enough(self) -> bool:
        """Whether more controls would not make the risk much more certain."""
        return self.control is not None and self._checked(self.control)[1]

    def _checked(self, control: Control) -> tuple[RiskEstimate, bool]:
        """The risk with the mean of the predictions corrected by real deletions."""
        n, m, training = len(self.training_losses), len(self.examples), self.training_losses.mean().item()
        losses = self.training_losses, self.own_losses, self.losses
        value, error, uncertain, _ = controlled_risk(*losses, control, self.mistake)
        copies = math.sqrt(n / self.distinct)
        change = value - training - (losses[2] - losses[1]).mean().item()
        checked = Checked(len(control.rows), change, uncertain * copies, 0.0, self.distinct)
        about = ("leverage", trained_on(n - 1, n), training, self.cost, min(m, self.distinct), n, control.notes)
        found = Found(value, copies * math.hypot(error, uncertain), *about, self.first_loss)
        return judge_controlled(found, checked), enough_controls(value, error, uncertain)


def leverage(
    run: Run, steps: Sequence[int], examples: int | Int[Tensor, "m"] | None = None, *, seed: int = 0
) -> list[Leverage]:
    """Predictions without each of some examples, before these steps of a run.

    Args:
        run: A recorded run with its problem; any module that maps each example by itself in evaluation mode.
        steps: The steps, in ascending order; of a run without all steps, the checkpoints nearest to them are used.
        examples: Indices of the examples, or a number of them to draw at random; default: as many as a kernel of 1000
            outputs allows.
        seed: Seed for the random draw.

    Raises:
        RunError: the run has no steps, its problem is not known, or it has more than 100 outputs for each example.
        DataError: an example that does not exist, or a loss without derivatives.
    """
    if not run.num_steps:
        raise RunError("the run has no steps: record at least one")
    trained, groups = _trained(run), duplicate_groups(run.problem.inputs)
    chosen, together = _choose(run, trained, excluded_together(groups), examples, seed)
    moments, wanted = choose_steps(run, steps)
    tangents = Tangents(run, chosen, seed)
    with Progress("leverage", len(moments) * tangents.units, shown=None, patient=True) as progress:
        read = [tangents.at(k, progress.advance) for k in moments]
    distinct = len(groups[trained].unique())
    found, halves = _follow(run, tangents, read, len(trained), together), None
    if len(chosen) < len(trained):
        half = len(chosen) // 2
        while half > 1 and together[half] == together[half - 1]:
            half -= 1
        some = [_first(t, half) for t in read]
        halves = _follow(run, Tangents(run, chosen[:half], seed), some, len(trained), together[:half])
    return [
        _reading(run, tangents, trained, read[i], found[i - 1], None if halves is None else halves[i - 1][0], distinct)
        for i in (moments.index(k) for k in wanted)
    ]


def leverage_work(run: Run) -> float:
    """Number of multiplications for one step of a run, without controls."""
    most, width = _most_examples(run)
    rows = min(most, run.num_examples) * width
    return 4.0 * _MOMENTS * rows * (rows**2 + run.num_weights)


def leverage_of_all(run: Run, *, seed: int = 0) -> Leverage:
    """The predictions at the end of a run without each of its training examples, in blocks of examples.

    Raises:
        RunError, DataError: as for :func:`leverage`.
    """
    trained, most = _trained(run), _most_examples(run)[0]
    left = trained[shuffled(len(trained), seed, "examples")]
    size, parts = -(-len(left) // -(-len(left) // most)), []
    while len(left):  # each part takes the copies of its examples along
        parts.append(leverage(run, [run.num_steps], left[:size], seed=seed)[0])
        left = left[~torch.isin(left, parts[-1].examples)]
    names = ("examples", "outputs", "excluded_outputs", "losses", "end_losses", "half_losses", "own_losses")
    place = torch.cat([part.examples for part in parts]).argsort()
    joined = {name: torch.cat([getattr(part, name) for part in parts])[place] for name in names}
    return replace(parts[0], **joined, cost=sum(part.cost for part in parts))


def choose_steps(run: Run, steps: Sequence[int]) -> tuple[list[int], list[int]]:
    """The moments at which to take kernels, from 0 on, and among them those that stand for these steps."""
    kept = list(range(run.num_steps + 1)) if run.is_dense else run.checkpoints
    wanted = [min(kept[1:], key=lambda k, t=t: abs(k - t)) for t in steps]
    last = wanted[-1]
    spaced = {min(kept, key=lambda k, j=j: abs(k - last ** (j / (_MOMENTS - 1)))) for j in range(_MOMENTS)}
    return sorted({0, *wanted, *(k for k in spaced if k <= last)}), wanted


def _reading(
    run: Run,
    tangents: Tangents,
    trained: Tensor,
    moment: Tangent,
    change: tuple[Tensor, Tensor],
    half: Tensor | None,
    distinct: int,
) -> Leverage:
    loss, targets = resolve_loss(run.problem.loss), tangents.targets.cpu()
    every = run.problem.batch(dtype=moment.losses_at.dtype)[1].cpu()
    own = moment.losses_at[tangents.examples]
    moved = [own + each.reshape(own.shape) for each in change]
    halved = torch.full((len(own),), math.nan, dtype=torch.float64)
    if half is not None:
        part = own[: len(half)] + half.reshape(own[: len(half)].shape)
        halved[: len(half)] = example_losses_of(loss, part, targets[: len(half)])
    return Leverage(
        examples=tangents.examples,
        step=moment.step,
        outputs=own,
        excluded_outputs=moved[0],
        losses=example_losses_of(loss, moved[0], targets),
        end_losses=example_losses_of(loss, moved[1], targets),
        half_losses=halved,
        own_losses=example_losses_of(loss, own, targets),
        training_losses=example_losses_of(loss, moment.losses_at[trained], every[trained]),
        mistake=unseen_mistake(loss, moved[0], targets, len(trained)),
        distinct=distinct,
        first_loss=float(run.losses[0]),
        cost=float(moment.outputs.numel()),
        gated=gate_closes(run),
        unfollowed="augmented inputs" if run.augmented else _SHUT if gate_shuts(run) else "",
    )


def _follow(run: Run, tangents: Tangents, read: list[Tangent], n: int, together: Tensor) -> list[tuple[Tensor, Tensor]]:
    shape = tangents.network_shape(read[0].outputs.shape[1])
    return list(Absence(run.problem.loss, tangents.targets.cpu(), shape, n, together).along(read))


def _first(moment: Tangent, half: int) -> Tangent:
    """The same with the first examples only."""
    rows = half * moment.outputs.shape[1]
    return replace(moment, outputs=moment.outputs[:half], kernel=moment.kernel[:rows, :rows])


def _trained(run: Run) -> Int[Tensor, "n"]:
    """The examples that were not held back."""
    return run.trained.nonzero().squeeze(1)


def _choose(
    run: Run, trained: Tensor, groups: Tensor, examples: int | Tensor | None, seed: int
) -> tuple[Int[Tensor, "m"], Int[Tensor, "m"]]:
    """Examples in whole groups, one group after the other, and the group of each, numbered in this order."""
    count = min(_most_examples(run)[0], len(trained))
    if isinstance(examples, Tensor):
        named = torch.isin(trained, choose_examples(run.num_examples, examples, seed))
        trained = trained[torch.isin(groups[trained], groups[trained[named]])]
    else:
        count = len(choose_examples(len(trained), min(count, examples or count), seed))
    every, group = groups[trained].unique(return_inverse=True)
    place = torch.arange(len(every))
    if count < len(trained):
        place[shuffled(len(every), seed, "examples")] = torch.arange(len(every))
    order = place[group].argsort(stable=True)
    chosen, together = trained[order], place[group][order]
    cut = min(count, len(chosen))
    while 1 < cut < len(chosen) and together[cut] == together[cut - 1]:
        cut -= 1
    return chosen[:cut], together[:cut]


def _most_examples(run: Run) -> tuple[int, int]:
    """The number of examples whose kernel is used at a time, and the number of outputs of each."""
    first, dtype = run.problem.batch(torch.tensor([0]))[0], run.layout.dtype
    parts = [x.to(dtype) if x.is_floating_point() else x for x in (first if isinstance(first, tuple) else (first,))]
    with torch.no_grad():
        width = run.module().eval()(*parts)[0].numel()
    most = MOST_ROWS // max(1, width)
    if most < FEWEST_EXAMPLES:
        limit = MOST_ROWS // FEWEST_EXAMPLES
        raise RunError(f"leverage needs at most {limit} outputs for each example, got {width}: use retrain_budget=10")
    return most, width
