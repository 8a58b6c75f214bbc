"""CIFAR-10N with augmentation and batch normalization: risk along one run, and labels judged without further training.

``python -m poprisk_lab.at_scale.cifar --data DATA --output FILE``, with CIFAR-10 and the labels of CIFAR-10N (either as
:mod:`poprisk_lab.data.cifar` reads them, or images packed by :mod:`.packed_images`), trains ResNet-18 once alone, with
its time taken, then the five folds of confident learning side by side: about six minutes on an H200. ``--smoke`` needs
no files. What is compared was written down before, in RULE.md.
"""

import argparse
import multiprocessing
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from poprisk import KeepBest, TailAverage, hold_back, out_of_sample_probabilities
from poprisk._core.store import load_result, save_result
from poprisk.optim import KeptRisk
from poprisk_lab.at_scale.numbers import CIFAR
from poprisk_lab.at_scale.packed_images import unpack_images
from poprisk_lab.data.cifar import cifar10, human_labels
from poprisk_lab.recipes.cifar_run import augmented, residual_network

FOLDS = 5
_MEAN, _SPREAD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
Arrays = dict[str, np.ndarray]
Save = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class CifarConfig:
    """One recipe, for the run that is judged and for the folds alike."""

    labels: str = "worse"
    epochs: int = 30
    batch: int = 128
    lr: float = 1e-3
    wd: float = 1e-2
    share: float = 0.05
    tail: float = 0.2
    blocks: tuple[int, ...] = (2, 2, 2, 2)
    width: int = 64
    seed: int = 0
    fold: int | None = None
    """Which fold is left out; None: the run that is judged."""
    bare_epochs: int = 2
    """Passes of the same training without anything around it, which are timed."""


TINY = CifarConfig(epochs=3, batch=32, blocks=(1, 1), width=8, bare_epochs=1)


class Data:
    """Images and labels on a device."""

    def __init__(self, arrays: Arrays, config: CifarConfig, device: torch.device) -> None:
        self.device = device
        self._scale = [torch.tensor(x, device=device).view(1, 3, 1, 1) for x in (_MEAN, _SPREAD)]
        self.images, self.test = self._pixels(arrays["train"]), self._pixels(arrays["test"])
        self.labels = torch.from_numpy(arrays[config.labels]).long()
        self.clean = torch.from_numpy(arrays["clean"]).long()
        self.test_labels = torch.from_numpy(arrays["test_labels"]).long().to(device)

    def _pixels(self, images: np.ndarray) -> Tensor:
        x = torch.from_numpy(images).to(self.device).permute(0, 3, 1, 2).float() / 255
        return ((x - self._scale[0]) / self._scale[1]).contiguous(memory_format=torch.channels_last)


class Training:
    """One training with AdamW at a constant rate, and the average of its weights.

    Args:
        data: The data.
        rows: Examples that it may train on.
        config: The recipe.
    """

    def __init__(self, data: Data, rows: Tensor, config: CifarConfig) -> None:
        torch.manual_seed(config.seed + 1000 * (0 if config.fold is None else config.fold + 1))
        self.data, self.rows, self.config = data, rows.to(data.device), config
        model = residual_network(config.blocks, config.width).to(data.device)
        self.model: nn.Module = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        fused = data.device.type == "cuda"
        self.optimizer = torch.optim.AdamW(model.parameters(), config.lr, weight_decay=config.wd, fused=fused)
        self._labels = data.labels.to(data.device)
        self._generator = torch.Generator(data.device).manual_seed(config.seed)
        self.per_epoch = len(rows) // config.batch

    def epoch(self, seen: dict[str, Tensor] | None = None) -> None:
        """One pass; ``seen`` collects the sum of the margins of every example, as it was trained on."""
        order = torch.randperm(len(self.rows), device=self.data.device, generator=self._generator)
        margins, places = [], []
        for batch in order.split(self.config.batch)[: self.per_epoch]:
            rows = self.rows[batch]
            labels = self._labels[rows]
            with torch.autocast(self.data.device.type, torch.bfloat16):
                x = augmented(self.data.images[rows], self._generator)
                outputs = self.model(x.contiguous(memory_format=torch.channels_last))
                loss = F.cross_entropy(outputs.float(), labels)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            if seen is not None:
                margins.append(margin(outputs.detach().float(), labels))
                places.append(rows)
        if seen is not None:
            seen["sum"].index_add_(0, torch.cat(places), torch.cat(margins))

    @torch.no_grad()
    def outputs(self, images: Tensor) -> Tensor:
        """Logits in evaluation mode."""
        self.model.eval()
        with torch.autocast(self.data.device.type, torch.bfloat16):
            found = torch.cat([self.model(part).float() for part in images.split(2000)])
        self.model.train()
        return found


def margin(values: Tensor, labels: Tensor) -> Tensor:
    """The value of the given label less the largest other one.

    >>> margin(torch.tensor([[1.0, 5.0, 2.0]]), torch.tensor([2]))
    tensor([-3.])
    """
    column = labels[:, None]
    return values.gather(1, column)[:, 0] - values.scatter(1, column, -torch.inf).amax(1)


def auc(score: Tensor, wrong: Tensor) -> float:
    """Share of pairs of a wrong and a right label in which the wrong one has the lower score; ties count half.

    >>> auc(torch.tensor([0.1, 0.9, 0.5]), torch.tensor([True, False, False]))
    1.0
    """
    values, place, counts = score.double().unique(return_inverse=True, return_counts=True)
    rank = (counts.cumsum(0) - (counts.double() - 1) / 2)[place]
    bad, good = int(wrong.sum()), int((~wrong).sum())
    return 1 - float((rank[wrong].sum() - bad * (bad + 1) / 2) / (bad * good)) if bad and good and len(values) else 0.5


def label_aucs(probabilities: Tensor, labels: Tensor, wrong: Tensor) -> dict[str, float]:
    """AUC of both scores by which cleanlab ranks labels."""
    own = probabilities.gather(1, labels[:, None])[:, 0]
    scores = {"self-confidence": own, "normalized margin": margin(probabilities, labels)}
    return {name: round(auc(score, wrong), 5) for name, score in scores.items()}


class Watch:
    """Times parts of a training on the device, and keeps what is only for the comparison apart."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = {}

    def time(self, name: str, work: Any) -> Any:
        """Do the work and add its seconds to those of this name."""
        self._wait()
        began = time.perf_counter()
        found = work()
        self._wait()
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - began
        return found

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def judged_run(arrays: Arrays, config: CifarConfig, device: torch.device) -> dict[str, Any]:
    """The run with KeepBest: its risk along the way, its labels judged from it, and what each part took."""
    data, watch = Data(arrays, config, device), Watch(device)
    rows = torch.arange(len(data.labels))
    (kept, kept_labels), (held, held_labels) = hold_back((rows, data.labels), config.share, seed=config.seed)
    bare, unused = Training(data, kept, config), {"sum": torch.zeros(len(rows), device=device)}
    bare.epoch(unused)  # chooses kernels
    watch.time("bare", lambda: [bare.epoch(unused) for _ in range(config.bare_epochs)])
    run = Training(data, kept, config)
    average = TailAverage(run.model, run.optimizer, tail=config.tail)
    block = (data.images[held.to(device)], held_labels.to(device))
    keeper = KeepBest(run.model, run.optimizer, block, F.cross_entropy, average=average)
    truth: list[dict[str, float]] = []
    measure = keeper.measure

    def both() -> None:
        watch.time("risk", measure)
        watch.time("truth", lambda: truth.append(_truth(run, average)))

    keeper.measure = both  # type: ignore[method-assign]
    seen = {"sum": torch.zeros(len(rows), device=device)}
    watch.time("training", lambda: [run.epoch(seen) for _ in range(config.epochs)])
    watch.seconds["training"] -= watch.seconds["truth"]
    images = data.images[kept.to(device)]
    last, known = run.outputs(images), watch.seconds["truth"]
    kept_risk = watch.time("finish", keeper.finish)
    watch.seconds["finish"] -= watch.seconds["truth"] - known
    plain, after = run.outputs(images), _accuracy(run.outputs(data.test), data.test_labels)
    found = watch.time("probabilities", lambda: out_of_sample_probabilities(keeper, data=(images, kept_labels)))
    wrong = kept_labels != data.clean[kept]
    seconds = watch.seconds
    return {
        "config": asdict(config),
        "trained": len(kept),
        "held": len(held),
        "wrong": int(wrong.sum()),
        "steps": keeper.steps,
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "bare_seconds": round(seconds["bare"] / config.bare_epochs * config.epochs, 3),
        "bare_step": seconds["bare"] / config.bare_epochs / bare.per_epoch,
        "curve": [{**_plain(each), **true} for each, true in zip(keeper.risks, truth, strict=True)],
        "kept": {**_plain(kept_risk), "test_accuracy": after},
        "probabilities": {"valid": found.valid, "reason": found.reason, "log_loss": found.log_loss},
        "auc": {
            "features, left out": label_aucs(found.probabilities, kept_labels, wrong),
            "kept weights, seen": label_aucs(plain.cpu().softmax(1), kept_labels, wrong),
            "last weights, seen": label_aucs(last.cpu().softmax(1), kept_labels, wrong),
            "margins along the run": {"area under margin": round(auc(seen["sum"].cpu()[kept], wrong), 5)},
        },
    }


def _plain(risk: KeptRisk) -> dict[str, Any]:
    value, error = float(risk.value), float(risk.standard_error)
    return {"step": risk.step, "value": value, "error": error, "valid": risk.valid, "accuracy": risk.accuracy}


def _truth(run: Training, average: TailAverage) -> dict[str, float]:
    """Accuracy on the clean test set, of the averaged weights and of the weights themselves."""
    with average.swapped(0):
        mean = _accuracy(run.outputs(run.data.test), run.data.test_labels)
    raw = _accuracy(run.outputs(run.data.test), run.data.test_labels)
    return {"test_accuracy": mean, "raw_test_accuracy": raw}


def _accuracy(outputs: Tensor, labels: Tensor) -> float:
    return float((outputs.argmax(1) == labels).float().mean())


def fold_run(arrays: Arrays, config: CifarConfig, device: torch.device, place: Path | None = None) -> Arrays:
    """One fold of confident learning: the outputs for its own examples, after every epoch; kept in a file so far."""
    data = Data(arrays, config, device)
    order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(config.seed))
    out = order[config.fold :: FOLDS].sort().values
    left = torch.ones(len(order), dtype=torch.bool)
    left[out] = False
    run = Training(data, left.nonzero().squeeze(1), config)
    average = TailAverage(run.model, run.optimizer, tail=config.tail)
    kinds: dict[str, list[np.ndarray]] = {"raw": [], "mean": []}
    images, found = data.images[out.to(device)], Arrays()
    for _ in range(config.epochs):
        run.epoch()
        kinds["raw"].append(run.outputs(images).cpu().numpy().astype(np.float16))
        with average.swapped(0):
            kinds["mean"].append(run.outputs(images).cpu().numpy().astype(np.float16))
        steps = np.array(config.epochs * run.per_epoch)
        found = {"out": out.numpy(), "steps": steps, **{name: np.stack(each) for name, each in kinds.items()}}
        if place is not None:
            np.savez(place.with_suffix(".part.npz"), allow_pickle=False, **found)
            place.with_suffix(".part.npz").replace(place)
    return found


def confident_learning(run: Mapping[str, Any], folds: list[Arrays], arrays: Arrays, kept: np.ndarray) -> dict[str, Any]:
    """AUC of confident learning on the examples that the run was trained on, and what its folds take one by one."""
    planned, labels = run["config"]["epochs"], run["config"]["labels"]
    epochs = min(len(fold["raw"]) for fold in folds)
    at_kept = min(epochs - 1, max(0, round(run["kept"]["step"] / run["steps"] * planned) - 1))
    y, rows = torch.from_numpy(arrays[labels]).long()[kept], torch.from_numpy(kept)
    wrong = y != torch.from_numpy(arrays["clean"]).long()[rows]
    found = {}
    for name, kind, epoch in (
        ("last weights", "raw", epochs - 1),
        ("averaged weights at the end", "mean", epochs - 1),
        ("averaged weights at the kept moment", "mean", at_kept),
    ):
        outputs = torch.zeros(len(arrays["clean"]), folds[0][kind].shape[-1])
        for fold in folds:
            outputs[torch.from_numpy(fold["out"])] = torch.from_numpy(fold[kind][epoch].astype(np.float32))
        found[f"{FOLDS} folds, {name}"] = label_aucs(outputs[rows].softmax(1), y, wrong)
    steps = sum(int(fold["steps"]) for fold in folds)
    return {"auc": found, "epochs": epochs, "steps": steps, "seconds": steps * run["bare_step"]}


def load(folder: Path | None) -> Arrays:
    """All arrays; without a folder, a few coloured squares with noise."""
    if folder is None:
        return _squares()
    if not (folder / "c0.xz").exists():
        images = cifar10(folder)
        given = human_labels(folder, images.train_labels)
        found = {name: values.numpy() for name, values in given.items()}
        moved = {"train": images.train_images, "test": images.test_images}
        found |= {name: np.ascontiguousarray(x.permute(0, 2, 3, 1).numpy()) for name, x in moved.items()}
        return {**found, "test_labels": images.test_labels.numpy()}
    with ProcessPoolExecutor(6) as pool:
        parts = list(pool.map(_unpacked, [folder / f"c{i}.xz" for i in range(6)]))
    with np.load(folder / "labels.npz") as labels:
        found = {name: labels[name].astype(np.int64) for name in labels.files}
    return {**found, "train": np.concatenate(parts[:5]), "test": parts[5]}


def _unpacked(path: Path) -> np.ndarray:
    return unpack_images(path.read_bytes(), 32)


def _squares() -> Arrays:
    draw = np.random.default_rng(0)
    clean = draw.integers(0, 10, 800)
    colours = draw.integers(60, 200, (10, 3))
    images = (colours[clean][:, None, None, :] + draw.normal(0, 30, (800, 32, 32, 3))).clip(0, 255).astype(np.uint8)
    flip = draw.random(600) < 0.3
    noisy = np.where(flip, (clean[:600] + draw.integers(1, 10, 600)) % 10, clean[:600])
    labels = {"clean": clean[:600], "worse": noisy, "random1": noisy}
    return {**labels, "train": images[:600], "test": images[600:], "test_labels": clean[600:]}


def _work(config: CifarConfig, arrays_path: str, device: str, place: str) -> Any:
    torch.set_num_threads(1)
    with np.load(arrays_path) as stored:
        arrays = dict(stored)
    if config.fold is None:
        return judged_run(arrays, config, torch.device(device))
    fold_run(arrays, config, torch.device(device), Path(place))
    return None


def study(
    folder: Path | None,
    names: list[str],
    config: CifarConfig,
    limit: float,
    save: Save,
    earlier: Path | None = None,
) -> dict[str, Any]:
    """Each label set's run, the first one alone, and then its folds side by side.

    Args:
        folder: Folder of the data; None makes some up.
        names: Label sets.
        config: The recipe.
        limit: Seconds after which no other label set is begun, and folds are scored as far as they are.
        save: Stores the result so far.
        earlier: A result to go on from: its runs are not repeated.
    """
    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    arrays = load(folder)
    _say(began, "images are there")
    result: dict[str, Any] = {"versions": versions(device), "runs": {}, "confident_learning": {}}
    if earlier is not None:
        result = load_result(earlier, CIFAR)["result"]
    parts = Path(tempfile.mkdtemp())
    np.savez(parts / "arrays.npz", allow_pickle=False, **arrays)
    for name in names:
        if time.perf_counter() - began > limit:
            break
        mine = replace(config, labels=name)
        tasks = [] if name in result["confident_learning"] else [replace(mine, fold=i) for i in range(FOLDS)]
        if name not in result["runs"]:
            if result["runs"]:
                tasks.insert(0, mine)
            else:
                _keep(result, judged_run(arrays, mine, device), save)
                _say(began, f"{name}: {result['runs'][name]['seconds']} {result['runs'][name]['auc']}")
        if tasks:
            _side_by_side(tasks, parts, str(device), result, save, limit - (time.perf_counter() - began))
        if (judged := _scored(result, name, parts, arrays)) is not None:
            result["confident_learning"][name] = judged
        result["wall_seconds"] = time.perf_counter() - began
        save(result)
        _say(began, f"{name}: {result['confident_learning'].get(name)}")
    shutil.rmtree(parts)
    return result


def _keep(result: dict[str, Any], found: dict[str, Any], save: Save) -> None:
    """Store a judged run; the clock of the first one counts, which ran alone."""
    alone = next(iter(result["runs"].values()), None)
    timed = {} if alone is None else {"bare_step": alone["bare_step"]}
    result["runs"][found["config"]["labels"]] = {**found, **timed}
    save(result)


def _side_by_side(
    tasks: list[CifarConfig], parts: Path, device: str, result: dict[str, Any], save: Save, seconds: float
) -> None:
    """Train until all are done, or the time is over."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(tasks), context) as pool:
        places = [str(parts / f"{task.labels}_{task.fold}.npz") for task in tasks]
        waiting = [
            pool.submit(_work, task, str(parts / "arrays.npz"), device, place)
            for task, place in zip(tasks, places, strict=True)
        ]
        try:
            for done in as_completed(waiting, timeout=max(seconds, 1.0)):
                if (found := done.result()) is not None:
                    _keep(result, found, save)
        except TimeoutError:
            for process in list(pool._processes.values()):
                process.kill()


def _scored(result: Mapping[str, Any], name: str, parts: Path, arrays: Arrays) -> dict[str, Any] | None:
    """Confident learning by the folds as far as they are; None where one has not begun."""
    places = [parts / f"{name}_{i}.npz" for i in range(FOLDS)]
    if name not in result["runs"] or not all(place.exists() for place in places):
        return None
    run, labels = result["runs"][name], torch.from_numpy(arrays[name]).long()
    (kept, _), _ = hold_back((torch.arange(len(labels)), labels), run["config"]["share"], seed=run["config"]["seed"])
    folds = [dict(np.load(place)) for place in places]
    return confident_learning(run, folds, arrays, kept.numpy())


def versions(device: torch.device) -> dict[str, str]:
    """What the trainings ran on."""
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return {"torch": torch.__version__, "python": platform.python_version(), "device": name}


def _say(began: float, what: str) -> None:
    print(f"{time.perf_counter() - began:6.1f} s  {what}", flush=True)


def main() -> None:
    """Run the study and store it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--labels", nargs="+", default=["worse", "random1"])
    parser.add_argument("--limit", type=float, default=500.0, help="seconds after which folds are scored as they are")
    parser.add_argument("--earlier", type=Path, help="a result whose runs are not repeated")
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--smoke", action="store_true", help="a tiny network and made-up images, no files")
    given = parser.parse_args()
    config = TINY if given.smoke else CifarConfig()
    config = config if given.epochs is None else replace(config, epochs=given.epochs)
    data = None if given.smoke else given.data
    save = partial(save_result, given.output, CIFAR, asdict(config))
    study(data, given.labels, config, given.limit, save, given.earlier)


if __name__ == "__main__":
    main()
