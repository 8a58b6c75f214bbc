r"""A module as functions of one flat weight vector: outputs, losses, gradients and Jacobians, example by example."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import grad, grad_and_value, jacrev, vmap

from poprisk._core.autodiff.function import FunctionModule, call_module
from poprisk._core.autodiff.independence import check_independence
from poprisk._core.autodiff.loss_derivatives import loss_hessians
from poprisk._core.autodiff.losses import ExampleLoss, resolve_loss, scalar_loss
from poprisk._core.autodiff.precision import exact_kernels
from poprisk._core.autodiff.products import BatchProducts, Inputs
from poprisk._core.autodiff.recurrent import is_recurrent, plain_operations
from poprisk._core.autodiff.replayed import wake_backward
from poprisk.errors import DataError


class FlatModel(BatchProducts):
    r"""The paper's :math:`F(w, z)` and :math:`\ell(u, y)` for a module, with w the trainable parameters in one vector.

    A parameter used in several places is one piece of w; frozen parameters and buffers are constants, read and never
    written. All functions are pure: the module's own weights serve only as the starting point ``weights``. Outputs of
    any shape are flattened to p numbers. What is one row per example is mapped one example at a time under ``vmap``, so
    that none can see another; the products ``jvp``, ``vjp``, ``hvp`` run the examples as one batch, are meant for exact
    work, and refuse weights below single precision.

    Args:
        module: Called with a batch (first axis). Batch statistics and active dropout are refused.
        loss: ``"squared"``, ``"cross_entropy"``, ``"logistic"``, or a function of ONE example's outputs and target (no
            batch axis, the module's own output shape) that returns a scalar.
        chunk_size: Examples worked on at a time; None takes them all at once, the products as many as memory allows.

    Raises:
        HyperparameterError: the loss is neither a known name nor callable.
        DataError: no parameter is trainable; from the methods: the module mixes examples or draws at random, the loss
            does not return a scalar, inputs and targets differ in length, or the precision is too low for exact work.

    >>> module = nn.Linear(2, 1, bias=False)
    >>> model = FlatModel(module, "squared")
    >>> w, x, y = torch.tensor([1.0, 0.0]), torch.tensor([[3.0, 1.0]]), torch.tensor([[1.0]])
    >>> model.per_example_gradients(w, x, y)  # (wᵀx - y) x
    tensor([[6., 2.]])
    >>> model.jvp(w, x, torch.tensor([1.0, 1.0])), model.vjp(w, x, torch.tensor([2.0]))
    (tensor([4.]), tensor([6., 2.]))
    """

    def __init__(self, module: nn.Module, loss: str | ExampleLoss, *, chunk_size: int | None = None) -> None:
        super().__init__()
        self.module = module
        self.loss = resolve_loss(loss)
        self.chunk_size = chunk_size
        self.recurrent = is_recurrent(module)
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._constants: dict[str, Tensor] = {}
        if not self.parameters:
            raise DataError(
                "the module has no trainable parameter: call requires_grad_(True) on those to differentiate by"
            )
        for device in {p.device for p in self.parameters.values()}:
            wake_backward(device)

    @classmethod
    def from_function(
        cls,
        function: Callable[[Tensor, Any], Tensor],
        weights: Float[Tensor, "d"],
        loss: str | ExampleLoss,
        *,
        chunk_size: int | None = None,
    ) -> "FlatModel":
        """The same for a pure function ``function(w, inputs) -> outputs`` of a batch, each example mapped by itself.

        >>> model = FlatModel.from_function(lambda w, x: (x @ w).tanh(), torch.zeros(2), "logistic")
        >>> model.output_jacobian(model.weights, torch.tensor([[1.0, 3.0]]))
        tensor([[[1., 3.]]])
        """
        return cls(FunctionModule(function, weights), loss, chunk_size=chunk_size)

    def with_constants(self, values: Mapping[str, Tensor]) -> "FlatModel":
        """The same model with these values of frozen parameters, in place of the module's own."""
        made = copy.copy(self)
        made._constants = dict(values)
        return made

    def with_loss(self, loss: str | ExampleLoss) -> "FlatModel":
        """The same model with another loss."""
        made = FlatModel(self.module, loss, chunk_size=self.chunk_size)
        return made.with_constants(self._constants)

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

    def outputs(self, w: Float[Tensor, "d"] | Float[Tensor, "b d"], inputs: Inputs) -> Float[Tensor, "b p"]:
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

    def output_jacobian(self, w: Float[Tensor, "d"] | Float[Tensor, "b d"], inputs: Inputs) -> Float[Tensor, "b p d"]:
        r"""The full Jacobian :math:`J_a = D_w F(w, z_a)`, never summed over outputs; p backward passes per example."""
        forward = self._forward()
        return self._map(jacrev(lambda w, x: forward(w, x).reshape(-1)), w, inputs)

    def output_gradient(self, w: Float[Tensor, "d"], inputs: Inputs, targets: Tensor) -> Float[Tensor, "b p"]:
        r"""The residual :math:`r_a = \nabla_u \ell(F(w, z_a), y_a)`; u - y for squared loss."""
        forward, score = self._forward(), scalar_loss(self.loss)
        return self._map(lambda w, x, y: grad(score)(forward(w, x), y).reshape(-1), w, inputs, targets)

    def output_hessian(self, w: Float[Tensor, "d"], inputs: Inputs, targets: Tensor) -> Float[Tensor, "b p p"]:
        r"""One symmetric block per example, :math:`\nabla_u^2 \ell(F(w, z_a), y_a)`; no 1/n inside."""
        _check_lengths(w, inputs, targets)
        return loss_hessians(self.loss, self.batch_outputs(w, inputs), targets)

    def _forward(self) -> Callable[[Tensor, Inputs], Tensor]:
        """F(w, z) of one example."""
        check_independence(self.module)

        def forward(w: Tensor, x: Inputs) -> Tensor:
            one = tuple(part.unsqueeze(0) for part in (x if isinstance(x, tuple) else (x,)))
            return self._call(w, one).squeeze(0)

        return forward

    def _batch_forward(self, inputs: Inputs) -> Callable[[Tensor], Tensor]:
        check_independence(self.module)
        batch = inputs if isinstance(inputs, tuple) else (inputs,)
        return lambda w: self._call(w, batch)

    def _call(self, w: Tensor, batch: tuple[Tensor, ...]) -> Tensor:
        # A forward that writes its buffers writes these copies, made here to belong to the transform around it.
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        with plain_operations(self.recurrent):
            out = call_module(self.module, (self.unflatten(w), self._constants, buffers), batch)
        n = batch[0].shape[0]
        if not isinstance(out, Tensor) or out.shape[:1] != (n,):
            got = f"shape {list(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise DataError(
                f"the module must return one tensor whose first axis counts the examples, got {got} for {n} "
                f"example{'s' * (n != 1)}: wrap it in a module that returns such a tensor"
            )
        return out

    def _loss(self) -> Callable[[Tensor, Inputs, Tensor], Tensor]:
        forward, score = self._forward(), scalar_loss(self.loss)
        return lambda w, x, y: score(forward(w, x), y)

    def _map(self, function: Callable[..., Any], w: Tensor, *data: Inputs) -> Any:
        """``function(w, one example…)`` over the examples; ``w`` is shared unless it has a row for each."""
        _check_lengths(w, *data)
        axes = (0 if w.dim() == 2 else None, *([0] * len(data)))
        with exact_kernels(self.module):
            return vmap(function, in_dims=axes, chunk_size=self.chunk_size)(w, *data)


def _check_lengths(w: Tensor, *data: Inputs) -> None:
    tensors = [part for each in data for part in (each if isinstance(each, tuple) else (each,))]
    lengths = {t.shape[0] if t.dim() else 0 for t in tensors} | ({w.shape[0]} if w.dim() == 2 else set())
    if len(lengths) != 1 or lengths == {0}:
        raise DataError(
            f"inputs and targets must have one and the same number of examples along their first axis, at least 1, got "
            f"shapes {[list(t.shape) for t in tensors]}"
        )
