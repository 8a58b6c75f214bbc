"""The tensors of a model that training changes: found once by name, read where they are now, shard by shard."""

import reprlib
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from poprisk.errors import HyperparameterError, StateDictError
from poprisk.optim._shards import as_part_of, is_sharded, local_part


class ModelTensors:
    """Trained parameters of a model, then some of its buffers.

    Tied weights are listed once. Parameters are looked up at each call, so that a tensor that the model replaces is
    found. Of sharded parameters (DTensors) the local part is given.

    Args:
        model: The model, without wrappers (see :func:`unwrapped`).
        buffers: ``"floating"``, ``"all"`` or ``"none"``. Buffers that are not part of the model's ``state_dict`` are
            left out.
    """

    def __init__(self, model: nn.Module, buffers: str) -> None:
        self.model = model
        trained, self._frozen = {}, {}
        for name, owner, key in _entries(model, "_parameters"):
            (trained if owner[key].requires_grad else self._frozen)[name] = (owner, key)
        kept = {
            name: (owner, key)
            for name, owner, key in _entries(model, "_buffers")
            if buffers == "all" or (buffers == "floating" and owner[key].is_floating_point())
        }
        self.trained = len(trained)
        self._set_places({**trained, **kept})

    def _set_places(self, places: dict[str, tuple[dict[str, Tensor], str]]) -> None:
        self.names, self._places = list(places), list(places.values())
        self.sharded = any(is_sharded(owner[key]) for owner, key in self._places)

    def current(self) -> list[Tensor]:
        """The tensors as they are now; of sharded ones the local part."""
        if self.sharded:
            return [local_part(owner[key]) for owner, key in self._places]
        return [owner[key] for owner, key in self._places]

    def as_parts(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors laid out like :meth:`current`, as parts of sharded tensors where the model's are sharded."""
        if not self.sharded:
            return list(tensors)
        pairs = zip(self._places, tensors, strict=True)
        return [as_part_of(owner[key], x) if is_sharded(owner[key]) else x for (owner, key), x in pairs]

    def begun(self) -> list[str]:
        """Names of parameters that were frozen when the list was made and require a gradient now."""
        return [name for name, (owner, key) in self._frozen.items() if owner[key].requires_grad]

    def include(self, names: Sequence[str]) -> None:
        """List these parameters, too, after the other parameters."""
        added = {name: self._frozen.pop(name) for name in names}
        places = list(zip(self.names, self._places, strict=True))
        self._set_places({**dict(places[: self.trained]), **added, **dict(places[self.trained :])})
        self.trained += len(added)

    def can_include(self, names: Sequence[str]) -> bool:
        """Whether all of these are frozen parameters of the model."""
        return set(names) <= set(self._frozen)

    def aliases(self) -> dict[str, int]:
        """Every name in the model's ``state_dict`` of a listed tensor, tied names included, with its position."""
        position = {id(owner[key]): i for i, (owner, key) in enumerate(self._places)}
        state = self.model.state_dict(keep_vars=True)
        return {name: position[id(value)] for name, value in state.items() if id(value) in position}


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel, DataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        else:
            return model


def reshard(model: nn.Module) -> None:
    """Under FSDP2 (``fully_shard``), free the whole parameters that a forward pass left, so that new ones are used."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            cast(Any, module).reshard()


def _entries(model: nn.Module, kind: str) -> Iterator[tuple[str, dict[str, Tensor], str]]:
    seen = set()
    for prefix, module in model.named_modules():
        owner = getattr(module, kind)
        for key, value in owner.items():
            left_out = kind == "_buffers" and key in module._non_persistent_buffers_set
            if value is None or id(value) in seen or left_out:
                continue
            seen.add(id(value))
            yield f"{prefix}.{key}" if prefix else key, owner, key


def check_followed(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse other types, and an optimizer of another model, unless a wrapper flattens or shards the parameters."""
    if not isinstance(model, nn.Module) or not hasattr(optimizer, "register_step_post_hook"):
        kinds = f"{type(model).__name__} and {type(optimizer).__name__}"
        raise HyperparameterError(
            f"expected a model and its optimizer, in this order, got {kinds}: change the arguments"
        )
    own = [each for each in unwrapped(model).parameters() if each.requires_grad]
    given = [each for group in optimizer.param_groups for each in group["params"]]
    if not own or any(type(each) is not nn.Parameter for each in (*own, *given)):
        return
    if {id(each) for each in own}.isdisjoint(id(each) for each in given):
        none = f"none of its {len(given)} parameters is one of the {len(own)} trained parameters of the model"
        raise HyperparameterError(
            f"the optimizer must train the model, but {none}: make it from this model's parameters"
        )


def check_keys(state: Any, own: Mapping[str, Any], kind: str) -> None:
    """Refuse a state that lacks an entry of one's own."""
    missing = sorted(own.keys() - state.keys()) if isinstance(state, Mapping) else None
    if missing is None or missing:
        what = f"got {type(state).__name__}" if missing is None else f"{', '.join(missing)} missing"
        raise StateDictError(f"expected what {kind}.state_dict() returned, {what}: pass that part of the checkpoint")


def shortened(value: Any) -> str:
    """A value in an error message; of arrays not all of it."""
    return reprlib.repr(value) if isinstance(value, str | int | float | None) else type(value).__name__


class ForwardHook:
    """Calls a method before the forward pass; copies and pickles of the model carry a hook that does nothing."""

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call the method, if its owner still exists."""
        method = None if torch.compiler.is_compiling() or self._method is None else self._method()
        if method is not None:
            method(module, args, kwargs)

    def __reduce__(self) -> tuple[type["ForwardHook"], tuple[()]]:
        """A hook without a method."""
        return ForwardHook, ()
