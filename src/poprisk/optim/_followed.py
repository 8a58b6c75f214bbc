"""The model and the optimizer that KeepBest and TailAverage follow: whether they belong together, and a hook."""

import reprlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from poprisk.errors import HyperparameterError, StateDictError
from poprisk.optim._model_tensors import unwrapped


def check_followed(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse a pair that cannot be followed: other types, or an optimizer that trains another model.

    Where parameters are flattened or sharded by a wrapper, those of the optimizer may be others: these are not refused.
    """
    if not isinstance(model, nn.Module) or not hasattr(optimizer, "register_step_post_hook"):
        raise HyperparameterError(
            f"expected a model and its optimizer, in this order, got {type(model).__name__} and "
            f"{type(optimizer).__name__}: pass a torch.nn.Module, then the torch.optim.Optimizer that trains it"
        )
    own = [each for each in unwrapped(model).parameters() if each.requires_grad]
    given = [each for group in optimizer.param_groups for each in group["params"]]
    if not own or any(type(each) is not nn.Parameter for each in (*own, *given)):
        return
    if {id(each) for each in own}.isdisjoint(id(each) for each in given):
        raise HyperparameterError(
            f"the optimizer must train the model, but none of its {len(given)} parameters is one of the {len(own)} "
            "trained parameters of the model: pass the optimizer that was made from the parameters of this model"
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
    """Calls a method before the forward pass; copies and pickles of the model carry a hook that does nothing.

    The owner of the method is not kept alive by the model, nor copied or pickled with it.
    """

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
