"""The simplest backend: the pure rule, parameter by parameter. Differentiable, capturable, the others' oracle."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from poprisk.optim._updates import SCALE, GroupUpdate, ParamUpdate, real, rule_state, set_counts
from poprisk.optim.rules._population import PopulationState, is_usable, population_step


def step(update: GroupUpdate) -> None:
    """One step for each parameter of the group."""
    for param in update.params:
        step_one(update, param)


def step_one(update: GroupUpdate, param: ParamUpdate) -> None:
    """One step of :func:`poprisk.optim.rules.population_step`, written back into the parameter and its state."""
    w, g = real(param.local), real(param.grad)
    if update.group["maximize"]:
        g = -g
    if update.grad_scale is not None:
        g = g / update.grad_scale.to(g.device)
    variance = None if param.variance is None else real(param.variance)
    old = rule_state(param, update.hyper)
    w_new, new = population_step(w, g, old, update.hyper, variance)
    if update.found_inf is not None:
        w_new, new = _unless(update.found_inf.to(w.device), (w, old), (w_new, new))
    if update.hyper.skip_nonfinite and update.hyper.gate is not None:
        left_out = (~is_usable(g)).sum()
        if update.found_inf is not None:  # then the whole step was left out, and the scaler knows
            left_out = left_out * (update.found_inf.to(w.device) == 0)
        update.left_out.add_(left_out.to(update.left_out.device))
    w.copy_(w_new)
    _write(update, param, new)


def _write(update: GroupUpdate, param: ParamUpdate, new: PopulationState) -> None:
    """Into the tensors that are there, or beside them where a graph must survive (``differentiable``)."""
    moments = {"exp_avg": new.m, "exp_avg_sq": new.v, "exp_var": new.s, SCALE: new.scale}
    for name, value in moments.items():
        if value is None:
            continue
        if update.group["differentiable"]:
            param.state[name] = torch.view_as_complex(value) if param.state[name].is_complex() else value
        else:
            real(param.state[name]).copy_(value)
    set_counts(param.state, new.step, new.var_step, new.gain)


def _unless(
    found_inf: Tensor, old: tuple[Tensor, PopulationState], new: tuple[Tensor, PopulationState]
) -> tuple[Tensor, PopulationState]:
    """The old weights and state where the gradient scaler found an overflow, without asking the device."""
    skip = found_inf.reshape(()) > 0

    def pick(before: Any, after: Any) -> Any:
        if before is None:
            return after
        # Numbers are filled in and not copied from the host, which would wait.
        like = after if isinstance(after, Tensor) else torch.full((), after, dtype=torch.float64, device=skip.device)
        kept = before.to(like) if isinstance(before, Tensor) else torch.full_like(like, before)
        return torch.where(skip, kept, like)

    names = ("m", "v", "s", "scale", "step", "var_step", "gain")
    fields: dict[str, Any] = {name: pick(getattr(old[1], name), getattr(new[1], name)) for name in names}
    return pick(old[0], new[0]), replace(new[1], **fields)
