r"""CIFAR-10 from a local folder, and human labels of its training images (CIFAR-10N).

Nothing is downloaded. Two layouts of the images are supported, and two of the labels. Pickles are read safely: only
numpy arrays, bytes, text, numbers and containers of them are built, and anything else in a file raises an error.
"""

import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BufferedIOBase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int, UInt8
from torch import Tensor

from poprisk.errors import DataError

NUM_CLASSES = 10
SOURCE = "the unpacked cifar-10-python.tar.gz of www.cs.toronto.edu/~kriz/cifar.html"
HUMAN_SOURCE = "data/CIFAR-10_human.pt of github.com/UCSC-REAL/cifar-10-100n"
_ARRAYS, _HUMAN_ARRAYS, _HUMAN_PICKLE = "cifar10.npz", "cifar10n_labels.npz", "CIFAR-10_human.pt"
_BATCHES, _TEST_BATCH, _UNPACKED = [f"data_batch_{i}" for i in range(1, 6)], "test_batch", "cifar-10-batches-py"
_KEYS = {
    "clean": "clean_label",
    "aggre": "aggre_label",
    "random1": "random_label1",
    "random2": "random_label2",
    "random3": "random_label3",
    "worse": "worse_label",
}
HUMAN_LABELS = tuple(_KEYS)
"""Names of the label sets: the true labels, the majority of three people, each person, and a wrong label if any."""
WRONG_SHARES = {"clean": 0.0, "aggre": 0.0901, "random1": 0.1723, "random2": 0.1812, "random3": 0.1764, "worse": 0.4021}
"""Number of wrong labels among the 50 000 of each set."""


@dataclass(frozen=True)
class CifarImages:
    """Colour images as bytes, channels first, with their true labels."""

    train_images: UInt8[Tensor, "train 3 side side"]
    train_labels: Int[Tensor, "train"]
    test_images: UInt8[Tensor, "test 3 side side"]
    test_labels: Int[Tensor, "test"]


def cifar10(folder: str | Path) -> CifarImages:
    """Read CIFAR-10 from a folder.

    Either the official python version, ``data_batch_1`` … ``data_batch_5`` and ``test_batch``, there or in
    ``cifar-10-batches-py``; or one file ``cifar10.npz`` with ``train_images`` (bytes [n, 32, 32, 3]), ``train_labels``,
    ``test_images`` and ``test_labels``.

    Raises:
        DataError: neither exists, or a file is damaged or contains anything but arrays; the message names the file.
    """
    folder = Path(folder)
    if (folder / _ARRAYS).exists():
        return _from_arrays(folder / _ARRAYS)
    for place in (folder, folder / _UNPACKED):
        if (place / _BATCHES[0]).exists():
            train, test = _from_pickles(place, _BATCHES), _from_pickles(place, [_TEST_BATCH])
            return CifarImages(*train, *test)
    raise DataError(f"{folder} has no CIFAR-10: put {SOURCE} there, or {_ARRAYS}")


def human_labels(folder: str | Path, clean: Int[Tensor, "train"]) -> dict[str, Int[Tensor, "train"]]:
    """The label sets of CIFAR-10N, by the names of :data:`HUMAN_LABELS`.

    Args:
        folder: Folder with the published ``CIFAR-10_human.pt``, or with the same arrays as ``cifar10n_labels.npz``.
        clean: The true labels of the training images; the file must contain the same ones, in the same order.

    Raises:
        DataError: there is no such file, or it is damaged or belongs to other images.
    """
    folder = Path(folder)
    if (path := folder / _HUMAN_ARRAYS).exists():
        arrays = _read_arrays(path, list(_KEYS.values()))
    elif (path := folder / _HUMAN_PICKLE).exists():
        arrays = _read_torch(path)
    else:
        raise DataError(f"{folder} has no CIFAR-10N labels: put {HUMAN_SOURCE} there, or {_HUMAN_ARRAYS}")
    labels = {name: _labels(path, _entry(path, arrays, key)) for name, key in _KEYS.items()}
    for name, values in labels.items():
        if len(values) != len(clean):
            raise DataError(f"{path} has {len(values)} labels {name!r} for {len(clean)} images: fetch {HUMAN_SOURCE}")
    if differ := int((labels["clean"] != clean.cpu()).sum()):
        raise DataError(
            f"{path} is for other images: {differ} of {len(clean)} of its clean labels differ from those of CIFAR-10"
        )
    return labels


class ArraysOnly(pickle.Unpickler):
    """An unpickler that builds only numpy arrays and plain values.

    >>> import io
    >>> ArraysOnly(io.BytesIO(pickle.dumps({"data": np.arange(3)})), "here").load()
    {'data': array([0, 1, 2])}
    >>> ArraysOnly(io.BytesIO(pickle.dumps(print)), "here").load()
    Traceback (most recent call last):
    poprisk.errors.DataError: here asks for builtins.print, which no file of arrays needs: do not trust it
    """

    def __init__(self, file: BufferedIOBase, name: str) -> None:
        super().__init__(file, encoding="bytes")
        self._name = name

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        """Look up a function that rebuilds an array, by either of the two names of numpy's core."""
        found = _ALLOWED.get((module_name.replace("numpy._core", "numpy.core"), global_name))
        if found is None:
            asked = f"{module_name}.{global_name}"
            raise DataError(f"{self._name} asks for {asked}, which no file of arrays needs: do not trust it")
        return found


def _latin(text: str, encoding: str) -> bytes:
    """Decode bytes as Python 3 writes them in an old pickle; no other encoding is needed."""
    if encoding not in ("latin1", b"latin1"):
        raise DataError(f"a pickle of arrays encodes bytes as latin1, got {encoding!r}: do not trust it")
    return text.encode("latin1")


_REBUILD: Callable[..., Any] = np.zeros(0).__reduce__()[0]  # type: ignore[assignment]
_FROM_BUFFER: Callable[..., Any] = np.zeros(1).__reduce_ex__(5)[0]  # type: ignore[assignment]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _REBUILD,
    ("numpy.core.numeric", "_frombuffer"): _FROM_BUFFER,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin,
}


def _from_arrays(path: Path) -> CifarImages:
    arrays = _read_arrays(path, ["train_images", "train_labels", "test_images", "test_labels"])
    parts: list[Tensor] = []
    for which in ("train", "test"):
        images, labels = arrays[f"{which}_images"], _labels(path, arrays[f"{which}_labels"])
        if images.ndim != 4 or images.shape[-1] != 3:
            raise DataError(f"{path}: {which}_images should be [n, 32, 32, 3], got {list(images.shape)}")
        parts += _pair(path, np.moveaxis(images, -1, 1), labels)
    return CifarImages(*parts)


def _from_pickles(folder: Path, names: list[str]) -> tuple[Tensor, Tensor]:
    images, labels = [], []
    for name in names:
        path = folder / name
        content = _read_pickle(path)
        rows = _entry(path, content, "data")
        if rows.ndim != 2 or rows.shape[1] != 3 * 32 * 32:
            raise DataError(f"{path}: data should be [n, 3072], got {list(rows.shape)}: fetch {SOURCE}")
        pair = _pair(path, rows.reshape(-1, 3, 32, 32), _labels(path, _entry(path, content, "labels")))
        images.append(pair[0])
        labels.append(pair[1])
    return torch.cat(images), torch.cat(labels)


def _read_pickle(path: Path) -> Mapping[Any, Any]:
    try:
        with path.open("rb") as file:
            content = ArraysOnly(file, str(path)).load()
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}; put {SOURCE} there") from None
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} is damaged ({_first_line(error)}): fetch {SOURCE} again") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} should hold a dictionary, got {type(content).__name__}: fetch {SOURCE}")
    return {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in content.items()}


def _read_arrays(path: Path, names: list[str]) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = {name: arrays[name] for name in names if name in arrays.files}
    except Exception as error:  # numpy raises whatever zip, zlib or the header raise
        raise DataError(f"{path} cannot be read as arrays ({_first_line(error)}): make it again") from None
    for name in names:
        _entry(path, found, name)
    return found


def _read_torch(path: Path) -> Mapping[str, Any]:
    """A dictionary of arrays as ``torch.save`` writes it, under torch's own restricted loader."""
    kinds = [type(np.dtype(code)) for code in ("u1", "i1", "i2", "i4", "i8")]
    names = [(_REBUILD, f"{core}.multiarray._reconstruct") for core in ("numpy.core", "numpy._core")]
    try:
        with torch.serialization.safe_globals([*names, np.ndarray, np.dtype, *kinds]):
            content = torch.load(path, weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged file
        raise DataError(f"{path} cannot be read as arrays ({_first_line(error)}): fetch {HUMAN_SOURCE}") from None
    if not isinstance(content, dict):
        raise DataError(f"{path} should hold a dictionary, got {type(content).__name__}: fetch {HUMAN_SOURCE}")
    return content


def _entry(path: Path, content: Mapping[str, Any], key: str) -> np.ndarray:
    if key not in content:
        there = ", ".join(str(name) for name in content) or "nothing"
        raise DataError(f"{path} should have an entry {key!r}, it has {there}")
    return np.asarray(content[key])


def _labels(path: Path, values: np.ndarray) -> Tensor:
    whole = values.ndim == 1 and values.size > 0 and np.issubdtype(values.dtype, np.integer)
    if not whole or values.min() < 0 or values.max() >= NUM_CLASSES:
        got = f"{values.dtype} {list(values.shape)}"
        raise DataError(f"{path}: labels should be whole numbers in 0 … {NUM_CLASSES - 1}, got {got}")
    return torch.from_numpy(values.astype(np.int64))


def _pair(path: Path, images: np.ndarray, labels: Tensor) -> tuple[Tensor, Tensor]:
    if images.dtype != np.uint8 or len(images) != len(labels) or images.shape[2] != images.shape[3]:
        raise DataError(
            f"{path}: images should be square, of bytes, as many as the {len(labels)} labels, got {images.dtype} "
            f"{list(images.shape)}"
        )
    return torch.from_numpy(np.ascontiguousarray(images)), labels


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
