"""What the gate is doing, per parameter group, as device scalars: nothing waits until a number is read."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from poprisk._core.types import Scalar
from poprisk.optim._shards import Shard, coordinates
from poprisk.optim._work import Job, Work, real, rule_state, was_stepped
from poprisk.optim.rules._coefficients import Hyper, current
from poprisk.optim.rules._population import PopulationState, current_gate, debiased_variance, linearize, population_step
from poprisk.optim.rules._threshold import deviation_noise, mean_noise


@dataclass(frozen=True)
class GateDiagnostics:
    """Meters of a parameter group, or of all; every field is a 0-dim tensor on the group's device.

    With ``signal="batch"`` the gate is that of the averaged signal: the batch's own is gone after the step.
    """

    active_fraction: Tensor
    """Share of coordinates whose gate was not closed in the last step."""
    mean_gate: Tensor
    """Mean of q in the last step."""
    noise_scale: Tensor
    """Gradient noise scale in batches, ``tr Cov(g_B) / |E g|²``, both debiased; times the batch size it is B_simple in
    examples. Infinite where no signal stands out of the noise."""
    population_rate: Tensor
    """Decrease of the loss per step that the *previous* step's direction gives on the *current* batch, to first order.
    The direction was chosen before this batch was seen, so on fresh data this estimates the population-risk rate
    without optimism. NaN without fresh gradients."""
    training_rate: Tensor
    """The same for the direction the coming step will take, scored on the batch that helps to choose it."""
    self_fit: Tensor
    """Share of the training rate that the population does not see, 1 - population_rate / training_rate."""

    def to_floats(self) -> dict[str, float]:
        """All meters as plain numbers: this is where the device is waited for."""
        values = torch.stack([getattr(self, f.name).double() for f in fields(self)]).tolist()
        return {f.name: v for f, v in zip(fields(self), values, strict=True)}


@dataclass(frozen=True)
class Sums:
    """What the meters are made of, summed over coordinates, so that those of several groups can be added."""

    total: Tensor
    """Open gates, gates, noise power, signal power, and the two rates."""
    coordinates: int
    fresh: bool
    gated: bool


def gate_sums(job: Job, fresh: bool) -> Sums:
    """The sums of one group from its state and, where ``fresh``, its gradients, which have not been used yet."""
    works = [w for w in job.works if was_stepped(w, job.hyper)]
    device = job.works[0].param.device if job.works else torch.device("cpu")
    total = torch.zeros(6, dtype=torch.float64, device=device)
    spread: dict[Any, tuple[Shard, Tensor]] = {}
    for work in works:
        sums = _sums(work, job, fresh).to(device)  # a group may lie on several devices
        if work.shard is None:
            total += sums
        else:  # all that is cut alike is added up over the processes at once
            cut = (work.shard.mesh, work.shard.mesh_axes)
            spread.setdefault(cut, (work.shard, torch.zeros_like(total)))[1].add_(sums)
    for shard, sums in spread.values():
        shard.add_up(sums, shard.mesh_axes)
        total += sums
    count = sum(coordinates(w.parameter) for w in works)
    return Sums(total, count, fresh and bool(works), job.hyper.gate is not None)


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


def _sums(work: Work, job: Job, fresh: bool) -> Tensor:
    """Sums over one tensor: open gates, gates, noise power, signal power, and the two rates."""
    hyper = job.hyper
    state = rule_state(work, hyper)
    q = current_gate(state, hyper)
    noise, signal = _powers(state, hyper)
    sums = [(q > 0).sum(), q.sum(), noise, signal]
    if fresh and work.parameter.grad is not None:
        g = real(work.grad) * job.sign
        if job.grad_scale is not None:  # set by GradScaler on an optimizer that unscales in its step
            g = g / job.grad_scale
        _, after = population_step(real(work.param), g, state, hyper)
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
    settled = deviation_noise(hyper.betas[0], _after(state.step), hyper.centering)
    noise = debiased_variance(state, hyper).double().sum() / (1.0 if state.observed else settled)
    m_hat = state.m.double() * c.m_debias
    return noise, m_hat.square().sum() - mean_noise(hyper.betas[0], _after(state.step)) * noise


def _after(step: Scalar) -> Scalar:
    return step.clamp(min=2) if isinstance(step, Tensor) else max(step, 2)


def _direction(state: PopulationState, hyper: Hyper) -> Tensor:
    """The step without its decay: M m."""
    return linearize(state, hyper).preconditioner * state.m
