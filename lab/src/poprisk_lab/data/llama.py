r"""A frozen Llama with many sets of LoRA adapters: R fine-tunings of one language model as one computation.

The base weights :math:`W` are shared, the adapters are stacked: member :math:`i` computes

.. math:: y_i = x_i W^\top + \tfrac{\alpha}{r}\, x_i A_i^\top B_i^\top

with :math:`A_i` [r, in] and :math:`B_i` [out, r], so that the large product runs once over the tokens of all members,
and only the adapters have gradients. Sequences are padded on the right: causal attention never sees the padding from an
earlier token, so that no mask is needed.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from poprisk.errors import HyperparameterError
from poprisk_lab.data.llama_weights import TARGETS, Llama, LlamaLayer, LlamaShape

StackedAdapters = Mapping[str, Float[Tensor, "members rows columns"]]
"""``"layer0.q.A"`` [members, rank, in] and ``"layer0.q.B"`` [members, out, rank], and so on."""


@dataclass(frozen=True)
class Lora:
    """Configuration of the adapters.

    Attributes:
        rank: Rank r, the number of columns of B.
        alpha: The product of the two matrices is multiplied by alpha / rank.
        targets: Some of :data:`TARGETS`.
    """

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = TARGETS

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise HyperparameterError(f"the rank of LoRA adapters must be at least 1, got {self.rank}")
        unknown = [target for target in self.targets if target not in TARGETS]
        if unknown or not self.targets:
            raise HyperparameterError(f"targets must be some of {TARGETS}, got {self.targets}")

    @property
    def scale(self) -> float:
        """The factor of the product of A and B."""
        return self.alpha / self.rank

    def initial(self, shape: LlamaShape, generator: Generator) -> dict[str, Float[Tensor, "rows columns"]]:
        r"""Initial adapters, as peft draws them: A uniform in :math:`\pm 1/\sqrt{in}`, B zero.

        With these adapters, the model is unchanged.

        >>> shape = LlamaShape(64, 32, 48, layers=2, heads=4, key_heads=2, head_width=8)
        >>> start = Lora(rank=4, targets=("q", "v")).initial(shape, torch.Generator().manual_seed(0))
        >>> {name: tuple(w.shape) for name, w in start.items() if name.startswith("layer0")}
        {'layer0.q.A': (4, 32), 'layer0.q.B': (32, 4), 'layer0.v.A': (4, 32), 'layer0.v.B': (16, 4)}
        """
        start = {}
        for layer in range(shape.layers):
            for target in self.targets:
                rows, columns = shape.projection(target)
                uniform = 2 * torch.rand(self.rank, columns, generator=generator) - 1
                start[f"layer{layer}.{target}.A"] = uniform / math.sqrt(columns)
                start[f"layer{layer}.{target}.B"] = torch.zeros(rows, self.rank)
        return start


class StackedLlama:
    """R members: one frozen Llama with R sets of adapters.

    Args:
        llama: Weights on the device and in the dtype to compute in: bfloat16 on a GPU, float32 on a CPU. The adapters
            stay float32 and are cast where they are used.
        lora: The adapters.
        recompute: Whether to keep only the input of a layer and compute the rest again for the gradient, which takes a
            third more time and a tenth of the memory.
        compiled: Whether ``torch.compile`` fuses the operations between the matrix products of a layer.

    Without recomputation a training step keeps about 21 kB per token and layer at the widths of SmolLM2-135M in
    bfloat16: 3.2 GB a member for 16 sequences of 320 tokens.
    """

    def __init__(self, llama: Llama, lora: Lora | None = None, *, recompute: bool = False, compiled: bool = False):
        self.llama, self.lora, self.recompute = llama, lora or Lora(), recompute
        self._layer: Any = torch.compile(_layer, dynamic=False) if compiled else _layer

    def hidden(
        self, adapters: StackedAdapters | None, tokens: Int[Tensor, "members batch time"]
    ) -> Float[Tensor, "members batch time width"]:
        """The input of the head for every token, after the last norm; without adapters, that of the base model."""
        shape, (members, batch, time) = self.llama.shape, tokens.shape
        x = F.embedding(tokens, self.llama.embedding).reshape(members, batch * time, shape.width)
        turn = rotations(shape, time, x.device, x.dtype)
        for index, layer in enumerate(self.llama.layers):
            arguments = (x, layer, self._adapters_of(adapters, index, x.dtype), shape, batch, turn, self.lora.scale)
            if self.recompute and adapters is not None:
                x = checkpoint(self._layer, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x = self._layer(*arguments)
        return F.rms_norm(x, (shape.width,), self.llama.norm, shape.norm_eps).view(members, batch, time, shape.width)

    def log_probability(
        self,
        adapters: StackedAdapters | None,
        tokens: Int[Tensor, "members batch time"],
        mask: Bool[Tensor, "members batch time"],
        targets: Int[Tensor, "members batch time"] | None = None,
    ) -> Float[Tensor, "members batch"]:
        """Sum of the log-probabilities of each sequence's masked tokens, given those before them.

        Args:
            adapters: Adapters of the members; ``None`` for the base model.
            tokens: Input tokens.
            mask: Mask of the tokens that count.
            targets: Target tokens, at the positions of ``tokens``; by default ``tokens``.
        """
        hidden = self.hidden(adapters, tokens)
        said = tokens if targets is None else targets
        if torch.is_grad_enabled():
            return completion_log_probability(hidden, said, mask, self.llama.head)
        return _of_selected(hidden, said, mask, self.llama.head)

    def _adapters_of(
        self, adapters: StackedAdapters | None, layer: int, dtype: torch.dtype
    ) -> dict[str, tuple[Tensor, Tensor]]:
        if adapters is None:
            return {}
        named = {target: f"layer{layer}.{target}" for target in self.lora.targets}
        return {t: (adapters[f"{n}.A"].to(dtype), adapters[f"{n}.B"].to(dtype)) for t, n in named.items()}


def completion_log_probability(
    hidden: Float[Tensor, "members batch time width"],
    tokens: Int[Tensor, "members batch time"],
    mask: Bool[Tensor, "members batch time"],
    head: Float[Tensor, "vocabulary width"],
    chunk: int = 4096,
) -> Float[Tensor, "members batch"]:
    r"""Sum over the masked tokens of :math:`\log p(token_t \mid h_{t-1})`, in float32 or finer.

    Logits exist for ``chunk`` tokens at a time. With a frozen head the derivative of a token's log-probability,
    :math:`W_{y} - \sum_v p_v W_v`, is known as soon as its logits are: it is kept in their place, and nothing is
    computed twice. The first token has no predecessor and never counts.
    """
    before, said, counts = hidden[:, :, :-1], tokens[:, :, 1:], mask[:, :, 1:]
    flat = _TokenLogProbability.apply(before.flatten(0, 2), said.flatten(), head, chunk)
    return (flat.view(said.shape) * counts).sum(-1)  # type: ignore[union-attr]


def _of_selected(hidden: Tensor, tokens: Tensor, mask: Tensor, head: Tensor, chunk: int = 4096) -> Tensor:
    """The same value from the logits of the masked tokens alone: less work, but their number is not known in advance.

    Not for training steps, which may be captured in a CUDA graph and need fixed shapes.
    """
    counts = mask[:, :, 1:]
    where = counts.flatten().nonzero().squeeze(1)
    before = hidden[:, :, :-1].flatten(0, 2).index_select(0, where)
    said = tokens[:, :, 1:].flatten().index_select(0, where)
    values: Tensor = _TokenLogProbability.apply(before, said, head, chunk)  # type: ignore[assignment]
    sequence = torch.div(where, counts.shape[-1], rounding_mode="floor")
    sums = torch.zeros(counts.shape[0] * counts.shape[1], dtype=values.dtype, device=values.device)
    return sums.index_add_(0, sequence, values).view(counts.shape[:2])


def rotations(
    shape: LlamaShape, time: int, device: torch.device, dtype: torch.dtype
) -> tuple[Float[Tensor, "time half"], Float[Tensor, "time half"]]:
    r"""Cosine and sine of :math:`t\,\theta^{-2j/d}`, the angle by which position t turns the pair (j, j + d/2)."""
    exponents = torch.arange(0, shape.head_width, 2, device=device, dtype=torch.float32) / shape.head_width
    angles = torch.outer(torch.arange(time, device=device, dtype=torch.float32), shape.rope_theta**-exponents)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def _layer(
    x: Float[Tensor, "members tokens width"],
    layer: LlamaLayer,
    adapters: dict[str, tuple[Tensor, Tensor]],
    shape: LlamaShape,
    batch: int,
    turn: tuple[Tensor, Tensor],
    scale: float,
) -> Float[Tensor, "members tokens width"]:
    """Attention, then the gated layer, each with a residual connection."""

    def linear(y: Tensor, target: str) -> Tensor:
        out = F.linear(y, getattr(layer, target))
        if target not in adapters:
            return out
        a, b = adapters[target]
        return torch.baddbmm(out, torch.bmm(y, a.mT), b.mT, alpha=scale)

    def heads(y: Tensor) -> Tensor:
        return y.view(len(x) * batch, -1, y.shape[-1] // shape.head_width, shape.head_width).transpose(1, 2)

    y = F.rms_norm(x, (shape.width,), layer.attention_norm, shape.norm_eps)
    query, key, value = (heads(linear(y, target)) for target in ("q", "k", "v"))
    mixed = F.scaled_dot_product_attention(
        _turned(query, *turn), _turned(key, *turn), value, is_causal=True, enable_gqa=shape.heads != shape.key_heads
    )
    x = x + linear(mixed.transpose(1, 2).reshape(len(x), x.shape[1], -1), "o")
    y = F.rms_norm(x, (shape.width,), layer.mlp_norm, shape.norm_eps)
    return x + linear(F.silu(linear(y, "gate")) * linear(y, "up"), "down")


def _turned(x: Float[Tensor, "sequences heads time wide"], cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


class _TokenLogProbability(torch.autograd.Function):
    """Log-probability of one token after each hidden state, with its derivative, in chunks."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, tokens: Tensor, head: Tensor, chunk: int) -> Tensor:  # type: ignore[override]
        slope = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        values = []
        for start in range(0, len(hidden), chunk):
            part, said = hidden[start : start + chunk], tokens[start : start + chunk].long()
            log_p = torch.log_softmax(_logits(part, head), -1)
            values.append(log_p.gather(1, said.unsqueeze(1)).squeeze(1))
            if slope is not None:
                expected = log_p.exp_().to(head.dtype) @ head
                torch.sub(head[said], expected, out=slope[start : start + chunk])
        if slope is not None:
            ctx.save_for_backward(slope)
        return torch.cat(values) if values else hidden.new_zeros(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        (slope,) = ctx.saved_tensors
        return gradient.unsqueeze(1).to(slope.dtype) * slope, None, None, None


def _logits(hidden: Tensor, head: Tensor) -> Tensor:
    """In float32 for a product of bfloat16: its sums are float32 anyway, and rounding them would lose digits."""
    if hidden.dtype == torch.bfloat16 and hidden.is_cuda:
        return torch.mm(hidden, head.T, out_dtype=torch.float32)
    logits = hidden @ head.T
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
