"""A first look at a problem before it is trained: model, loss and examples are tried together on a few examples."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from poprisk._core.autodiff import call_module, parts_of, take_examples
from poprisk._core.seeds import seeded
from poprisk._core.store import where
from poprisk._core.text import one_line
from poprisk.errors import DataError, PopRiskError
from poprisk.runs._data_check import check_classes

_FEW = 2
_SEEDS, _ROWS = 16, 8


def check_takes(what: str, function: Any, *arguments: str, **named: Any) -> None:
    """Check that something can be called with these arguments, as far as its signature tells; else a DataError.

    >>> check_takes("loss", lambda outputs, target: outputs, "outputs", "target")
    """
    if not callable(function):
        raise DataError(f"{what} must be a function{_of(arguments)}, got {type(function).__name__}: pass a function")
    try:
        signature = inspect.signature(function)
    except (ValueError, TypeError):
        return
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        wanted = f"{what} must be a function{_of((*arguments, *named))}"
        raise DataError(one_line(f"{wanted}, got {signature}: {error}; change what it takes")) from None


def first_look(problem: Any, module: nn.Module) -> None:
    """Try the model and the loss on a few examples, with its buffers kept as they are; a DataError says what fails."""
    if lazy := [name for name, p in module.named_parameters() if is_lazy(p)]:
        raise DataError(
            f"make_model must return a module with all its weights, got {lazy[0]!r} without a shape: call the lazy "
            "module on an example in make_model"
        )
    if not any(p.requires_grad for p in module.parameters()):
        raise DataError(
            "make_model must return a module with weights to train, got one without a parameter that requires a "
            "gradient: add a layer, or call requires_grad_(True)"
        )
    look = _Look(problem, module)
    look.at("training", problem.inputs, problem.targets)
    if problem.test is not None:
        look.at("test", *problem.test)


def _telling(inputs: Any, targets: Tensor) -> Tensor:
    """The first examples, and those with the smallest and largest target and index, where a wrong one shows."""
    found = set(range(min(_FEW, len(targets))))
    for x in (targets, *(x for x in parts_of(inputs) if x.dtype in (torch.int32, torch.int64) and x.numel())):
        found |= {int(x.argmin()) * len(x) // x.numel(), int(x.argmax()) * len(x) // x.numel()}
    return torch.tensor(sorted(found), device=targets.device)


def check_seeded(problem: Any) -> None:
    """Check on a few examples that the augmentation draws all its random numbers from its generator, for replays.

    A DataError says that with the same seed it gives other inputs.
    """
    rows = torch.arange(min(_ROWS, len(problem)), device=problem.device)
    with seeded(0):  # what is drawn from torch's own generator differs from call to call, and is forgotten afterwards
        for seed in range(_SEEDS if problem.augment is not None else 0):
            both = [parts_of(_augmented(problem, take_examples(problem.inputs, rows), seed)) for _ in range(2)]
            if not all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(*both, strict=True)):
                raise DataError(
                    "augment must return the same inputs for generators with the same seed, but it returned others: "
                    "draw all its random numbers from the generator, as torch.rand(…, generator=generator) does"
                )


def _augmented(problem: Any, given: Any, seed: int = 0) -> Any:
    """The inputs, augmented as in a step."""
    if problem.augment is None:
        return given
    with _of_user(f"augment must take the inputs ({_described(given)})", "correct it"):
        found = problem.augment(given, torch.Generator().manual_seed(seed))
    same = type(found) is type(given) if isinstance(given, tuple) else isinstance(found, Tensor)
    if not same or not all(
        isinstance(x, Tensor) and len(x) == len(y) for x, y in zip(parts_of(found), parts_of(given), strict=False)
    ):
        got = _described(found) if isinstance(found, Tensor | tuple) else type(found).__name__
        raise DataError(f"augment must return inputs in the form it takes, {_described(given)}, got {got}: return them")
    return found


def _described(inputs: Any) -> str:
    return " and ".join(
        f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
        for x in parts_of(inputs)
    )


class _Look:
    def __init__(self, problem: Any, module: nn.Module) -> None:
        self.problem, self.module = problem, module
        self.dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)

    def at(self, which: str, inputs: Any, targets: Tensor) -> None:
        """Look at a few examples of a set."""
        problem, rows = self.problem, _telling(inputs, targets)
        taken = take_examples(inputs, rows)
        taken = parts_of(_augmented(problem, taken) if which == "training" else taken)
        batch = [x.to(self.dtype, copy=True) if x.is_floating_point() else x.clone() for x in taken]
        wanted = targets[rows].to(self.dtype) if targets.is_floating_point() else targets[rows]
        images = any(x.dtype == torch.uint8 for x in batch)
        do = "convert images, x.permute(0, 3, 1, 2).float() / 255 if their colours are last" if images else "correct"
        do += " make_model or the inputs" * (not images)
        with _of_user(f"the model must take the {which} inputs ({_described(tuple(batch))})", do):
            outputs = self._outputs(batch)
        if not all(torch.equal(x.nan_to_num(), y.to(x.dtype).nan_to_num()) for x, y in zip(batch, taken, strict=True)):
            raise DataError("the model must leave its inputs as they are, but changed them: copy them in its forward")
        count = len(wanted)
        if not isinstance(outputs, Tensor):
            raise DataError(
                f"the model must return one tensor of outputs, got {type(outputs).__name__}: let its forward return "
                "only what the loss takes"
            )
        if outputs.dim() < 1 or len(outputs) != count:
            raise DataError(
                f"the model must return outputs for each of its {count} inputs, got shape {list(outputs.shape)}: keep "
                "the first axis for the examples"
            )
        if not outputs.requires_grad:
            raise DataError(
                "the model's outputs must depend on its weights, got outputs without a gradient: remove detach() and "
                "no_grad() from its forward"
            )
        if not problem.allow_nonfinite and not bool(outputs.isfinite().all()):
            raise DataError(
                f"the model's outputs must be finite, got NaN or infinite ones for {which} examples before "
                "the first step: check the scale of the inputs and the initial weights"
            )
        classes = outputs.shape[1] if outputs.dim() == targets.dim() + 1 else None
        check_classes(problem.loss, which, targets, classes)
        self._loss(which, outputs, wanted)

    def _outputs(self, batch: list[Tensor]) -> Any:
        training = [(m, m.training) for m in self.module.modules()]
        buffers = {name: b.clone() for name, b in self.module.named_buffers()}
        self.module.eval()
        try:
            with torch.random.fork_rng(devices=[]), torch.enable_grad():
                return call_module(self.module, buffers, tuple(batch))
        finally:
            for each, before in training:
                each.training = before

    def _loss(self, which: str, outputs: Tensor, targets: Tensor) -> None:
        shapes = f"outputs {list(outputs.shape)} and {which} targets {str(targets.dtype).removeprefix('torch.')} "
        do = "correct the loss or the targets"
        if not targets.is_floating_point() and targets.dim() > 1:
            do = "pass targets.squeeze(1)" if targets.shape[1] == 1 else "pass targets.argmax(1) if they are one-hot"
        with _of_user(f"loss must take {shapes}{list(targets.shape)}", do):
            losses = [self.problem.example_loss(u, y) for u, y in zip(outputs, targets, strict=True)]
        for y, loss in zip(targets, losses, strict=True):
            if not isinstance(loss, Tensor) or loss.dim() != 0 or loss.is_complex():
                got = f"{loss.dtype} {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise DataError(f"loss must return a scalar for one example, got {got}: sum or average its outputs")
            if not loss.requires_grad:
                raise DataError(
                    "loss must depend on the model's outputs, got a value without a gradient: compute it from the "
                    "outputs with torch functions"
                )
            if not self.problem.allow_nonfinite and not bool(loss.isfinite()):
                target = one_line(str(y.tolist()))[:60]
                raise DataError(f"loss must be finite, got {loss.item()} for {which} target {target}: correct either")
        with _of_user("the loss of a batch must be computed", "write it for torch.func.vmap, without .item() and if"):
            found = self.problem.batch_loss(outputs, targets)
        if not isinstance(found, Tensor) or found.dim() != 0:
            got = type(found).__name__
            raise DataError(f"batch_loss must return one number as a tensor, got {got}: return the mean")


@contextmanager
def _of_user(must: str, do: str) -> Iterator[None]:
    """Turn an error of the model or of the loss into one line."""
    try:
        yield
    except PopRiskError:
        raise
    except Exception as error:
        raise DataError(one_line(f"{must}, but got an error at {where(error)}: {do}")) from error


def _of(arguments: tuple[str, ...]) -> str:
    return f" of ({', '.join(arguments)})" if arguments else " without arguments"
