"""What exact products need of the arithmetic: weights of at least single precision, and kernels that are exact too."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from poprisk.errors import DataError, PopRiskError, RunError

EXACT_DTYPES = (torch.float32, torch.float64)
# How PyTorch begins to say that an operation cannot be put under vmap; the operation follows.
_NO_BATCHING = "Batching rule not implemented for "


def check_precision(parameters: Mapping[str, Tensor], w: Tensor) -> None:
    """Refuses weights too coarse for derivatives that are multiplied and subtracted over a whole run."""
    for name, p in parameters.items():
        if p.dtype not in EXACT_DTYPES:
            raise DataError(
                f"exact products need float32 or float64 weights, but {name!r} is {p.dtype}, in which differences over "
                "a step are lost to rounding: call .double() (or .float()) on the module"
            )
    expected = torch.float64 if any(p.dtype == torch.float64 for p in parameters.values()) else torch.float32
    if w.dtype != expected:
        raise DataError(
            f"w must have the dtype of the module's weights, {expected}, got {w.dtype}: convert the vector, or call "
            f".to({w.dtype}) on the module"
        )
    if torch.is_autocast_enabled(w.device.type):
        raise DataError("exact products cannot run under autocast, which rounds inside the forward: leave its context")


def check_outputs_precision(outputs: Tensor, dtype: torch.dtype | None = None) -> None:
    """Refuses outputs of low precision, or of another precision than the weights."""
    if outputs.dtype not in EXACT_DTYPES or (dtype is not None and outputs.dtype != dtype):
        raise DataError(
            f"exact products need outputs of {dtype or 'float32 or float64'}, got {outputs.dtype}: let the forward "
            "keep the weights' precision from end to end"
        )


@contextmanager
def exact_kernels(module: nn.Module | None = None) -> Iterator[None]:
    """Kernels that every transform can differentiate, and refusal of chance, for the time of a ``with`` block.

    Fused attention has neither forward mode nor a batching rule, and the fused encoder layer of inference has no
    derivative at all: both give way to the plain formula.

    The module is named where ``vmap`` has no batching rule for a part of it.

    >>> with exact_kernels():
    ...     torch.func.vmap(torch.sin)(torch.zeros(2))
    tensor([0., 0.])
    """
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        stack.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            yield
        except RuntimeError as error:
            if _NO_BATCHING in str(error) and not isinstance(error, PopRiskError):
                raise RunError(_unbatched(str(error), module)) from error
            if "randomness error mode" not in str(error):
                raise
            raise DataError(
                "every example must be mapped by a fixed function of the weights, but the forward or the loss draws at "
                "random: call .eval() on the module or switch the random operation off"
            ) from error


def _unbatched(text: str, module: nn.Module | None) -> str:
    """Which operation, of which module, and what to do."""
    operation = text.partition(_NO_BATCHING)[2].split(". ")[0].split()[0].removeprefix("aten::")
    kind = operation.split(".")[0].split("_")[0]
    children = () if module is None else module.named_modules()
    found = [
        f"{type(child).__name__} {name!r}" if name else type(child).__name__
        for name, child in children
        if isinstance(child, (nn.RNNBase, nn.RNNCellBase)) and type(child).__name__.lower().startswith(kind)
    ]
    where = f" (in {', '.join(found)})" if found else ""
    return (
        f"torch.func.vmap cannot batch the operation {operation!r}{where}, so examples cannot be differentiated one by "
        "one, nor members trained together: write it out in plain operations (a recurrent cell as nn.Linear layers, "
        "sigmoid and tanh in a loop over time), or use attention or convolutions"
    )
