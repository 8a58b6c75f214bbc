"""Models that the kernels are tested on, and the naive kernel: one backward pass per output, in float64."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from poprisk._core.autodiff.flat import FlatModel


class Transformer(nn.Module):
    """One block of attention over tokens; the embedding is the output matrix too, and used through a function there."""

    def __init__(self, vocabulary: int = 7, width: int = 6, length: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.place = nn.Embedding(length, width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.LayerNorm(width)
        self.hidden = nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.embedding(tokens) + self.place(torch.arange(tokens.shape[1]))
        h = h + F.scaled_dot_product_attention(self.query(h), self.key(h), self.value(h))
        h = self.norm(h + self.hidden(h))
        return h[:, -1] @ self.embedding.weight.T


class TiedEncoder(nn.Module):
    """A matrix that two layers share, and a third layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 4, bias=False)
        self.decoder = nn.Linear(4, 4)
        self.decoder.weight = self.encoder.weight
        self.twice = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.twice(torch.tanh(self.twice(self.encoder(x))))))


class Words(nn.Module):
    """An embedding with a token that is not trained, used once, and a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(200, 3, padding_idx=0)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)
        self.head = nn.Linear(3, 2)
        self.head.bias.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.frozen(self.embedding(tokens))).mean(dim=1))


class Overwritten(nn.Module):
    """A layer whose input is changed in place after the call, through an operation that does not need it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen_first = nn.Linear(4, 4)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = x * 1.0
        out = self.head(h)
        h.add_(1.0)
        return out + self.frozen_first(h)[:, :2]


class Slope(nn.Module):
    """Outputs that are derivatives by the input, as in physics-informed training; the layers are called once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 5), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> Tensor:
        def total(x: Tensor) -> Tensor:
            return self.second(torch.tanh(self.first(x))).sum()

        return torch.func.grad(total)(x)


class Straight(nn.Module):
    """The derivative of a linear map: its weights themselves, reached through the transpose that the map made."""

    def __init__(self) -> None:
        super().__init__()
        self.map = nn.Linear(2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.map(x).square().sum(), x, create_graph=True)[0]


class Scaled(nn.Linear):
    """A linear layer with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x)


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(3, 4, 2, dilation=2, bias=False),
        nn.GroupNorm(2, 4),
        nn.Conv2d(4, 4, 1, groups=2),
        nn.Tanh(),
        nn.Conv2d(4, 3, 1),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


def multilayer() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 40, bias=False), nn.Tanh(), Scaled(40, 3))


MODELS = {
    "multilayer": (multilayer, lambda n: torch.randn(n, 5)),
    "convolutions": (convolutions, lambda n: torch.randn(n, 1, 8, 8)),
    "transformer": (Transformer, lambda n: torch.randint(0, 7, (n, 4))),
    "tied": (TiedEncoder, lambda n: torch.randn(n, 4)),
    "words": (Words, lambda n: torch.randint(0, 200, (n, 3)) % 150),
}


def make(name: str, n: int = 6, seed: int = 0) -> tuple[FlatModel, Tensor, Tensor]:
    """The model in float64, its weights, and n examples."""
    torch.manual_seed(seed)
    build, draw = MODELS[name]
    module, x = build().double(), draw(n)
    model = FlatModel(module, "squared")
    return model, model.weights, x.double() if x.is_floating_point() else x


def naive_jacobian(model: FlatModel, x: Tensor) -> Tensor:
    """[n p, d] by one backward pass per output of the module itself."""
    rows = []
    for i in range(x.shape[0]):
        for output in model.module(x[i : i + 1]).reshape(-1):
            parts = torch.autograd.grad(
                output, list(model.parameters.values()), retain_graph=True, materialize_grads=True
            )
            rows.append(torch.cat([part.reshape(-1) for part in parts]))
    return torch.stack(rows)
