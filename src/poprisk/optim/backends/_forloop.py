"""The simplest backend: the pure rule, parameter by parameter. Differentiable, capturable, the others' oracle."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from poprisk.optim._work import Job, Work, real, rule_state, set_counts
from poprisk.optim.rules._population import PopulationState, is_usable, population_step


def step(job: Job) -> None:
    """One step for each parameter of the group."""
    for work in job.works:
        step_one(job, work)


def step_one(job: Job, work: Work) -> None:
    """One step of :func:`poprisk.optim.rules.population_step`, written back into the parameter and its state."""
    w, g = real(work.param), real(work.grad)
    if job.group["maximize"]:
        g = -g
    if job.grad_scale is not None:
        g = g / job.grad_scale.to(g.device)
    variance = None if work.variance is None else real(work.variance)
    old = rule_state(work, job.hyper)
    w_new, new = population_step(w, g, old, job.hyper, variance)
    if job.found_inf is not None:
        w_new, new = _unless(job.found_inf.to(w.device), (w, old), (w_new, new))
    if job.hyper.skip_nonfinite and job.hyper.gate is not None:
        left_out = (~is_usable(g)).sum()
        if job.found_inf is not None:  # then the whole step was left out, and the scaler knows
            left_out = left_out * (job.found_inf.to(w.device) == 0)
        job.left_out.add_(left_out.to(job.left_out.device))
    w.copy_(w_new)
    _write(job, work, new)


def _write(job: Job, work: Work, new: PopulationState) -> None:
    """Into the tensors that are there, or beside them where a graph must survive (``differentiable``)."""
    moments = {"exp_avg": new.m, "exp_avg_sq": new.v, "exp_var": new.s}
    for name, value in moments.items():
        if value is None:
            continue
        if job.group["differentiable"]:
            work.state[name] = torch.view_as_complex(value) if work.state[name].is_complex() else value
        else:
            real(work.state[name]).copy_(value)
    set_counts(work.state, new.step, new.var_step, new.gain)


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

    names = ("m", "v", "s", "step", "var_step", "gain")
    fields: dict[str, Any] = {name: pick(getattr(old[1], name), getattr(new[1], name)) for name in names}
    return pick(old[0], new[0]), replace(new[1], **fields)
