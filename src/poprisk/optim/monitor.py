"""Watches a running optimizer for two things worth a warning, without making the device wait."""

import warnings
from typing import Any

import torch
from torch import Tensor

from poprisk.errors import ClosedGateWarning, NonFiniteGradientWarning
from poprisk.optim.work import Job, Work, rule_state
from poprisk.rules.population import current_gate

CLOSED_BELOW = 0.01
PATIENCE = 200
EVERY = 20
SAMPLE_TENSORS = 32
SAMPLE_ELEMENTS = 2048


class Monitor:
    """Mean gate on a sample of coordinates every few steps, and the count of non-finite gradient entries."""

    def __init__(self) -> None:
        self.steps = 0
        self.closed_since: int | None = None
        self.counters: dict[torch.device, Tensor] = {}
        self.pending: list[tuple[Tensor, Any]] = []
        self.said: set[str] = set()

    def counter(self, device: torch.device) -> Tensor:
        """The running count of left-out gradient entries on a device."""
        if device not in self.counters:
            self.counters[device] = torch.zeros((), dtype=torch.int32, device=device)
        return self.counters[device]

    def after_step(self, jobs: list[Job]) -> None:
        """Called once per step; looks every few steps, and on a device reads what an earlier look left behind."""
        self.steps += 1
        on_cpu = all(device.type == "cpu" for device in self.counters)
        if on_cpu and "nonfinite" not in self.said and any(c.item() for c in self.counters.values()):
            self._say_nonfinite(sum(int(c.item()) for c in self.counters.values()))
        if self.steps % EVERY or {"closed", "nonfinite"} <= self.said or _capturing():
            return
        gates = [g for g in (sampled_gate(job) for job in jobs) if g is not None]
        if not gates:
            return
        reading = torch.stack([torch.stack(gates).mean().double(), self._total(gates[0].device)])
        self._read_pending()
        if reading.is_cuda:
            host = torch.empty(2, dtype=torch.float64, pin_memory=True)
            host.copy_(reading, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self.pending.append((host, event))
        else:
            self._judge(reading)

    def _total(self, device: torch.device) -> Tensor:
        counts = [c.double() for d, c in self.counters.items() if d == device]
        return torch.stack(counts).sum() if counts else torch.zeros((), dtype=torch.float64, device=device)

    def _read_pending(self) -> None:
        while self.pending and self.pending[0][1].query():
            self._judge(self.pending.pop(0)[0])

    def _judge(self, reading: Tensor) -> None:
        gate, left_out = reading.tolist()
        if left_out:
            self._say_nonfinite(int(left_out))
        if gate >= CLOSED_BELOW:
            self.closed_since = None
            return
        self.closed_since = self.steps - EVERY if self.closed_since is None else self.closed_since
        if self.steps - self.closed_since >= PATIENCE and "closed" not in self.said:
            self.said.add("closed")
            warnings.warn(
                f"the mean gate has been under {CLOSED_BELOW:.0%} for {PATIENCE} steps (now {gate:.2%}), so training hardly "
                "moves. If the loss is falling too slowly: raise lr (10 times an AdamW lr is a good start), or lower "
                "alpha (alpha='calibrated' is the break-even test), or lower strength, or use gate='snr'",
                ClosedGateWarning,
                stacklevel=3,
            )

    def _say_nonfinite(self, count: int) -> None:
        if "nonfinite" in self.said:
            return
        self.said.add("nonfinite")
        warnings.warn(
            f"at least {count} gradient entries were NaN or infinite; their coordinates (weight, m, v, s) were left as they were for "
            "that step. Look for the overflow, or pass skip_nonfinite=False to let it through as torch.optim.AdamW does",
            NonFiniteGradientWarning,
            stacklevel=4,
        )


def sampled_gate(job: Job) -> Tensor | None:
    """Mean gate of a group over at most 32 tensors and 2048 coordinates of each: precise enough for a warning, and cheap."""
    hyper = job.hyper
    if hyper.gate is None or not job.works:
        return None
    stride = max(1, len(job.works) // SAMPLE_TENSORS)
    means = [_mean_gate(w, job) for w in job.works[::stride][:SAMPLE_TENSORS]]
    return torch.stack(means).mean()


def _mean_gate(work: Work, job: Job) -> Tensor:
    every = max(1, work.param.numel() // SAMPLE_ELEMENTS)
    element_wise = job.hyper.granularity == "element"

    def thin(x: Tensor) -> Tensor:
        return x.reshape(-1)[::every] if element_wise else x

    moments = {name: thin(x) if name.startswith("exp_") else x for name, x in work.state.items()}
    sample = Work(work.param, work.grad, moments, work.key, work.variance)
    return current_gate(rule_state(sample, job.hyper), job.hyper).float().mean()


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
