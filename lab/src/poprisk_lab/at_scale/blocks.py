"""Weights of a Llama in blocks of few bits, as GGUF has them, and the language model they stand for.

One safetensors file has the blocks of every tensor as bytes, [rows, bytes], under the names of Hugging Face; its notes
say which kind each is and what the sizes of the model are.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from poprisk.errors import DataError


def dequantized(blocks: Tensor, kind: str, columns: int) -> Tensor:
    """The numbers of a tensor's rows.

    Args:
        blocks: Bytes [rows, bytes].
        kind: ``"F32"``; ``"Q8_0"``: 32 numbers share a float16 factor; ``"Q4_1"``: they share a factor and a minimum.
        columns: Numbers in a row.

    >>> one = torch.tensor([1.0, 0.5], dtype=torch.float16).view(torch.uint8)
    >>> dequantized(torch.cat([one, torch.full((16,), 0x21, dtype=torch.uint8)])[None], "Q4_1", 32)[0, [0, 16]]
    tensor([1.5000, 2.5000])
    """
    rows = len(blocks)
    if kind == "F32":
        return blocks.contiguous().view(torch.float32)
    size = {"Q8_0": 34, "Q4_1": 20}.get(kind)
    if size is None or blocks.shape[1] != columns // 32 * size:
        raise DataError(f"blocks of kind {kind!r} with {blocks.shape[1]} bytes do not hold {columns} numbers")
    parts = blocks.reshape(-1, size)
    factor = parts[:, :2].contiguous().view(torch.float16).float()
    if kind == "Q8_0":
        return (factor * parts[:, 2:].contiguous().view(torch.int8).float()).reshape(rows, columns)
    least, bits = parts[:, 2:4].contiguous().view(torch.float16).float(), parts[:, 4:]
    return (factor * torch.cat([bits & 15, bits >> 4], 1).float() + least).reshape(rows, columns)


def load_blocks(path: str | Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The configuration of the model, and its weights in float32."""
    with safe_open(str(path), "pt") as file:
        notes = file.metadata()
        kinds, weights = json.loads(notes["kinds"]), {}
        for name, described in kinds.items():
            kind, sizes = described.split(":")
            shape = [int(x) for x in sizes.split("x")]
            weights[name] = dequantized(file.get_tensor(name), kind, shape[-1]).reshape(shape)
    return json.loads(notes["config"]), weights


def language_model(path: str | Path | None) -> nn.Module:
    """A Llama of transformers in float32; without a path, a tiny random one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    if path is None:
        torch.manual_seed(0)
        return LlamaForCausalLM(LlamaConfig(**{**_TINY, **_PLAIN}))
    config, weights = load_blocks(path)
    model = LlamaForCausalLM(LlamaConfig(**{**config, **_PLAIN}))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise DataError(f"{path} does not hold this model: missing {missing[:3]}, unexpected {unexpected[:3]}")
    model.tie_weights()
    return model


_PLAIN: dict[str, Any] = {"use_cache": False, "attn_implementation": "eager"}
_TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
