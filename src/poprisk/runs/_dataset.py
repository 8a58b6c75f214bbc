"""A dataset that returns the index of each example with the example."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.utils.data import Dataset, IterableDataset

from poprisk.errors import RunError


class IndexedDataset(Dataset[Any]):
    """Each example with its index in front: ``(index, *example)``, or ``{"index": index, **example}`` for mappings.

    A :class:`torch.utils.data.DataLoader` collects the indices of a batch into one tensor, in any order of sampling.

    Args:
        dataset: A dataset with ``__len__`` and ``__getitem__``.

    Raises:
        RunError: the dataset has no ``__len__`` or ``__getitem__``.

    >>> list(IndexedDataset([("a", 1), ("b", 0)]))
    [(0, 'a', 1), (1, 'b', 0)]
    """

    def __init__(self, dataset: Any) -> None:
        if (
            isinstance(dataset, IterableDataset)
            or not hasattr(dataset, "__getitem__")
            or not hasattr(dataset, "__len__")
        ):
            raise RunError(
                f"the dataset must have __len__ and __getitem__, so that examples have an index, got "
                f"{type(dataset).__name__}"
            )
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        example = self.dataset[index]
        if isinstance(example, Mapping):
            return {"index": index, **example}
        return (index, *example) if isinstance(example, tuple | list) else (index, example)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))
