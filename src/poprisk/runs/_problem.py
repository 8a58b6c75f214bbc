r"""A training problem: a model factory, a loss, training examples, and how to display one."""

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn
from torch.func import vmap
from torch.nn import functional as F

from poprisk._core.autodiff import ExampleLoss, FlatModel, Inputs, parts_of, resolve_loss, take_examples
from poprisk._core.store import (
    Importable,
    described,
    fingerprint,
    importable,
    located,
    remember,
    require_known,
    resolve,
)
from poprisk.errors import DataError, HyperparameterError
from poprisk.runs._data_check import check_finite, check_targets, check_varied
from poprisk.runs._edits import edited, new_targets
from poprisk.runs._first_look import check_takes, first_look
from poprisk.runs._formats import as_examples, as_factory, as_loss, check_plain

Augmentation = Callable[[Inputs, Generator], Inputs]
BatchLoss = Callable[[Tensor, Tensor], Tensor]
_BUILT: WeakSet[nn.Module] = WeakSet()
"""The modules of all problems: one that was trained is no start for another training."""


class Problem:
    r"""A training problem: model, loss and training examples.

    The training objective is :math:`\Phi_S = \frac1n \sum_i \ell(F(w, z_i), y_i)`. A run saves a description of its
    problem: import paths of the functions (``"package.module:function"`` or ``"script.py:function"``, with JSON
    arguments) and a fingerprint of the data (SHA-256 over dtypes, shapes and bytes), never the data themselves. A
    problem made with :meth:`build` is rebuilt when the run is opened; any other must be passed again,
    ``Run.load(path, problem=…)``, and is checked against the description.

    Args:
        make_model: Builds the module: a function or class, called with ``arguments`` under ``seed``. Or the module
            itself: trainings start from copies of it, and ``seed`` is not used.
        loss: ``"squared"``, ``"cross_entropy"``, ``"logistic"``, a module such as ``nn.MSELoss()``, or a function of
            ONE example's outputs and target that returns a scalar.
        inputs: All training inputs, first axis the examples; a tuple where the forward takes several. Tensors or NumPy
            arrays (floats are converted to torch's default dtype); or a torch ``Dataset`` or ``DataLoader`` of
            (inputs, target), which is read into memory once.
        targets: All training targets; leave them out where a dataset has them.
        name: Name of the problem, for messages and reports.
        arguments: Keyword arguments of ``make_model``, JSON values if the run is to be reopened by itself.
        show: Function that returns a display of the example with a given index; default: a line of text.
        test: Test inputs and targets as a tuple, or a dataset or loader of them.
        augment: Function of a batch of inputs and a seeded generator that returns augmented inputs; it must draw all
            its random numbers from the generator, or ``train`` and ``Recorder`` refuse it.
        batch_loss: Mean of ``loss`` over a batch of outputs and targets, computed exactly as in the training loop, for
            replays that are equal bit by bit.
        seed: Seed for the initial weights.
        allow_nonfinite: Whether NaN and infinite inputs and targets are meant: a warning instead of an error.

    Raises:
        DataError: inputs and targets (or the test inputs and targets) differ in length, are empty or not finite, or the
            targets do not fit the loss.
        HyperparameterError: the model or the loss is none of these, or a module is given with ``arguments``.

    >>> problem = Problem(nn.Linear, "squared", torch.ones(4, 2), torch.zeros(4, 1),
    ...                   arguments={"in_features": 2, "out_features": 1})
    >>> len(problem), problem.model(torch.float64).weights.dtype
    (4, torch.float64)
    >>> problem.description["make_model"]["path"]
    'torch.nn.modules.linear:Linear'
    >>> problem.show(3)
    'example 3: input float32 [2], target [0.0]'
    """

    def __init__(
        self,
        make_model: Callable[..., nn.Module] | nn.Module,
        loss: str | ExampleLoss | nn.Module,
        inputs: Any,
        targets: Any = None,
        *,
        name: str = "problem",
        arguments: Mapping[str, Any] | None = None,
        show: Callable[[int], Any] | None = None,
        test: Any = None,
        augment: Augmentation | None = None,
        batch_loss: BatchLoss | None = None,
        seed: int = 0,
        allow_nonfinite: bool = False,
    ) -> None:
        check_plain(name, seed, arguments)
        if isinstance(make_model, nn.Module) and arguments:
            raise HyperparameterError("a module is built already: leave arguments out, or pass its class instead")
        self.make_model, self.arguments = as_factory(make_model), dict(arguments or {})
        check_takes("make_model", self.make_model, **self.arguments)
        for what, function, taken in (
            ("show", show, ("index",)),
            ("augment", augment, ("inputs", "generator")),
            ("batch_loss", batch_loss, ("outputs", "targets")),
        ):
            if function is not None:
                check_takes(what, function, *taken)
        self.inputs, self.targets = as_examples("training", inputs, targets)
        _check_examples("training", self.inputs, self.targets)
        self.test: tuple[Inputs, Tensor] | None = None
        if test is not None:
            self.test = as_examples("test", *test) if test and isinstance(test, tuple) else as_examples("test", test)
            _check_examples("test", *self.test)
        self.loss = as_loss(loss, self.targets)
        if callable(self.loss):
            check_takes("loss", self.loss, "outputs", "target")
        for which, examples in (("training", (self.inputs, self.targets)), ("test", self.test)):
            if examples is not None:
                check_finite(which, _named(*examples), allow_nonfinite)
                check_targets(which, examples[1], self.loss)
        check_varied(self.inputs, self.targets)
        self.name, self.augment, self.seed, self.allow_nonfinite = name, augment, seed, allow_nonfinite
        self._show, self._batch_loss, self._example_loss = show, batch_loss, resolve_loss(self.loss)
        self._source: Importable | None = None
        self._splits: list[dict[str, Any]] = []

    @classmethod
    def build(cls, factory: str | Callable[..., "Problem"], **arguments: Any) -> "Problem":
        """Call a function that returns a problem, and remember the call, so that a run of it can be opened by its path.

        Args:
            factory: The function, or its import path ``"package.module:function"``, or ``"folder/script.py:function"``.
            arguments: Keyword arguments for the function, as JSON values.

        Raises:
            DataError: the path cannot be imported, or the function does not return a problem.
        """
        function = resolve(factory) if isinstance(factory, str) else factory
        if not callable(function):
            got = type(function).__name__
            raise DataError(f"{factory!r} must be a function that returns a Problem, got {got}: name one")
        check_takes(f"{factory!r}", function, **arguments)
        problem = function(**arguments)
        if not isinstance(problem, cls):
            got = type(problem).__name__
            raise DataError(f"{factory!r} must return a Problem, got {got}: end with return Problem(…)")
        problem._source = described(factory, arguments) if isinstance(factory, str) else importable(function, arguments)
        problem.remember(lasting=False)
        return problem

    def remember(self, *, lasting: bool = True) -> None:
        """Remember the call of :meth:`build`, so that runs that name it may be opened: by this process, or by all."""
        if self._source is not None and self._source.path is not None:
            remember(self._source, lasting=lasting)

    def __len__(self) -> int:
        """Number n of training examples."""
        return len(self.targets)

    @property
    def device(self) -> torch.device:
        """The device of the examples."""
        return self.targets.device

    def module(self, dtype: torch.dtype | None = None, device: torch.device | str | None = None) -> nn.Module:
        """A new module with the initial weights given by ``seed``, by default on the device of the examples."""
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise HyperparameterError(f"dtype must be a floating-point type of torch, got {dtype}: pass torch.float64")
        devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else []
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(self.seed)
            module = self.make_model(**self.arguments)
        if not isinstance(module, nn.Module):
            raise DataError(f"make_model must return a torch module, got {type(module).__name__}: return one")
        if module in _BUILT:
            raise DataError("make_model must build a new module each time, got the same again: pass the module itself")
        if any(p.is_meta for p in module.parameters()):
            raise DataError("make_model must return a module with values, got one on the meta device: initialize it")
        _BUILT.add(module)
        return module.to(device=self.device if device is None else device, dtype=dtype)

    def check_fits(self, module: nn.Module) -> None:
        """Try a module and the loss on the first examples, before a training; a DataError if they do not fit."""
        first_look(self, module)

    @property
    def example_loss(self) -> ExampleLoss:
        """The loss of one example's outputs and target."""
        return self._example_loss

    def model(self, dtype: torch.dtype | None = None) -> FlatModel:
        """The model as functions of its flat weights, with this problem's loss."""
        return FlatModel(self.module(dtype), self.loss)

    def batch(
        self,
        indices: Int[Tensor, "b"] | None = None,
        *,
        generator: Generator | None = None,
        dtype: torch.dtype | None = None,
    ) -> tuple[Inputs, Tensor]:
        """Inputs and targets by index (default: all), cast to ``dtype``, augmented if a generator is given."""
        rows = slice(None) if indices is None else indices.to(self.device)
        inputs, targets = take_examples(self.inputs, rows), self.targets[rows]
        if self.augment is not None and generator is not None:
            inputs = self.augment(inputs, generator)
        return _cast(inputs, dtype), _cast_one(targets, dtype)

    def batch_loss(
        self, outputs: Tensor, targets: Tensor, weights: Float[Tensor, "b"] | None = None
    ) -> Float[Tensor, ""]:
        r"""The mean loss of a batch, :math:`\frac1b \sum_i \ell_i`; with ``weights`` :math:`\sum_i \omega_i \ell_i`."""
        if weights is not None:
            return (weights * vmap(self._example_loss)(outputs, targets)).sum()
        if self._batch_loss is not None:
            return self._batch_loss(outputs, targets)
        if self.loss == "cross_entropy" and outputs.dim() == 2:
            return F.cross_entropy(outputs, targets)
        if self.loss == "squared" and outputs.shape == targets.shape:
            return 0.5 * (outputs - targets).square().sum() / len(targets)
        return vmap(self._example_loss)(outputs, targets).mean()

    def show(self, i: int) -> Any:
        """Example i in a form for display.

        Raises:
            DataError: there is no such example.
        """
        if not hasattr(i, "__index__") or not 0 <= int(i) < len(self):
            raise DataError(f"the index of an example must lie in 0 … {len(self) - 1}, got {i}")
        if self._show is not None:
            return self._show(i)
        parts = [f"{str(x.dtype).removeprefix('torch.')} {list(x.shape[1:])}" for x in parts_of(self.inputs)]
        target = self.targets[i]
        shown = target.tolist() if target.numel() <= 8 else f"of shape {list(target.shape)}"
        return f"example {i}: input {' and '.join(parts)}, target {shown}"

    def to(self, device: torch.device | str) -> "Problem":
        """The same problem with its examples on another device."""
        moved = object.__new__(type(self))
        moved.__dict__.update(self.__dict__)
        moved.inputs, moved.targets = _move(self.inputs, device), self.targets.to(device)
        moved.test = None if self.test is None else (_move(self.test[0], device), self.test[1].to(device))
        return moved

    def hold_back_labels(self) -> Tensor | None:
        """The class of each example for a stratified draw, None where targets are not classes."""
        return self.targets if self.targets.dim() == 1 and not self.targets.is_floating_point() else None

    def held_back(self, kept: Int[Tensor, "k"], held: Int[Tensor, "h"]) -> tuple["Problem", "Problem"]:
        """The problem without the held-back examples, and one of these only; :func:`~poprisk.hold_back` calls this.

        The test set stays with the first. A problem made with :meth:`build` can be rebuilt without them, too.
        """
        rest, block = self._part(kept, {"without": held.tolist()}), self._part(held, {"only": held.tolist()})
        rest.test = self.test
        return rest, block

    def with_targets(self, targets: Any) -> "Problem":
        """The same problem with other training targets, e.g. corrected labels; the test set stays.

        A run of it saves which targets differ, so that it is rebuilt with them. The function that made this problem
        stays as it is, and so runs of it can still be opened.

        Args:
            targets: All training targets, as in the problem.

        Raises:
            DataError: their shape or kind is not that of the problem's targets, or they do not fit the loss.

        >>> problem = Problem(nn.Linear(1, 2), "cross_entropy", torch.zeros(3, 1), torch.tensor([0, 1, 1]))
        >>> problem.with_targets([0, 1, 0]).targets
        tensor([0, 1, 0])
        """
        given, edit = new_targets(self, targets)
        if not edit["changed"]:
            return self
        changed = self._copy()
        changed.targets = given
        changed._splits = [*self._splits, edit]
        return changed

    def _copy(self) -> "Problem":
        copied = object.__new__(type(self))
        copied.__dict__.update({name: value for name, value in self.__dict__.items() if name != "fingerprint"})
        return copied

    def _part(self, rows: Tensor, split: dict[str, Any]) -> "Problem":
        part = self._copy()
        part.inputs, part.targets = self.batch(rows)
        part.test, part._splits = None, [*self._splits, split]
        if self._show is not None:
            show, original = self._show, rows.tolist()
            part._show = lambda i: show(original[i])
        return part

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over dtypes, shapes and bytes of the training examples."""
        return fingerprint(_named(self.inputs, self.targets))

    @property
    def description(self) -> dict[str, Any]:
        """The description that a run saves, as JSON values."""
        optional = {"augment": self.augment, "batch_loss": self._batch_loss}
        return {
            "name": self.name,
            "source": None if self._source is None else _with_folder(self._source),
            **self._functions,
            **{k: None if f is None else importable(f).as_json() for k, f in optional.items()},
            "seed": self.seed,
            "examples": len(self),
            "data": {k: f"{x.dtype} {list(x.shape)}" for k, x in _named(self.inputs, self.targets).items()},
            "fingerprint": self.fingerprint,
            "test_fingerprint": None if self.test is None else fingerprint(_named(*self.test)),
            **({"splits": self._splits} if self._splits else {}),
        }

    @property
    def _functions(self) -> dict[str, dict[str, Any]]:
        loss = {"name": self.loss} if isinstance(self.loss, str) else importable(self.loss).as_json()
        return {"make_model": importable(self.make_model, self.arguments).as_json(), "loss": loss}

    def check_is(self, description: Mapping[str, Any]) -> None:
        """Check that this is the described problem.

        The examples, the loss, and the import path and arguments of ``make_model`` (and of a loss that is a function)
        are compared where both sides have one. A function without an import path is accepted here; it is checked
        against the recorded steps when the run is analyzed.

        Raises:
            DataError: the training examples, the loss or the model differ from the description.
        """
        if description["fingerprint"] != self.fingerprint:
            data = {k: f"{x.dtype} {list(x.shape)}" for k, x in _named(self.inputs, self.targets).items()}
            raise DataError(
                f"the run was not trained on the examples of problem {self.name!r} as they are now: expected "
                f"fingerprint {description['fingerprint'][:12]} of {description['data']}, got {self.fingerprint[:12]} "
                f"of {data}; if the task was edited since then, undo that: corrected labels are passed with poprisk "
                "train --labels FILE, or problem.with_targets(…)"
            )
        for part, here in self._functions.items():
            there, now, named = _called(description[part]), _called(here), "name" in description[part]
            if there is None or there == now or (now is None and not named):
                continue
            raise DataError(
                f"the run was trained with {part}={there}, but problem {self.name!r} has {part}="
                f"{now or repr(getattr(self, part))}: pass the one that was used"
                + ("" if named else "; if it is the same function under another name, wrap it in a lambda")
            )

    @classmethod
    def from_description(
        cls, description: Mapping[str, Any], folder: Path | None = None, *, trust: bool = False
    ) -> "Problem":
        """Rebuild a problem that was made with :meth:`build`, and check that it is the same one.

        Args:
            description: The value of :attr:`description` when the problem was saved.
            folder: Directory in which the description was saved; the path of a script is relative to it.
            trust: Whether to make the call that the description names even if this user has not made it here.

        Raises:
            UntrustedError: this user has not made the call on this machine.
            DataError: the problem was not made with :meth:`build`, cannot be imported, or has other examples now.
        """
        source = description["source"]
        if source is None or source["path"] is None:
            why = "it was not made by Problem.build" if source is None else source["reason"]
            raise DataError(
                f"problem {description['name']!r} cannot be rebuilt, but is needed: {why}; pass problem=…, with "
                f"examples {description['data']} of fingerprint {description['fingerprint'][:12]} and the model "
                f"factory {description['make_model']['path'] or 'that was used'}"
            )
        source = located(source, folder, None)
        call = Importable(source["path"], source["arguments"], folder=source.get("folder"))
        if trust:
            remember(call, lasting=False)
        require_known(call, "the run" if folder is None else str(folder))
        path = source["path"] if call.folder is None else str(Path(call.folder) / source["path"])
        problem = cls.build(path, **source["arguments"])
        problem = edited(problem, description.get("splits", ()))
        problem.check_is(description)
        return problem


def _called(description: Mapping[str, Any]) -> str | None:
    """Name of a described loss or function, with its arguments; None without an import path."""
    if "name" in description:
        return repr(description["name"])
    path, arguments = description["path"], description["arguments"]
    path = path and path.replace(".py:", ":")  # as a script or imported from its folder: the same function
    return path and f"{path}({', '.join(f'{k}={v!r}' for k, v in sorted(arguments.items()))})"


def _with_folder(source: Importable) -> dict[str, Any]:
    return source.as_json() if source.folder is None else {**source.as_json(), "folder": source.folder}


def _named(inputs: Inputs, targets: Tensor) -> dict[str, Tensor]:
    parts = parts_of(inputs)
    names = ["inputs"] if len(parts) == 1 else [f"inputs[{i}]" for i in range(len(parts))]
    return {**dict(zip(names, parts, strict=True)), "targets": targets}


def _check_examples(which: str, inputs: Inputs, targets: Tensor) -> None:
    if not parts_of(inputs):
        raise DataError(f"{which} inputs must be a tensor or a tuple of tensors, got an empty tuple: pass the inputs")
    shapes = {name: list(x.shape) for name, x in _named(inputs, targets).items()}
    lengths = {shape[0] if shape else 0 for shape in shapes.values()}
    if len(lengths) != 1 or 0 in lengths or not targets.numel():
        raise DataError(f"{which} inputs and targets must have the same number of examples, at least 1, got {shapes}")


def _cast_one(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x.to(dtype) if dtype is not None and x.is_floating_point() else x


def _cast(inputs: Inputs, dtype: torch.dtype | None) -> Inputs:
    return tuple(_cast_one(x, dtype) for x in inputs) if isinstance(inputs, tuple) else _cast_one(inputs, dtype)


def _move(inputs: Inputs, device: torch.device | str) -> Inputs:
    return tuple(x.to(device) for x in inputs) if isinstance(inputs, tuple) else inputs.to(device)
