r"""AdamW times the openings of a gate, or of a control that opens as much without choosing coordinates."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from poprisk.optim.rules import Hyper, PopulationState
from poprisk.optim.rules._population import initial_state, population_direction

Opening = Literal["gate", "mean", "shuffled", "random", "relative"]
OPENINGS: tuple[Opening, ...] = ("gate", "mean", "shuffled", "random", "relative")


class OpenedAdamW(Optimizer):
    r"""AdamW whose step is multiplied, coordinate by coordinate, by an opening computed from the SNR gate q.

    The gate is that of the run itself, :math:`q = \hat m^2/(\hat m^2 + \lambda \hat s)`. Each control opens as much and
    leaves out one thing: ``mean`` the choice of coordinates, ``shuffled`` which coordinate gets which opening,
    ``random`` also the sizes of the openings. ``relative`` is the gate in AdamW's units, (1 + min(1, q / its mean
    over the tensor))/2.

    Args:
        params: Parameters or groups.
        lr: Learning rate.
        opening: ``gate``, ``mean`` (q's mean over the tensor), ``shuffled`` (q at a random other place of the tensor),
            ``random`` (0 or 1, open with the probability of the mean) or ``relative``.
        strength: λ.
        weight_decay: Decoupled weight decay, not gated.
        seed: Seed for the random draws.

    >>> w = torch.tensor([1.0, -2.0], requires_grad=True)
    >>> optimizer = OpenedAdamW([w], lr=0.1, opening="mean", strength=1.0, weight_decay=0.0)
    >>> w.square().sum().backward()
    >>> optimizer.step()  # after one gradient every coordinate of the gate is open by a half
    >>> w.detach()
    tensor([ 0.9500, -1.9500])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 0.06,
        opening: Opening = "gate",
        *,
        strength: float = 100.0,
        weight_decay: float = 5e-3,
        seed: int = 0,
    ) -> None:
        super().__init__(params, {"lr": lr, "opening": opening, "strength": strength, "weight_decay": weight_decay})
        self._seed, self._generators = seed, dict[torch.device, torch.Generator]()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """One step; a closure is not called."""
        for group in self.param_groups:
            hyper = Hyper(gate="snr", strength=group["strength"])
            for p in group["params"]:
                if p.grad is None:
                    continue
                state: PopulationState = self.state[p].get("rule") or initial_state(p, hyper)
                moved = population_direction(p.grad, state, hyper)
                self.state[p]["rule"] = moved.state
                adam = moved.update / moved.gate.clamp(min=torch.finfo(moved.gate.dtype).tiny)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * self._opened(moved.gate, group["opening"]) * adam)

    def _opened(self, q: Tensor, opening: Opening) -> Tensor:
        if opening == "gate":
            return q
        if opening == "relative":
            return 0.5 + 0.5 * (q / q.mean()).clamp(max=1)
        if opening == "mean":
            return q.mean()
        if q.device not in self._generators:
            self._generators[q.device] = torch.Generator(q.device).manual_seed(self._seed)
        generator = self._generators[q.device]
        if opening == "shuffled":
            return q.flatten()[torch.randperm(q.numel(), device=q.device, generator=generator)].view_as(q)
        return (torch.rand(q.shape, device=q.device, generator=generator) < q.mean()).to(q.dtype)
