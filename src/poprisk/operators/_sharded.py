r"""Tangent kernels of models that are sharded by FSDP2: weights and directions sharded, examples on their process.

Every process has its shards of the weights and its own examples, and calls the same methods in the same order. The
adjoint :math:`\sum_r J_r^\top u_r` is one backward pass, whose gradients FSDP2 adds up and shards. The product
:math:`J_r v` is one forward pass in forward mode: while FSDP2 gathers the weights of a module, the direction is
gathered as well, so that a process never holds more than twice as much of the model whole as in training.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.autograd.forward_ad as forward_mode
from torch import Tensor, nn

from poprisk.errors import DataError, RunError


class ShardedKernel:
    r"""The product with :math:`K = J M J^\top` for a model under ``torch.distributed.fsdp.fully_shard``.

    Rows and columns are the outputs of all processes' examples; each process passes and gets those of its own.

    Args:
        model: The root module that ``fully_shard`` was applied to, in the mode in which it is evaluated, with the
            default reduction of gradients (their mean over processes).
        inputs: This process's examples, as the module takes them.
        preconditioner: The diagonal of M: a number, or DTensors like the trained parameters.

    Raises:
        DataError: the module is not sharded by FSDP2.
        RunError: the products are not adjoint: the model draws at random, or uses a parameter outside of the forward
            pass of the module that gathers it.
    """

    def __init__(
        self, model: nn.Module, *inputs: Tensor, preconditioner: float | Sequence[Tensor] = 1.0, check: bool = True
    ) -> None:
        from torch.distributed import get_world_size
        from torch.distributed.fsdp import FSDPModule
        from torch.distributed.tensor import DTensor

        if not isinstance(model, FSDPModule):
            raise DataError(f"expected a model under fully_shard (FSDP2), got {type(model).__name__}")
        gathering = [m for m in model.modules() if isinstance(m, FSDPModule)]
        for each in gathering:
            each.reshard()
        self._model, self._inputs = model, inputs
        self._places = {m: _own_parameters(m, gathering) for m in gathering}
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        """The trained parameters; a direction has a DTensor like each of them."""
        if not all(isinstance(p, DTensor) for p in self.parameters):
            raise DataError(
                "every trained parameter must be in a module under fully_shard: apply it to the root as well"
            )
        self._index = {id(p): i for i, p in enumerate(self.parameters)}
        self._which = {m: [self._index.get(id(o._parameters[n])) for o, n in own] for m, own in self._places.items()}
        self._M, self._processes = preconditioner, get_world_size()
        with torch.no_grad():
            self.shape: torch.Size = self._model(*inputs).shape
        """Of this process's outputs."""
        if check:
            self._check()

    def __matmul__(self, v: Tensor) -> Tensor:
        """K v: numbers like this process's outputs, for all processes' ``v``."""
        g = self.adjoint(v)
        scales = [self._M] * len(g) if isinstance(self._M, int | float) else self._M
        return self.product([scale * each for scale, each in zip(scales, g, strict=True)])

    def adjoint(self, u: Tensor) -> list[Tensor]:
        """The sum of Jᵀ u over all processes, sharded like the parameters."""
        before = [p.grad for p in self.parameters]
        try:
            for p in self.parameters:
                p.grad = None
            with torch.enable_grad():
                self._model(*self._inputs).backward(u)
            # FSDP2 takes the mean over processes
            return [torch.zeros_like(p) if p.grad is None else p.grad * self._processes for p in self.parameters]
        finally:
            for p, grad in zip(self.parameters, before, strict=True):
                p.grad = grad

    def product(self, direction: Sequence[Tensor]) -> Tensor:
        """J v for this process's examples, where v is sharded like the parameters."""
        with torch.no_grad(), forward_mode.dual_level(), self._along(list(direction)):
            found = forward_mode.unpack_dual(self._model(*self._inputs)).tangent
        return torch.zeros(self.shape) if found is None else found

    @contextmanager
    def _along(self, direction: list[Any]) -> Iterator[None]:
        """Parameters have tangents while they are gathered: after FSDP2's hook before, before its hook after."""
        with ExitStack() as stack:
            for module, places in self._places.items():
                which, plain = self._which[module], {}

                def gathered(*_: Any, places: Any = places, which: Any = which, plain: Any = plain) -> None:
                    for (owner, name), i in zip(places, which, strict=True):
                        if i is not None:
                            p = plain[owner, name] = owner._parameters[name]
                            tangent = direction[i].full_tensor().to(p.dtype)
                            owner._parameters[name] = forward_mode.make_dual(p.detach(), tangent)

                def freed(*_: Any, plain: Any = plain) -> None:
                    for (owner, name), p in plain.items():
                        owner._parameters[name] = p
                    plain.clear()

                stack.callback(freed)
                stack.callback(module.register_forward_pre_hook(gathered).remove)
                stack.callback(module.register_forward_hook(freed, prepend=True).remove)
            yield

    def _check(self) -> None:
        """⟨u, J v⟩ = ⟨Jᵀ u, v⟩ for a random pair."""
        from torch.distributed import all_reduce

        generator = torch.Generator().manual_seed(0)
        u = torch.randn(self.shape, generator=generator).to(self.parameters[0])
        v = [torch.ones_like(p) * (1 + i % 3) for i, p in enumerate(self.parameters)]
        Jv = self.product(v)
        ours = torch.stack([(u.to(Jv) * Jv).double().sum(), (u.to(Jv) * Jv).double().square().sum()])
        all_reduce(ours)
        sums: list[Any] = [(a * b).sum() for a, b in zip(self.adjoint(u.to(Jv)), v, strict=True)]
        theirs = torch.stack([each.full_tensor().double() for each in sums]).sum()
        if not bool((ours[0] - theirs).abs() <= 1e-3 * (ours[1].sqrt() + theirs.abs())):
            raise RunError(
                f"J and its adjoint disagree ({float(ours[0]):.6g} and {float(theirs):.6g}): the model draws at random "
                "(call model.eval()), or uses a parameter outside of the module that gathers it (shard its parent)"
            )


def _own_parameters(module: nn.Module, gathering: Sequence[nn.Module]) -> list[tuple[nn.Module, str]]:
    """Modules and names of the parameters that a module gathers: those below it, up to the next that gathers."""
    found = [(module, name) for name, p in module._parameters.items() if p is not None]
    for child in module.children():
        found += [] if any(child is each for each in gathering) else _own_parameters(child, gathering)
    return found
