r"""Population-risk descent with the full-matrix rule: steps along the one direction on which the examples agree."""

import warnings
from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from poprisk._core.linalg import offdiagonal_projector
from poprisk.errors import BackendWarning, DataError, GradientError, HyperparameterError
from poprisk.optim._gate import checked_number

BASES = ("identity", "adam")


class PopulationProjectorDescent(Optimizer):
    r"""Descent with the preconditioner of greatest population rate, Theorem ``thm:kernel_increment``; for small models.

    .. math:: w \leftarrow w - \eta M^\star \bar g_B - \eta \lambda w, \qquad
        M^\star = P^{1/2} 1_{(0,\infty)}(P^{1/2} A_B P^{1/2}) P^{1/2}

    The step needs the gradient of every example, so ``step`` takes a closure that returns the vector of their losses,
    and holds a few copies of the b×d matrix of gradients.

    Differs from the paper: :math:`M^\star` has rank one at most (see :func:`poprisk.optim.population_projector`);
    where the examples share no direction, the step is weight decay alone. With several parameter groups, each group's
    lr is part of P, so that M stays symmetric (with one lr this is the formula above). The base ``"adam"`` has the
    current batch in v, as Adam does, while the theorem requires a P fixed before the batch was seen.

    Args:
        params: Parameters or groups; dense, float32 or float64.
        lr: Step size η.
        base: P: ``"identity"``, or ``"adam"`` for :math:`1/(\sqrt{\hat v} + \epsilon)`.
        beta2: Decay of v, for ``base="adam"``.
        eps: Adam's ε, for ``base="adam"``; above 0, since P must be finite where a gradient is always 0.
        weight_decay: λ, decoupled.

    Raises:
        HyperparameterError: a value is out of range.
        GradientError: a parameter is sparse, complex or of half precision, or gets a sparse gradient.
        DataError: from ``step``: the closure does not return a vector of at least two losses with a graph.

    >>> w = torch.zeros(2, requires_grad=True)
    >>> x, y = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.tensor([1.0, 1.0])
    >>> optimizer = PopulationProjectorDescent([w], lr=1.0)
    >>> losses = optimizer.step(lambda: (x @ w - y).square() / 2)
    >>> w.detach().abs().round(decimals=5)  # the examples agree on the first coordinate and contest the second
    tensor([1., 0.])
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-2,
        *,
        base: Literal["identity", "adam"] = "identity",
        beta2: float = 0.999,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self._batched = True
        self.rate: Tensor | None = None
        """η Ω attained by the last step on its own batch; optimistic, since M was chosen there."""
        super().__init__(params, {"lr": lr, "base": base, "beta2": beta2, "eps": eps, "weight_decay": weight_decay})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restores a pickled optimizer; attributes outside torch's own state are reset."""
        super().__setstate__(state)
        self._batched = True
        self.rate = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters with options of their own, validated."""
        super().add_param_group(param_group)
        try:
            _check_group(self.param_groups[-1])
        except Exception:
            self.param_groups.pop()
            raise

    def step(self, closure: Callable[[], Tensor]) -> Float[Tensor, "b"]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Takes one step and returns the losses it is based on.

        Args:
            closure: Evaluates the model on one batch and returns the loss of each example, [b], before any reduction.
                It neither calls ``backward`` nor clears gradients: ``.grad`` is not used.
        """
        with torch.enable_grad():
            losses = closure()
        _check_losses(losses)
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        gradients = self._per_example_gradients(losses, params)
        with torch.no_grad():
            self._update(params, gradients)
        return losses.detach()

    def _update(self, params: list[Tensor], gradients: list[Tensor]) -> None:
        """Flattens, finds M*, and writes the weights."""
        G = torch.cat([g.flatten(start_dim=1) for g in gradients], dim=1)
        options = {p: group for group in self.param_groups for p in group["params"]}
        means = [g.mean(dim=0) for g in gradients]
        scales = [self._base(p, mean, options[p]) for p, mean in zip(params, means, strict=True)]
        M = offdiagonal_projector(G, torch.cat([s.reshape(-1) for s in scales]))
        move = M.matvec(G.mean(dim=0))
        self.rate = M.rate
        for p, part in zip(params, move.split([p.numel() for p in params]), strict=True):
            p.mul_(1 - options[p]["lr"] * options[p]["weight_decay"])
            p.sub_(part.view(p.shape).to(p.dtype))

    def _base(self, p: Tensor, mean: Tensor, group: dict[str, Any]) -> Tensor:
        """The parameter's part of P, times its learning rate."""
        if group["base"] == "identity":
            return torch.full_like(mean, group["lr"])
        state = self.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
        state["step"] += 1
        v, beta2 = state["exp_avg_sq"], group["beta2"]
        v.mul_(beta2).addcmul_(mean, mean, value=1 - beta2)
        v_hat = v / (1 - beta2 ** state["step"].item())
        return group["lr"] / (v_hat.sqrt() + group["eps"])

    def _per_example_gradients(self, losses: Tensor, params: list[Tensor]) -> list[Tensor]:
        """Gradient of each loss by each parameter, [b, *shape]; zeros where a parameter has no part in the losses."""
        found = self._batched_vjp(losses, params) if self._batched else None
        if found is None:
            rows = [torch.autograd.grad(loss, params, retain_graph=True, allow_unused=True) for loss in losses]
            found = [_stack_rows(column, p) for column, p in zip(zip(*rows, strict=True), params, strict=True)]
        if all(g is None for g in found):
            raise DataError(
                "the losses depend on none of the parameters: compute them from this optimizer's parameters"
            )
        b = losses.shape[0]
        return [p.new_zeros(b, *p.shape) if g is None else _dense(g) for g, p in zip(found, params, strict=True)]

    def _batched_vjp(self, losses: Tensor, params: list[Tensor]) -> list[Tensor | None] | None:
        """All rows in one backward pass under vmap; None, from then on, where an operation does not allow it."""
        eye = torch.eye(losses.shape[0], dtype=losses.dtype, device=losses.device)
        try:
            found = torch.autograd.grad(
                losses, params, grad_outputs=eye, is_grads_batched=True, retain_graph=True, allow_unused=True
            )
        except (RuntimeError, TypeError) as error:
            self._batched = False
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            warnings.warn(
                f"per-example gradients are computed one by one, which is slower with the same result: the backward "
                f"pass of this model cannot be batched ({reason})",
                BackendWarning,
                stacklevel=4,
            )
            return None
        return list(found)


def _stack_rows(column: tuple[Tensor | None, ...], p: Tensor) -> Tensor | None:
    if all(row is None for row in column):
        return None
    return torch.stack([torch.zeros_like(p) if row is None else _dense(row) for row in column])


def _dense(g: Tensor) -> Tensor:
    if g.layout != torch.strided:
        raise GradientError(
            f"PopulationProjectorDescent needs dense gradients, got layout {g.layout}: create the embedding with "
            "sparse=False"
        )
    return g


def _check_losses(losses: Any) -> None:
    if not isinstance(losses, Tensor) or losses.dim() != 1 or losses.shape[0] < 2:
        got = f"a tensor of shape {list(losses.shape)}" if isinstance(losses, Tensor) else repr(losses)
        raise DataError(
            f"the closure must return the loss of each example, a vector of at least 2, got {got}: use "
            "reduction='none', and neither average nor call backward"
        )
    if not losses.requires_grad:
        raise DataError(
            "the closure's losses must carry a graph, got a tensor without: do not detach them or use no_grad"
        )


def _check_group(group: dict[str, Any]) -> None:
    expected: list[tuple[str, str, Callable[[float], bool]]] = [
        ("lr", "a finite number ≥ 0", lambda x: x >= 0),
        ("beta2", "a number in [0, 1)", lambda x: 0 <= x < 1),
        ("eps", "a finite number > 0", lambda x: x > 0),
        ("weight_decay", "a finite number ≥ 0", lambda x: x >= 0),
    ]
    for name, what, ok in expected:
        checked_number(name, group[name], what, ok)
    if group["base"] not in BASES:
        raise HyperparameterError(f"base must be one of {BASES}, got {group['base']!r}")
    for p in group["params"]:
        if p.dtype not in (torch.float32, torch.float64) or p.layout != torch.strided:
            raise GradientError(
                "PopulationProjectorDescent needs dense parameters in float32 or float64, got "
                f"{p.dtype} with layout {p.layout}: convert them (.float(), torch.view_as_real, .to_dense()), or give "
                "them an optimizer of their own"
            )
