r"""What the examples contribute to a kernel: rows of the Jacobian, and pairs of factors where it is an outer product.

A kernel block is the contraction of the features of two sets of examples:

.. math:: K_{ij,i'j'} = \langle R_{ij}, R_{i'j'} \rangle
    + \sum_{\text{layers}} \sum_{t,t'} \langle \delta_{ijt}, \delta_{i'j't'} \rangle
    \big( m_A \langle a_{it}, a_{i't'} \rangle + m_c \big)

Rows carry the root of a diagonal preconditioner M; for a layer kept as factors M is one number for the weight and one
for the bias.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import jacrev, vmap
from torch.nn import functional as F

from poprisk._core.autodiff import FlatModel, Inputs, exact_kernels, slices, take_examples
from poprisk.operators._kernels.layers import Layer, Structure, call_example, listening

# Passing over a number of a temporary costs about as much as this many operations inside a matrix product.
PASS_FLOPS = 32


@dataclass(frozen=True, eq=False)
class Factors:
    """One layer's part of the features, without its Jacobian."""

    signals: Tensor
    """What came in: [b, T, inputs], or the tokens of an embedding [b, T]."""
    cotangents: Float[Tensor, "b p T o"]
    """The derivative of every output by what the layer gave."""
    weight_scale: float
    bias_scale: float
    padding: int | None = None
    """The token of an embedding that is not trained."""

    def take(self, rows: slice) -> "Factors":
        """Some of the examples."""
        scales = (self.weight_scale, self.bias_scale, self.padding)
        return Factors(self.signals[rows], self.cotangents[rows], *scales)

    @staticmethod
    def joined(parts: "tuple[Factors, ...]") -> "Factors":
        """Those of stretches of examples as those of all."""
        signals = torch.cat([part.signals for part in parts])
        cotangents = torch.cat([part.cotangents for part in parts])
        return Factors(signals, cotangents, parts[0].weight_scale, parts[0].bias_scale, parts[0].padding)

    def similarity(self, other: "Factors") -> Float[Tensor, "bT cT"]:
        r""":math:`m_A \langle a, a' \rangle + m_c` for all pairs of positions."""
        a, c = self.signals.flatten(0, 1), other.signals.flatten(0, 1)
        if a.dim() == 2:
            return (self.weight_scale * a @ c.T).add_(self.bias_scale)
        same = (a[:, None] == c) if self.padding is None else (a[:, None] == c) & (a != self.padding)[:, None]
        return same.to(self.cotangents.dtype).mul_(self.weight_scale)


@dataclass(frozen=True, eq=False)
class Features:
    """The features of b examples with p outputs each."""

    rows: Float[Tensor, "b p r"]
    factors: tuple[Factors, ...]

    def take(self, rows: slice) -> "Features":
        """Some of the examples."""
        return Features(self.rows[rows], tuple(each.take(rows) for each in self.factors))


def joined(parts: Sequence[Features]) -> Features:
    """Those of stretches of examples as those of all."""
    if len(parts) == 1:
        return parts[0]
    rows = torch.cat([part.rows for part in parts])
    layers = zip(*(part.factors for part in parts), strict=True)
    return Features(rows, tuple(Factors.joined(layer) for layer in layers))


def contract(left: Features, right: Features) -> Float[Tensor, "bp cp"]:
    """The kernel block of two sets of examples.

    >>> one = Features(torch.tensor([[[3.0, 4.0]]]), ())
    >>> contract(one, one)
    tensor([[25.]])
    """
    K = left.rows.flatten(0, 1) @ right.rows.flatten(0, 1).T
    for first, second in zip(left.factors, right.factors, strict=True):
        if first.cotangents.shape[2] == 1:
            _add_single_position(K, first, second)
        else:
            _add_positions(K, first, second)
    return K


def _add_single_position(K: Tensor, left: Factors, right: Factors) -> None:
    b, p, _, o = left.cotangents.shape
    c = right.cotangents.shape[0]
    products = left.cotangents.reshape(b * p, o) @ right.cotangents.reshape(c * p, o).T
    K.view(b, p, c, p).addcmul_(products.view(b, p, c, p), left.similarity(right).view(b, 1, c, 1))


def _add_positions(K: Tensor, left: Factors, right: Factors) -> None:
    b, p, T, o = left.cotangents.shape
    c = right.cotangents.shape[0]
    theirs = right.cotangents.reshape(c * p * T, o).T
    for i in range(b):  # one example at a time: the products of all positions are T² times as many as the kernel's
        mine = left.take(slice(i, i + 1))
        products = (mine.cotangents.reshape(p * T, o) @ theirs).view(p, T, c, p, T)
        similarity = mine.similarity(right).view(1, T, c, 1, T)
        K[i * p : (i + 1) * p] += products.mul_(similarity).sum(dim=(1, 4)).view(p, c * p)


@dataclass(frozen=True, eq=False)
class Recipe:
    """How a model's features are made: which layers stay factors, and what M does to each piece."""

    structure: Structure
    factored: tuple[Layer, ...]
    unfolded: tuple[Layer, ...]
    """Layers whose Jacobian rows are made of their factors: cheaper here, or M tells their weights apart."""
    scales: Mapping[str, Tensor]
    """The root of M in each parameter's shape; empty for the identity."""

    @property
    def row_length(self) -> int:
        """Numbers in one row."""
        return self.structure.plain_size + sum(layer.size for layer in self.unfolded)

    @property
    def factor_length(self) -> int:
        """Numbers in the factors of one example."""
        p = self.structure.p
        return sum(
            each.positions * ((1 if isinstance(each.module, nn.Embedding) else each.inputs) + p * each.outputs)
            for each in self.factored
        )

    @property
    def pair_flops(self) -> float:
        """Operations that one entry of the kernel costs."""
        return 2.0 * self.row_length + sum(factored_flops(each, self.structure.p) for each in self.factored)

    def scale(self, name: str | None) -> float:
        """The number that M is on a parameter; 0 for a parameter that is not trained."""
        if name is None:
            return 0.0
        return self.scales[name].flatten()[0].item() ** 2 if self.scales else 1.0


def factored_flops(layer: Layer, p: int) -> float:
    """Operations per entry of the kernel when the layer stays factors: products of outputs, passes over results."""
    return layer.positions**2 * (2 * layer.outputs + 2 * layer.inputs / p**2 + PASS_FLOPS)


def make_recipe(structure: Structure, scales: Mapping[str, Tensor], *, row_speed: float = 1.0) -> Recipe:
    """Decides layer by layer: factors where they are cheaper and M allows, Jacobian rows otherwise.

    ``row_speed`` is how many times faster products of rows are than those of factors, where rows are rounded.
    """
    factored, unfolded = [], []
    for layer in structure.layers:
        cheaper = factored_flops(layer, structure.p) < 2 * layer.size / row_speed
        given = [scales[name].flatten() for name in (layer.weight, layer.bias) if name and scales]
        uniform = all(bool((scale == scale[0]).all()) for scale in given)
        (factored if cheaper and uniform else unfolded).append(layer)
    return Recipe(structure, tuple(factored), tuple(unfolded), scales)


def compute_features(model: FlatModel, w: Tensor, recipe: Recipe, inputs: Inputs, chunk: int) -> Features:
    """The features of some examples, ``chunk`` examples at a time."""
    n = (inputs[0] if isinstance(inputs, tuple) else inputs).shape[0]
    rows: Tensor | None = None
    factors: list[tuple[Factors, ...]] = []
    for part in slices(n, chunk):
        pieces, made = feature_pieces(model, w, recipe, take_examples(inputs, part))
        some = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)
        if len(some) == n:
            return Features(some, made)
        rows = some.new_empty(n, *some.shape[1:]) if rows is None else rows
        rows[part] = some
        factors.append(made)
    assert rows is not None
    return Features(rows, tuple(Factors.joined(parts) for parts in zip(*factors, strict=True)))


def feature_pieces(
    model: FlatModel, w: Tensor, recipe: Recipe, inputs: Inputs
) -> tuple[list[Float[Tensor, "b p _"]], tuple[Factors, ...]]:
    """The rows of some examples in pieces side by side, parameter by parameter, and the factors of the other layers."""
    by_output, by_weight, signals = _differentiate(model, w, recipe.structure, inputs)
    b, p = (next(iter({**by_output, **by_weight}.values()))).shape[:2]
    pieces = [_scaled(J, recipe.scales.get(name)).reshape(b, p, -1) for name, J in by_weight.items()]
    for layer in recipe.unfolded:
        pieces += _unfold(layer, signals.pop(layer.name), by_output.pop(layer.name), recipe)
    factors = tuple(_factors(layer, signals[layer.name], by_output[layer.name], recipe) for layer in recipe.factored)
    return pieces or [w.new_empty(b, p, 0)], factors


def _differentiate(
    model: FlatModel, w: Tensor, structure: Structure, inputs: Inputs
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Jacobians by what each layer gave and by the plain parameters, and what came into each layer, by example."""
    parameters = {name: piece.detach() for name, piece in model.unflatten(w).items()}
    plain = {name: parameters.pop(name) for name in structure.plain}
    modules = {layer.name: layer.module for layer in structure.layers}
    nothing = {layer.name: w.new_zeros(layer.output_shape) for layer in structure.layers}

    def outputs(added: dict[str, Tensor], plain: dict[str, Tensor], x: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
        signals: dict[str, Tensor] = {}

        def perturb(name: str, signal: Tensor, out: Tensor) -> Tensor:
            signals[name] = signal
            return out + added[name]

        one = tuple(part.unsqueeze(0) for part in (x if isinstance(x, tuple) else (x,)))
        with listening(modules, perturb):
            return call_example(model, {**parameters, **plain}, one).reshape(-1), signals

    with exact_kernels():
        jacobians = jacrev(outputs, argnums=(0, 1), has_aux=True)
        (by_output, by_weight), signals = vmap(jacobians, in_dims=(None, None, 0))(nothing, plain, inputs)
    return by_output, by_weight, signals


def _scaled(J: Tensor, scale: Tensor | None) -> Tensor:
    return J if scale is None else J * scale


def _unfold(layer: Layer, signal: Tensor, J_out: Tensor, recipe: Recipe) -> list[Tensor]:
    """The layer's Jacobian rows, weight then bias, with the root of M."""
    cotangents = _cotangents(layer, J_out)
    b, p, _, o = cotangents.shape
    if isinstance(layer.module, nn.Embedding):
        tokens = signal.reshape(b, -1)
        J = cotangents.new_zeros(b, layer.inputs, p, o)
        trained = cotangents.transpose(1, 2)
        if layer.module.padding_idx is not None:
            trained = trained * (tokens != layer.module.padding_idx)[:, :, None, None]
        J.scatter_add_(1, tokens[:, :, None, None].expand(-1, -1, p, o), trained.contiguous())
        J = J.transpose(1, 2)
    else:
        J = torch.einsum("bpto,btm->bpom", cotangents, _signals(layer, signal))
    J = _scaled(J.reshape(b, p, *layer.module.weight.shape), recipe.scales.get(layer.weight)).reshape(b, p, -1)
    if layer.bias is None:
        return [J]
    return [J, _scaled(cotangents.sum(dim=2), recipe.scales.get(layer.bias))]


def _factors(layer: Layer, signal: Tensor, J_out: Tensor, recipe: Recipe) -> Factors:
    scales = (recipe.scale(layer.weight), recipe.scale(layer.bias))
    cotangents = _cotangents(layer, J_out).contiguous()
    if isinstance(layer.module, nn.Embedding):
        return Factors(signal.reshape(signal.shape[0], -1), cotangents, *scales, layer.module.padding_idx)
    return Factors(_signals(layer, signal), cotangents, *scales)


def _cotangents(layer: Layer, J_out: Tensor) -> Float[Tensor, "b p T o"]:
    b, p = J_out.shape[:2]
    if isinstance(layer.module, nn.Conv2d):
        by_channel = J_out.reshape(b, p, prod(layer.output_shape[:-3]), layer.outputs, -1)
        return by_channel.transpose(3, 4).flatten(2, 3) if by_channel.shape[2] > 1 else by_channel[:, :, 0].mT
    return J_out.reshape(b, p, layer.positions, layer.outputs)


def _signals(layer: Layer, signal: Tensor) -> Float[Tensor, "b T m"]:
    b, module = signal.shape[0], layer.module
    if not isinstance(module, nn.Conv2d):
        return signal.reshape(b, layer.positions, layer.inputs)
    if module.kernel_size == (1, 1) and module.stride == (1, 1) and module.padding == (0, 0):
        patches = signal.reshape(-1, layer.inputs, prod(signal.shape[-2:]))
    else:
        patches = _patches(module, signal.reshape(-1, *signal.shape[-3:]))
    return patches.mT if patches.shape[0] == b else patches.mT.reshape(b, layer.positions, layer.inputs)


def _patches(module: nn.Conv2d, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b m T"]:
    """What every position of a convolution sees, as ``F.unfold`` has it, which on a GPU takes a launch per image."""
    if not images.is_cuda:
        return F.unfold(images, module.kernel_size, module.dilation, module.padding, module.stride)  # type: ignore[arg-type]
    return strided_patches(module, images)


def strided_patches(module: nn.Conv2d, images: Float[Tensor, "b c h w"]) -> Float[Tensor, "b m T"]:
    """The same as one copy out of an overlapping view.

    >>> convolution = nn.Conv2d(2, 1, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2))
    >>> x = torch.arange(2 * 2 * 5 * 6.0).reshape(2, 2, 5, 6)
    >>> expected = F.unfold(x, (3, 2), (1, 2), (1, 0), (2, 1))
    >>> torch.equal(strided_patches(convolution, x), expected)
    True
    """
    (kh, kw), (sh, sw), (dh, dw) = module.kernel_size, module.stride, module.dilation
    assert not isinstance(module.padding, str)
    ph, pw = module.padding
    padded = F.pad(images, (pw, pw, ph, ph)) if ph or pw else images.contiguous()
    b, c, h, w = padded.shape
    tall, wide = (h - dh * (kh - 1) - 1) // sh + 1, (w - dw * (kw - 1) - 1) // sw + 1
    image, channel, row, column = padded.stride()
    strides = (image, channel, dh * row, dw * column, sh * row, sw * column)
    return padded.as_strided((b, c, kh, kw, tall, wide), strides).reshape(b, c * kh * kw, tall * wide)
