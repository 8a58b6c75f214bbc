r"""A module as functions of one flat weight vector: outputs, losses, gradients and Jacobians, example by example."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from poprisk.autodiff.independence import check_independence
from poprisk.autodiff.losses import ExampleLoss, resolve_loss
from poprisk.errors import DataError

# One tensor, or the tensors of a forward with several positional arguments; the first axis counts the examples.
Inputs = Tensor | tuple[Tensor, ...]


def take_examples(inputs: Inputs, rows: Tensor | slice) -> Inputs:
    """Some examples of a batch."""
    return tuple(part[rows] for part in inputs) if isinstance(inputs, tuple) else inputs[rows]


class FlatModel:
    r"""The paper's :math:`F(w, z)` and :math:`\ell(u, y)` for a module, with w the trainable parameters in one vector.

    A parameter used in several places is one piece of w; frozen parameters and buffers are constants, read and never
    written. All functions are pure: the module's own weights serve only as the starting point ``weights``. Examples are
    mapped one at a time under ``vmap``, so that none can see another; outputs of any shape are flattened to p numbers.

    Args:
        module: Called with a batch (first axis). Batch statistics and active dropout are refused.
        loss: ``"squared"``, ``"cross_entropy"``, or a function of ONE example's outputs and target (no batch axis, the
            module's own output shape) that returns a scalar.
        chunk_size: Examples worked on at a time; None takes them all at once.

    Raises:
        HyperparameterError: the loss is neither a known name nor callable.
        DataError: no parameter is trainable; from the methods: the module mixes examples or draws at random, the loss
            does not return a scalar, or inputs and targets differ in length.

    >>> module = nn.Linear(2, 1, bias=False)
    >>> model = FlatModel(module, "squared")
    >>> w, x, y = torch.tensor([1.0, 0.0]), torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0]])
    >>> model.per_example_gradients(w, x, y)  # (wᵀx - y) x
    tensor([[6., 2.]])
    """

    def __init__(self, module: nn.Module, loss: str | ExampleLoss, *, chunk_size: int | None = None) -> None:
        self.module = module
        self.loss = resolve_loss(loss)
        self.chunk_size = chunk_size
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise DataError(
                "the module has no trainable parameter: call requires_grad_(True) on those to differentiate by"
            )

    @property
    def size(self) -> int:
        """d, the number of trainable weights; shared ones count once."""
        return sum(p.numel() for p in self.parameters.values())

    @property
    def weights(self) -> Float[Tensor, "d"]:
        """A copy of the module's trainable weights as they are now."""
        return torch.cat([p.detach().reshape(-1) for p in self.parameters.values()])

    def unflatten(self, w: Float[Tensor, "d"]) -> dict[str, Tensor]:
        """The pieces of a flat vector by parameter name, in each parameter's shape and dtype."""
        if w.shape != (self.size,):
            raise DataError(f"w must be a flat vector [{self.size}] like .weights, got shape {list(w.shape)}")
        pieces = w.split([p.numel() for p in self.parameters.values()])
        named = zip(self.parameters.items(), pieces, strict=True)
        return {name: piece.view(p.shape).to(p.dtype) for (name, p), piece in named}

    def outputs(self, w: Float[Tensor, "d"], inputs: Inputs) -> Float[Tensor, "b p"]:
        """F(w, z) for each example, flattened."""
        forward = self._forward()
        return self._map(lambda w, x: forward(w, x).reshape(-1), w, inputs)

    def per_example_losses(
        self, w: Float[Tensor, "d"] | Float[Tensor, "b d"], inputs: Inputs, targets: Tensor
    ) -> Float[Tensor, "b"]:
        """ℓ(F(w, z_a), y_a); with a matrix for w, each example is scored by its own row of weights."""
        return self._map(self._loss(), w, inputs, targets)

    def per_example_gradients(self, w: Float[Tensor, "d"], inputs: Inputs, targets: Tensor) -> Float[Tensor, "b d"]:
        r"""One gradient per row, :math:`g_a = J_a^\top r_a` of Eq. ``per_example_triple``."""
        return self._map(grad(self._loss()), w, inputs, targets)

    def losses_and_gradients(
        self, w: Float[Tensor, "d"], inputs: Inputs, targets: Tensor
    ) -> tuple[Float[Tensor, "b"], Float[Tensor, "b d"]]:
        """``per_example_losses`` and ``per_example_gradients`` for the price of the second."""
        gradients, losses = self._map(grad_and_value(self._loss()), w, inputs, targets)
        return losses, gradients

    def output_jacobian(self, w: Float[Tensor, "d"], inputs: Inputs) -> Float[Tensor, "b p d"]:
        r"""The full Jacobian :math:`J_a = D_w F(w, z_a)`, never summed over outputs; p backward passes per example."""
        forward = self._forward()
        return self._map(jacrev(lambda w, x: forward(w, x).reshape(-1)), w, inputs)

    def output_gradient(self, w: Float[Tensor, "d"], inputs: Inputs, targets: Tensor) -> Float[Tensor, "b p"]:
        r"""The residual :math:`r_a = \nabla_u \ell(F(w, z_a), y_a)`; u - y for squared loss."""
        forward, score = self._forward(), self._scalar_loss
        return self._map(lambda w, x, y: grad(score)(forward(w, x), y).reshape(-1), w, inputs, targets)

    def _forward(self) -> Callable[[Tensor, Inputs], Tensor]:
        """F(w, z) of one example."""
        check_independence(self.module)

        def forward(w: Tensor, x: Inputs) -> Tensor:
            one = tuple(part.unsqueeze(0) for part in (x if isinstance(x, tuple) else (x,)))
            # A forward that writes its buffers writes these copies, made here to belong to the transform around it.
            buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
            out = functional_call(self.module, (self.unflatten(w), buffers), one)
            if not isinstance(out, Tensor) or out.shape[:1] != (1,):
                got = f"shape {list(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
                raise DataError(
                    f"the module must return one tensor whose first axis counts the examples, got {got} for one "
                    "example: wrap it in a module that returns such a tensor"
                )
            return out.squeeze(0)

        return forward

    def _loss(self) -> Callable[[Tensor, Inputs, Tensor], Tensor]:
        forward, score = self._forward(), self._scalar_loss
        return lambda w, x, y: score(forward(w, x), y)

    def _scalar_loss(self, u: Tensor, y: Tensor) -> Tensor:
        value = self.loss(u, y)
        if not isinstance(value, Tensor) or value.dim() != 0:
            got = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise DataError(f"loss must return a scalar for one example, got {got}: sum or average over its outputs")
        return value

    def _map(self, function: Callable[..., Any], w: Tensor, *data: Inputs) -> Any:
        """``function(w, one example…)`` over the examples; ``w`` is shared unless it has a row for each."""
        _check_lengths(w, *data)
        axes = (0 if w.dim() == 2 else None, *([0] * len(data)))
        try:
            # Fused attention has no batching rule: vmap would run it example by example.
            with sdpa_kernel(SDPBackend.MATH):
                return vmap(function, in_dims=axes, chunk_size=self.chunk_size)(w, *data)
        except RuntimeError as error:
            if "randomness error mode" not in str(error):
                raise
            raise DataError(
                "every example must be mapped by a fixed function of the weights, but the forward or the loss draws at "
                "random: call .eval() on the module or switch the random operation off"
            ) from error


def _check_lengths(w: Tensor, *data: Inputs) -> None:
    tensors = [part for each in data for part in (each if isinstance(each, tuple) else (each,))]
    lengths = {t.shape[0] if t.dim() else 0 for t in tensors} | ({w.shape[0]} if w.dim() == 2 else set())
    if len(lengths) != 1 or lengths == {0}:
        raise DataError(
            f"inputs and targets must have one and the same number of examples along their first axis, at least 1, got "
            f"shapes {[list(t.shape) for t in tensors]}"
        )
