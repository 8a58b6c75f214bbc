r"""From an optimizer's state just after its step to the pieces of :class:`~poprisk.runs.AffineStep`, as flat vectors.

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

SGD's κ is 1 at a parameter's first step, whatever the dampening. With ``amsgrad`` v̂ is the running maximum. All of
torch's implementations (for-loop, foreach, fused) have the same linearization up to rounding.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from poprisk._core.types import Linearization
from poprisk.errors import RunError
from poprisk.optim import PopRiskAdamW, adam_options, linearize_adam, linearize_sgd, sgd_options
from poprisk.runs._layout import Layout
from poprisk.runs._step import PerWeight

OPTIMIZERS: dict[str, type[Optimizer]] = {
    "torch.optim.SGD": SGD,
    "torch.optim.Adam": Adam,
    "torch.optim.AdamW": AdamW,
    "poprisk.PopRiskAdamW": PopRiskAdamW,
}
COLUMNS = ("scale", "momentum", "new_gradient", "buffer_share", "direct_share", "decay", "coupled_decay")
"""Numbers kept for each parameter group; ``scale`` is M if M is one number, otherwise NaN."""
BUFFERS = ("momentum_buffer", "exp_avg")


def optimizer_name(optimizer: Optimizer) -> str:
    """Name of the optimizer in a run's manifest.

    Raises:
        RunError: the linearization of the optimizer, or of one of its options, is not known.

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
                    f"{name} with {option}=True cannot be recorded: use {option}=False (minimize the negative loss)"
                )
        if group.get("signal", "ema") != "ema":
            raise RunError(f'{name} with signal={group["signal"]!r} has no linearization: use signal="ema"')
    return name


def affine_map(layout: Layout, linear: Mapping[str, Tensor]) -> dict[str, PerWeight]:
    """The fields of :class:`~poprisk.runs.AffineStep` that depend on the optimizer, from the linearization on disk."""
    table = linear["coefficients"]
    values = {name: layout.spread(table[:, i].tolist()) for i, name in enumerate(COLUMNS)}
    vectors = {name: linear[name] for name in ("preconditioner", "decay") if name in linear}
    return {"preconditioner": values.pop("scale"), **values, **vectors}


class Linearizer:
    """Computes the linearization of each of an optimizer's steps.

    Args:
        optimizer: One of ``OPTIMIZERS``.
        layout: Layout of the flat weights.
        parameters: Parameters in the layout's order.

    >>> from poprisk.runs._layout import layout_of
    >>> model = torch.nn.Linear(1, 1)
    >>> optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    >>> linearizer = Linearizer(optimizer, *layout_of(model, optimizer))
    >>> for _ in range(2):
    ...     model(torch.ones(1, 1)).sum().backward()
    ...     linearizer.before()
    ...     optimizer.step()
    ...     print(linearizer.after()["coefficients"][0, 2].item())  # κ
    1.0
    0.5
    """

    def __init__(self, optimizer: Optimizer, layout: Layout, parameters: Sequence[Tensor]) -> None:
        self.name = optimizer_name(optimizer)
        self.optimizer, self.layout, self.parameters = optimizer, layout, parameters
        self._is_sgd = self.name == "torch.optim.SGD"  # then M is one number per group
        self._fresh: list[bool] = []

    def before_a_sparse_step(self) -> None:
        """Like :meth:`before` if :meth:`after` will not be called: only checks that all gradients exist."""
        if any(p.grad is None for p in self.parameters):
            self.before()

    def before(self) -> None:
        """Call it when gradients are ready: checks that the step can be linearized, and notes which are first steps.

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
            raise RunError("the optimizer's parameter groups changed during the run: start another recording")
        if not self._is_sgd:
            return
        self._fresh = []
        for group in groups:
            fresh = {self.optimizer.state[p].get("momentum_buffer") is None for p in group["params"]}
            if group["momentum"] != 0 and len(fresh) > 1:
                raise RunError(
                    "some parameters of a group have a momentum buffer and others do not: start with a new optimizer"
                )
            self._fresh.append(True in fresh)

    def after(self) -> dict[str, Tensor]:
        """The linearization of the step just taken, as kept on disk; ``before()`` must be called before the step.

        Returns:
            ``coefficients`` [groups, 7], a row of ``COLUMNS`` for each parameter group; and the flat vectors
            ``preconditioner`` (Adam and its relatives), ``decay`` (if gated) and ``buffer`` (with momentum).
        """
        with torch.no_grad():
            lins = self._linearizations()
            firsts = [group["params"][0] if group["params"] else None for group in self.optimizer.param_groups]
            rows = [[0.0] * len(COLUMNS) if p is None else self._row(lins[p], p) for p in firsts]
            table = torch.tensor(rows, dtype=torch.float64)
            vectors = {"decay": self._spread("decay", lins), "buffer": self._buffer()}
            if not self._is_sgd:
                vectors["preconditioner"] = self._spread("preconditioner", lins)
        return {"coefficients": table, **{name: x for name, x in vectors.items() if x is not None}}

    def ungated(self) -> Tensor | None:
        """The preconditioner of the step just taken with an open gate; None for optimizers without a gate."""
        if not isinstance(self.optimizer, PopRiskAdamW):
            return None
        with torch.no_grad():
            return self._spread("preconditioner", self.optimizer.linearize(gated=False))

    def _linearizations(self) -> dict[Tensor, Linearization]:
        """Each parameter's step."""
        if isinstance(self.optimizer, PopRiskAdamW):
            return self.optimizer.linearize()
        found = {}
        for g, group in enumerate(self.optimizer.param_groups):
            if self._is_sgd:
                found |= dict.fromkeys(group["params"], linearize_sgd(**sgd_options(group), first=self._fresh[g]))
                continue
            options, second = adam_options(group), "max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"
            for p in group["params"]:
                state = self.optimizer.state[p]
                found[p] = linearize_adam(state[second], float(state["step"]), **options)
        return found

    def _row(self, lin: Linearization, p: Tensor) -> list[float]:
        """The numbers of ``COLUMNS``, NaN if they are kept as a vector."""
        scale = float(lin.preconditioner) if self._is_sgd else math.nan
        decay = math.nan if _has_entries(lin.decay, p) else float(lin.decay)
        return [scale, lin.momentum, lin.kappa, lin.buffer_share, lin.direct_share, decay, lin.coupled_decay]

    def _spread(self, name: str, lins: Mapping[Tensor, Linearization]) -> Tensor | None:
        """One value for each weight; None if there is one number per group."""
        values = [(getattr(lins[p], name), p) for p in self.parameters]
        if not any(_has_entries(value, p) for value, p in values):
            return None
        wide = self.layout.dtype
        return self.layout.flatten([torch.as_tensor(x, device=p.device, dtype=wide).expand_as(p) for x, p in values])

    def _buffer(self) -> Tensor | None:
        states: list[Mapping[str, Any]] = [self.optimizer.state[p] for p in self.parameters]
        return flat_buffer(self.layout, states, self.parameters)


def flat_buffer(
    layout: Layout, states: Sequence[Mapping[str, Any]], parameters: Sequence[Tensor]
) -> Float[Tensor, "d"] | None:
    """The momentum buffers as one vector, zero for parameters without one; None if no parameter has one."""
    found = [next((s[key] for key in BUFFERS if s.get(key) is not None), None) for s in states]
    if all(buffer is None for buffer in found):
        return None
    pairs = zip(found, parameters, strict=True)
    return layout.flatten([torch.zeros_like(p) if buffer is None else buffer for buffer, p in pairs])


def unexplained(
    layout: Layout,
    linear: Mapping[str, Tensor],
    gradient: Float[Tensor, "d"],
    before: Float[Tensor, "d"],
    after: Float[Tensor, "d"],
    parameters: Sequence[Tensor],
    ungated: Callable[[], Tensor | None] = lambda: None,
) -> Float[Tensor, "d"] | None:
    """The change of the weights that the step's affine map does not explain; None if it is within rounding.

    A gate is a difference of numbers of size one, so that what is nearly closed is known to the rounding of those:
    ``ungated`` computes the preconditioner with an open gate, and is asked where a difference is larger.
    """
    values = {k: x.to(before) if isinstance(x, Tensor) else x for k, x in affine_map(layout, linear).items()}
    driven = gradient + values["coupled_decay"] * before
    without_momentum = torch.as_tensor(values["momentum"], device=before.device) == 0
    v = torch.where(without_momentum, driven, linear["buffer"]) if "buffer" in linear else driven
    push = values["preconditioner"] * (values["buffer_share"] * v + values["direct_share"] * driven)
    rest = (after - before) + push + values["decay"] * before
    eps = max(torch.finfo(p.dtype).eps for p in parameters)
    rounding = 64 * eps * (before.abs() + after.abs() + push.abs()) + torch.finfo(before.dtype).tiny
    if bool((rest.abs() > rounding).any()) and (M := ungated()) is not None:
        rounding += 64 * eps * (M.to(before) * v).abs()
    return rest if bool((rest.abs() > rounding).any()) else None


def _has_entries(value: Any, p: Tensor) -> bool:
    """Whether there is a value for each entry of a parameter instead of one number."""
    return isinstance(value, Tensor) and value.shape == p.shape
