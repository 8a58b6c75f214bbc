r"""Derivatives of a stack of linear layers and activations, written out as matrix products.

With :math:`z_l = W_l h_{l-1} + b_l`, :math:`h_l = \varphi(z_l)` and :math:`\delta_l = \partial L/\partial z_l`, one
forward and one backward sweep of tangents (Pearlmutter's R-operator) give the product with the Hessian:

.. math::
   \dot z_l &= \dot W_l h_{l-1} + W_l \dot h_{l-1} + \dot b_l, \qquad \dot h_l = \varphi'(z_l) \dot z_l \\
   \dot\delta_{l-1} &= \varphi'(z)\,(W_l^\top \dot\delta_l + \dot W_l^\top \delta_l)
       + \varphi''(z)\, \dot z\, W_l^\top \delta_l \\
   (H v)_{W_l} &= \dot\delta_l h_{l-1}^\top + \delta_l \dot h_{l-1}^\top, \qquad
   (H v)_{b_l} = \textstyle\sum \dot\delta_l

Automatic differentiation of many directions at once does the same arithmetic with thinner products and larger
temporaries; on two CPU cores these formulas are several times faster. Examples are columns here: h is [features, b].
"""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from poprisk._core.autodiff import FlatModel, Inputs, loss_gradients, loss_hessians
from poprisk.risk._influence.batch_derivatives import BatchDerivatives, GeneralBatch

_PIECEWISE_LINEAR = (nn.ReLU, nn.LeakyReLU, nn.Identity, nn.ReLU6, nn.Hardtanh)
"""Activations whose second derivative is 0."""
_ACTIVATIONS = (*_PIECEWISE_LINEAR, nn.Tanh, nn.Sigmoid, nn.GELU, nn.SiLU, nn.Softplus, nn.ELU)
"""Elementwise modules; their derivatives come from automatic differentiation."""


@dataclass(frozen=True)
class Layer:
    """A linear layer: the positions of its weights in the flat vector, and the activations after it."""

    weight: slice
    bias: slice | None
    shape: tuple[int, int]
    activations: tuple[nn.Module, ...]


def linear_layers(model: FlatModel, inputs: Inputs | None = None) -> list[Layer] | None:
    """The layers of a module that consists of linear layers and activations only, all trainable; None for any other.

    Args:
        model: The network.
        inputs: Inputs of the network. Linear layers act on the last axis: where an example has several axes and no
            ``Flatten`` comes first, layers are shared over positions, and the result is None.

    >>> module = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2, bias=False))
    >>> [layer.shape for layer in linear_layers(FlatModel(module, "squared")) or []]
    [(3, 4), (2, 3)]
    >>> linear_layers(FlatModel(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), "squared")) is None
    True
    """
    places, start = {}, 0
    for p in model.parameters.values():
        places[id(p)] = slice(start, start + p.numel())
        start += p.numel()
    children = [child for child in _flat_children(model.module) if type(child) is not nn.Identity]
    if children and type(children[0]) is nn.Flatten and (children[0].start_dim, children[0].end_dim) == (1, -1):
        children = children[1:]
    elif isinstance(inputs, Tensor) and inputs.dim() != 2:
        return None
    found: list[tuple[nn.Linear, list[nn.Module]]] = []
    for child in children:
        if type(child) is nn.Linear:
            found.append((child, []))
        elif type(child) in _ACTIVATIONS and found:
            found[-1][1].append(child)
        else:
            return None
    owned = [p for linear, _ in found for p in (linear.weight, linear.bias) if p is not None]
    if not found or {id(p) for p in owned} != set(places) or len(owned) != len(places) or _watched(model.module):
        return None
    return [
        Layer(
            places[id(linear.weight)],
            None if linear.bias is None else places[id(linear.bias)],
            (linear.out_features, linear.in_features),
            tuple(activations),
        )
        for linear, activations in found
    ]


class StackBatch(BatchDerivatives):
    """The derivatives of a stack of linear layers at one batch.

    Args:
        layers: From :func:`linear_layers`.
        model: The network and its loss.
        w: The weights at which derivatives are taken.
        inputs: The batch.
        targets: Its targets.
        shares: Factor of each example's loss in the step's gradient.
    """

    def __init__(
        self,
        layers: list[Layer],
        model: FlatModel,
        w: Float[Tensor, "d"],
        inputs: Tensor,
        targets: Tensor,
        shares: Float[Tensor, "b"],
    ) -> None:
        super().__init__(model, w, inputs, targets, shares)
        self._layers = layers
        self._weights = [self.w[layer.weight].view(layer.shape) for layer in layers]
        self._forward()
        self._backward()

    def _forward(self) -> None:
        assert isinstance(self.inputs, Tensor)
        self._hidden = [self.inputs.flatten(1).to(self.w.dtype).T.contiguous()]
        self._slopes: list[Tensor | None] = []
        self._bends: list[Tensor | None] = []
        for layer, W in zip(self._layers, self._weights, strict=True):
            z = W @ self._hidden[-1]
            if layer.bias is not None:
                z += self.w[layer.bias, None]
            h, slope, bend = _activate(layer, z)
            self._hidden.append(h)
            self._slopes.append(slope)
            self._bends.append(bend)
        u = self._hidden[-1].T
        self.residuals = loss_gradients(self.model.loss, u, self.targets)
        self._curvature = self.shares[:, None, None] * loss_hessians(self.model.loss, u, self.targets)

    def _backward(self) -> None:
        """δ of every layer, and φ'' times the gradient that reaches it."""
        self.gradient = torch.empty_like(self.w)
        self._deltas: list[Tensor] = [self.residuals] * len(self._layers)
        self._bent: list[Tensor | None] = [None] * len(self._layers)
        back = (self.shares[:, None] * self.residuals).T
        for i in reversed(range(len(self._layers))):
            layer, slope, bend = self._layers[i], self._slopes[i], self._bends[i]
            delta = back if slope is None else slope * back
            self._deltas[i] = delta.contiguous()
            self._bent[i] = None if bend is None else bend * back
            self.gradient[layer.weight] = (delta @ self._hidden[i].T).flatten()
            if layer.bias is not None:
                self.gradient[layer.bias] = delta.sum(1)
            back = self._weights[i].T @ delta

    def tensors(self) -> list[Tensor | None]:
        """All tensors that :meth:`push` reads, in a fixed order."""
        fixed = [self.w, self.shares, self.residuals, self._curvature]
        return [*fixed, *self._hidden, *self._deltas, *self._slopes, *self._bent]

    def on(self, tensors: Sequence[Tensor | None]) -> "StackBatch":
        """A copy with other tensors, in the order of :meth:`tensors`; only :meth:`push` may be called on it."""
        made, count = copy.copy(self), len(self._layers)
        given = list(tensors)
        made.w, made.shares, made.residuals, made._curvature = (_there(x) for x in given[:4])
        made._weights = [made.w[layer.weight].view(layer.shape) for layer in self._layers]
        made._hidden = [_there(x) for x in given[4 : 5 + count]]
        made._deltas = [_there(x) for x in given[5 + count : 5 + 2 * count]]
        made._slopes, made._bent = given[5 + 2 * count : 5 + 3 * count], given[5 + 3 * count :]
        return made

    def push(
        self, V: Float[Tensor, "q d"], source: Float[Tensor, "q b p"] | None = None
    ) -> tuple[Float[Tensor, "q d"], Float[Tensor, "q b p"]]:
        """See the base class."""
        pieces = [V[:, layer.weight].reshape(len(V), *layer.shape) for layer in self._layers]
        changes: list[Tensor | None] = [None]
        tangents: list[Tensor] = []
        for i, layer in enumerate(self._layers):
            dz, dh = torch.matmul(pieces[i], self._hidden[i]), changes[-1]
            if dh is not None:
                dz += torch.matmul(self._weights[i], dh)
            if layer.bias is not None:
                dz += V[:, layer.bias, None]
            tangents.append(dz)
            slope = self._slopes[i]
            changes.append(dz if slope is None else slope * dz)
        last = changes[-1]
        assert last is not None
        du = last.mT.contiguous()  # [q, b, p]
        back = torch.matmul(du.unsqueeze(2), self._curvature).squeeze(2)
        back = (back if source is None else back + source).mT
        return self._pull_tangents(V, pieces, changes, tangents, back), du

    def push_alone(self, V: Float[Tensor, "m d"], rows: Int[Tensor, "m"]) -> Float[Tensor, "m d"]:
        """See the base class: the same sweeps, where each direction has a batch of one example."""
        alone = copy.copy(self)
        alone._hidden, alone._deltas = ([x[:, rows].T.unsqueeze(2) for x in xs] for xs in (self._hidden, self._deltas))
        alone._slopes, alone._bent = (
            [None if x is None else x[:, rows].T.unsqueeze(2) for x in xs] for xs in (self._slopes, self._bent)
        )
        alone._curvature = self._curvature[rows].unsqueeze(1)
        return alone.push(V)[0]

    def _pull_tangents(
        self, V: Tensor, pieces: list[Tensor], changes: list[Tensor | None], tangents: list[Tensor], back: Tensor
    ) -> Tensor:
        out = torch.empty_like(V)
        for i in reversed(range(len(self._layers))):
            layer, slope, bent, dh = self._layers[i], self._slopes[i], self._bent[i], changes[i]
            d_delta = (back if slope is None else slope * back).contiguous()
            if bent is not None:
                d_delta += bent * tangents[i]
            piece = torch.matmul(d_delta, self._hidden[i].mT)
            if dh is not None:
                piece += torch.matmul(self._deltas[i], dh.mT)
            out[:, layer.weight] = piece.flatten(1)
            if layer.bias is not None:
                out[:, layer.bias] = d_delta.sum(2)
            if i:
                back = torch.matmul(self._weights[i].T, d_delta) + torch.matmul(pieces[i].mT, self._deltas[i])
        return out


def batch_derivatives(
    model: FlatModel,
    layers: list[Layer] | None,
    w: Float[Tensor, "d"],
    inputs: Inputs,
    targets: Tensor,
    shares: Float[Tensor, "b"],
) -> BatchDerivatives:
    """The derivatives of a batch, by :class:`StackBatch` if the model is a stack of linear layers."""
    if layers is None or isinstance(inputs, tuple):
        return GeneralBatch(model, w, inputs, targets, shares)
    return StackBatch(layers, model, w, inputs, targets, shares)


def _activate(layer: Layer, z: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """φ, φ' and φ''; None for φ' of the identity, and for φ'' of a piecewise linear activation."""
    if not layer.activations:
        return z, None, None

    with torch.enable_grad():
        at = z.detach().requires_grad_()
        h = at
        for activation in layer.activations:
            h = activation(h.clone())  # an activation may work in place
        straight = all(type(activation) in _PIECEWISE_LINEAR for activation in layer.activations)
        slope = torch.autograd.grad(h.sum(), at, create_graph=not straight)[0]
        bend = torch.autograd.grad(slope.sum(), at)[0] if slope.requires_grad else None
    return h.detach(), slope.detach(), bend


def _there(x: Tensor | None) -> Tensor:
    assert x is not None
    return x


def _flat_children(module: nn.Module) -> Iterator[nn.Module]:
    if type(module) is nn.Sequential:
        for child in module:
            yield from _flat_children(child)
    else:
        yield module


def _watched(module: nn.Module) -> bool:
    """Whether hooks or parametrizations may change the forward pass."""
    return any(
        m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or hasattr(m, "parametrizations")
        for m in module.modules()
    )
