"""hold_back: set a block of the training examples aside, to choose the moment of training by."""

from collections.abc import Mapping, Sequence, Sized
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from poprisk._core.seeds import shuffled
from poprisk.errors import DataError
from poprisk.optim._model_tensors import shortened


@runtime_checkable
class Splittable(Protocol):
    """Data that can set examples aside by two methods, as :class:`~poprisk.Problem` can."""

    def hold_back_labels(self) -> Any:
        """The class of each example, or None where there are no classes."""
        ...

    def held_back(self, kept: Tensor, held: Tensor) -> tuple[Any, Any]:
        """The data without the held examples, and the held ones."""
        ...


def hold_back(data: Any, share: float = 0.05, *, seed: int = 0, labels: Any = None) -> tuple[Any, Any]:
    """Split training data into what to train on and a small block to choose the moment of training by.

    The block is drawn at random from the *training* examples and is as noisy as they are: its loss is an unbiased
    estimate of the population risk of a model trained on the rest, whatever the noise in the labels. Where the classes
    are known, each keeps its share (a stratified draw). The same seed gives the same block.

    Args:
        data: A map-style dataset or a list of examples (the parts come as :class:`torch.utils.data.Subset`), a Hugging
            Face dataset, a pandas table, a :class:`~poprisk.Problem` (its test set stays with the first part), or a
            tuple of tensors, arrays, tables or lists of one length, the targets last.
        share: Share of the examples to hold back, in [0, 1). With 0 the second part is None.
        seed: Seed for the random draw.
        labels: The class of each example, for a stratified draw. By default they are taken from ``data`` where that
            does not read every example: the last array of a tuple or a ``TensorDataset``, or an attribute ``targets``
            or ``labels``. ``False`` draws without regard to classes.

    Returns:
        The examples to train on and those held back, in the form that ``data`` has.

    Raises:
        DataError: ``share`` is out of range, the data cannot be split, or nothing would be left to train on.

    >>> inputs, targets = torch.arange(40.0).reshape(40, 1), torch.arange(40) % 2
    >>> (x, y), (held_x, held_y) = hold_back((inputs, targets), share=0.1)
    >>> len(x), len(held_x), held_y.bincount().tolist()
    (36, 4, [2, 2])
    """
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        raise DataError(f"share must be a number in [0, 1), got {shortened(share)}: use hold_back((x, y), 0.05)")
    check_examples(data)
    if share == 0:
        return data, None
    count = common_length(data) if isinstance(data, tuple) else len(data)
    if count < 2:
        raise DataError(f"holding examples back needs at least 2 of them, got {count}")
    classes = None if labels is False else _classes(data if labels is None else None, labels, count)
    held = _draw(count, share, seed, classes)
    kept = torch.ones(count, dtype=torch.bool)
    kept[held] = False
    return _parts(data, kept.nonzero().squeeze(1), held)


def check_examples(data: Any) -> None:
    """Refuse what is neither a dataset nor a tuple of arrays, but looks like one."""
    arrays = isinstance(data, list) and 2 <= len(data) <= 4 and all(getattr(each, "shape", ()) for each in data)
    if arrays and len(data) < len(data[0]) and len({len(each) for each in data}) == 1:
        raise DataError(f"expected a list of examples, got a list of {len(data)} arrays: pass a tuple of them")
    indexed = isinstance(data, Sized) and hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)
    if not (indexed or isinstance(data, Splittable)) or isinstance(data, Mapping):
        wanted = "pass the dataset, not a DataLoader or a stream, or a tuple (inputs, targets)"
        raise DataError(f"the data must have a length and take indices, got {type(data).__name__}: {wanted}")


def _draw(count: int, share: float, seed: int, classes: Tensor | None) -> Tensor:
    """Positions to hold back, sorted: at least one, and at least one is left."""
    order = shuffled(count, seed, "held back")
    size = min(max(round(count * share), 1), count - 1)
    if classes is None:
        return order[:size].sort().values
    # Within each class the shuffled examples get evenly spaced ranks; the smallest ranks over all classes are held.
    rank = torch.empty(count, dtype=torch.float64)
    in_order = classes[order]
    for each in classes.unique():
        members = order[in_order == each]
        rank[members] = (torch.arange(len(members), dtype=torch.float64) + 0.5) / len(members)
    return order[rank[order].argsort(stable=True)[:size]].sort().values


def common_length(parts: Sequence[Any]) -> int:
    """The length that all parts have."""
    lengths = [len(part) for part in parts]
    if len(set(lengths)) != 1:
        raise DataError(f"the parts of the data must have one length, got {lengths}")
    return lengths[0]


def _classes(data: Any, labels: Any, count: int) -> Tensor | None:
    """Class numbers of all examples, where there are few enough of them to be classes."""
    given = labels is not None
    if not given:
        labels = _labels_of(data)
    if labels is None:
        return None
    array = _array(labels)
    if array.shape[:1] != (count,):
        if given:
            raise DataError(f"labels must have one entry for each of the {count} examples, got {array.shape}")
        return None
    if array.ndim != 1 or (array.dtype.kind not in "iubUSO" and not given):
        return None
    try:
        found, numbers = np.unique(array, return_inverse=True)
    except TypeError:  # objects that cannot be sorted
        return None
    return torch.from_numpy(numbers.astype(np.int64)) if len(found) <= max(2, count // 2) else None


def _labels_of(data: Any) -> Any:
    if isinstance(data, tuple):
        return data[-1]
    if isinstance(data, TensorDataset):
        return data.tensors[-1]
    if isinstance(data, Splittable):
        return data.hold_back_labels()
    if isinstance(data, Subset):
        below = _labels_of(data.dataset)
        return None if below is None or not len(_array(below)) else _array(below)[np.asarray(data.indices)]
    for name in ("targets", "labels"):
        if (found := getattr(data, name, None)) is not None:
            return found
    columns = getattr(data, "column_names", None) or ()
    return next((data[name] for name in ("label", "labels") if name in columns), None)


def _array(labels: Any) -> np.ndarray:
    try:
        return np.asarray(labels.cpu() if isinstance(labels, Tensor) else labels)
    except ValueError:  # sequences of different lengths: no classes
        return np.empty(0)


def _parts(data: Any, kept: Tensor, held: Tensor) -> tuple[Any, Any]:
    if isinstance(data, tuple):
        return tuple(_rows(part, kept) for part in data), tuple(_rows(part, held) for part in data)
    if isinstance(data, Splittable):
        return data.held_back(kept, held)
    if hasattr(data, "select") and hasattr(data, "column_names"):  # a Hugging Face dataset
        return data.select(kept.tolist()), data.select(held.tolist())
    if hasattr(data, "iloc"):
        return _rows(data, kept), _rows(data, held)
    dataset = cast(Dataset[Any], data)
    return Subset(dataset, kept.tolist()), Subset(dataset, held.tolist())


def _rows(part: Any, index: Tensor) -> Any:
    if isinstance(part, Tensor):
        return part[index.to(part.device)]
    if isinstance(part, Sequence):
        return [part[i] for i in index.tolist()]
    return part.iloc[index.numpy()] if hasattr(part, "iloc") else part[index.numpy()]
