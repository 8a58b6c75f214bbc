"""What a fused backend need not check again while the same tensors come, step after step."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from poprisk.optim._work import COUNTERS, Job, Work


class Plan:
    """The tensors and options of a group whose last step took one launch, and what that launch needed to know.

    The counters of all parameters become views of one vector each, so that counting is one operation and not hundreds.
    """

    def __init__(self, job: Job, works: list[Work], payload: Any) -> None:
        self.payload = payload
        self.counters: dict[str, Tensor] = {}
        for name in COUNTERS:
            if name in works[0].state:
                vector = torch.stack([w.state[name] for w in works])
                self.counters[name] = vector
                for w, view in zip(works, vector.unbind(), strict=True):
                    w.state[name] = view
        self.options = _options(job)
        self.known = [(*_tensors(w), w.grad.dtype, w.grad.stride()) for w in works]

    def fits(self, job: Job) -> bool:
        """Whether parameters, states, layouts, options and step counts are still those the plan was made for."""
        works = job.works
        if len(works) != len(self.known) or _options(job) != self.options or job.found_inf is not None:
            return False
        for w, (param, m, v, s, step, dtype, stride) in zip(works, self.known, strict=True):
            state, grad = w.state, w.grad
            same = w.param is param and state["exp_avg"] is m and state["exp_avg_sq"] is v and state["step"] is step
            if not same or state.get("exp_var") is not s or w.variance is not None:
                return False
            if grad.dtype != dtype or grad.stride() != stride:
                return False
        return all(bool((x == x[0]).all()) for x in self.counters.values())

    def count(self, after: Mapping[str, Any]) -> None:
        """Sets all counters to what they are after the step."""
        for name, vector in self.counters.items():
            vector.fill_(after[name])


def remembered(job: Job) -> Plan | None:
    """The plan of the step before, if it still fits."""
    plan = job.memory.get("plan")
    if plan is None or plan.fits(job):
        return plan
    del job.memory["plan"]
    return None


def remember(job: Job, works: list[Work], payload: Any) -> None:
    """Keeps what this step found out, if it took one launch for the whole group and its counters are on the host."""
    if job.found_inf is not None:
        return
    alike = len(works) == len(job.works) and not any(w.variance is not None or w.state["step"].is_cuda for w in works)
    if alike and len({tuple(w.state[n].item() for n in COUNTERS if n in w.state) for w in works}) == 1:
        job.memory["plan"] = Plan(job, works, payload)


def _tensors(work: Work) -> tuple[Any, ...]:
    state = work.state
    return work.param, state["exp_avg"], state["exp_avg_sq"], state.get("exp_var"), state["step"]


def _options(job: Job) -> tuple[Any, ...]:
    h, group = job.hyper, job.group
    rule = (h.gate, h.alpha == "calibrated", h.shared_state, h.granularity, h.normalize_gate, h.signal, h.gated_decay)
    on_device = isinstance(h.lr, Tensor) and h.lr.is_cuda
    return (*rule, h.skip_nonfinite, group["capturable"], on_device)
