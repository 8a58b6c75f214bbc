"""Warnings of a running optimizer, on a closed gate and on non-finite gradients, without making the device wait."""

import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from poprisk.errors import ClosedGateWarning, NonFiniteGradientWarning
from poprisk.optim._learning_rate import FACTOR, WEAK_FACTOR
from poprisk.optim._updates import SCALE, GroupUpdate, ParamUpdate, real, rule_state
from poprisk.optim.rules._coefficients import Hyper
from poprisk.optim.rules._population import PopulationState, current_gate

CLOSED_BELOW = 0.02  # of a gate's value where signal equals noise
PATIENCE = 200
EVERY = 25
AT_MOST = 400
SAMPLE_TENSORS = 16
SAMPLE_ELEMENTS = 2048


class Monitor:
    """Reads the mean gate on a sample of coordinates every few steps, and counts non-finite gradient entries."""

    def __init__(self) -> None:
        self.steps = 0
        self.next_look = EVERY
        self.interval = EVERY
        self.closed_since: int | None = None
        self.counters: dict[torch.device, Tensor] = {}
        self.pending: list[tuple[Tensor, Any]] = []
        self.said: set[str] = set()

    def counter(self, device: torch.device) -> Tensor:
        """The running count of left-out gradient entries on a device."""
        if device not in self.counters:
            self.counters[device] = torch.zeros((), dtype=torch.int32, device=device)
        return self.counters[device]

    def after_step(self, updates: list[GroupUpdate]) -> None:
        """Called once per step; looks every few steps, and on a device reads what an earlier look left behind."""
        self.steps += 1
        on_cpu = all(device.type == "cpu" for device in self.counters)
        if on_cpu and "nonfinite" not in self.said and any(c.item() for c in self.counters.values()):
            self._say_nonfinite(sum(int(c.item()) for c in self.counters.values()))
        if self.steps < self.next_look or {"closed", "nonfinite"} <= self.said or _capturing():
            return
        self.next_look = self.steps + self.interval
        gates = [(g, closed_below(update.hyper)) for update in updates if (g := sampled_gate(update)) is not None]
        if not gates:
            return
        device = gates[0][0].device  # one device speaks for all
        gates = [(g, limit) for g, limit in gates if g.device == device]
        gates = [(g, limit) for g, limit in gates if limit] or gates  # of those that can close, where there are any
        gate = torch.stack([g for g, _ in gates]).mean()
        limit = sum(limit for _, limit in gates) / len(gates)
        left_out = self.counter(device).double()
        reading = torch.stack([gate.double(), torch.full_like(left_out, limit), left_out])
        while self.pending and self.pending[0][1].query():
            self._judge(self.pending.pop(0)[0])
        if reading.is_cuda:
            host = torch.empty(3, dtype=torch.float64, pin_memory=True)
            host.copy_(reading, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self.pending.append((host, event))
        else:
            self._judge(reading)

    def _judge(self, reading: Tensor) -> None:
        gate, limit, left_out = reading.tolist()
        if left_out:
            self._say_nonfinite(int(left_out))
        if not gate < limit:  # all is well: look less and less often
            self.closed_since = None
            self.interval = min(2 * self.interval, AT_MOST)
            return
        self.interval = EVERY
        self.next_look = min(self.next_look, self.steps + EVERY)
        self.closed_since = self.steps - EVERY if self.closed_since is None else self.closed_since
        if self.steps - self.closed_since >= PATIENCE and "closed" not in self.said:
            self.said.add("closed")
            warnings.warn(
                f"the mean gate has been under {100 * limit:.2g}% for {PATIENCE} steps (now {100 * gate:.3g}%), so few "
                "coordinates move. On noisy data this can be right. If the loss falls too slowly, lower Gate.alpha "
                "(Gate(alpha='calibrated') is the break-even test) or use gate='snr'. A gate with normalize=False also "
                f"needs a larger lr than AdamW ({WEAK_FACTOR} times for a strength of 1, {FACTOR} times for 100); "
                "normalize=True takes AdamW's",
                ClosedGateWarning,
                stacklevel=3,
            )

    def _say_nonfinite(self, count: int) -> None:
        if "nonfinite" in self.said:
            return
        self.said.add("nonfinite")
        warnings.warn(
            f"at least {count} gradient entries were NaN or infinite; their coordinates (weight, m, v, s) were not "
            "updated in that step. Find the source of the overflow, or pass skip_nonfinite=False to let such entries "
            "through, as torch.optim.AdamW does",
            NonFiniteGradientWarning,
            stacklevel=4,
        )


def closed_below(hyper: Hyper) -> float:
    r"""The mean gate under which a group counts as closed.

    .. math:: \frac{0.02}{1 + \lambda}

    This is a fiftieth of the gate's value where signal equals noise. A strong gate passes little, and a larger learning
    rate makes up for it: the limit is 1% at strength 1 and 0.02% at 100. The hard gate has no strength and counts as
    one of strength 1. In AdamW's units the limit is 0: every coordinate moves by half of AdamW's step or more.

    >>> closed_below(Hyper(gate="snr", strength=100.0, normalize_gate=True))
    0.0
    >>> closed_below(Hyper()), closed_below(Hyper(gate="hard", strength=100.0))
    (0.01, 0.01)
    >>> round(closed_below(Hyper(gate="snr", strength=100.0)), 6)
    0.000198
    """
    if hyper.normalize_gate:
        return 0.0
    return CLOSED_BELOW / (1 + (1.0 if hyper.gate == "hard" else hyper.strength))


def sampled_gate(update: GroupUpdate) -> Tensor | None:
    """Mean gate of a group on some coordinates of its largest tensors: precise enough for a warning, and cheap.

    Each process looks at what it holds itself. When it looks depends on what it saw, so it must not wait for others.
    """
    hyper = update.hyper
    params = [w for w in update.params if w.local.numel()]
    if hyper.gate is None or not params:
        return None
    params = sorted(params, key=lambda w: -w.local.numel())[:SAMPLE_TENSORS]
    params = [w for w in params if w.local.device == params[0].local.device]
    if hyper.normalize_gate:
        return torch.stack([w.state[SCALE][0] for w in params]).mean().float()
    if hyper.granularity != "element":
        states = [replace(rule_state(w, hyper), whole=None) for w in params]
        return torch.stack([current_gate(state, hyper).float().mean() for state in states]).mean()
    return current_gate(_sample(params, hyper), hyper).float().mean()


def _sample(params: list[ParamUpdate], hyper: Hyper) -> PopulationState:
    """A few coordinates of each tensor side by side, with the counters of the largest."""

    def thin(x: Tensor) -> Tensor:
        return real(x).reshape(-1)[:: max(1, x.numel() // SAMPLE_ELEMENTS)].to(torch.float32)

    names = ["exp_avg", "exp_avg_sq", *(["exp_var"] if hyper.tracks_variance else [])]
    moments = [torch.cat([thin(w.state[name]) for w in params]) for name in names]
    state = rule_state(params[0], hyper)
    return replace(state, m=moments[0], v=moments[1], s=moments[2] if hyper.tracks_variance else None, whole=None)


def _capturing() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
