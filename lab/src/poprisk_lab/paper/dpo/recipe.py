"""DPO and fine-tuning with AdamW at its usual learning rate: the last step, the mean of the weights, the kept moment.

Nothing is tuned. Of the training examples 5% are held back, as noisy as the rest; one training gives the last weights,
their mean (:class:`poprisk.TailAverage`) and the weights that :class:`poprisk.KeepBest` kept, all measured on the clean
evaluation examples of :mod:`poprisk_lab.paper.dpo.task`. DPO is classification here: the rewards of the two answers are
the scores of two classes, and the label says which answer the (perhaps swapped) pair prefers.

``python -m poprisk_lab.paper.dpo.recipe DATA OUTPUT`` writes ``lab/results/recipe_fine_tuning.json``, with the folder
``smollm2`` of the DPO experiment in ``DATA``: about three minutes on an H200. ``--smoke`` needs no files.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from poprisk import KeepBest, TailAverage, hold_back
from poprisk._core.seeds import stream
from poprisk._core.store import save_result
from poprisk_lab.data.llama import StackedLlama
from poprisk_lab.engine.task import TaskMetric
from poprisk_lab.paper.dpo.task import (
    DpoTask,
    FineTuning,
    measured_log_probability,
    on_device,
    pair_log_probability,
    preference_metrics,
    rewards,
)
from poprisk_lab.paper.sft.task import HELD_OUT, SftTask

KIND = "recipe_fine_tuning"
Metrics = dict[str, float]


@dataclass(frozen=True)
class RecipeConfig:
    """What is trained.

    Attributes:
        dpo: The DPO task; its noise is set by ``swapped``.
        sft: The fine-tuning task; its noise is set by ``replaced``.
        swapped: Shares of swapped pairs; 0 is clean.
        replaced: Shares of replaced target tokens; 0 is clean.
        dpo_lr: AdamW's usual learning rate for DPO with LoRA.
        sft_lr: AdamW's usual learning rate for fine-tuning with LoRA.
        share: Share of the training examples that is held back.
        tail: Tail of the average.
        seeds: Seeds of the trainings.
    """

    dpo: DpoTask = field(default_factory=DpoTask)
    sft: SftTask = field(default_factory=SftTask)
    swapped: tuple[float, ...] = (0.3, 0.0)
    replaced: tuple[float, ...] = (0.2, 0.0)
    dpo_lr: float = 5e-5
    sft_lr: float = 2e-4
    share: float = 0.05
    tail: float = 0.2
    seeds: tuple[int, ...] = (0, 1, 2)


_TINY = FineTuning(rank=2)
SMOKE = RecipeConfig(
    dpo=DpoTask(_TINY, batch=6, steps=12, evaluations=3),
    sft=SftTask(_TINY, batch=6, steps=12, evaluations=3),
    swapped=(0.3,),
    replaced=(0.2,),
    dpo_lr=3e-3,
    sft_lr=3e-3,
    share=0.2,
    seeds=(0,),
)
"""A tiny random Llama and synthetic text: no files, a few seconds."""


class Adapters(nn.Module):
    """The adapters of one fine-tuning of a frozen Llama."""

    def __init__(self, model: StackedLlama, initial: Mapping[str, Tensor], device: torch.device) -> None:
        super().__init__()
        self._names = list(initial)
        self.weights = nn.ParameterList([nn.Parameter(weight.to(device)) for weight in initial.values()])
        self._model = model

    def stacked(self) -> dict[str, Tensor]:
        """The adapters as those of a single member."""
        return {name: weight.unsqueeze(0) for name, weight in zip(self._names, self.weights, strict=True)}

    def said(self, tokens: Tensor, mask: Tensor, targets: Tensor | None = None) -> Tensor:
        """Log-probability of each sequence."""
        given = None if targets is None else targets.unsqueeze(0)
        return self._model.log_probability(self.stacked(), tokens.unsqueeze(0), mask.unsqueeze(0), given)[0].float()


class DpoModel(Adapters):
    """The rewards of both answers of pairs of the training set, given by their numbers."""

    def __init__(self, task: DpoTask, seed: int, device: torch.device) -> None:
        training, self._measuring = task.model.models(device)
        super().__init__(training, task.model.initial(seed), device)
        preferences = task.model.preferences()
        self._train, self._evaluation = (on_device(p, device) for p in (preferences.train, preferences.evaluation))
        self._beta, self._mask = task.beta, self._train.mask
        self._reference, self._evaluation_reference = (
            pair_log_probability(self._measuring, None, pairs, 1)[0] for pairs in (self._train, self._evaluation)
        )

    def forward(self, pairs: Tensor) -> Tensor:
        """Rewards [pairs, 2]: the scores of two classes."""
        tokens, mask = (x[pairs].flatten(0, 1) for x in (self._train.tokens, self._mask))
        return rewards(self.said(tokens, mask).unflatten(0, (len(pairs), 2)), self._reference[pairs], self._beta)

    @torch.no_grad()
    def measure(self) -> Metrics:
        """The metrics on the clean evaluation pairs."""
        policy = pair_log_probability(self._measuring, self.stacked(), self._evaluation, 1)
        found = preference_metrics(rewards(policy, self._evaluation_reference, self._beta))
        return {name: float(value[0]) for name, value in found.items()}


class SftModel(Adapters):
    """The negative log-likelihood of answers of the training set, given by their numbers."""

    def __init__(self, task: SftTask, seed: int, device: torch.device) -> None:
        training, self._measuring = task.model.models(device)
        super().__init__(training, task.model.initial(seed), device)
        preferences = task.model.preferences()
        self._tokens, self._mask = (x[:, 0].to(device) for x in (preferences.train.tokens, preferences.train.mask))
        self._targets = task.targets(seed).to(device)
        held_out = preferences.evaluation
        self._held_out, self._held_out_mask = (x[:, 0].to(device) for x in (held_out.tokens, held_out.mask))

    def forward(self, answers: Tensor) -> Tensor:
        """The sum over the tokens of each answer."""
        return -self.said(self._tokens[answers], self._mask[answers], self._targets[answers])

    @torch.no_grad()
    def measure(self) -> Metrics:
        """The loss per token on the clean held-out answers."""
        said = measured_log_probability(self._measuring, self.stacked(), self._held_out, self._held_out_mask, 1)
        return {HELD_OUT: float(-said.sum() / self._held_out_mask.sum())}


def token_loss(sums: Tensor, counts: Tensor) -> Tensor:
    """The mean over all tokens of several answers, from the sum and the number of tokens of each.

    >>> token_loss(torch.tensor([2.0, 6.0]), torch.tensor([1.0, 3.0]))
    tensor(2.)
    """
    return sums.sum() / counts.sum()


def train(task: DpoTask | SftTask, lr: float, seed: int, config: RecipeConfig, device: torch.device) -> dict[str, Any]:
    """One training: the metrics of the last, the best, the averaged and the kept weights."""
    began = time.perf_counter()
    is_dpo = isinstance(task, DpoTask)
    model = DpoModel(task, seed, device) if is_dpo else SftModel(task, seed, device)
    count = len(task.model.preferences().train)
    targets = task.swapped(seed).long() if is_dpo else task.model.preferences().train.mask[:, 0].sum(1).float()
    loss = F.cross_entropy if is_dpo else token_loss
    labels = None if is_dpo else False
    (examples, given), held = hold_back((torch.arange(count), targets), config.share, seed=seed, labels=labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    average = TailAverage(model, optimizer, config.tail)
    keeper = KeepBest(model, optimizer, held, loss, average=average)
    looks = {round((k + 1) * task.steps / task.evaluations) for k in range(task.evaluations)}
    curve: list[Metrics] = []
    for step, batch in enumerate(_batches(len(examples), task.batch, task.steps, seed), start=1):
        optimizer.zero_grad()
        loss(model(examples[batch].to(device)), given[batch].to(device)).backward()
        optimizer.step()
        if step in looks:
            curve.append(model.measure())
    with average.swapped():
        mean = model.measure()
    risk = keeper.finish()
    first = task.metrics[0]
    return {
        "task": task.name,
        "seed": seed,
        "lr": lr,
        "held_back": len(held[1]),
        "steps": sorted(looks),
        "curve": curve,
        "last": curve[-1],
        "best": best_of(curve, first),
        "mean": mean,
        "kept": model.measure(),
        "kept_step": risk.step,
        "measured": risk.measured,
        "risk": {"value": risk.value, "standard_error": risk.standard_error, "valid": risk.valid},
        "seconds": round(time.perf_counter() - began, 1),
    }


def best_of(curve: Sequence[Metrics], metric: TaskMetric) -> Metrics:
    """The best checkpoint by a metric, which only the evaluation set can find.

    >>> best_of([{"loss": 2.0}, {"loss": 1.0}, {"loss": 3.0}], TaskMetric("loss", higher_is_better=False))
    {'loss': 1.0}
    """
    return (max if metric.higher_is_better else min)(curve, key=lambda found: found[metric.name])


def run(config: RecipeConfig, device: torch.device | None = None) -> dict[str, Any]:
    """Every task with every seed."""
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tasks: list[tuple[DpoTask | SftTask, float]] = [
        *((replace(config.dpo, noise=noise), config.dpo_lr) for noise in config.swapped),
        *((replace(config.sft, noise=noise), config.sft_lr) for noise in config.replaced),
    ]
    found = []
    for task, lr in tasks:
        for seed in config.seeds:
            found.append(train(task, lr, seed, config, device))
            print(f"{task.name}, seed {seed}: {found[-1]['seconds']} s", flush=True)
    described = {
        task.name: {"description": task.description, "metrics": [asdict(metric) for metric in task.metrics]}
        for task, _ in tasks
    }
    return {"tasks": described, "runs": found}


def _batches(count: int, size: int, steps: int, seed: int) -> Iterator[Tensor]:
    """Batches of shuffled passes; the rest of a pass that fills no batch is left out."""
    generator, given = torch.Generator().manual_seed(stream(seed, "recipe batches")), 0
    while given < steps:
        for batch in torch.randperm(count, generator=generator).split(size):
            if len(batch) == size and given < steps:
                given += 1
                yield batch


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and store the result."""
    parser = argparse.ArgumentParser(
        prog="python -m poprisk_lab.paper.dpo.recipe", description="The recipe on a Llama."
    )
    parser.add_argument("data", type=Path, help="folder with the data sets, among them smollm2")
    parser.add_argument("output", type=Path, help="file for the result")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and synthetic text, a few seconds")
    options = parser.parse_args(arguments)
    folder = options.data / "smollm2"
    model = FineTuning(folder.as_posix(), ((folder / "preferences.safetensors").as_posix(),))
    config = SMOKE if options.smoke else RecipeConfig(dpo=DpoTask(model), sft=SftTask(model))
    print(f"Wrote {save_result(options.output, KIND, asdict(config), run(config))}")


if __name__ == "__main__":
    main()
