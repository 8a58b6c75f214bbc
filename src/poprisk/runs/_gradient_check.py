"""Is a step's gradient the one of the recorded examples under the recorded loss? Asked of a run's first steps."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from poprisk.errors import RunError
from poprisk.runs._execute import randomness_of
from poprisk.runs._problem import Problem
from poprisk.runs._recorded_step import RecordedStep


def check_gradient(problem: Problem, module: nn.Module, parameters: Sequence[Tensor], step: RecordedStep) -> None:
    r"""Compares ``.grad`` with :math:`c \sum_i \omega_i \nabla \ell_i` at the weights as they are.

    Left out where there is no such gradient: forwards that draw at random or mix examples, weights of low precision.

    Raises:
        RunError: they differ by more than the root of the machine epsilon.
    """
    exact = all(p.dtype in (torch.float32, torch.float64) for p in parameters)
    if not exact or randomness_of(module) is not None:
        return
    expected = _gradients(problem, module, parameters, step)
    factor = step.factor * step.loss_scale
    pairs = [(p.grad.detach(), factor * g) for p, g in zip(parameters, expected, strict=True) if p.grad is not None]
    difference = _norm([used - g for used, g in pairs])
    size = max(_norm([used for used, _ in pairs]), _norm([g for _, g in pairs]))
    tolerance = max(torch.finfo(p.dtype).eps for p in parameters) ** 0.5
    if not difference <= tolerance * size:
        raise RunError(
            f"the gradient of step {step.number} is not that of the recorded examples under loss={problem.loss!r}: "
            f"relative difference {difference / size if size else difference:.1e}. Are these the right indices, is the "
            "loss their mean (else pass weights=), are gradients zeroed, are inputs not changed at random (else "
            "augmentation=)? verify_steps=0 records without this check"
        )


def _gradients(problem: Problem, module: nn.Module, parameters: Sequence[Tensor], step: RecordedStep) -> list[Tensor]:
    generator, dtype = step.generator, parameters[0].dtype
    total = [torch.zeros_like(p) for p in parameters]
    buffers = {name: b.clone() for name, b in module.named_buffers()}
    for indices, weights in step.parts:
        inputs, targets = problem.batch(indices, generator=generator, dtype=dtype)
        device = parameters[0].device
        inputs = tuple(x.to(device) for x in inputs) if isinstance(inputs, tuple) else (inputs.to(device),)
        mean = torch.full((len(indices),), 1 / (len(step.parts) * len(indices)), dtype=torch.float64)
        omega = (mean if weights is None else weights).to(parameters[0])
        with torch.enable_grad():
            outputs = functional_call(module, buffers, inputs)
            loss = problem.batch_loss(outputs, targets.to(device), omega)
            gradients = torch.autograd.grad(loss, list(parameters), allow_unused=True)
        total = [t if g is None else t + g for t, g in zip(total, gradients, strict=True)]
    return total


def _norm(tensors: Sequence[Tensor]) -> float:
    return torch.stack([x.double().norm() for x in tensors]).norm().item()
