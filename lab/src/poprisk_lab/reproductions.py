"""The experiments that ``poprisk reproduce`` knows: each one's sizes, its run, and how its saved result is shown."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import RenderableType

from poprisk.errors import HyperparameterError

if TYPE_CHECKING:
    from poprisk._core.store import Figure  # imports torch, which no --help needs

ALL = "all"
"""Stands for every experiment in turn."""

Saved = Mapping[str, Any]
"""What ``poprisk._core.store.load_result`` gives."""


DATA = "data"
"""Where data sets are looked for unless told otherwise."""


@dataclass(frozen=True)
class Files:
    """What an experiment reads, all in one folder among the data sets.

    Attributes:
        folder: Its name.
        wanted: Names of files with what to put there: of each entry's names, one suffices.
    """

    folder: str
    wanted: tuple[tuple[tuple[str, ...], str], ...]

    def missing(self, data: str | Path) -> str | None:
        """Which file is missing and how to get it, in one line; None if none is missing.

        >>> Files("images", ((("a.npz", "b.pt"), "the images"),)).missing("nowhere")
        'nowhere/images has no a.npz or b.pt: put the images there'
        """
        place = Path(data) / self.folder
        for names, source in self.wanted:
            if not any((place / name).exists() for name in names):
                return f"{place.as_posix()} has no {' or '.join(names)}: put {source} there"
        return None


class Result(Protocol):
    """What an experiment returns."""

    def save(self, path: str | Path) -> Path:
        """Write it as JSON, with its environment."""
        ...


@dataclass(frozen=True)
class Reproduction:
    """An experiment, ready to run and to be shown."""

    kind: str
    """Kind of the saved result."""
    full: Any
    """The configuration whose numbers are reported."""
    smoke: Any
    """A configuration of a few seconds, which only shows that everything works."""
    run: Callable[..., Result]
    """Called with a configuration, a progress callback and, if it is resumable, a folder for its parts."""
    draw: Callable[[Saved], "Figure"]
    lines: Callable[[Saved], Iterable[RenderableType]]
    resumable: bool = False
    """Whether finished parts are kept on disk and not computed again."""
    with_data: Callable[[Any, str], Any] | None = None
    """The full configuration with its files in another folder, where it needs files."""
    files: Files | None = None
    """The files it needs; None if it reads none."""


def _measurement(folder: str) -> Reproduction:
    """A measurement that trains no competing optimizers: ``paper/FOLDER/{study,figure,numbers}.py``."""
    study, figure, numbers = (_module(folder, part) for part in ("study", "figure", "numbers"))
    return Reproduction(
        kind=study.KIND,
        full=_only_config(study),
        smoke=study.SMOKE,
        run=study.run,
        draw=figure.draw,
        lines=numbers.lines,
    )


def _comparison(
    name: str,
    full: Any = None,
    with_data: Any = None,
    files: Callable[[], Files] | None = None,
) -> Reproduction:
    """A comparison of optimizers, from the modules of its folder: ``study``, ``figure`` and ``numbers``."""
    study, figure, numbers = (_module(name, part) for part in ("study", "figure", "numbers"))
    return Reproduction(
        kind=study.KIND,
        full=(full or _only_config)(study),
        smoke=study.SMOKE,
        run=study.run,
        draw=figure.draw,
        lines=numbers.lines,
        resumable=True,
        with_data=with_data,
        files=None if files is None else files(),
    )


def _module(name: str, part: str) -> Any:
    return import_module(f"poprisk_lab.paper.{name}.{part}")


def _only_config(experiment: Any) -> Any:
    """The configuration whose defaults are the full size: of the same class as the smoke's."""
    return type(experiment.SMOKE)()


def _labelled(name: str, files: Callable[[], Files]) -> Reproduction:
    return _comparison(name, with_data=lambda config, folder: replace(config, folder=folder), files=files)


def _fashion() -> Files:
    from poprisk_lab.paper.labels.task import ARCHIVES, FASHION

    names = [f"{which}-{kind}-ubyte" for which in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    return Files(FASHION, tuple(((name, f"{name}.gz"), ARCHIVES[FASHION]) for name in names))


def _cifar10() -> Files:
    from poprisk_lab.data.cifar import HUMAN_SOURCE, SOURCE

    images = ("cifar10.npz", "data_batch_1", "cifar-10-batches-py/data_batch_1")
    return Files("cifar10", ((images, SOURCE), (("cifar10n_labels.npz", "CIFAR-10_human.pt"), HUMAN_SOURCE)))


def _smollm2() -> Files:
    model = "the model HuggingFaceTB/SmolLM2-135M-Instruct"
    pairs = "pairs written by poprisk_lab.data.preferences.save_preferences"
    weights = ((("config.json",), model), (("model.safetensors",), model))
    return Files("smollm2", (*weights, (("preferences.safetensors",), pairs)))


def _smollm2_in(folder: str) -> dict[str, Any]:
    return {"folder": f"{folder}/smollm2", "data": (f"{folder}/smollm2/preferences.safetensors",)}


def _fine_tuning(name: str) -> Reproduction:
    study = _module(name, "study")
    return _comparison(
        name,
        full=lambda _: study.full_config(**_smollm2_in(DATA)),
        with_data=lambda _, folder: study.full_config(**_smollm2_in(folder)),
        files=_smollm2,
    )


def _default_choice() -> Reproduction:
    return _comparison(
        "default_choice",
        with_data=lambda config, folder: replace(config, labels=replace(config.labels, folder=folder)),
        files=_fashion,
    )


def _gate_variants() -> Reproduction:
    from poprisk_lab.gates import plan
    from poprisk_lab.gates.figure import draw
    from poprisk_lab.gates.numbers import lines

    return Reproduction(
        kind=plan.KIND,
        full=_only_config(plan),
        smoke=plan.SMOKE,
        run=plan.run,
        draw=draw,
        lines=lines,
        resumable=True,
        with_data=plan.images_in,
        files=_fashion(),
    )


_KNOWN: dict[str, tuple[str, Callable[[], Reproduction]]] = {
    "coupling": (
        "training displacement determines test displacement while the kernel moves",
        partial(_measurement, "coupling"),
    ),
    "signal": (
        "directions that dissipate most per complexity, what a test set loses without the rest",
        partial(_measurement, "signal"),
    ),
    "capacity": (
        "exact risk against simulated fits across capacity, and the price of interpolated noise",
        partial(_measurement, "capacity"),
    ),
    "time": (
        "which directions are fitted first, and generalization long after interpolation",
        partial(_measurement, "time_axis"),
    ),
    "grokking": (
        "steps until a transformer generalizes on modular division",
        partial(_comparison, "grokking"),
    ),
    "pinn": (
        "a physics-informed network from a noisy initial condition",
        partial(_comparison, "pinn"),
    ),
    "lorenz": (
        "chaotic dynamics from noisy states",
        partial(_comparison, "lorenz"),
    ),
    "inr": (
        "denoising photographs with a coordinate network",
        partial(_comparison, "inr"),
    ),
    "dpo": (
        "preference alignment with swapped pairs (needs --data with smollm2)",
        partial(_fine_tuning, "dpo"),
    ),
    "labels": (
        "wrong labels on digits and Fashion-MNIST (needs --data with fashion)",
        partial(_labelled, "labels", _fashion),
    ),
    "cifar": (
        "CIFAR-10 with the labels people gave (needs --data with cifar10)",
        partial(_labelled, "cifar", _cifar10),
    ),
    "teacher": (
        "a teacher network's labels, some of them replaced",
        partial(_comparison, "teacher"),
    ),
    "char_language": (
        "a character language model, clean and with wrong targets",
        partial(_comparison, "char_language"),
    ),
    "sft": (
        "fine-tuning a language model, clean and with wrong targets (needs --data with smollm2)",
        partial(_fine_tuning, "sft"),
    ),
    "gate_variants": (
        "variants of the gate: is one noise-proof and quick? (needs --data with fashion)",
        _gate_variants,
    ),
    "default_choice": (
        "candidates for PopRiskAdamW's defaults on noisy and clean tasks (needs --data with fashion)",
        _default_choice,
    ),
}


def known() -> dict[str, str]:
    """What each name stands for, in a line; nothing heavy is imported for it.

    >>> "coupling" in known()
    True
    """
    return {name: claim for name, (claim, _) in _KNOWN.items()}


def chosen_names(name: str | None) -> list[str]:
    """The experiments meant by a name: the one of that name, or every one for ``all``.

    >>> len(chosen_names("all")) == len(known()), chosen_names("pinn")
    (True, ['pinn'])
    """
    return list(_KNOWN) if name == ALL else [require_known(name)]


def require_known(name: str | None) -> str:
    """The name, if there is an experiment of that name.

    Raises:
        HyperparameterError: there is none; the message lists those there are and the one that was perhaps meant.

    >>> require_known("coupling")
    'coupling'
    """
    if name in _KNOWN:
        return name
    listed = "; ".join(f"{known_name} ({claim})" for known_name, claim in known().items())
    if name is None:
        raise HyperparameterError(f"reproduce needs the NAME of an experiment. Known: {listed}")
    near = get_close_matches(name.lower(), _KNOWN, n=1)
    guess = f", did you mean {near[0]!r}?" if near else "."
    raise HyperparameterError(f"no experiment is called {name!r}{guess} Known: {listed}")


def reproduction(name: str) -> Reproduction:
    """The experiment of this name, imported now.

    Raises:
        HyperparameterError: there is none.
        MissingExtraError: a package that the experiment or its figure needs is not installed.
    """
    return _KNOWN[require_known(name)][1]()
