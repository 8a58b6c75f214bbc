"""How far the optimizer moves each weight for a unit of gradient, at a recorded step."""

from dataclasses import dataclass
from functools import reduce

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.runs import AffineStep, PerWeight, Run

_STATE = "checkpoint.state.exp_avg_sq."
_NEAR, _STEPS = 1.5, 16
"""Steps up to this factor before and after, and how many of them, among which a literal gate opens for a weight."""


@dataclass(frozen=True)
class Pace:
    """What one step does with a gradient that stays the same, and with no gradient."""

    move: Float[Tensor, "d"]
    """Movement of each weight against a unit of its gradient, momentum summed up."""
    decay: float
    """Share of the weights that weight decay removes in a step, averaged over them."""
    inertia: float
    """Number of steps by which momentum β delays a movement, β/(1 - β), averaged over the weights."""
    lr: Float[Tensor, "d"] | None
    """Learning rates of an optimizer that divides by the root of squared gradients; None for SGD."""


def pace_at(run: Run, k: int) -> Pace:
    """The pace just before step k, or at the last step: as recorded, or from the checkpoint's optimizer state."""
    name, last = run.manifest["optimizer"]["name"], max(min(k, run.num_steps - 1), 0)
    groups = run.options(k)
    lr = None if name == "torch.optim.SGD" else _wide(run, [float(group["lr"]) for group in groups])
    factor = float(run.recorded(last).selection(last).double().sum()) / run.num_examples
    if run.is_dense:
        step = run.step(last)
        near = _near(last, run.num_steps) if any(g.get("gate") and not g["normalize_gate"] for g in groups) else [last]
        moves = (_wide(run, each.preconditioner) * _scale(each) for each in map(run.step, near))
        move = reduce(torch.maximum, moves)
        decay = torch.as_tensor(step.decay).mean() + (torch.as_tensor(step.coupled_decay) * move).mean()
        return Pace(move * factor, float(decay), _inertia(groups), lr)
    move = _from_checkpoint(run, k, groups)
    rates = lr if name in ("torch.optim.AdamW", "poprisk.PopRiskAdamW") and lr is not None else move
    decay = (_wide(run, [float(group.get("weight_decay", 0.0)) for group in groups]) * rates).mean()
    return Pace(move * factor, float(decay), _inertia(groups), lr)


def gate_closes(run: Run) -> bool:
    """Whether the run has a gate that stops single weights for some steps: a hard or a literal one."""
    return any(g.get("gate") and (g["gate"] == "hard" or not g["normalize_gate"]) for g in run.options(0))


def gate_shuts(run: Run) -> bool:
    """Whether the run has a gate that leaves most weights where they are: one that is hard and literal."""
    return any(g.get("gate") == "hard" and not g["normalize_gate"] for g in run.options(0))


def _scale(step: AffineStep) -> PerWeight:
    """What a gradient that stays the same adds to the momentum that moves the weights."""
    return step.buffer_share * step.new_gradient / (1 - torch.as_tensor(step.momentum)) + step.direct_share


def _near(k: int, steps: int) -> list[int]:
    """Steps about step k: a gate that is closed there may let the missing gradient through soon."""
    first, last = int(k / _NEAR), min(steps - 1, max(int(k * _NEAR), k + 1))
    return sorted({first + (last - first) * j // (_STEPS - 1) for j in range(_STEPS)})


def _inertia(groups: list[dict]) -> float:
    betas = [float(g["betas"][0]) if "betas" in g else float(g.get("momentum", 0.0)) for g in groups]
    return sum(beta / (1 - beta) for beta in betas) / len(betas)


def _from_checkpoint(run: Run, k: int, groups: list[dict]) -> Float[Tensor, "d"]:
    """The learning rate, divided by the roots of squared gradients or by what momentum leaves of a gradient."""
    lr = _wide(run, [float(group["lr"]) for group in groups])
    if "betas" not in groups[0]:
        kept = [(1 - g.get("dampening", 0.0)) / (1 - g.get("momentum", 0.0)) for g in groups]
        return lr * _wide(run, kept)
    state, pieces = run.checkpoint(k), run.layout.split(torch.zeros(run.num_weights))
    names = zip(run.layout.names, pieces, strict=True)
    squares = torch.cat([state.get(_STATE + name, piece).reshape(-1).float() for name, piece in names])
    started = lr / (1 - _wide(run, [float(group["betas"][0]) ** (k + 1) for group in groups]))
    unbiased = 1 - _wide(run, [float(group["betas"][1]) ** max(k, 1) for group in groups])
    return started / ((squares / unbiased).sqrt() + _wide(run, [float(group["eps"]) for group in groups]))


def _wide(run: Run, values: list[float] | float | Tensor) -> Float[Tensor, "d"]:
    found = run.layout.spread(values) if isinstance(values, list) else values
    return torch.as_tensor(found, dtype=torch.float32).expand(run.num_weights)
