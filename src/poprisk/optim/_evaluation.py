"""Evaluating a model in the middle of training, without a trace: modes and random streams stay as they are."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[torch.device]:
    """Evaluation mode without gradients; afterwards every submodule has its mode, and random numbers go on as before.

    Yields:
        The device of the model.
    """
    device = next((each.device for each in model.parameters()), torch.device("cpu"))
    modes = [(module, module.training) for module in model.modules()]
    kept = nullcontext() if device.type == "meta" else torch.random.fork_rng([device] if device.type == "cuda" else [])
    model.eval()
    try:
        with torch.no_grad(), kept:
            yield device
    finally:
        for module, training in modes:
            module.training = training
