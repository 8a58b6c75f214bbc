"""Read images and labels in the idx format of MNIST and its relatives, with or without gzip."""

import gzip
import zlib
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from poprisk.errors import DataError

_UNSIGNED_BYTE = 8
"""The code of the format for unsigned bytes, the only type of number in these data sets."""


@dataclass(frozen=True)
class ImageSplit:
    """Training and test images, flattened, in [0, 1], with their labels."""

    train_inputs: Float[Tensor, "train pixels"]
    train_labels: Int[Tensor, "train"]
    test_inputs: Float[Tensor, "test pixels"]
    test_labels: Int[Tensor, "test"]


def idx_split(folder: str | Path) -> ImageSplit:
    """Read the four files ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-…``, each plain or ``.gz``.

    Raises:
        DataError: a file is missing or damaged, or images and labels differ in number; the message names the file.
    """
    train, test = (_pair(Path(folder), which) for which in ("train", "t10k"))
    if train[0].shape[1] != test[0].shape[1]:
        raise DataError(
            f"training and test images in {folder} must have the same size, got {train[0].shape[1]} and "
            f"{test[0].shape[1]} pixels: the files are of two data sets"
        )
    return ImageSplit(*train, *test)


def read_idx(path: str | Path) -> UInt8[Tensor, "*shape"]:
    """Read an idx file of unsigned bytes: two zero bytes, type, number of axes, their sizes (big-endian), the numbers.

    Raises:
        DataError: the file is missing, is not an idx file of bytes, or does not have the length its header says.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "labels-idx1-ubyte"
    ...     _ = path.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 3, 7, 2, 1]))
    ...     read_idx(path)
    tensor([7, 2, 1], dtype=torch.uint8)
    """
    content = _content(Path(path))
    axes = content[3] if len(content) > 3 else 0
    begin = 4 + 4 * axes
    if content[:3] != bytes([0, 0, _UNSIGNED_BYTE]) or not axes or len(content) < begin:
        raise DataError(
            f"{path} should be an idx file of unsigned bytes, which begins with 00 00 08, got {content[:4].hex(' ')!r} "
            f"in {len(content)} bytes: fetch it again"
        )
    shape = tuple(int.from_bytes(content[4 * i : 4 * i + 4], "big") for i in range(1, axes + 1))
    if len(content) != begin + prod(shape):
        raise DataError(
            f"{path} is damaged: its header says {list(shape)}, which makes {begin + prod(shape)} bytes, got "
            f"{len(content)}; fetch it again"
        )
    return torch.from_numpy(np.frombuffer(content, np.uint8, offset=begin).reshape(shape).copy())


def _pair(folder: Path, which: str) -> tuple[Tensor, Tensor]:
    images, labels = (_find(folder, f"{which}-{kind}") for kind in ("images-idx3-ubyte", "labels-idx1-ubyte"))
    x, y = read_idx(images), read_idx(labels)
    if x.dim() != 3 or y.dim() != 1 or len(x) != len(y) or not len(x):
        raise DataError(
            f"{images} and {labels} should be images and as many labels, got shapes {list(x.shape)} and {list(y.shape)}"
        )
    return x.flatten(1).float() / 255, y.long()


def _find(folder: Path, name: str) -> Path:
    for path in (folder / name, folder / f"{name}.gz"):
        if path.exists():
            return path
    raise DataError(f"{folder} has no file {name} or {name}.gz: put the data set's four idx files there")


def _content(path: Path) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged: it does not unpack ({error}); fetch it again") from None
