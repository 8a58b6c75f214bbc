r"""First and second derivatives of the batch of one step: H v and J_i v of every example, for many v in one pass.

The batch of a step enters its gradient as :math:`g = \sum_{i \in B} \sigma_i \nabla\ell_i(w)` with shares
:math:`\sigma_i = S_i / n` (1/b for a mean). A direction v in weight space, and a source :math:`\rho_i` in each
example's residual, change it by

.. math:: \dot g = \sum_i \sigma_i \nabla^2\ell_i\, v + \sum_i J_i^\top \rho_i, \qquad \dot u_i = J_i v

Forward and adjoint differentiation through a run need nothing else: :math:`\langle \nabla\ell_i, v \rangle =
\langle r_i, \dot u_i \rangle`, and the response of g to a label is :math:`-\sigma_i J_i^\top`.
"""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import grad, jvp, vjp, vmap

from poprisk._core.autodiff import (
    FlatModel,
    Inputs,
    JacobianWay,
    double_backward,
    exact_kernels,
    flatten_outputs,
    load_forward_mode,
    loss_gradients,
    scalar_loss,
    take_first_way,
)
from poprisk.errors import DataError


@contextmanager
def exact_transforms(module: nn.Module | None = None) -> Iterator[None]:
    """Exact kernels, without PyTorch's warning about its own buffer in the second derivative of ``logsigmoid``."""
    with exact_kernels(module), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "An output with one or more elements was resized", UserWarning)
        yield


class BatchDerivatives(ABC):
    """Derivatives of a batch at fixed weights; the rows of a block are directions.

    Args:
        model: The network and its loss.
        w: The weights at which derivatives are taken.
        inputs: Inputs of the batch.
        targets: Targets of the batch.
        shares: Factor of each example's loss in the step's gradient.
    """

    gradient: Float[Tensor, "d"]
    """g, the step's gradient."""
    residuals: Float[Tensor, "b p"]
    r""":math:`r_i = \nabla_u \ell_i`, without the share."""

    def __init__(
        self, model: FlatModel, w: Float[Tensor, "d"], inputs: Inputs, targets: Tensor, shares: Float[Tensor, "b"]
    ) -> None:
        load_forward_mode()
        self.model, self.w, self.inputs, self.targets, self.shares = model, w.detach(), inputs, targets, shares

    @abstractmethod
    def push(
        self, V: Float[Tensor, "q d"], source: Float[Tensor, "q b p"] | None = None
    ) -> tuple[Float[Tensor, "q d"], Float[Tensor, "q b p"]]:
        """The change of the gradient along each direction (and under each source), and of every example's outputs."""

    def push_alone(self, V: Float[Tensor, "m d"], rows: Int[Tensor, "m"]) -> Float[Tensor, "m d"]:
        r"""Each direction times the Hessian of one example: :math:`\sigma_i \nabla^2\ell_i v`, :math:`i = rows_m`."""
        forward, score = self.model._forward(), scalar_loss(self.model.loss)
        several = isinstance(self.inputs, tuple)

        def gradient(share: Tensor, y: Tensor, x: tuple[Tensor, ...]) -> Callable[[Tensor], Tensor]:
            return grad(lambda w: share * score(forward(w, x if several else x[0]), y))

        def forwards(v: Tensor, share: Tensor, y: Tensor, *x: Tensor) -> Tensor:
            return jvp(gradient(share, y, x), (self.w,), (v,))[1]

        def backwards(v: Tensor, share: Tensor, y: Tensor, *x: Tensor) -> Tensor:
            return vjp(gradient(share, y, x), self.w)[1](v)[0]  # the Hessian is symmetric

        parts = self.inputs if isinstance(self.inputs, tuple) else (self.inputs,)
        data = (V, self.shares[rows], self.targets[rows], *(part[rows] for part in parts))
        return self._derived("own_hessian_way", lambda: vmap(forwards)(*data), lambda: vmap(backwards)(*data))

    def input_slopes(self, V: Float[Tensor, "q d"]) -> Tensor:
        r""":math:`\nabla_{x_i} \langle \sigma_i \nabla_w \ell_i, v \rangle` for every direction and example."""
        x = one_float_input(self.inputs)

        # Never reverse over forward mode: PyTorch differentiates the tangent of a layer norm wrongly.
        def forwards(v: Tensor) -> Tensor:
            return jvp(lambda w: grad(self._total, argnums=1)(w, x), (self.w,), (v,))[1]

        def backwards(v: Tensor) -> Tensor:
            return grad(lambda x: torch.dot(grad(self._total)(self.w, x), v))(x)

        return self._derived("input_way", lambda: vmap(forwards)(V), lambda: vmap(backwards)(V))

    def push_inputs(self, V: Float[Tensor, "q d"], dx: Tensor) -> tuple[Float[Tensor, "q d"], Float[Tensor, "q b p"]]:
        """The change of the gradient and of the outputs when w changes by V and the batch's inputs by ``dx[q]``."""
        x = one_float_input(self.inputs)

        def outputs(w: Tensor, x: Tensor) -> Tensor:
            return self.model._batch_forward(x)(w).reshape(-1)

        def forwards(v: Tensor, dx: Tensor) -> Tensor:
            both = lambda w, x: torch.cat([grad(self._total)(w, x), outputs(w, x)])  # noqa: E731
            return jvp(both, (self.w, x), (v, dx))[1]

        def backwards(v: Tensor, dx: Tensor) -> Tensor:
            def along(w: Tensor) -> Tensor:  # ⟨∇L, (v, dx)⟩, whose gradient by w is the result
                by_w, by_x = grad(self._total, argnums=(0, 1))(w, x)
                return torch.dot(by_w, v) + (by_x * dx).sum()

            transposed = vjp(vjp(outputs, self.w, x)[1], torch.zeros_like(self.residuals).reshape(-1))[1]
            return torch.cat([grad(along)(self.w), transposed((v, dx))[0]])

        return self._split(self._derived("input_way", lambda: vmap(forwards)(V, dx), lambda: vmap(backwards)(V, dx)))

    def _derived(self, way: str, forwards: Callable[[], Tensor], backwards: Callable[[], Tensor]) -> Tensor:
        """A derivative by forward mode, or by two reverse modes; the model remembers which one works."""
        ways = {JacobianWay.FORWARD: forwards, JacobianWay.DOUBLE_BACKWARD: backwards}
        with exact_transforms(self.model.module):
            known, found = take_first_way(ways, getattr(self.model, way))
        setattr(self.model, way, known)
        return found

    def _split(self, joined: Float[Tensor, "q d_bp"]) -> tuple[Float[Tensor, "q d"], Float[Tensor, "q b p"]]:
        """Changes of the gradient and of the outputs, from both side by side."""
        d = self.w.numel()
        return joined[:, :d], joined[:, d:].reshape(len(joined), *self.residuals.shape)

    def _total(self, w: Tensor, x: Inputs) -> Tensor:
        u = self.model._batch_forward(x)(w)
        return (self.shares * vmap(scalar_loss(self.model.loss))(u, self.targets)).sum()


class GeneralBatch(BatchDerivatives):
    """Derivatives of any model: forward over reverse mode, or reverse over reverse where PyTorch has no forward mode.

    >>> model = FlatModel(torch.nn.Linear(2, 1, bias=False), "squared")
    >>> x, y = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.zeros(2, 1)
    >>> batch = GeneralBatch(model, torch.tensor([1.0, 1.0]), x, y, torch.tensor([0.5, 0.5]))
    >>> batch.gradient  # mean of u x
    tensor([0.5000, 2.0000])
    >>> Hv, du = batch.push(torch.tensor([[1.0, 1.0]]))
    >>> Hv, du.flatten()
    (tensor([[0.5000, 2.0000]]), tensor([1., 2.]))
    """

    def __init__(
        self, model: FlatModel, w: Float[Tensor, "d"], inputs: Inputs, targets: Tensor, shares: Float[Tensor, "b"]
    ) -> None:
        super().__init__(model, w, inputs, targets, shares)
        self._forward = model._batch_forward(inputs)
        with exact_transforms(model.module):
            self.gradient, u = grad(self._tilted, has_aux=True)(self.w, None)
        self.residuals = loss_gradients(model.loss, u, targets)

    def push(
        self, V: Float[Tensor, "q d"], source: Float[Tensor, "q b p"] | None = None
    ) -> tuple[Float[Tensor, "q d"], Float[Tensor, "q b p"]]:
        """See the base class."""
        forward, reverse = self._forward_over_reverse, self._reverse_over_reverse
        return self._split(self._derived("hessian_way", lambda: forward(V, source), lambda: reverse(V, source)))

    def _forward_over_reverse(self, V: Tensor, source: Tensor | None) -> Tensor:
        def both(w: Tensor, rho: Tensor) -> Tensor:
            g, u = grad(self._tilted, has_aux=True)(w, rho)
            return torch.cat([g, u.reshape(-1)])

        none = torch.zeros_like(self.residuals)
        if source is None:
            return vmap(lambda v: jvp(lambda w: both(w, none), (self.w,), (v,))[1])(V)
        return vmap(lambda v, rho: jvp(both, (self.w, none), (v, rho))[1])(V, source)

    def _reverse_over_reverse(self, V: Tensor, source: Tensor | None) -> Tensor:
        flat = lambda w: self._forward(w).reshape(self.residuals.shape)  # noqa: E731
        pull = vjp(lambda w: grad(self._tilted, has_aux=True)(w, None)[0], self.w)[1]
        Hv = vmap(lambda v: pull(v)[0])(V)  # the Hessian is symmetric
        if source is not None:
            Hv = Hv + vmap(lambda rho: vjp(flat, self.w)[1](rho)[0])(source)
        du = double_backward(flat, self.w, V.T.contiguous())
        return torch.cat([Hv, du.movedim(-1, 0).flatten(1)], 1)

    def _tilted(self, w: Tensor, rho: Tensor | None) -> tuple[Tensor, Tensor]:
        """The batch's loss plus ⟨source, outputs⟩, and the outputs."""
        u = self._forward(w)
        total = (self.shares * vmap(scalar_loss(self.model.loss))(u, self.targets)).sum()
        return (total if rho is None else total + (rho * flatten_outputs(u)).sum()), u


def one_float_input(inputs: Inputs) -> Tensor:
    """The inputs, where derivatives by them exist.

    Raises:
        DataError: there are several tensors, or they hold whole numbers.
    """
    if isinstance(inputs, tuple) or not inputs.is_floating_point():
        kind = f"{len(inputs)} tensors" if isinstance(inputs, tuple) else str(inputs.dtype)
        raise DataError(f"derivatives by inputs need one floating-point input tensor, got {kind}: leave inputs out")
    return inputs
