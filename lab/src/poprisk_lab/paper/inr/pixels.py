"""Small pictures inside a JSON file: eight bits a value, compressed, as text."""

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor


def packed_pixels(picture: Float[Tensor, "height width channels"]) -> dict[str, Any]:
    """Values in [0, 1], those outside clipped and NaN black, rounded to 8 bits and packed as text.

    >>> packed = packed_pixels(torch.tensor([[[0.0, 0.5, 2.0]]]))
    >>> packed["shape"], unpacked_pixels(packed).tolist()
    ([1, 1, 3], [[[0, 128, 255]]])
    """
    values = (picture.detach().cpu().nan_to_num(nan=0.0).clamp(0, 1) * 255).round().to(torch.uint8)
    packed = base64.b64encode(zlib.compress(bytes(values.flatten().tolist()), level=9))
    return {"shape": list(values.shape), "zlib_base64": packed.decode("ascii")}


def unpacked_pixels(packed: Mapping[str, Any]) -> Any:
    """The picture that :func:`packed_pixels` packed, as an array of bytes [height, width, channels]."""
    import numpy as np  # the one caller draws, and has it

    values = zlib.decompress(base64.b64decode(packed["zlib_base64"]))
    return np.frombuffer(values, dtype=np.uint8).reshape(packed["shape"])
