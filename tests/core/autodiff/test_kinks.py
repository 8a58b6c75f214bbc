"""Steps split at their kinks: against breakpoints in closed form, and against fine sums where there are none."""

import pytest
import torch
from networks import build, draw
from torch import nn
from torch.func import functional_call, jacrev

from poprisk._core.autodiff.flat import FlatModel
from poprisk._core.autodiff.segment import SegmentJacobian


def deep():
    torch.manual_seed(1)
    layers = (nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 8), nn.LeakyReLU(0.1), nn.Linear(8, 6), nn.Hardtanh())
    return nn.Sequential(*layers, nn.Linear(6, 2)).double()


def pooled():
    torch.manual_seed(2)
    first = (nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*first, nn.Linear(8, 5), nn.ReLU6(), nn.Linear(5, 2)).double()


class Functional(nn.Module):
    """Kinks that no module shows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(4, 8, dtype=torch.float64), nn.Linear(8, 2, dtype=torch.float64)

    def forward(self, x):
        z = self.first(x)
        return self.second(torch.maximum(z.relu(), 0.5 * z) + z.clamp(-0.3, 0.4).abs())


def segment(module, x, size=1.0, **options):
    model = FlatModel(module, "squared")
    w = model.weights
    direction = torch.randn(len(w), generator=torch.Generator().manual_seed(7), dtype=w.dtype)
    end = w + size * direction / direction.norm()
    return model, w, end, SegmentJacobian(model, w, end, x, secant=False, **options)


def points(n=8):
    return torch.randn(n, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def naive_jacobian(module, w, x):
    """[p, d] for one example, without the library."""
    sizes = dict(module.named_parameters())

    def outputs(flat):
        pieces = flat.split([p.numel() for p in sizes.values()])
        state = {name: piece.view(p.shape) for (name, p), piece in zip(sizes.items(), pieces, strict=True)}
        return functional_call(module, state, (x[None],))[0]

    return jacrev(outputs)(w)


def closed_form(module, w, end, x):
    """One hidden layer: units switch where an affine function of θ is 0, and J is affine in θ between."""
    hidden, inputs = module[0].weight.shape
    rows = []
    for example in x:
        extended = torch.cat([example, torch.ones(1, dtype=x.dtype)])
        z = []
        for weights in (w, end):
            W = weights[: hidden * inputs].view(hidden, inputs)
            b = weights[hidden * inputs : hidden * (inputs + 1)]
            z.append(torch.cat([W, b[:, None]], 1) @ extended)
        zeros = z[0] / (z[0] - z[1])
        ends = torch.cat([zeros[(zeros > 0) & (zeros < 1)], zeros.new_tensor([0.0, 1.0])]).sort().values
        middles, lengths = (ends[1:] + ends[:-1]) / 2, ends.diff()
        rows.append(
            sum(c * naive_jacobian(module, w + t * (end - w), example) for t, c in zip(middles, lengths, strict=True))
        )
    return torch.cat(rows)


def relative(a, b):
    return float((a - b).norm() / b.norm())


def test_it_is_the_mean_jacobian_of_a_relu_network():
    module, x = build("relu"), draw("relu", 8)
    _, w, end, J = segment(module, x, kinks=True)
    exact = closed_form(module, w, end, x)
    assert len(J.crossing) >= 4
    assert J.correction <= 1e-13
    assert relative(J.to_dense(), exact) <= 1e-12
    gauss = segment(module, x)[3]
    assert gauss.nodes == 32
    assert relative(gauss.to_dense(), exact) > 1e-4  # what the rule is for


@pytest.mark.parametrize(("make", "shape"), [(deep, (4,)), (pooled, (1, 6, 6)), (Functional, (4,))])
def test_deeper_networks_pooling_and_functions(make, shape):
    module = make()
    x = torch.randn(5, *shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    model, w, end, J = segment(module, x, kinks=True)
    assert len(J.crossing) >= 3
    assert J.correction <= 1e-12
    dense, cells = J.to_dense(), 300
    middles = [(c + 0.5) / cells for c in range(cells)]
    fine = sum(model.output_jacobian(w + t * (end - w), x) for t in middles).flatten(0, 1) / cells
    assert relative(dense, fine) <= 2e-3  # a sum over cells is off by one cell at each kink
    assert relative(dense, fine) < relative(segment(module, x)[3].to_dense(), fine)


@pytest.mark.parametrize("make", [deep, Functional])
def test_push_pull_and_matrix_are_one_operator(make):
    _, _, _, J = segment(make(), points(), kinks=True)
    generator = torch.Generator().manual_seed(5)
    X, C = (torch.randn(k, 3, generator=generator, dtype=torch.float64) for k in reversed(J.shape))
    dense = J.to_dense()
    assert relative(J @ X, dense @ X) <= 1e-12
    assert relative(J.T @ C, dense.T @ C) <= 1e-12
    assert relative(J.with_nodes(5).to_dense(), dense) <= 1e-12


def test_without_kinks_nothing_changes():
    module, x = build("mlp"), draw("mlp", 5)
    _, _, _, J = segment(module, x, kinks=True)
    plain = segment(module, x)[3]
    assert len(J.crossing) == 0
    assert J.nodes == plain.nodes
    assert torch.equal(J.to_dense(), plain.to_dense())
