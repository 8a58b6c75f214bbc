r"""Influence on MNIST against real removals, from one recorded run, and its wrong labels.

For each setting: the influence of every training example on the loss of every query, from one run, with its time;
what really happens when single examples and subsets are given weight 0 (same order, same batches, others unchanged);
and how the two differ. The causes of a difference are separated by

- *rounding*: a training with all weights 1 through the same stacked arithmetic, against the recorded run;
- *derivatives*: real trainings in float64 with weights changed by ±ε, for several ε, against the forward derivative;
- *chaos*: the same removals again, each from first weights shifted by its own one part in a million, against the run
  from the unshifted ones. Where the two disagree, what a removal does is in part no property of the example.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Generator, Tensor

from poprisk._core.store import TensorFile, fingerprint, load_result, read_tensors, save_result, write_tensors
from poprisk.errors import DataError
from poprisk.risk import Unrolled, influence_on, retrain
from poprisk.risk._retraining.members import Members
from poprisk.risk._retraining.retrain import example_losses, member_outputs
from poprisk.runs import Run
from poprisk_lab.data.idx import ImageSplit
from poprisk_lab.paper.mnist_influence.metrics import linear_datamodeling_score, loo_correlation
from poprisk_lab.paper.mnist_influence.mislabels import mislabel_seed, summarize
from poprisk_lab.paper.mnist_influence.task import SMOKE, MnistConfig, Setting, images, network, train_images
from poprisk_lab.theory.exclusion import excluded_weights

__all__ = ["Clock", "KIND", "MnistConfig", "Queries", "SMOKE", "Setting", "images", "network", "run", "train_images"]

KIND = "MNIST influence"
_MILLIONTH = 1e-6


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
    split = images(config, data)
    store = _Store(folder, config, fingerprint(vars(split)))
    labels = []
    for seed in config.label_seeds:
        labels.append(store.stage(f"labels, seed {seed}", partial(mislabel_seed, config, split, seed)))
        progress(f"labels, seed {seed}: {labels[-1]}")
    settings = [_Study(config, setting, split, store).results(progress) for setting in config.settings]
    return {"settings": settings, "mislabels": summarize(labels)}


def _agreement(predicted: Float[Tensor, "q m"], actual: Float[Tensor, "q m"]) -> dict[str, float]:
    """Agreement of a prediction with the truth; the slope regresses the actual change on the predicted one."""
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
