"""One step of every arm on the rows it owns: weights [members, d], hyper-parameters [members, 1], all in place."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.optim.rules._coefficients import Hyper
from poprisk.optim.rules._population import PopulationState, current_gate, population_direction
from poprisk_lab.engine.arms import BETA1, Arm
from poprisk_lab.engine.parameter_layout import ParameterLayout
from poprisk_lab.engine.peers import PEERS


@dataclass(frozen=True)
class Block:
    """The members of one arm: what a step reads and writes besides weights and gradients.

    Attributes:
        arm: The arm, which determines the rule.
        hyper: Every hyper-parameter, as a float64 column with one value per member.
        state: State of the rule.
        steps: Number of steps of the run, for the cosine decay; on the device.
        gate: Buffer for the gate of each step, for members that controls follow.
        step: Buffer for each step without weight decay, for the same members.
    """

    arm: Arm
    hyper: Mapping[str, Float[Tensor, "members 1"]]
    state: Mapping[str, Tensor]
    steps: Float[Tensor, ""]
    gate: Float[Tensor, "members d"] | None = None
    step: Float[Tensor, "members d"] | None = None

    @classmethod
    def make(
        cls,
        arm: Arm,
        hyper: Mapping[str, Tensor],
        weights: Float[Tensor, "members d"],
        steps: int,
        followed: bool = False,
    ) -> "Block":
        """A block before its first step, for members with these weights."""
        members, device = len(weights), weights.device
        names = ("m", "v", "s") if arm.gated else PEERS[arm.rule].states
        state = {name: torch.zeros_like(weights, requires_grad=False) for name in names}
        if arm.gated:
            state["gain"] = torch.zeros(members, 1, dtype=torch.float64, device=device)
        horizon = torch.tensor(float(steps), dtype=torch.float64, device=device)
        seen = (torch.zeros_like(weights), torch.zeros_like(weights)) if followed else (None, None)
        return cls(arm, hyper, state, horizon, *seen)

    def evaluated(self, w: Float[Tensor, "members d"], t: Float[Tensor, ""]) -> Float[Tensor, "members d"]:
        """The weights that are the result of the run after step t, which a rule may keep beside those it trains."""
        peer = None if self.arm.gated else PEERS[self.arm.rule]
        if peer is None or peer.evaluated is None:
            return w
        return peer.evaluated(w, self.state, {"beta1": BETA1, **self.hyper}, t)

    def mean_gate(self, t: Float[Tensor, ""], layout: ParameterLayout) -> Float[Tensor, "members"]:
        """The mean gate of each member in the last step, computed from its state; NaN without a gate."""
        if not self.arm.gated:
            return torch.full((len(self.hyper["lr"]),), float("nan"), device=t.device)
        hyper, memory = _hyper(self), self.state
        columns = [memory[name].split(layout.segments, dim=1) for name in ("m", "v", "s")]
        gates = (
            current_gate(PopulationState(m, v, s, t, t, memory["gain"]), hyper)
            for m, v, s in zip(*columns, strict=True)
            if m.shape[1]  # a gap may be empty
        )
        total = sum((gate * _boost(gate) if self.arm.relative else gate).sum(1) for gate in gates)
        return torch.as_tensor(total) / layout.size


@dataclass(frozen=True)
class Lockstep:
    """What the members with the defaults did in this step, one entry per control member with the same seed."""

    gate: Float[Tensor, "members 1"]
    norm: Float[Tensor, "members 1"]
    lr: Float[Tensor, "members 1"]
    openings: Float[Tensor, "members d"] | None = None
    """Gate of each weight, for the shuffled gate."""


def take_step(
    arm: Arm,
    segments: tuple[int, ...],
    w: Float[Tensor, "members d"],
    g: Float[Tensor, "members d"],
    t: Float[Tensor, ""],
    block: Block,
    lockstep: Lockstep | None = None,
    uniform: Float[Tensor, "members d"] | None = None,
) -> None:
    """Update the rows of a block and its state by one step.

    Args:
        arm: Arm of the block; a separate argument because it determines what is compiled.
        segments: Lengths of the segments of a row; only used if the gate depends on the tensor.
        w: The rows, changed in place.
        g: Their gradients.
        t: Number of this step, starting at 1; on the device.
        block: Hyper-parameters and state; the state is changed in place.
        lockstep: What the members with the defaults did; only for a control.
        uniform: Random numbers in [0, 1), for the random mask and for rules that draw.
    """
    h, usable = block.hyper, None
    if arm.gated:
        u, gate, usable, state = _gated(arm, segments, g, t, block)
        if block.gate is not None:
            block.gate.copy_(gate)
    else:
        u, state = _ungated(arm, segments, w, g, t, block, uniform)
    for name, value in state.items():
        block.state[name].copy_(value)
    lr = h["lr"] * (t / h["lr_warmup"].clamp(min=1)).clamp(max=1)
    if arm.cosine:
        lr = lr * 0.5 * (1 + torch.cos(torch.pi * (t - 1) / block.steps))
    own_decay = not arm.gated and "weight_decay" in PEERS[arm.rule].knobs
    decay, lr = (
        torch.zeros_like(lr, dtype=w.dtype) if own_decay else (lr * h["weight_decay"]).to(w.dtype),
        lr.to(w.dtype),
    )
    if lockstep is not None:
        u, lr = _follow(arm, u, lr, lockstep, uniform)
    if block.step is not None:
        block.step.copy_(lr * u)
    step = lr * u + decay * w
    w.sub_(step if usable is None else torch.where(usable, step, 0.0))  # no update without a usable gradient


def _gated(
    arm: Arm, segments: tuple[int, ...], g: Tensor, t: Tensor, block: Block
) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Tensor]]:
    hyper, memory = _hyper(block), block.state
    whole = PopulationState(memory["m"], memory["v"], memory["s"], t - 1, t - 1, memory["gain"])
    if not arm.per_tensor:
        moved = population_direction(g, whole, hyper)
        u, gate = moved.update, moved.gate
        if arm.relative:
            boost = torch.cat([_boost(part) for part in gate.split(segments, dim=1) if part.shape[1]], 1)
            u, gate = u * boost, gate * boost
        return u, gate, moved.usable, _moments(moved.state)
    columns = [x.split(segments, dim=1) for x in (g, memory["m"], memory["v"], memory["s"])]
    parts = [
        population_direction(g_part, replace(whole, m=m, v=v, s=s), hyper)
        for g_part, m, v, s in zip(*columns, strict=True)
        if g_part.shape[1]  # a gap may be empty
    ]
    state = {name: torch.cat([_moments(part.state)[name] for part in parts], dim=1) for name in ("m", "v", "s")}
    state["gain"] = _moments(parts[0].state)["gain"]
    usable = [part.usable for part in parts if part.usable is not None]
    return (
        torch.cat([part.update for part in parts], 1),
        torch.cat([part.gate for part in parts], 1),
        torch.cat(usable, 1) if usable else None,
        state,
    )


def _boost(gate: Float[Tensor, "members n"]) -> Float[Tensor, "members n"]:
    """What turns the gate of one tensor into (1 + min(1, gate / its mean))/2, as a factor.

    The library's gate takes the mean from the step before. A weight whose gate is 0, which for the SNR gate means that
    its averaged gradient is 0, does not move.
    """
    tiny = torch.finfo(gate.dtype).tiny
    ratio = (gate / gate.mean(1, keepdim=True).clamp(min=tiny)).clamp(max=1)
    return 0.5 * (1 + ratio) / gate.clamp(min=tiny)


def _ungated(
    arm: Arm, segments: tuple[int, ...], w: Tensor, g: Tensor, t: Tensor, block: Block, uniform: Tensor | None
) -> tuple[Tensor, dict[str, Tensor]]:
    peer = PEERS[arm.rule]
    given = {"weights": w} if "weights" in peer.knobs else {}
    if "uniform" in peer.knobs:
        assert uniform is not None
        given["uniform"] = uniform
    plain = {"beta1": BETA1, "eps": arm.eps, **block.hyper}
    if not arm.per_tensor:
        return peer.direction(g, block.state, plain | given, t)
    columns = {name: x.split(segments, dim=1) for name, x in ({"g": g} | given | dict(block.state)).items()}
    found = []
    for k in (k for k, size in enumerate(segments) if size):  # a gap may be empty
        part = {name: parts[k] for name, parts in columns.items()}
        state, extra = {name: part[name] for name in block.state}, {name: part[name] for name in given}
        found.append(peer.direction(part["g"], state, plain | extra, t))
    return (
        torch.cat([u for u, _ in found], 1),
        {name: torch.cat([state[name] for _, state in found], 1) for name in block.state},
    )


def _hyper(block: Block) -> Hyper:
    arm, h = block.arm, block.hyper
    return Hyper(
        betas=(BETA1, h["beta2"]),  # type: ignore[arg-type]  # columns broadcast like numbers
        eps=arm.eps,
        gate=arm.rule,  # type: ignore[arg-type]
        alpha="calibrated" if arm.calibrated else h["alpha"],  # type: ignore[arg-type]
        strength=h["strength"],  # type: ignore[arg-type]
        rho=h["rho"],  # type: ignore[arg-type]
        warmup_steps=h["gate_warmup"],  # type: ignore[arg-type]
        granularity="row" if arm.per_tensor else "element",  # the row of one tensor's columns is one member's tensor
    )


def _follow(arm: Arm, u: Tensor, lr: Tensor, lockstep: Lockstep, uniform: Tensor | None) -> tuple[Tensor, Tensor]:
    if arm.control == "gate_mean":
        return u, lr * lockstep.gate
    if arm.control == "random_mask":
        assert uniform is not None
        return torch.where(uniform < lockstep.gate, u, 0.0), lr
    if arm.control == "shuffled_gate":
        assert lockstep.openings is not None
        return u * lockstep.openings, lr
    own = u.norm(dim=1, keepdim=True).clamp(min=torch.finfo(u.dtype).tiny)
    return u * (lockstep.norm / lockstep.lr.to(u.dtype) / own), lr


def _moments(state: PopulationState) -> dict[str, Tensor]:
    assert state.s is not None
    assert isinstance(state.gain, Tensor)
    return {"m": state.m, "v": state.v, "s": state.s, "gain": state.gain}
