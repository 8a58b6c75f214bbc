"""A training loop by hand, recorded; then what its steps amounted to: what test outputs could see, and from whom."""

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from poprisk import PopRiskAdamW, Problem, Recorder, Run, Window, dissipation_channels

INPUTS, TRAIN, TEST = 5, 48, 24


def points(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points of two classes, on the two sides of a curved surface."""
    x = torch.randn(count, INPUTS, generator=torch.Generator().manual_seed(seed))
    return x, (x[:, 0] + x[:, 1] > 0.3 * x[:, 2].square()).long()


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh(), nn.Linear(16, 2))


def train(problem: Problem, data: TensorDataset, kind: str, epochs: int, folder: Path) -> None:
    """The loop as it was, with three lines for the recorder."""
    torch.manual_seed(0)
    model = problem.module()
    make = {"PopRiskAdamW": PopRiskAdamW, "AdamW": torch.optim.AdamW}[kind]
    optimizer = make(model.parameters(), lr=1e-2)
    with Recorder(folder, model, optimizer, problem=problem) as recorder:  # 1
        loader = DataLoader(recorder.dataset(data), batch_size=16, shuffle=True)  # 2: examples with their index
        for _ in range(epochs):
            for index, x, y in loader:
                with recorder.step(index):  # 3
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(model(x), y).backward()
                    optimizer.step()


def look(run: Run, test_labels: Tensor, wrong: int) -> None:
    """The operators of the whole run, and what they say."""
    window = Window.of_run(run)
    ops = window.dense_operators()
    channels = dissipation_channels(ops.factor, ops.train_transfer, ops.test_transfer)
    error = (ops.predicted_test - ops.test_displacement).norm() / ops.test_displacement.norm()
    print(f"test displacement: predicted from the gradient at the start to a relative error of {error:.1e}")

    shares = channels.roots.square().cumsum(0) / channels.roots.square().sum()
    print(
        f"of {window.num_outputs} directions of the output gradient, {int((shares < 0.99).sum()) + 1} hold 99% of the "
        f"dissipation"
    )
    # The change of the test outputs is a sum over training examples, -G_i g_i, and the source: no approximation.
    # Here it is read off the margin, right class minus wrong class, averaged over the test points.
    margin = (2.0 * nn.functional.one_hot(test_labels, 2) - 1).double().flatten() / len(test_labels)
    n = run.num_examples
    pushes = -(margin @ ops.test_transfer).reshape(n, -1).mul(ops.output_gradient.reshape(n, -1)).sum(1)
    print(f"the mean test margin changed by {margin @ ops.test_displacement:+.4f}. Of this")
    print(f"{pushes[wrong:].sum():+10.4f} came from the {n - wrong} examples with their right label")
    print(f"{pushes[:wrong].sum():+10.4f} from the {wrong} with a wrong one")
    print(f"{margin @ ops.sources.test:+10.4f} from the source: weight decay")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizer", choices=("PopRiskAdamW", "AdamW"), default="PopRiskAdamW")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--wrong", type=int, default=8, help=f"wrong labels among the {TRAIN}")
    parser.add_argument("--output", type=Path, help="a new folder to keep the run in")
    options = parser.parse_args()
    x, y = points(TRAIN, seed=1)
    y[: options.wrong] = 1 - y[: options.wrong]
    test = points(TEST, seed=2)
    problem = Problem(network, "cross_entropy", x, y, name="two sides", test=test)
    folder = options.output or Path(tempfile.mkdtemp()) / "run"
    train(problem, TensorDataset(x, y), options.optimizer, options.epochs, folder)
    run = Run.load(folder, problem=problem)  # a later process does the same
    print(f"{options.optimizer}: {run}")
    look(run, test[1], options.wrong)


if __name__ == "__main__":
    main()
