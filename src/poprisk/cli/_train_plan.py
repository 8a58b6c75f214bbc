"""The settings of ``poprisk train``: from the command line, from a TOML file, or from both."""

import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from poprisk.cli._options import between
from poprisk.errors import DataError, HyperparameterError

if TYPE_CHECKING:
    from torch.optim import Optimizer

OPTIMIZERS = ("poprisk", "adamw", "sgd")
OPTIMIZER, HOLD_BACK = "adamw", 0.05
"""What ``poprisk train`` uses if nothing else is asked for: the optimizer, and the share of examples to hold back."""
SHARE, TAIL = 0.05, 0.2
"""The share that ``--hold-back`` means without a number, and the share of the steps that weights are averaged over."""
LIMITS: dict[str, tuple[Any, Any]] = {
    "steps": (1, 100_000_000),
    "epochs": (1, 1_000_000),
    "batch_size": (1, 100_000_000),
    "seed": (0, 2**63 - 1),
    "every": (1, 100_000_000),
    "clip_norm": (1e-12, 1e12),
    "hold_back": (0.0, 0.9),
    "tail": (1e-6, 1.0),
}
"""Numeric settings, with their limits."""
_EPOCHS, _BATCH = 20, 32


@dataclass(frozen=True)
class TrainPlan:
    """Settings of a training; numbers that are None follow from the problem."""

    task: str
    """``script.py:function`` or ``package.module:function``."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments for that function."""
    optimizer: str = OPTIMIZER
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the optimizer, such as lr; the others keep their defaults."""
    steps: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    seed: int = 0
    output: Path = Path("poprisk-run")
    every: int | None = None
    clip_norm: float | None = None
    hold_back: float = HOLD_BACK
    """Share of the examples to hold back; 0 holds none back."""
    tail: float = TAIL
    labels: tuple[Path, ...] = ()
    """Files with corrections of the task's targets, applied one after another."""
    refit: bool = False
    """Whether to train again on all examples after the held-back ones chose the moment."""

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise HyperparameterError(f"optimizer must be one of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}")
        if self.refit and not self.hold_back:
            raise HyperparameterError("refit trains again for the length that held-back examples chose: hold some back")
        if self.steps is not None and self.epochs is not None:
            raise HyperparameterError(
                f"give steps or epochs, not both: got steps={self.steps} and epochs={self.epochs}"
            )

    def trained(self, examples: int) -> int:
        """The number of examples to train on: those that are not held back.

        >>> TrainPlan("a:b", hold_back=0.05).trained(60), TrainPlan("a:b", hold_back=0.0).trained(60)
        (57, 60)
        """
        return examples - min(max(round(examples * self.hold_back), 1), examples - 1) if self.hold_back else examples

    def batch_of(self, examples: int) -> int:
        """The batch size; by default 32, but at most a sixth of the data, because the gate needs noise between batches.

        >>> TrainPlan("a:b").batch_of(60), TrainPlan("a:b", batch_size=20).batch_of(60)
        (10, 20)
        """
        return self.batch_size or max(1, min(_BATCH, examples // 6))

    def steps_of(self, examples: int) -> int:
        """The number of steps: as given, or that of the epochs, by default 20.

        >>> TrainPlan("a:b", epochs=3).steps_of(60), TrainPlan("a:b").steps_of(60)
        (18, 120)
        """
        return self.steps or (self.epochs or _EPOCHS) * max(1, examples // self.batch_of(examples))

    def make_optimizer(self) -> Callable[..., "Optimizer"]:
        """A function that makes the optimizer for given parameters.

        Raises:
            HyperparameterError: The optimizer does not have one of the options.
        """
        from torch.optim import SGD, AdamW

        from poprisk.optim import DEFAULTS, PopRiskAdamW, join_gate

        made = {"poprisk": PopRiskAdamW, "adamw": AdamW, "sgd": SGD}[self.optimizer]
        known = list(inspect.signature(made.__init__).parameters)[2:]  # without self and the parameters
        if made is PopRiskAdamW:
            known = [*DEFAULTS.as_dict()]  # with the gate's, one by one
        unknown = next((name for name in self.options if name not in known), None)
        if unknown is not None:
            raise HyperparameterError(f"{self.optimizer} has no option {unknown!r}; its options are {', '.join(known)}")
        plain = {name: tuple(v) if isinstance(v, list) else v for name, v in self.options.items()}
        return partial(made, **(join_gate(plain) if made is PopRiskAdamW else plain))


def with_share(arguments: Sequence[str]) -> list[str]:
    """The arguments as typed, with the usual share after a ``--hold-back`` that has no number.

    >>> with_share(["train", "--hold-back", "task.py:make", "--hold-back", "0.1"])
    ['train', '--hold-back', '0.05', 'task.py:make', '--hold-back', '0.1']
    """
    out: list[str] = []
    for word, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        out.append(word)
        if word == "--hold-back" and not _is_number(following):
            out.append(str(SHARE))
    return out


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def read_plan(task: str, given: Mapping[str, Any]) -> TrainPlan:
    """Settings from the command line; if TASK is a ``.toml`` file, whatever is not typed comes from the file.

    Args:
        task: TASK as typed.
        given: Options as typed: ``optimizer``, ``lr``, ``output`` and those of :data:`LIMITS`; None if not typed.

    Raises:
        DataError: The file cannot be read, or has an unknown key.
        HyperparameterError: A value is out of range.
    """
    typed = {name: value for name, value in given.items() if value is not None}
    lr = typed.pop("lr", None)
    plan: dict[str, Any] = _from_file(Path(task)) if task.endswith(".toml") else {"task": task}
    if {"steps", "epochs"} & typed.keys():
        plan = {name: value for name, value in plan.items() if name not in ("steps", "epochs")}
    if typed.get("optimizer", plan.get("optimizer")) != plan.get("optimizer"):
        plan["options"] = {}  # they belong to another optimizer
    plan |= typed
    if lr is not None:
        plan["options"] = {**plan.get("options", {}), "lr": lr}
    return TrainPlan(**plan)


def _from_file(path: Path) -> dict[str, Any]:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}): name an existing file") from None
    except ValueError as error:
        raise DataError(f"{path} is not valid TOML ({error}): correct it there") from None
    known = {"task", "arguments", "optimizer", "output", "labels", "refit", *LIMITS}
    strange = next((name for name in content if name not in known), None)
    if strange is not None:
        raise DataError(f"{path} has the unknown key {strange!r}; known keys are {', '.join(sorted(known))}")
    if not isinstance(content.get("task"), str):
        raise DataError(f'{path} needs task = "script.py:function" or "package.module:function"')
    tables = {name: _table(path, name, content.pop(name, {})) for name in ("arguments", "optimizer")}
    plan = {"task": _beside(path, content.pop("task")), "arguments": tables["arguments"]}
    if "name" in tables["optimizer"]:
        plan["optimizer"] = tables["optimizer"].pop("name")
    plan["options"] = tables["optimizer"]
    if "output" in content:
        if not isinstance(output := content.pop("output"), str):
            raise HyperparameterError(f"{path}: output must be the name of a directory in quotes, got {output!r}")
        plan["output"] = Path(output)
    plan["labels"] = _files(path, content.pop("labels", []))
    if not isinstance(again := content.pop("refit", False), bool):
        raise HyperparameterError(f"{path}: refit must be true or false, got {again!r}")
    plan["refit"] = again
    return plan | {name: _within(path, name, value) for name, value in content.items()}


def _files(path: Path, value: Any) -> tuple[Path, ...]:
    """Files named in a plan, relative to it."""
    names = [value] if isinstance(value, str) else value
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise HyperparameterError(f"{path}: labels must be the name of a file or a list of them, got {value!r}")
    return tuple(path.parent / name for name in names)


def _table(path: Path, name: str, value: Any) -> dict[str, Any]:
    if name == "optimizer" and isinstance(value, str):
        return {"name": value}
    if not isinstance(value, dict):
        raise DataError(f"{path}: [{name}] must be a table, got {value!r}")
    return dict(value)


def _within(path: Path, name: str, value: Any) -> Any:
    try:
        return between(*LIMITS[name])(value)
    except typer.BadParameter as error:
        raise HyperparameterError(f"{path}: {name}: {error}") from None


def _beside(config: Path, task: str) -> str:
    """The path of a script relative to the file that names it."""
    return (config.parent / task).as_posix() if task.rpartition(":")[0].endswith(".py") else task
