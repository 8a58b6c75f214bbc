"""The weights of a Llama: their sizes, read from a Hugging Face folder or drawn at random."""

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.errors import DataError

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
"""The projections of a layer that can have an adapter: all matrix products."""


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a Llama, and the two constants that do not follow from its weights."""

    vocabulary: int
    width: int
    hidden: int
    """Width of the gated layer between attention layers."""
    layers: int
    heads: int
    key_heads: int
    """Heads of keys and values, each shared by heads / key_heads queries."""
    head_width: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.heads % self.key_heads:
            raise DataError(f"heads must be a multiple of key_heads, got {self.heads} and {self.key_heads}")

    def projection(self, target: str) -> tuple[int, int]:
        """(out, in) of one of a layer's projections.

        >>> LlamaShape(64, 32, 48, 2, heads=4, key_heads=2, head_width=8).projection("k")
        (16, 32)
        """
        queries, keys = self.heads * self.head_width, self.key_heads * self.head_width
        shapes = {"q": (queries, self.width), "k": (keys, self.width), "v": (keys, self.width)}
        shapes |= {"o": (self.width, queries), "gate": (self.hidden, self.width), "up": (self.hidden, self.width)}
        return {**shapes, "down": (self.width, self.hidden)}[target]


@dataclass(frozen=True)
class LlamaLayer:
    """Weights of one layer."""

    attention_norm: Float[Tensor, "width"]
    q: Float[Tensor, "queries width"]
    k: Float[Tensor, "keys width"]
    v: Float[Tensor, "keys width"]
    o: Float[Tensor, "width queries"]
    mlp_norm: Float[Tensor, "width"]
    gate: Float[Tensor, "hidden width"]
    up: Float[Tensor, "hidden width"]
    down: Float[Tensor, "width hidden"]


@dataclass(frozen=True)
class Llama:
    """Frozen weights of a Llama."""

    shape: LlamaShape
    embedding: Float[Tensor, "vocabulary width"]
    layers: tuple[LlamaLayer, ...]
    norm: Float[Tensor, "width"]
    head: Float[Tensor, "vocabulary width"]
    """The embedding itself if the two are tied."""

    def to(self, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> "Llama":
        """The same weights on another device or in another dtype; computations use their dtype."""

        def moved(tensor: Tensor) -> Tensor:
            return tensor.to(device=device, dtype=dtype)

        layers = tuple(LlamaLayer(*(moved(getattr(layer, f.name)) for f in fields(layer))) for layer in self.layers)
        embedding = moved(self.embedding)
        head = embedding if self.head is self.embedding else moved(self.head)
        return replace(self, embedding=embedding, layers=layers, norm=moved(self.norm), head=head)


def read_shape(folder: str | Path) -> LlamaShape:
    """Read the sizes from the ``config.json`` of a Hugging Face folder.

    Raises:
        DataError: there is no such file, or it describes a network that this module does not implement.
    """
    path = Path(folder) / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise DataError(f"{path} is missing: give the folder of a Llama as Hugging Face saves it") from None
    except ValueError as error:
        raise DataError(f"{path} should be JSON, but is not ({error}); fetch it again") from None
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    expected = {
        "model_type": (config.get("model_type"), "llama"),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (config.get("attention_bias", False), False),
        "mlp_bias": (config.get("mlp_bias", False), False),
        "rope_type": (rope.get("rope_type", "default"), "default"),
    }
    for name, (got, wanted) in expected.items():
        if got != wanted:
            raise DataError(f"{path}: {name} must be {wanted!r} for this network, got {got!r}; use a plain Llama")
    try:
        heads = config["num_attention_heads"]
        return LlamaShape(
            vocabulary=config["vocab_size"],
            width=config["hidden_size"],
            hidden=config["intermediate_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            key_heads=config.get("num_key_value_heads") or heads,
            head_width=config.get("head_dim") or config["hidden_size"] // heads,
            rope_theta=float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0),
            norm_eps=config.get("rms_norm_eps", 1e-6),
        )
    except KeyError as error:
        raise DataError(f"{path} has no {error}: fetch the folder again") from None


_NAMES = {
    "attention_norm": "input_layernorm",
    **{target: f"self_attn.{target}_proj" for target in ("q", "k", "v", "o")},
    "mlp_norm": "post_attention_layernorm",
    **{target: f"mlp.{target}_proj" for target in ("gate", "up", "down")},
}


def load_llama(folder: str | Path) -> Llama:
    """Read the weights of a Hugging Face folder with ``config.json`` and one ``model.safetensors``, in their own dtype.

    Raises:
        DataError: a file or a tensor is missing, or a shape does not match the configuration.
    """
    from safetensors.torch import load_file

    path, shape = Path(folder) / "model.safetensors", read_shape(folder)
    if not path.is_file():
        raise DataError(f"{path} is missing: give a folder whose weights are one safetensors file")
    tensors = load_file(path)

    def get(name: str, *sizes: int) -> Tensor:
        tensor = tensors.get(name)
        if tensor is None or tuple(tensor.shape) != sizes:
            got = "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise DataError(f"{path}: {name} should have shape {sizes}, got {got}; fetch the folder again")
        return tensor

    embedding = get("model.embed_tokens.weight", shape.vocabulary, shape.width)
    layers = []
    for index in range(shape.layers):
        sizes = {f.name: (shape.width,) if "norm" in f.name else shape.projection(f.name) for f in fields(LlamaLayer)}
        prefix = f"model.layers.{index}"
        parts = {name: get(f"{prefix}.{_NAMES[name]}.weight", *size) for name, size in sizes.items()}
        layers.append(LlamaLayer(**parts))
    tied = "lm_head.weight" not in tensors
    head = embedding if tied else get("lm_head.weight", shape.vocabulary, shape.width)
    return Llama(shape, embedding, tuple(layers), get("model.norm.weight", shape.width), head)


def random_llama(shape: LlamaShape, seed: int) -> Llama:
    r"""An untrained Llama: normal weights of standard deviation :math:`1/\sqrt{in}`, norms 1, tied embedding.

    >>> tiny = random_llama(LlamaShape(64, 32, 48, layers=2, heads=4, key_heads=2, head_width=8), seed=0)
    >>> len(tiny.layers), tiny.head is tiny.embedding
    (2, True)
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) / math.sqrt(columns)

    embedding = draw(shape.vocabulary, shape.width)
    one = torch.ones(shape.width)
    layers = tuple(
        LlamaLayer(attention_norm=one, mlp_norm=one, **{target: draw(*shape.projection(target)) for target in TARGETS})
        for _ in range(shape.layers)
    )
    return Llama(shape, embedding, layers, one, embedding)
