"""Small float64 networks of the kinds the products must take, with inputs for each."""

import torch
from torch import nn
from torch.nn import functional as F


class Transformer(nn.Module):
    """One pre-norm layer on integer tokens; the embedding is the read-out as well; position and mask are buffers."""

    def __init__(self, tokens: int = 5, width: int = 4, length: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, width)
        self.attention = nn.Linear(width, 3 * width)
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.up, self.down = nn.Linear(width, 6), nn.Linear(6, width)
        self.readout = nn.Linear(width, tokens, bias=False)
        self.readout.weight = self.embedding.weight
        self.register_buffer("position", torch.randn(length, width))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        h = self.embedding(tokens) + self.position
        q, k, v = self.attention(self.norms[0](h)).view(*h.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        h = h + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(h.shape)
        h = h + self.down(F.gelu(self.up(self.norms[1](h))))
        return self.readout(h[:, -1])


def build(kind: str) -> nn.Module:
    torch.manual_seed(3)
    modules = {
        "mlp": lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.GELU(), nn.Linear(5, 3)),
        "relu": lambda: nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3)),
        "cnn": lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(3, 2, 2), nn.GELU(), nn.Flatten(), nn.Linear(2, 3)
        ),
        "smooth cnn": lambda: nn.Sequential(
            nn.Conv2d(1, 3, 3), nn.Tanh(), nn.AvgPool2d(2), nn.Conv2d(3, 2, 2), nn.GELU(), nn.Flatten(), nn.Linear(2, 3)
        ),
        "transformer": Transformer,
        "normalized": lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.SiLU(), nn.Linear(6, 2)).eval(),
    }
    return modules[kind]().double()


def draw(kind: str, n: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if kind == "transformer":
        return torch.randint(0, 5, (n, 3), generator=generator)
    shape = (n, 1, 6, 6) if "cnn" in kind else (n, 4)
    return torch.randn(shape, generator=generator, dtype=torch.float64)
