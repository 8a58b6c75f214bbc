r"""The variants of the gate as a torch optimizer: to try one of them on a problem of one's own."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from poprisk.errors import GradientError, HyperparameterError
from poprisk_lab.gates.variants import NEED_HALVES, VARIANTS

_PASS = "gate_warmup"  # the rules' name for the steps in a pass


class VariantAdamW(Optimizer):
    r"""AdamW with one of the gates of :mod:`poprisk_lab.gates.variants`; for trials, not for speed.

    .. math:: w \leftarrow w - \eta\, q \odot \hat m/(\sqrt{\hat v} + \epsilon) - \eta \lambda w

    What each gate q is, and on which tasks it kept noise out or was quick, is in ``docs/gates.md``. The usual one is
    the best trade-off found there: AdamW while batches are fresh, then, block by block, as far as the next batch agrees
    with the step decided before it, and Algorithm 1's gate where it does not.

    A step copies gradients and states of a group into one row and back, so that it costs several times a fused AdamW,
    and holds up to five arrays more than it. A group is judged by itself. For everyday training use
    :class:`poprisk.PopRiskAdamW`.

    Args:
        params: Parameters or groups; dense, float32 or float64, a group on one device.
        lr: Step size η.
        variant: A name in :data:`poprisk_lab.gates.variants.VARIANTS`, but for those that compare halves of a batch.
        steps_per_pass: Optimizer steps in a pass over the training examples (``len(loader)``, divided by the batches
            that are accumulated). Wanted by the variants that count passes, the usual one among them.
        betas: Decays of m and v.
        eps: Adam's ε, above 0.
        weight_decay: λ, decoupled.
        rho: Decay of s, the noise.
        alpha: Threshold of Algorithm 1's gate.
        strength: Strength of Algorithm 1's gate.

    Raises:
        HyperparameterError: a value is out of range, an unknown variant, or ``steps_per_pass`` is wanted and missing.
        GradientError: a parameter is sparse, complex, sharded or of half precision, or gets a sparse gradient.

    >>> w = torch.tensor([1.0, -2.0], requires_grad=True)
    >>> optimizer = VariantAdamW([w], lr=0.1, steps_per_pass=100, weight_decay=0)
    >>> w.square().sum().backward()
    >>> optimizer.step()  # the first pass is AdamW's
    >>> w.detach()
    tensor([ 0.9000, -1.9000])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        variant: str = "agreement_after_first_pass",
        steps_per_pass: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        rho: float = 0.99,
        alpha: float = 1.0,
        strength: float = 1.0,
    ) -> None:
        options = {"lr": lr, "variant": variant, "steps_per_pass": steps_per_pass, "betas": betas, "eps": eps}
        options |= {"weight_decay": weight_decay, "rho": rho, "alpha": alpha, "strength": strength, "step": 0}
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with options of their own, validated."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Takes one step; parameters without a gradient sit out.

        Args:
            closure: Evaluates the model and returns the loss, if given.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                group["step"] += 1
                self._move(group, params)
        return loss

    def _move(self, group: dict[str, Any], params: list[Tensor]) -> None:
        rule, sizes = VARIANTS[group["variant"]], [p.numel() for p in params]
        states = {name: torch.cat([self._state(p, name) for p in params]) for name in rule.states}
        g = torch.cat([_dense(p).reshape(-1) for p in params])
        u, states = rule.direction(g, states, _knobs(group), group["step"])
        lr, decay = float(group["lr"]), float(group["lr"]) * group["weight_decay"]
        kept = {name: value.split(sizes) for name, value in states.items()}
        for i, (p, move) in enumerate(zip(params, u.split(sizes), strict=True)):
            p.sub_(lr * move.view(p.shape) + decay * p)
            self.state[p].update({name: parts[i].view(p.shape).clone() for name, parts in kept.items()})

    def _state(self, p: Tensor, name: str) -> Tensor:
        if name not in self.state[p]:
            self.state[p][name] = torch.zeros_like(p, memory_format=torch.contiguous_format)
        return self.state[p][name].reshape(-1)


def _knobs(group: dict[str, Any]) -> dict[str, float]:
    beta1, beta2 = group["betas"]
    knobs = {"beta1": beta1, "beta2": beta2, **{name: group[name] for name in ("eps", "rho", "alpha", "strength")}}
    return knobs | {_PASS: math.inf if group["steps_per_pass"] is None else float(group["steps_per_pass"])}


def _dense(p: Tensor) -> Tensor:
    g = p.grad
    assert g is not None
    if g.layout != torch.strided:
        raise GradientError(
            f"VariantAdamW needs dense gradients, got layout {g.layout}: create the embedding with sparse=False"
        )
    return g


def _check_group(group: dict[str, Any]) -> None:
    name = group["variant"]
    if name not in VARIANTS or name in NEED_HALVES:
        known = ", ".join(variant for variant in VARIANTS if variant not in NEED_HALVES)
        halves = ": it compares the halves of a batch, which one gradient does not show" if name in NEED_HALVES else ""
        raise HyperparameterError(f"variant must be one of {known}, got {name!r}{halves}")
    if _PASS in VARIANTS[name].knobs and group["steps_per_pass"] is None:
        raise HyperparameterError(
            f"the variant {name!r} counts passes over the data: give steps_per_pass, the optimizer steps in one "
            "(len(loader), divided by the batches that are accumulated)"
        )
    beta1, beta2 = group["betas"]
    checks: list[tuple[str, Any, str, Callable[[float], bool]]] = [
        ("lr", group["lr"], "a finite number ≥ 0", lambda x: x >= 0),
        ("betas[0]", beta1, "a number in [0, 1)", lambda x: 0 <= x < 1),
        ("betas[1]", beta2, "a number in [0, 1)", lambda x: 0 <= x < 1),
        ("eps", group["eps"], "a finite number > 0", lambda x: x > 0),
        ("rho", group["rho"], "a number in [0, 1)", lambda x: 0 <= x < 1),
        *((key, group[key], "a finite number ≥ 0", lambda x: x >= 0) for key in ("weight_decay", "alpha", "strength")),
    ]
    if group["steps_per_pass"] is not None:
        checks.append(("steps_per_pass", group["steps_per_pass"], "a finite number ≥ 1", lambda x: x >= 1))
    for key, value, what, ok in checks:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or not ok(value):
            raise HyperparameterError(f"{key} must be {what}, got {value!r}")
    for p in group["params"]:
        if p.dtype not in (torch.float32, torch.float64) or p.layout != torch.strided or hasattr(p, "placements"):
            raise GradientError(
                "VariantAdamW needs dense parameters in float32 or float64, whole on one device, got "
                f"{type(p).__name__} of {p.dtype} with layout {p.layout}: convert them, or use PopRiskAdamW, which "
                "trains in half precision and in shards"
            )
