"""Networks of the scale benchmark, written out: ResNet-18 for 32×32 images, a decoder with Qwen2.5-0.5B's shapes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BasicBlock(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Features to features."""
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(h)) + self.shortcut(x))


class ResNet18(nn.Module):
    """ResNet-18 with the stem for small images: 11.2 M weights at width 64."""

    def __init__(self, outputs: int = 1, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        blocks, before = [], width
        for i, stride in enumerate((1, 2, 2, 2)):
            after = width * 2**i
            blocks += [BasicBlock(before, after, stride), BasicBlock(after, after, 1)]
            before = after
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(before, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """Images to outputs."""
        h = self.blocks(F.relu(self.bn1(self.conv1(x))))
        return self.head(h.mean(dim=(2, 3)))


def calibrated_resnet(outputs: int, width: int, device: str) -> ResNet18:
    """Random weights, with the running statistics of random images, in evaluation mode: examples are independent."""
    torch.manual_seed(0)
    module = ResNet18(outputs, width).to(device)
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.momentum = None  # the plain mean over batches
    with torch.no_grad():
        for _ in range(2):
            module(torch.randn(128, 3, 32, 32, device=device))
    return module.eval()


@dataclass(frozen=True)
class DecoderShape:
    """Sizes of a decoder; the defaults are Qwen2.5-0.5B's."""

    vocabulary: int = 151_936
    width: int = 896
    layers: int = 24
    heads: int = 14
    key_value_heads: int = 2
    hidden: int = 4864

    @property
    def head_width(self) -> int:
        """Numbers of one head."""
        return self.width // self.heads


class Decoder(nn.Module):
    """Embedding, layers of attention and gated linear units, tied output matrix; weights float32, products bfloat16."""

    def __init__(self, shape: DecoderShape, device: str) -> None:
        super().__init__()
        self.shape = shape
        w, kv, h = shape.width, shape.key_value_heads * shape.head_width, shape.hidden
        sizes = [(w,), (w, w), (w,), (kv, w), (kv,), (kv, w), (kv,), (w, w), (w,), (h, w), (h, w), (w, h)]
        self.embedding = nn.Parameter(0.02 * torch.randn(shape.vocabulary, w, device=device))
        self.final = nn.Parameter(torch.ones(w, device=device))
        self.layers = nn.ModuleList(
            nn.ParameterList(_initial(size, i in (0, 8), device) for i, size in enumerate(sizes))
            for _ in range(shape.layers)
        )

    def loss(self, tokens: Tensor, targets: Tensor, start: Callable, block: Callable, head: Callable) -> Tensor:
        """The mean cross-entropy of the next token."""
        cos, sin = rotations(tokens.shape[1], self.shape.head_width, tokens.device)
        h = start(tokens, self.embedding)
        for layer in self.layers:
            h = block(h, cos, sin, self.shape.heads, *layer.parameters())
        return head(h, self.final, self.embedding, targets)


def _initial(size: tuple[int, ...], norm: bool, device: str) -> nn.Parameter:
    if len(size) == 1:
        return nn.Parameter(torch.ones(size, device=device) if norm else torch.zeros(size, device=device))
    return nn.Parameter(0.02 * torch.randn(size, device=device))


def rotations(length: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions, [length, width]."""
    frequency = 10_000.0 ** (-torch.arange(0, width, 2, device=device) / width)
    angles = torch.arange(length, device=device)[:, None] * frequency
    both = torch.cat([angles, angles], dim=1)
    return both.cos(), both.sin()


def decoder_start(tokens: Tensor, embedding: Tensor) -> Tensor:
    """Tokens to vectors."""
    return F.embedding(tokens, embedding)


def decoder_block(
    h: Tensor,
    cos: Tensor,
    sin: Tensor,
    heads: int,
    norm1: Tensor,
    wq: Tensor,
    bq: Tensor,
    wk: Tensor,
    bk: Tensor,
    wv: Tensor,
    bv: Tensor,
    wo: Tensor,
    norm2: Tensor,
    wg: Tensor,
    wu: Tensor,
    wd: Tensor,
) -> Tensor:
    """One layer, as a function of its weights: compiled once, it serves all layers."""
    b, length, width = h.shape
    with torch.autocast(h.device.type, torch.bfloat16):
        x = F.rms_norm(h, (width,), norm1)
        q, k, v = (
            F.linear(x, weight, bias).view(b, length, -1, width // heads).transpose(1, 2)
            for weight, bias in ((wq, bq), (wk, bk), (wv, bv))
        )
        q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        groups = heads // k.shape[1]
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + F.linear(mixed.transpose(1, 2).reshape(b, length, width), wo)
        x = F.rms_norm(h, (width,), norm2)
        return h + F.linear(F.silu(F.linear(x, wg)) * F.linear(x, wu), wd)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


def decoder_head(h: Tensor, norm: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Logits and their cross-entropy."""
    with torch.autocast(h.device.type, torch.bfloat16):
        logits = F.linear(F.rms_norm(h, (h.shape[-1],), norm), embedding)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
