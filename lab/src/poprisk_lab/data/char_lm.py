"""A character-level language model on English text that comes with every CPython: the topics of its ``help()``."""

import hashlib
import math
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class CharText:
    """A text as character codes, with its last tenth held out."""

    train: Int[Tensor, "train"]
    held_out: Int[Tensor, "held_out"]
    vocabulary: str
    sha256: str
    """Hash of the whole text in UTF-8; the text differs a little from one version of CPython to the next."""


def help_topics(held_out_share: float = 0.1) -> CharText:
    """The topics in the order of their names, with an empty line between them."""
    from pydoc_data.topics import topics

    text = "\n\n".join(topics[name] for name in sorted(topics))
    vocabulary = "".join(sorted(set(text)))
    number = {character: i for i, character in enumerate(vocabulary)}
    codes = torch.tensor([number[character] for character in text])
    cut = round(len(codes) * (1 - held_out_share))
    return CharText(codes[:cut], codes[cut:], vocabulary, hashlib.sha256(text.encode()).hexdigest())


def random_windows(codes: Int[Tensor, "n"], count: int, length: int, generator: Generator) -> Int[Tensor, "count len"]:
    """Windows of the text at random positions, one character longer than the context."""
    starts = torch.randint(len(codes) - length, (count, 1), generator=generator)
    return codes[starts + torch.arange(length + 1)]


def all_windows(codes: Int[Tensor, "n"], length: int) -> Int[Tensor, "count len"]:
    """The text cut into consecutive windows, each starting with the last character of the previous one."""
    count = (len(codes) - 1) // length
    return codes[torch.arange(count).unsqueeze(1) * length + torch.arange(length + 1)]


class CharTransformer(nn.Module):
    """A small pre-norm transformer decoder with learned positions and tied embeddings."""

    def __init__(self, vocabulary: int, width: int, heads: int, layers: int, context: int) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        blocks = [_Block(width, heads) for _ in range(layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width)
        for embedding in (self.characters, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        for block in blocks:
            for projection in (block.mixed, block.down):
                nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * layers))

    def forward(self, codes: Int[Tensor, "batch time"]) -> Float[Tensor, "batch time vocabulary"]:
        """Logits of the next character at each position."""
        place = torch.arange(codes.shape[1], device=codes.device)
        hidden = self.characters(codes) + self.positions(place)
        for block in self.blocks:
            hidden = block(hidden)
        return self.norm(hidden) @ self.characters.weight.T


class _Block(nn.Module):
    """Causal attention, then a GELU layer four times as wide, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attended, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.attended(self.norm1(hidden)).unflatten(-1, (3, self.heads, -1))
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.mixed(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.norm2(hidden))))


def next_character_loss(model: nn.Module, windows: Int[Tensor, "count len"]) -> Float[Tensor, ""]:
    """Mean negative log-likelihood of each character given those before it in its window, in nats."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
