r"""What batch statistics take out of a network's derivatives.

In evaluation mode a network with batch normalization depends on the scale of the weights before each normalization and
on their common shift; in training it does not, because the statistics follow. For the weights :math:`w_c` of channel c
of the layer before, with inputs x, normalized outputs y, their deviation σ and the normalization's γ and β:

.. math:: \frac{du}{dw_c} = \frac{\partial u}{\partial w_c}
   - \frac{\gamma_c}{\sigma_c} \Big(\frac{\partial u}{\partial \beta_c} \bar x
   + \frac{\partial u}{\partial \gamma_c} \overline{y_c x}\Big)

with means over the examples. What the statistics of one layer do to those of the next is left out.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm


@dataclass(frozen=True)
class Normalized:
    """A layer followed by a batch normalization."""

    layer: str
    norm: str
    mean_input: Float[Tensor, "inputs"]
    mean_product: Float[Tensor, "channels inputs"]
    """Mean of each channel's normalized output times the inputs."""
    scale: Float[Tensor, "channels"]
    """γ/σ."""


def normalized_layers(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Normalized]:
    """The linear and convolutional layers whose outputs are normalized over the batch, as found in a forward pass."""
    names = {child: name for name, child in module.named_modules()}
    made: dict[int, tuple[nn.Module, Tensor, Tensor]] = {}  # holds the outputs, so that no id is used twice
    found: list[Normalized] = []

    def after(layer: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            made[id(out)] = layer, given[0], out
        elif isinstance(layer, _BatchNorm) and layer.affine and id(given[0]) in made:
            before, x, u = made[id(given[0])]
            rows = _rows(before, x)
            if rows is not None:
                found.append(_statistics(names[before], names[layer], layer, rows, u.movedim(1, -1).flatten(0, -2)))

    hooks = [child.register_forward_hook(after) for child in module.modules() if not list(child.children())]
    try:
        with torch.no_grad():
            module(*inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def without_statistics(
    rows: Float[Tensor, "rows d"], places: Mapping[str, slice], layers: list[Normalized]
) -> Float[Tensor, "rows d"]:
    """Take out of derivatives in evaluation mode, in place, what the statistics take out of them in training."""
    for each in layers:
        needed = [f"{each.norm}.bias", f"{each.norm}.weight", f"{each.layer}.weight"]
        if any(name not in places for name in needed):
            continue  # frozen
        by_shift, by_scale, weight = (rows[:, places[name]] for name in needed)
        shift, scale = (by_shift * each.scale)[:, :, None], (by_scale * each.scale)[:, :, None]
        weight -= (shift * each.mean_input + scale * each.mean_product).flatten(1)
        if f"{each.layer}.bias" in places:
            rows[:, places[f"{each.layer}.bias"]] = 0
    return rows


def _statistics(before: str, name: str, norm: _BatchNorm, x: Tensor, u: Tensor) -> Normalized:
    deviation = (u.var(0, unbiased=False) + norm.eps).sqrt()
    y = (u - u.mean(0)) / deviation
    return Normalized(before, name, x.mean(0), y.T @ x / len(x), norm.weight.detach() / deviation)


def _rows(layer: nn.Module, x: Tensor) -> Float[Tensor, "rows inputs"] | None:
    """What each output of a layer is the product of its weights with; None where that is not written down."""
    if isinstance(layer, nn.Linear):
        return x if x.dim() == 2 else None
    if not isinstance(layer, nn.Conv2d) or layer.groups != 1 or isinstance(layer.padding, str):
        return None
    patches = F.unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    return patches.transpose(1, 2).flatten(0, 1)
