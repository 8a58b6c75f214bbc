"""Choose some of a model's parameters: by name, by module, by pattern, or its last layer or LoRA adapters."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from poprisk._core.autodiff import Inputs
from poprisk._core.text import one_line
from poprisk.errors import HyperparameterError

LAST_LAYER = "last_layer"
LORA = "lora"
Parameters = str | Sequence[str]
"""``"last_layer"``, ``"lora"``, or names of parameters or modules, or patterns such as ``"*.attention.*"``."""


def choose_parameters(
    module: nn.Module, trained: Sequence[str], parameters: Parameters, example: Inputs
) -> tuple[str, ...]:
    """The names of the trained parameters that are meant, in the order of the model.

    Args:
        module: The model.
        trained: Names of its trained parameters.
        parameters: ``"last_layer"`` (the trained layer that is called last), ``"lora"`` (adapters of LoRA, by peft's
            names), or one or several names of parameters, names of modules, or patterns.
        example: A batch of one example, to find the last layer with.

    Raises:
        HyperparameterError: a name or a pattern fits no trained parameter.

    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    >>> names = [name for name, _ in model.named_parameters()]
    >>> choose_parameters(model, names, "last_layer", torch.zeros(1, 2))
    ('2.weight', '2.bias')
    >>> choose_parameters(model, names, ("0", "*.bias"), torch.zeros(1, 2))
    ('0.weight', '0.bias', '2.bias')
    """
    wanted = (parameters,) if isinstance(parameters, str) else tuple(parameters)
    if not wanted:
        raise HyperparameterError(
            f'parameters must be "{LAST_LAYER}", "{LORA}", or names or patterns of parameters, got {parameters!r}'
        )
    found: set[str] = set()
    for each in wanted:
        if each == LAST_LAYER:
            fitting = _of_last_layer(module, trained, example)
        elif each == LORA:
            fitting = {name for name in trained if "lora_" in name}
        else:
            fitting = {n for n in trained if n == each or n.startswith(f"{each}.") or fnmatchcase(n, each)}
        if not fitting:
            some = ", ".join(trained[:3]) + (", …" if len(trained) > 3 else "")
            raise HyperparameterError(one_line(f"parameters must fit some of {some}, got {each!r}: correct the name"))
        found |= fitting
    return tuple(name for name in trained if name in found)


def _of_last_layer(module: nn.Module, trained: Sequence[str], example: Inputs) -> set[str]:
    """The parameters of the last module called that has any of its own."""
    owned = {name: {f"{name}.{p}" if name else p for p, _ in m.named_parameters(recurse=False)} & set(trained)
             for name, m in module.named_modules()}  # fmt: skip
    called: list[str] = []
    hooks = [
        m.register_forward_hook(lambda *_, name=name: called.append(name))
        for name, m in module.named_modules()
        if owned[name]
    ]
    try:
        with torch.no_grad():
            module(*(example if isinstance(example, tuple) else (example,)))
    finally:
        for hook in hooks:
            hook.remove()
    return owned[called[-1]] if called else set()
