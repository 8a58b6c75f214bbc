"""Find wrong labels by an audit of one run, correct them, and train again; compare with random corrections."""

import argparse
import time
from functools import partial

import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from poprisk import AuditTable, Problem, Run, audit, train
from poprisk.runs import digits_split, replace_labels

HOW = (
    "unchanged",
    "random fifth corrected",
    "most suspicious corrected",
    "suggested labels",
    "all correct",
)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def trained(inputs: Tensor, labels: Tensor, steps: int, seed: int) -> Run:
    """Train and record checkpoints only, which the audit uses."""
    problem = Problem(network, "cross_entropy", inputs, labels, name="digits", seed=seed)
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    every = max(1, steps // 60)
    return train(problem, optimizer, steps, batch_size=50, seed=seed, every=every, progress=False)


def accuracy(run: Run, inputs: Tensor, labels: Tensor) -> float:
    module = run.problem.module()
    nn.utils.vector_to_parameters(run.weights(run.num_steps), module.parameters())
    with torch.no_grad():
        return (module(inputs).argmax(1) == labels).double().mean().item()


def with_true(labels: Tensor, true: Tensor, inspected: Tensor) -> Tensor:
    """The labels after someone has inspected and corrected these examples."""
    fixed = labels.clone()
    fixed[inspected] = true[inspected]
    return fixed


def one_seed(options: argparse.Namespace, seed: int) -> tuple[list[float], AuditTable, Tensor]:
    split = digits_split(seed, options.size)
    generator = torch.Generator().manual_seed(seed)
    spoiled = replace_labels(split.train_labels, options.wrong, 10, generator)
    test = split.test_inputs, split.test_labels
    run = trained(split.train_inputs, spoiled.labels, options.steps, seed)
    table = audit(run, tier="any", progress=False)

    number = int(options.inspect * options.size)
    random = torch.randperm(options.size, generator=generator)[:number]
    versions = (
        with_true(spoiled.labels, split.train_labels, random),
        with_true(spoiled.labels, split.train_labels, table.order()[:number]),
        table.cleaned_targets(),
        split.train_labels,
    )
    runs = [run, *(trained(split.train_inputs, labels, options.steps, seed) for labels in versions)]
    return [accuracy(each, *test) for each in runs], table, spoiled.wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument(
        "--size", type=int, default=800, help="number of training examples; the other digits are the test set"
    )
    parser.add_argument("--wrong", type=float, default=0.2, help="share of the training labels replaced by a wrong one")
    parser.add_argument("--inspect", type=float, default=0.2, help="share of the training examples inspected")
    options = parser.parse_args()
    start = time.perf_counter()
    found = [one_seed(options, seed) for seed in range(options.seeds)]
    accuracies = torch.tensor([values for values, _, _ in found], dtype=torch.float64)

    print(f"digits: {options.size} training examples, {options.wrong:.0%} of the labels wrong, {options.seeds} seeds")
    for table, wrong in [each[1:] for each in found][:3]:
        auc = roc_auc_score(wrong, table["suspicion"])
        share = wrong[table.order()[: int(options.inspect * len(wrong))]].sum() / wrong.sum()
        number, suspect = table.wrong_labels, table.is_suspect
        print(
            f"poprisk audit: {number.value:.0f} ± {number.standard_error:.0f} wrong labels estimated, "
            f"{wrong.sum()} actual; {(suspect & wrong).sum()} of {suspect.sum()} suspects are wrong; "
            f"{share:.0%} of the wrong labels in the first {options.inspect:.0%}, AUC {auc:.3f}"
        )
    print("\naccuracy on clean test images after training on the labels")
    errors = accuracies.std(0) / len(accuracies) ** 0.5 if len(accuracies) > 1 else accuracies[0] * 0
    for how, mean, error in zip(HOW, accuracies.mean(0).tolist(), errors.tolist(), strict=True):
        print(f"  {how:<28} {100 * mean:5.1f} ± {100 * error:.1f} %")
    gain = accuracies[:, 2] - accuracies[:, 1]
    print(
        f"inspecting {options.inspect:.0%}: audit beats random by {100 * gain.mean():.1f} points on average, ", end=""
    )
    print(f"in {int((gain > 0).sum())} of {options.seeds} seeds   ({time.perf_counter() - start:.0f} s)")


if __name__ == "__main__":
    main()
