"""Data, losses and models as people have them, in the form that a problem keeps: tensors, functions, factories."""

import copy
import functools
import math
from collections.abc import Callable, Mapping, Sized
from numbers import Integral
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, default_collate, default_convert

from poprisk._core.autodiff import IGNORED, ExampleLoss, Inputs, check_same_shape
from poprisk._core.text import one_line
from poprisk.errors import DataError, HyperparameterError, PopRiskError

_CHUNK = 256
_READ_TWICE = 4


class CopiesOf:
    """Makes copies of a module, with the weights it has now: a factory for a module that was built already."""

    def __init__(self, module: nn.Module) -> None:
        try:
            self.module = copy.deepcopy(module)
        except Exception as error:
            must = f"the module must be one that can be copied, got {type(module).__name__}: {error}"
            raise HyperparameterError(one_line(f"{must}; pass a function that builds it")) from error

    def __call__(self) -> nn.Module:
        return copy.deepcopy(self.module)


def as_examples(which: str, inputs: Any, targets: Any = None, *more: Any) -> tuple[Inputs, Tensor]:
    """Inputs and targets as tensors.

    Args:
        which: "training" or "test", for messages.
        inputs: Tensors, NumPy arrays, lists or tables, several in a tuple; or a dataset or data loader of
            (inputs, target), read once in the order of its indices.
        targets: The targets; None for a dataset or loader, which has them.
        more: Nothing; several inputs belong into one tuple.

    Raises:
        DataError: These are not examples, or a dataset returns another example each time.

    >>> as_examples("training", np.ones((2, 3)), [0, 1])[0].dtype, as_examples("training", np.eye(2), [0, 1])[1]
    (torch.float32, tensor([0, 1]))
    """
    if more:
        raise DataError(f"{which} must have inputs and targets, got {2 + len(more)} parts: pass ((x1, x2), targets)")
    if isinstance(inputs, DataLoader | Dataset):
        if targets is not None:
            kind = type(inputs).__name__
            raise DataError(f"{which} targets must be left out with a {kind}, which has its own, got some: pass one")
        return _of_dataset(which, inputs)
    if targets is None:
        raise DataError(
            f"{which} targets are missing: pass inputs and targets, or a Dataset or DataLoader of (inputs, target)"
        )
    several = isinstance(inputs, tuple)
    parts = tuple(as_tensor(f"{which} inputs", each) for each in (inputs if several else (inputs,)))
    return parts if several else parts[0], _target(as_tensor(f"{which} targets", targets))


def as_loss(loss: Any, targets: Tensor) -> str | ExampleLoss:
    """A loss given as a module, ``nn.MSELoss()`` for example, as the loss of one example; any other as it is.

    Raises:
        HyperparameterError: Its mean over a batch is not the mean of the losses of the examples.
    """
    if not isinstance(loss, nn.Module):
        return loss
    name = type(loss).__name__
    if getattr(loss, "reduction", "mean") != "mean":
        raise HyperparameterError(
            f"{name} must have reduction='mean', got {loss.reduction!r}: training minimizes the mean over examples"
        )
    if any(getattr(loss, each, None) is not None for each in ("weight", "pos_weight")):
        raise HyperparameterError(
            f"{name} with class weights must be the mean of its examples' losses, but divides by the batch's weights: "
            "pass a function of one example's outputs and target, such as lambda u, y: weight[y] * cross_entropy(u, y)"
        )
    one = targets.dim() == 1
    if type(loss) is nn.CrossEntropyLoss:
        if loss.label_smoothing == 0 and loss.ignore_index == IGNORED and (one or targets.is_floating_point()):
            return "cross_entropy"
        options = {"label_smoothing": loss.label_smoothing, "ignore_index": loss.ignore_index}
        return functools.partial(mean_cross_entropy, **options)
    if type(loss) is nn.BCEWithLogitsLoss and targets.numel() == len(targets):
        return "logistic"
    return _OfOne(loss)


def check_plain(name: Any, seed: Any, arguments: Any) -> None:
    """Refuse a name, a seed or arguments of the wrong type."""
    if not isinstance(name, str):
        raise HyperparameterError(f"name must be a text, got {name!r}: pass name='my problem'")
    check_seed(seed)
    if arguments is not None and not (isinstance(arguments, Mapping) and all(isinstance(k, str) for k in arguments)):
        raise HyperparameterError(
            f"arguments must be a dict of keyword arguments of make_model, got {arguments!r}: pass one"
        )


def check_seed(seed: Any) -> int:
    """The seed as an int; a HyperparameterError if it is none."""
    return whole("seed must be a whole number of 64 bits", seed, -(2**63), 2**63 - 1, ": pass seed=0")


def whole(must: str, value: Any, low: float, high: float = math.inf, do: str = "") -> int:
    """A whole number of any kind (Python's, numpy's) as an int.

    Raises:
        HyperparameterError: it is none, or out of range; the message begins with ``must``.

    >>> whole("every must be a whole number", np.int64(3), 1)
    3
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise HyperparameterError(one_line(f"{must}, got {value!r}{do}"))
    return int(value)


def as_factory(model: Any) -> Callable[..., Any]:
    """A function that builds the module: the one given, or one that copies the module given."""
    if isinstance(model, nn.Module):
        return CopiesOf(model)
    if not callable(model):
        raise HyperparameterError(
            f"make_model must be a module or a function that builds one, got a {type(model).__name__}: pass either"
        )
    return model


def mean_cross_entropy(
    outputs: Tensor, target: Tensor, label_smoothing: float = 0.0, ignore_index: int = IGNORED
) -> Tensor:
    """Cross-entropy of one example as ``nn.CrossEntropyLoss`` has it: the mean over its places that are not ignored.

    >>> mean_cross_entropy(torch.zeros(4), torch.tensor(1), label_smoothing=0.1)
    tensor(1.3863)
    """
    total = F.cross_entropy(
        outputs.unsqueeze(0),
        target.unsqueeze(0),
        reduction="sum",
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
    )
    if target.is_floating_point():  # class probabilities: the first axis has the classes
        return total / max(1, target[0].numel())
    return total / (target != ignore_index).sum().clamp(min=1)


class _OfOne:
    """The loss of one example by a module that takes batches."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, outputs: Tensor, target: Tensor) -> Tensor:
        by_element = isinstance(self.module, nn.MSELoss | nn.L1Loss | nn.SmoothL1Loss | nn.HuberLoss)
        if by_element:
            check_same_shape(outputs, target)
        return self.module(outputs.unsqueeze(0), target.unsqueeze(0))


def as_tensor(what: str, value: Any) -> Tensor:
    """Numbers in any form as a tensor; a DataError that begins with ``what`` if they are none."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or value.is_meta or value.is_quantized or value.is_nested:
            kind = (
                "meta" if value.is_meta else "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
            )
            raise DataError(f"{what} must be an ordinary tensor with values, got a {kind} one: pass a dense tensor")
        return value
    if isinstance(value, list) and value and all(isinstance(each, Tensor) for each in value):
        shapes = {tuple(each.shape) for each in value}
        if len(shapes) > 1:
            raise DataError(f"{what} must have one shape, got {len(shapes)} different ones: pad them to one length")
        return torch.stack(value)
    if np.ma.is_masked(value):
        raise DataError(f"{what} must all have values, got an array with masked ones: fill them, or leave rows out")
    try:
        array = np.asarray(value)
    except ValueError as error:
        first = str(error).partition(". ")[0]
        raise DataError(
            f"{what} cannot be made an array ({first}): rows must have one length; pad or cut them"
        ) from None
    if array.dtype.kind not in "biuf":
        number = "number the classes: _, targets = numpy.unique(labels, return_inverse=True)"
        hint = number if array.dtype.kind in "OUS" and "targets" in what else "pass tensors, arrays or a Dataset"
        if array.dtype.kind == "O" and array.shape and hint != number:
            hint = "use .astype('float32') if all of it is numbers"
        got = f"{array.dtype} {list(array.shape)}" if array.shape else type(value).__name__
        raise DataError(f"{what} must be numbers, got {got}: {hint}")
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if array.dtype.kind == "f" and array.dtype != np.float16:
        array = array.astype(np.dtype(str(torch.get_default_dtype()).removeprefix("torch.")), copy=False)
    elif array.dtype.kind == "u" and array.dtype.itemsize > 1:
        array = array.astype(np.int64)
    return torch.as_tensor(array if array.flags.writeable and all(s >= 0 for s in array.strides) else array.copy())


def _target(targets: Tensor) -> Tensor:
    """Classes as torch's losses want them; anything else as it is."""
    return targets if targets.is_floating_point() or targets.is_complex() else targets.long()


def _of_dataset(which: str, data: Any) -> tuple[Inputs, Tensor]:
    loader = data if isinstance(data, DataLoader) else None
    dataset: Any = data if loader is None else loader.dataset
    if isinstance(dataset, IterableDataset) or not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
        raise DataError(
            f"the {which} data must have __len__ and __getitem__, so that examples have an index, got "
            f"{type(dataset).__name__}: pass a Dataset that has both"
        )
    if not len(dataset):
        raise DataError(f"the {which} dataset is empty")
    if isinstance(sampler := getattr(loader, "sampler", None), Sized) and len(sampler) != len(dataset):
        raise DataError(
            f"the sampler of the {which} loader must draw all {len(dataset)} examples, but draws {len(sampler)}: pass "
            "the dataset itself, or a torch.utils.data.Subset of it"
        )
    collate = getattr(loader, "collate_fn", None)
    if collate in (None, default_convert):
        collate = default_collate
    if type(dataset) is TensorDataset and collate is default_collate:
        return _parted(which, list(dataset.tensors))

    def read(start: int, stop: int) -> list[Tensor]:
        batch = [dataset[i] for i in range(start, stop)]
        if isinstance(batch[0], Mapping) or not isinstance(batch[0], tuple | list):
            raise DataError(
                f"an example of the {which} dataset must be a tuple of inputs and target, got "
                f"{type(batch[0]).__name__}: pass arrays instead, inputs and targets"
            )
        return _joined(which, lambda: [_part(which, each) for each in collate(batch)])

    few = min(_READ_TWICE, len(dataset))
    if any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(read(0, few), read(0, few), strict=True)):
        raise DataError(
            f"the {which} dataset returns another example each time it is read: take the random transform out of it, "
            "and pass it as augment="
        )
    chunks = [read(start, min(start + _CHUNK, len(dataset))) for start in range(0, len(dataset), _CHUNK)]
    return _parted(which, _joined(which, lambda: [torch.cat(part) for part in zip(*chunks, strict=True)]))


def _part(which: str, values: Any) -> Tensor:
    """One of the parts of a dataset's examples."""
    if isinstance(values, tuple | list) and len(values) and isinstance(values[0], Tensor):
        raise DataError(
            f"an example of the {which} dataset must be a tuple of tensors, got one within it: return (x1, x2, target)"
        )
    return values if isinstance(values, Tensor) else as_tensor(f"values of the {which} dataset", values)


def _joined(which: str, join: Callable[[], list[Tensor]]) -> list[Tensor]:
    """Several examples or batches as one, by a function that may find that they do not fit."""
    try:
        return join()
    except PopRiskError:
        raise
    except (TypeError, RuntimeError, ValueError) as error:
        brief = str(error).splitlines()[0][:160]
        raise DataError(
            f"examples of the {which} dataset do not make a batch of tensors: {brief}; give them one form"
        ) from None


def _parted(which: str, parts: list[Tensor]) -> tuple[Inputs, Tensor]:
    if len(parts) < 2:
        raise DataError(
            f"an example of the {which} dataset must be a tuple of inputs and target, got {len(parts)} part: return "
            "both"
        )
    *inputs, targets = (as_tensor(f"values of the {which} dataset", each) for each in parts)
    return tuple(inputs) if len(inputs) > 1 else inputs[0], _target(targets)
