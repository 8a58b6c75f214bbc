"""State of the gate in each parameter group, as device scalars: nothing waits for the device until a number is read."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from poprisk.optim._shards import Shard, coordinates
from poprisk.optim._updates import GroupUpdate, ParamUpdate, real, rule_state, was_stepped
from poprisk.optim.rules._coefficients import Hyper, at_least, current
from poprisk.optim.rules._population import PopulationState, current_gate, debiased_variance, linearize, population_step
from poprisk.optim.rules._threshold import deviation_noise, mean_noise


@dataclass(frozen=True)
class GateDiagnostics:
    """Meters of a parameter group, or of all; every field is a 0-dim tensor on the group's device.

    With ``signal="batch"`` the gate shown is that of the averaged signal, because the gate of the batch is not kept.
    """

    active_fraction: Tensor
    """Share of coordinates whose gate was not closed in the last step."""
    mean_gate: Tensor
    """Mean of what multiplied AdamW's step in the last step: q, or for a normalized gate q̃ (:class:`poprisk.Gate`)."""
    noise_scale: Tensor
    """Gradient noise scale in batches, ``tr Cov(g_B) / |E g|²``, both debiased; times the batch size it is B_simple in
    examples. Infinite if no signal can be distinguished from the noise."""
    population_rate: Tensor
    """Decrease of the loss per step that the *previous* step's direction gives on the *current* batch, to first order.
    The direction was chosen before this batch was seen, so on fresh data this estimates the population-risk rate
    without optimism. NaN without fresh gradients."""
    training_rate: Tensor
    """The same for the direction the coming step will take, scored on the batch that helps to choose it."""
    self_fit: Tensor
    """Share of the training rate that does not reduce population risk, 1 - population_rate / training_rate."""

    def to_floats(self) -> dict[str, float]:
        """All meters as Python numbers; this waits for the device."""
        values = torch.stack([getattr(self, f.name).double() for f in fields(self)]).tolist()
        return {f.name: v for f, v in zip(fields(self), values, strict=True)}


@dataclass(frozen=True)
class Sums:
    """Sums over coordinates from which the meters are computed; those of several groups can be added."""

    total: Tensor
    """Open gates, gates, noise power, signal power, and the two rates."""
    coordinates: int
    fresh: bool
    gated: bool


def gate_sums(update: GroupUpdate, fresh: bool) -> Sums:
    """The sums of one group from its state and, where ``fresh``, its gradients, which have not been used yet."""
    params = [w for w in update.params if was_stepped(w, update.hyper)]
    device = update.params[0].local.device if update.params else torch.device("cpu")
    total = torch.zeros(6, dtype=torch.float64, device=device)
    spread: dict[Any, tuple[Shard, Tensor]] = {}
    for param in params:
        sums = _sums(param, update, fresh).to(device)  # a group may lie on several devices
        if param.shard is None:
            total += sums
        else:  # parameters split alike are summed over the processes at once
            cut = (param.shard.mesh, param.shard.mesh_axes)
            spread.setdefault(cut, (param.shard, torch.zeros_like(total)))[1].add_(sums)
    for shard, sums in spread.values():
        shard.add_up(sums, shard.mesh_axes)
        total += sums
    count = sum(coordinates(w.parameter) for w in params)
    return Sums(total, count, fresh and bool(params), update.hyper.gate is not None)


def over_all(groups: Sequence[Sums]) -> Sums:
    """Several groups as one: the rates of all add up; gate and noise are those of the groups that have a gate."""
    heard = [s for s in groups if s.gated] or list(groups)
    device = groups[0].total.device
    gate = torch.stack([s.total[:4].to(device) for s in heard]).sum(0)
    rates = torch.stack([s.total[4:].to(device) for s in groups]).sum(0)
    return Sums(
        total=torch.cat([gate, rates]),
        coordinates=sum(s.coordinates for s in heard),
        fresh=any(s.fresh for s in groups),
        gated=any(s.gated for s in groups),
    )


def meters(sums: Sums) -> GateDiagnostics:
    """The meters that belong to these sums."""
    active, gate, noise, signal, population, training = sums.total.unbind()
    count = max(1, sums.coordinates)
    signal = signal.clamp(min=0)
    nothing = torch.full_like(active, float("nan"))
    return GateDiagnostics(
        active_fraction=active / count,
        mean_gate=gate / count,
        noise_scale=noise / signal,
        population_rate=population if sums.fresh else nothing,
        training_rate=training if sums.fresh else nothing,
        self_fit=1 - population / training if sums.fresh else nothing,
    )


def _sums(param: ParamUpdate, update: GroupUpdate, fresh: bool) -> Tensor:
    """Sums over one tensor: open gates, gates, noise power, signal power, and the two rates."""
    hyper = update.hyper
    state = rule_state(param, hyper)
    q = current_gate(state, hyper)
    literal = current_gate(state, replace(hyper, normalize_gate=False)) if hyper.in_adamw_units else q
    noise, signal = _powers(state, hyper)
    sums = [(literal > 0).sum(), q.sum(), noise, signal]
    if fresh and param.parameter.grad is not None:
        g = real(param.grad) * update.sign
        if update.grad_scale is not None:  # set by GradScaler on an optimizer that unscales in its step
            g = g / update.grad_scale
        _, after = population_step(real(param.local), g, state, hyper)
        sums += [(g * _direction(state, hyper)).sum(), (g * _direction(after, hyper)).sum()]
    else:
        sums += [torch.zeros_like(sums[0])] * 2
    return torch.stack([x.double() for x in sums])


def _powers(state: PopulationState, hyper: Hyper) -> tuple[Tensor, Tensor]:
    """Variance of the batch gradient and squared norm of its mean, both debiased for the averages' own noise."""
    if hyper.gate is None:
        zero = torch.zeros((), dtype=torch.float64, device=state.m.device)
        return zero, zero
    c = current(hyper, state.step, state.var_step, state.gain)
    step = at_least(state.step, 2.0)
    settled = deviation_noise(hyper.betas[0], step, hyper.centering)
    noise = debiased_variance(state, hyper).double().sum() / (1.0 if state.observed else settled)
    m_hat = state.m.double() * c.m_debias
    return noise, m_hat.square().sum() - mean_noise(hyper.betas[0], step) * noise


def _direction(state: PopulationState, hyper: Hyper) -> Tensor:
    """The step without its decay: M m."""
    return linearize(state, hyper).preconditioner * state.m
