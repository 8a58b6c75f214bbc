r"""Influence on MNIST against real removals, from one recorded run, and its wrong labels.

For each setting: the influence of every training example on the loss of every query, from one run, with its time;
what really happens when single examples and subsets are given weight 0 (same order, same batches, others unchanged);
and what stands between the two. That is told apart by

- *rounding*: a training with all weights 1 through the same stacked arithmetic, against the recorded run;
- *derivatives*: real trainings in float64 with weights changed by ±ε, for several ε, against the forward derivative;
- *chaos*: the same removals again, each from first weights shifted by its own one part in a million, against the run
  from the unshifted ones. Where the two disagree, what a removal does is in part no property of the example.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor, nn

from poprisk._core.store import TensorFile, load_result, read_tensors, save_result, write_tensors
from poprisk.errors import DataError
from poprisk.risk import Unrolled, influence_on, retrain
from poprisk.risk._exclusion import excluded_weights
from poprisk.risk._retraining.members import Members
from poprisk.risk._retraining.retrain import example_losses, member_outputs
from poprisk.runs import Problem, Run, train
from poprisk_lab.data.idx import ImageSplit, idx_split
from poprisk_lab.paper.mnist_influence.metrics import linear_datamodeling_score, loo_correlation

KIND = "MNIST influence"
_CLASSES = 10
_MILLIONTH = 1e-6


@dataclass(frozen=True)
class Setting:
    """One training and how many test examples to ask about."""

    name: str
    optimizer: str
    """``"sgd"`` or ``"adam"``."""
    activation: str = "relu"
    """``"relu"`` or ``"tanh"``."""
    queries: int = 500
    dtype: str = "float32"


@dataclass(frozen=True)
class MnistConfig:
    """What is trained and measured."""

    settings: tuple[Setting, ...] = (
        Setting("SGD, ReLU", "sgd"),
        Setting("Adam, ReLU", "adam"),
        Setting("SGD, tanh", "sgd", "tanh", 50),
        Setting("SGD, ReLU, float64", "sgd", "relu", 50, "float64"),
        Setting("Adam, tanh", "adam", "tanh", 50),
    )
    n: int = 5000
    hidden: tuple[int, ...] = (128, 64)
    batch_size: int = 64
    epochs: int = 3
    sgd_lr: float = 0.05
    momentum: float = 0.9
    adam_lr: float = 1e-3
    seed: int = 0
    removals: int = 100
    subsets: int = 100
    subset_size: int = 50
    epsilons: tuple[float, ...] = (1e-1, 1e-3, 1e-5, 1e-7)
    flipped: float = 0.1
    label_seeds: tuple[int, ...] = (0, 1, 2)
    exact_wrong: int = 60
    """Wrong labels for which the exact columns are made, in the first of the seeds; and right ones:"""
    exact_right: int = 90
    synthetic: bool = False
    """Images of the same form made up on the spot."""


SMOKE = MnistConfig(
    settings=(Setting("SGD, ReLU", "sgd", queries=12), Setting("Adam, tanh", "adam", "tanh", 6)),
    n=160,
    hidden=(8, 6),
    batch_size=32,
    epochs=2,
    removals=6,
    subsets=5,
    subset_size=8,
    epsilons=(1e-6,),
    label_seeds=(0, 1),
    exact_wrong=4,
    exact_right=6,
    synthetic=True,
)


def network(inputs: int, hidden: list[int], activation: str) -> nn.Module:
    """Fully connected layers."""
    made = {"relu": nn.ReLU, "tanh": nn.Tanh}[activation]
    sizes, layers = [inputs, *hidden], []
    for before, after in pairwise(sizes):
        layers += [nn.Linear(before, after), made()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], _CLASSES))


def images(config: MnistConfig, data: str | Path | None) -> ImageSplit:
    """The first n training images and all test images; or made-up ones.

    Raises:
        DataError: no folder is given, a file is missing or damaged, or there are fewer than n images.
    """
    if config.synthetic:
        return _made_up(config)
    if data is None:
        raise DataError("MNIST's four idx files are needed: give the folder that they lie in")
    split, n = idx_split(data), config.n
    if len(split.train_labels) < n:
        raise DataError(f"{n} training images are needed, got {len(split.train_labels)} in {data}")
    return ImageSplit(split.train_inputs[:n], split.train_labels[:n], split.test_inputs, split.test_labels)


def _made_up(config: MnistConfig) -> ImageSplit:
    generator = Generator().manual_seed(config.seed)
    centres = torch.rand(_CLASSES, 49, generator=generator)
    number = 2 * config.n
    labels = torch.randint(_CLASSES, (number,), generator=generator)
    inputs = (centres[labels] + 0.2 * torch.randn(number, 49, generator=generator)).clamp(0, 1)
    n = config.n
    return ImageSplit(inputs[:n], labels[:n], inputs[n:], labels[n:])


def train_images(
    config: MnistConfig,
    setting: Setting,
    split: ImageSplit,
    *,
    labels: Tensor | None = None,
    seed: int | None = None,
    dtype: torch.dtype | None = None,
) -> Run:
    """A recorded run of the setting, with other labels or another seed where given."""
    seed = config.seed if seed is None else seed
    dtype = getattr(torch, setting.dtype) if dtype is None else dtype
    targets = split.train_labels if labels is None else labels
    arguments = {
        "inputs": split.train_inputs.shape[1],
        "hidden": list(config.hidden),
        "activation": setting.activation,
    }
    problem = Problem(
        network,
        "cross_entropy",
        split.train_inputs.to(dtype),
        targets,
        name=setting.name,
        arguments=arguments,
        seed=seed,
    )
    makers: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
        "sgd": partial(torch.optim.SGD, lr=config.sgd_lr, momentum=config.momentum),
        "adam": partial(torch.optim.Adam, lr=config.adam_lr),
    }
    steps = config.epochs * (config.n // config.batch_size)
    optimizer = makers[setting.optimizer]
    return train(problem, optimizer, steps, batch_size=config.batch_size, seed=seed, dtype=dtype, progress=False)


@dataclass(frozen=True)
class Queries:
    """Test examples whose losses are asked about."""

    run: Run
    inputs: Float[Tensor, "q pixels"]
    labels: Int[Tensor, "q"]

    def losses(self, weights: Float[Tensor, "members d"]) -> Float[Tensor, "q members"]:
        """Of networks with these weights."""
        outputs = member_outputs(self.run, weights, self.inputs)
        return torch.stack([example_losses(self.run.problem, each, self.labels) for each in outputs], 1)


class Clock:
    """Seconds by the wall and of this process on all its threads."""

    def __init__(self) -> None:
        self.seconds = self.cpu_seconds = 0.0

    @contextmanager
    def running(self) -> Iterator[None]:
        """Counts what is done inside."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.seconds += time.perf_counter() - wall
        self.cpu_seconds += time.process_time() - cpu

    def reading(self) -> dict[str, float]:
        """As JSON values."""
        return {
            "seconds": round(self.seconds, 1),
            "cpu_seconds": round(self.cpu_seconds, 1),
            "threads": torch.get_num_threads(),
        }


class _Study:
    """One setting: its run, made when first needed, and its stages."""

    def __init__(self, config: MnistConfig, setting: Setting, split: ImageSplit, store: "_Store") -> None:
        self.config, self.setting, self.split, self.store = config, setting, split, store
        generator = Generator().manual_seed(config.seed + 1)
        self.asked = torch.randperm(len(split.test_labels), generator=generator)[: setting.queries]
        self.removed = torch.randperm(config.n, generator=generator)[: config.removals]
        self.left_out = torch.zeros(config.subsets, config.n, dtype=torch.bool)
        for row in self.left_out:
            row[torch.randperm(config.n, generator=generator)[: config.subset_size]] = True
        self._run: Run | None = None

    @property
    def run(self) -> Run:
        if self._run is None:
            self._run = train_images(self.config, self.setting, self.split)
        return self._run

    @property
    def queries(self) -> Queries:
        return Queries(self.run, self.split.test_inputs[self.asked], self.split.test_labels[self.asked])

    @property
    def last(self) -> Float[Tensor, "d"]:
        return self.run.weights(self.run.num_steps)

    def results(self, progress: Callable[[str], None]) -> dict[str, Any]:
        stages: dict[str, Callable[[], dict[str, Any]]] = {
            "influence": self.influence,
            "removals": self.removals,
            "subsets": self.subsets,
            "derivative": self.derivative,
        }
        found: dict[str, Any] = {}
        for name, make in stages.items():
            key = f"{self.setting.name}: {name}"
            stored = self.store.stage(key, make, self.setting)
            found[name] = {k: v for k, v in stored.items() if k != "matrix"}
            progress(f"{key}: {found[name]}")
        return {"setting": asdict(self.setting), **found}

    def influence(self) -> dict[str, Any]:
        outputs = member_outputs(self.run, self.last[None], self.split.test_inputs)[0]
        right = outputs.argmax(1) == self.split.test_labels
        clock, queries = Clock(), self.queries
        with clock.running():
            unrolled = Unrolled(self.run)
            matrix = influence_on(unrolled, queries.inputs, queries.labels)
        file = write_tensors(self.store.folder / f"{_plain(self.setting.name)}.safetensors", {"influence": matrix})
        return {
            "test_accuracy": right.double().mean().item(),
            "steps": self.run.num_steps,
            "weights": self.run.num_weights,
            "kinks": list(unrolled.kinks),
            **clock.reading(),
            "matrix": asdict(file),
        }

    def matrix(self) -> Float[Tensor, "q n"]:
        stored = self.store.stage(f"{self.setting.name}: influence", self.influence, self.setting)["matrix"]
        return read_tensors(self.store.folder, TensorFile(**stored))[0]["influence"]

    def removals(self) -> dict[str, Any]:
        m, n = len(self.removed), self.config.n
        alpha = torch.ones(m, n)
        alpha[torch.arange(m), self.removed] = 0
        clock, queries = Clock(), self.queries
        with clock.running():
            retrained = retrain(self.run, Members(alpha), progress=False).weights
        own = queries.losses(retrain(self.run, Members(torch.ones(1, n)), progress=False).weights)
        recorded = queries.losses(self.last[None])
        actual = queries.losses(retrained) - own
        again = (
            queries.losses(retrain(self.run, Members(alpha, initial=self._shifted(m)), progress=False).weights) - own
        )
        moved = excluded_weights(self.run, self.removed, mass_preserving=False).T
        columns = {
            "first_order": self.matrix()[:, self.removed],
            "linearized": queries.losses(self.last + moved) - recorded,
            "same_removals_again": again,
        }
        return {
            "pairs": actual.numel(),
            "trainings": {"count": m, **clock.reading()},
            "actual_rms": _rms(actual),
            "rounding_rms": _rms(own - recorded),
            **{name: _agreement(predicted, actual) for name, predicted in columns.items()},
        }

    def subsets(self) -> dict[str, Any]:
        trained = retrain(self.run, Members((~self.left_out).float()), progress=False).weights
        shifted = Members((~self.left_out).float(), initial=self._shifted(len(self.left_out)))
        losses, again = (
            self.queries.losses(w).T for w in (trained, retrain(self.run, shifted, progress=False).weights)
        )
        matrix = self.matrix()
        score = linear_datamodeling_score(matrix, self.left_out, losses)
        ceiling = _mean_spearman(losses, again)
        predicted = matrix @ self.left_out.T.to(matrix)
        change = losses.T - self.queries.losses(self.last[None])
        return {
            "lds": score.value,
            "standard_error": score.standard_error,
            "same_subsets_again": ceiling,
            "pooled": _agreement(predicted, change),
        }

    def derivative(self) -> dict[str, Any]:
        run = train_images(self.config, self.setting, self.split, dtype=torch.float64)
        unrolled = Unrolled(run)
        found = {f"{e:g}": unrolled.spot_check(3, epsilon=e).deviations for e in self.config.epsilons}
        return {"relative_error": {e: d.median().item() for e, d in found.items()}, "examples": 3}

    def _shifted(self, count: int) -> Float[Tensor, "count d"]:
        first = self.run.weights(0)
        noise = torch.randn(count, len(first), generator=Generator().manual_seed(self.config.seed + 2))
        return first * (1 + _MILLIONTH * noise.to(first))


class _Store:
    """Stages by name, each on disk when it is done; a stage does not depend on which other settings there are."""

    def __init__(self, folder: str | Path, config: MnistConfig, data: str) -> None:
        self.folder = Path(folder)
        self.described = {**asdict(config), "settings": None, "data": data}

    def stage(self, name: str, make: Callable[[], dict[str, Any]], setting: Setting | None = None) -> dict[str, Any]:
        """What the stage gave before, or gives now.

        Raises:
            DataError: the folder holds this stage of another configuration, or of other data.
        """
        path = self.folder / f"{_plain(name)}.json"
        described = _json_like({**self.described, "setting": None if setting is None else asdict(setting)})
        if path.exists():
            stored = load_result(path, KIND)
            if stored["config"] != described:
                raise DataError(f"{path} was made with another configuration: give another folder, or remove it")
            return stored["result"]
        save_result(path, KIND, described, make())
        return load_result(path, KIND)["result"]


def run(
    config: MnistConfig,
    data: str | Path | None,
    folder: str | Path,
    progress: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Every stage; each is stored in ``folder`` when it is done, and read where it was done before.

    Args:
        config: What to do.
        data: The folder with MNIST's four idx files; not needed for made-up images.
        folder: Where stages are kept.
        progress: Is told each stage's result.

    Raises:
        DataError: the data are missing or damaged, or the folder holds results of another configuration.
    """
    from poprisk._core.store import fingerprint
    from poprisk_lab.paper.mnist_influence.mislabels import mislabel_seed, summarize

    split = images(config, data)
    store = _Store(folder, config, fingerprint(vars(split)))
    labels = []
    for seed in config.label_seeds:
        labels.append(store.stage(f"labels, seed {seed}", partial(mislabel_seed, config, split, seed)))
        progress(f"labels, seed {seed}: {labels[-1]}")
    settings = [_Study(config, setting, split, store).results(progress) for setting in config.settings]
    return {"settings": settings, "mislabels": summarize(labels)}


def _agreement(predicted: Float[Tensor, "q m"], actual: Float[Tensor, "q m"]) -> dict[str, float]:
    """Of a prediction with the truth; the slope is that of the actual change regressed on the predicted one."""
    pooled = loo_correlation(predicted, actual)
    by_query = loo_correlation(predicted, actual, per_query=True).pearson
    return {
        "pearson": float(pooled.pearson),
        "slope_actual_on_predicted": float(pooled.slope),
        "median_pearson_by_query": float(torch.as_tensor(by_query).nanmedian()),
        "rmse": float(pooled.rmse),
        "predicted_rms": _rms(predicted),
    }


def _mean_spearman(one: Float[Tensor, "trainings q"], other: Float[Tensor, "trainings q"]) -> float:
    """Over queries: the linear datamodeling score of a prediction that is one more training."""
    ranks = [x.argsort(0).argsort(0).double() for x in (one, other)]
    centred = [x - x.mean(0) for x in ranks]
    products = (centred[0] * centred[1]).sum(0) / (centred[0].square().sum(0) * centred[1].square().sum(0)).sqrt()
    return products.nanmean().item()


def _rms(x: Tensor) -> float:
    return x.double().square().mean().sqrt().item()


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)


def _json_like(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _json_like(each) for key, each in value.items()}
    return [_json_like(each) for each in value] if isinstance(value, tuple | list) else value
