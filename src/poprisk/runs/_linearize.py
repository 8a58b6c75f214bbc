r"""From an optimizer's state just after its step to the pieces of :class:`~poprisk.runs.Step`, as flat vectors.

===================== ================================ ========== ===== ===== =========== =========
optimizer             M                                κ          a     b     λ           λᶜ
===================== ================================ ========== ===== ===== =========== =========
SGD                   lr                               1          1     0     0           decay
SGD, momentum μ       lr                               1 - damp.  1     0     0           decay
SGD, Nesterov         lr                               1          μ     1     0           decay
Adam                  lr / ((1-β1ᵗ)(√v̂ + ε))           1 - β1     1     0     0           decay
AdamW                 the same                         1 - β1     1     0     lr decay    0
PopRiskAdamW          the same times the gate q        1 - β1     1     0     lr decay    0
===================== ================================ ========== ===== ===== =========== =========

SGD's κ is 1 at a parameter's first step, whatever the dampening. With ``amsgrad`` v̂ is the running maximum. Every way
torch carries out a step (for-loop, foreach, fused) has the same linearization to rounding.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from poprisk._core.types import Linearization
from poprisk.errors import RunError
from poprisk.optim import PopRiskAdamW
from poprisk.runs._layout import Layout
from poprisk.runs._step import PerWeight

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "torch.optim.SGD": SGD,
    "torch.optim.Adam": Adam,
    "torch.optim.AdamW": AdamW,
    "poprisk.PopRiskAdamW": PopRiskAdamW,
}
COLUMNS = ("scale", "momentum", "new_gradient", "buffer_share", "direct_share", "decay", "coupled_decay")
"""Numbers that each parameter group has of its own; ``scale`` is M where M is one number, else NaN."""
BUFFERS = ("momentum_buffer", "exp_avg")


@dataclass(frozen=True)
class LinearizedStep:
    """One step as an affine map; vectors are None where the group's number says it all."""

    coefficients: Float[Tensor, "groups 7"]
    """One row of ``COLUMNS`` for each parameter group."""
    preconditioner: Float[Tensor, "d"] | None
    """M, for rules of Adam's kind."""
    decay: Float[Tensor, "d"] | None
    """λ, where it is gated."""
    buffer: Float[Tensor, "d"] | None
    """v after the step; None if no group has momentum."""


def optimizer_name(optimizer: Optimizer) -> str:
    """The name under which a run keeps its optimizer.

    Raises:
        RunError: a rule whose linearization is not known, by name, or an option that has none.

    >>> optimizer_name(SGD([torch.zeros(1, requires_grad=True)]))
    'torch.optim.SGD'
    """
    name = next((name for name, kind in OPTIMIZERS.items() if type(optimizer) is kind), None)
    if name is None:
        raise RunError(
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__} cannot be recorded: its steps have no known "
            f"linearization; use one of {', '.join(OPTIMIZERS)}"
        )
    for group in optimizer.param_groups:
        for option in ("maximize", "differentiable"):
            if group.get(option):
                raise RunError(
                    f"{name} with {option}=True cannot be recorded: a run descends; minimize the negative loss"
                )
        if group.get("signal", "ema") != "ema":
            raise RunError(f'{name} with signal={group["signal"]!r} has no linearization: use signal="ema"')
    return name


def spread_coefficients(layout: Layout, coefficients: Float[Tensor, "groups 7"]) -> dict[str, PerWeight]:
    """The numbers of each group as numbers of each weight, by the names of ``COLUMNS``."""
    return {name: layout.spread(coefficients[:, i].tolist()) for i, name in enumerate(COLUMNS)}


class Linearizer:
    """Looks at an optimizer before and after its step.

    Args:
        optimizer: One of ``OPTIMIZERS``.
        layout: Where its parameters lie.
        parameters: In the layout's order.

    >>> from poprisk.runs._layout import layout_of
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    >>> linearizer = Linearizer(optimizer, *layout_of(model, optimizer))
    >>> for _ in range(2):
    ...     model(torch.ones(1, 1)).sum().backward()
    ...     linearizer.before()
    ...     optimizer.step()
    ...     print(linearizer.after().coefficients[0, 2].item())  # κ
    1.0
    0.5
    """

    def __init__(self, optimizer: Optimizer, layout: Layout, parameters: Sequence[Tensor]) -> None:
        self.name = optimizer_name(optimizer)
        self.optimizer, self.layout, self.parameters = optimizer, layout, parameters
        self._fresh: list[bool] = []

    def before_a_sparse_step(self) -> None:
        """The same as :meth:`before` where nobody will ask for :meth:`after`: the least that must be looked at."""
        if any(p.grad is None for p in self.parameters):
            self.before()

    def before(self) -> None:
        """To be called when gradients are ready: refuses what has no linearization, and sees who takes a first step.

        Raises:
            RunError: a parameter has no gradient or a sparse one, or the groups have changed.
        """
        for name, p in zip(self.layout.names, self.parameters, strict=True):
            if p.grad is None:
                raise RunError(
                    f"parameter {name!r} has no gradient: use it in the loss, or freeze it with requires_grad_(False)"
                )
            if p.grad.layout is not torch.strided:
                raise RunError(f"parameter {name!r} has a sparse gradient, which cannot be recorded: use sparse=False")
        groups = self.optimizer.param_groups
        if sum(len(g["params"]) for g in groups) != len(self.parameters):
            raise RunError("the optimizer's parameter groups have changed during the run: start another recording")
        if self.name != "torch.optim.SGD":
            return
        self._fresh = []
        for group in groups:
            fresh = {self.optimizer.state[p].get("momentum_buffer") is None for p in group["params"]}
            if group["momentum"] != 0 and len(fresh) > 1:
                raise RunError("some parameters of a group have a momentum buffer and others none: start afresh")
            self._fresh.append(True in fresh)

    def after(self) -> LinearizedStep:
        """The step just taken. ``before()`` must have been called before it."""
        with torch.no_grad():
            if self.name == "torch.optim.SGD":
                return self._sgd()
            return self._gated() if isinstance(self.optimizer, PopRiskAdamW) else self._adam()

    def _sgd(self) -> LinearizedStep:
        rows = []
        for group, fresh in zip(self.optimizer.param_groups, self._fresh, strict=True):
            momentum = float(group["momentum"])
            kappa = 1.0 if fresh or momentum == 0 else 1 - float(group["dampening"])
            shares = (momentum, 1.0) if group["nesterov"] else (1.0, 0.0)
            rows.append([float(group["lr"]), momentum, kappa, *shares, 0.0, float(group["weight_decay"])])
        return LinearizedStep(_table(rows), None, None, self._buffer())

    def _adam(self) -> LinearizedStep:
        rows, scale = [], {}
        for group in self.optimizer.param_groups:
            lr, decay = float(group["lr"]), float(group["weight_decay"])
            beta1 = float(group["betas"][0])
            decoupled, coupled = (lr * decay, 0.0) if group["decoupled_weight_decay"] else (0.0, decay)
            rows.append([math.nan, beta1, 1 - beta1, 1.0, 0.0, decoupled, coupled])
            for p in group["params"]:
                scale[id(p)] = _adam_preconditioner(self.optimizer.state[p], group, lr)
        M = self.layout.flatten([scale[id(p)] for p in self.parameters])
        return LinearizedStep(_table(rows), M, None, self._buffer())

    def _gated(self) -> LinearizedStep:
        assert isinstance(self.optimizer, PopRiskAdamW)
        lins = self.optimizer.linearize()
        rows, gated_decay = [], False
        for group in self.optimizer.param_groups:
            lin = lins[group["params"][0]]
            decay = math.nan if group["gated_decay"] else float(lin.decay)
            gated_decay |= math.isnan(decay)
            rows.append([math.nan, lin.momentum, 1 - lin.momentum, 1.0, 0.0, decay, 0.0])
        M = self.layout.flatten([lins[p].preconditioner for p in self.parameters])
        return LinearizedStep(_table(rows), M, self._decay(lins) if gated_decay else None, self._buffer())

    def _decay(self, lins: Mapping[Tensor, Linearization]) -> Tensor:
        wide = {"dtype": self.layout.dtype}
        decays = [torch.as_tensor(lins[p].decay, device=p.device, **wide).expand_as(p) for p in self.parameters]
        return self.layout.flatten(decays)

    def _buffer(self) -> Tensor | None:
        states: list[Mapping[str, Any]] = [self.optimizer.state[p] for p in self.parameters]
        return flat_buffer(self.layout, states, self.parameters)


def flat_buffer(
    layout: Layout, states: Sequence[Mapping[str, Any]], parameters: Sequence[Tensor]
) -> Float[Tensor, "d"] | None:
    """The momentum buffers as one vector, zero where there is none yet; None if there is none at all."""
    found = [next((s[key] for key in BUFFERS if s.get(key) is not None), None) for s in states]
    if all(buffer is None for buffer in found):
        return None
    pairs = zip(found, parameters, strict=True)
    return layout.flatten([torch.zeros_like(p) if buffer is None else buffer for buffer, p in pairs])


def _table(rows: list[list[float]]) -> Float[Tensor, "groups 7"]:
    return torch.tensor(rows, dtype=torch.float64)


def _adam_preconditioner(state: Mapping[str, Any], group: Mapping[str, Any], lr: float) -> Tensor:
    t = float(state["step"])
    beta1, beta2 = (float(beta) for beta in group["betas"])
    second = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
    return (lr / (1 - beta1**t)) / (second.sqrt() / math.sqrt(1 - beta2**t) + group["eps"])
