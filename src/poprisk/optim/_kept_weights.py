"""Weights set aside during training: the best so far, in memory and in a file, or a few moments spread over the run."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from poprisk._core.store import write_tensors
from poprisk.errors import StateDictError
from poprisk.optim._model_tensors import ModelTensors, reshard
from poprisk.optim._shards import is_sharded, local_part

_MOST = 16
"""Moments that are kept where nothing was held back."""
_BYTES = 2**30
"""Memory that they may take altogether."""


class KeptWitness(Protocol):
    """A record of a training that takes over what is kept at its end."""

    def before_kept(self) -> None:
        """Called while the model still has the weights of its last step."""
        ...

    def after_kept(self, risk: Any, steps: int, moments: Sequence[Any]) -> None:
        """Called when it has the kept weights: with their risk, the steps that were counted, and all measurements."""
        ...


_WITNESSES: "WeakKeyDictionary[Optimizer, ReferenceType[KeptWitness]]" = WeakKeyDictionary()


def witness_kept(optimizer: Optimizer, witness: KeptWitness) -> None:
    """Tell this record, while it exists, what a :class:`~poprisk.KeepBest` of the optimizer keeps."""
    _WITNESSES[optimizer] = ref(witness)


def witness_of(optimizer: Optimizer | None) -> KeptWitness | None:
    """The record of this optimizer's training, if there is one."""
    found = None if optimizer is None else _WITNESSES.get(optimizer)
    return None if found is None else found()


class KeptWeights:
    """One copy of all that training changes in a model: trained parameters and buffers.

    Args:
        model: The model, without wrappers.
        path: File that is replaced, as a whole, whenever other weights are kept; written by the first process only.
    """

    def __init__(self, model: nn.Module, path: Path | None) -> None:
        self._path, self._tensors = path, ModelTensors(model, "all")
        reshard(model)
        self._copies = [each.detach().clone() for each in self._tensors.current()]

    def include_unfrozen(self) -> None:
        """Keep parameters that are about to be trained for the first time, too."""
        if begun := self._tensors.begun():
            self._include(begun)

    @torch.no_grad()
    def keep(self, notes: dict[str, Any]) -> None:
        """Copy the model's present weights aside, and write them."""
        reshard(self._tensors.model)
        torch._foreach_copy_(self._copies, self._tensors.current())
        if self._path is not None:
            whole = self._whole()  # in every process: shards are gathered
            if process_rank() == 0:
                write_tensors(self._path, whole, notes)

    @torch.no_grad()
    def restore(self) -> None:
        """Put the weights that were kept into the model."""
        reshard(self._tensors.model)
        torch._foreach_copy_(self._tensors.current(), self._copies)

    def state(self) -> dict[str, Tensor]:
        """The copies by name; references."""
        return dict(zip(self._tensors.names, self._tensors.as_parts(self._copies), strict=True))

    @torch.no_grad()
    def load(self, state: dict[str, Tensor]) -> None:
        """Go on from :meth:`state`."""
        unfrozen = [name for name in state if name not in self._tensors.names]
        if unfrozen and self._tensors.can_include(unfrozen):
            self._include(unfrozen)
        own = self.state()
        if set(own) != set(state) or any(own[name].shape != state[name].shape for name in own):
            raise StateDictError("the kept weights belong to another model: construct KeepBest as it was when saved")
        if any(is_sharded(own[name]) != is_sharded(state[name]) for name in own):
            raise StateDictError(
                "kept weights and model must both be sharded or whole: use torch.distributed.checkpoint"
            )
        torch._foreach_copy_(
            self._copies, [local_part(state[n]).to(c) for n, c in zip(self._tensors.names, self._copies, strict=True)]
        )

    def _include(self, names: list[str]) -> None:
        place = self._tensors.trained
        self._tensors.include(names)
        added = self._tensors.current()[place : place + len(names)]
        self._copies[place:place] = [each.detach().clone() for each in added]

    def _whole(self) -> dict[str, Tensor]:
        first, whole = process_rank() == 0, []
        for each in self._tensors.as_parts(self._copies):
            gathered = each.full_tensor() if is_sharded(each) else each
            whole.append(gathered.cpu() if first else None)
        found, used = {}, set()
        for name, i in self._tensors.aliases().items() if first else ():
            found[name] = whole[i].clone() if i in used else whole[i]  # safetensors takes no tied tensors
            used.add(i)
        return found


class Snapshots:
    """Weights of a bounded number of moments, about evenly spaced over the steps so far.

    Args:
        model: The model, without wrappers. Of sharded models nothing is kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors = ModelTensors(model, "all")
        size = sum(each.numel() * each.element_size() for each in self._tensors.current())
        self._most = 0 if self._tensors.sharded else min(_MOST, _BYTES // max(size, 1))
        self._stride, self._rows = 1, dict[int, list[Tensor]]()

    @property
    def steps(self) -> list[int]:
        """Steps of the moments that are kept."""
        return list(self._rows)

    def wants(self, step: int) -> bool:
        """Whether the weights after this step are to be kept."""
        return self._most > 1 and step % self._stride == 0

    @torch.no_grad()
    def keep(self, step: int) -> None:
        """Keep the model's present weights; every second moment is dropped where there are too many."""
        self._rows[step] = [each.detach().clone() for each in self._tensors.current()]
        while len(self._rows) > self._most:
            self._stride *= 2
            self._rows = {k: row for k, row in self._rows.items() if k % self._stride == 0}

    @torch.no_grad()
    def restore(self, step: int) -> None:
        """Put the weights of a moment into the model."""
        torch._foreach_copy_(self._tensors.current(), self._rows[step])

    def state(self) -> dict[str, Any]:
        """Tensors and plain numbers; references."""
        return {"stride": self._stride, "rows": {str(step): row for step, row in self._rows.items()}}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`state`."""
        own = self._tensors.current()
        rows = {int(step): row for step, row in state["rows"].items()}
        self._stride = int(state["stride"])
        self._rows = {k: [x.to(y, copy=True) for x, y in zip(row, own, strict=True)] for k, row in rows.items()}


def process_rank() -> int:
    """This process's rank in the process group, 0 without one."""
    return distributed.get_rank() if distributed.is_available() and distributed.is_initialized() else 0
