"""Operations and bytes that a call really makes, counted below every transform."""

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry


class Counted(TorchDispatchMode):
    """Flops of matrix products and convolutions; bytes of every operation's operands and results, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.bytes, self.calls = 0, 0, 0
        self.by_name: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        if not func.is_view and not _makes_no_traffic(func):
            read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
            made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            moved = sum(_bytes(x) for x in [*read, *made])
            self.bytes += moved
            self.calls += 1
            self.by_name[str(func)] = self.by_name.get(str(func), 0) + moved
        return result


def counted(call: Callable[[], Any]) -> Counted:
    with Counted() as found:
        call()
    return found


NO_TRAFFIC = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "_unsafe_view"}


def _makes_no_traffic(func: Any) -> bool:
    return func._overloadpacket.__name__ in NO_TRAFFIC


def _bytes(x: Tensor) -> int:
    """Of what is stored: an expanded tensor is read once."""
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else 1
    return count * x.element_size()
