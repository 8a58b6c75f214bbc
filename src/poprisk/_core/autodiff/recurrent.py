"""Recurrent layers in plain operations, since ``vmap`` and forward mode cannot take PyTorch's own, single ones."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch._decomp import get_decompositions
from torch.overrides import TorchFunctionMode

_KINDS = ("gru", "lstm", "rnn_tanh", "rnn_relu")
_CELL = "_cell"


class _PlainOperations(TorchFunctionMode):
    """Runs the steps of a recurrent layer one after the other, by PyTorch's own decompositions."""

    def __init__(self) -> None:
        super().__init__()
        overloads = [getattr(getattr(torch.ops.aten, kind), form) for kind in _KINDS for form in ("input", "data")]
        self._steps = get_decompositions(overloads)

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind, _, rest = getattr(func, "__name__", "").partition(_CELL)
        if kind not in _KINDS or rest:
            return func(*args, **(kwargs or {}))
        layer = getattr(torch.ops.aten, kind)
        if func.__name__.endswith(_CELL):
            return self._cell(layer, kind == "lstm", *args)
        packed = isinstance(args[3], list | tuple)
        return self._steps[layer.data if packed else layer.input](*args, **(kwargs or {}))

    def _cell(self, layer: Any, has_memory: bool, x: Any, state: Any, w: Any, u: Any, b: Any = None, c: Any = None):
        """A cell is its layer on a sequence of one."""
        weights = [w, u] if b is None else [w, u, b, c]
        state = [part[None] for part in state] if has_memory else state[None]
        found = self._steps[layer.input](x[None], state, weights, b is not None, 1, 0.0, False, False, False)
        return (found[1][0], found[2][0]) if has_memory else found[1][0]


def is_recurrent(module: nn.Module) -> bool:
    """Whether the module contains a recurrent layer or cell."""
    return any(isinstance(child, nn.RNNBase | nn.RNNCellBase) for child in module.modules())


def plain_operations(recurrent: bool) -> AbstractContextManager[Any]:
    """A context in which recurrent layers run in plain operations; it does nothing where there are none.

    >>> layer, x = nn.GRU(2, 3), torch.randn(4, 1, 2)
    >>> with plain_operations(is_recurrent(layer)):
    ...     plain = layer(x)[0]
    >>> torch.allclose(plain, layer(x)[0], atol=1e-6)
    True
    """
    return _PlainOperations() if recurrent else nullcontext()
