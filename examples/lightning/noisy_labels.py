"""Lightning on noisy labels: AdamW, then PopRiskAdamW with its callback. Made-up data, under half a minute on a CPU."""

import argparse
import json
import logging
import tempfile
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from poprisk import PopRiskAdamW
from poprisk.integrations.lightning import METERS_FILE, PopRiskCallback

SEGMENTS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")
ROW, UPPER, LOWER = (1, 2, 3), (1, 2, 3), (5, 6, 7)
BARS = {"a": (0, ROW), "b": (UPPER, 4), "c": (LOWER, 4), "d": (8, ROW), "e": (LOWER, 0), "f": (UPPER, 0), "g": (4, ROW)}


def digits(count: int, wrong: float, seed: int) -> tuple[Tensor, Tensor]:
    """Seven-segment digits, moved by up to a pixel each way, with noise; a share of the labels is wrong."""
    generator = torch.Generator().manual_seed(seed)
    shapes = torch.zeros(10, 9, 5)
    for shape, lit in zip(shapes, SEGMENTS, strict=True):
        for name in lit:
            shape[BARS[name]] = 1
    right = torch.randint(10, (count,), generator=generator)
    images = 0.2 * torch.randn(count, 10, 6, generator=generator)
    moved = torch.randint(2, (count, 2), generator=generator)
    for image, label, (down, along) in zip(images, right, moved, strict=True):
        image[down : down + 9, along : along + 5] += shapes[label]
    other = (right + torch.randint(1, 10, (count,), generator=generator)) % 10
    return images.flatten(1), torch.where(torch.rand(count, generator=generator) < wrong, other, right)


class Classifier(pl.LightningModule):
    """A network with one hidden layer; the clean labels it is validated on are only looked at."""

    def __init__(self, optimizer: type[torch.optim.Optimizer], lr: float) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(60, 256), nn.ReLU(), nn.Linear(256, 10))
        self.optimizer, self.lr = optimizer, lr
        self.accuracies: list[float] = []

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """The loss on the labels as they are, some of them wrong."""
        loss = nn.functional.cross_entropy(self.network(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        """Accuracy on the whole test set, which is one batch."""
        self.accuracies.append((self.network(batch[0]).argmax(1) == batch[1]).float().mean().item())
        self.log("test_accuracy", self.accuracies[-1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """All that changes for PopRiskAdamW is the class and its lr."""
        return self.optimizer(self.parameters(), lr=self.lr)


def fit(optimizer: type[torch.optim.Optimizer], lr: float, steps: int, folder: Path) -> Classifier:
    pl.seed_everything(0, verbose=False)
    train, test = TensorDataset(*digits(1500, wrong=0.4, seed=1)), TensorDataset(*digits(2000, wrong=0.0, seed=2))
    trainer = pl.Trainer(
        max_steps=steps,
        val_check_interval=min(60, steps),
        check_val_every_n_epoch=None,  # counted in steps, whatever the epoch
        gradient_clip_val=1.0,
        callbacks=[PopRiskCallback(every=5)] if optimizer is PopRiskAdamW else [],  # the one line for the meters
        logger=CSVLogger(folder, name=optimizer.__name__, version=f"lr_{lr:g}"),
        log_every_n_steps=10,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    model = Classifier(optimizer, lr)
    trainer.fit(model, DataLoader(train, batch_size=128, shuffle=True), DataLoader(test, batch_size=len(test)))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=960)
    parser.add_argument("--adamw-lr", type=float, default=1e-3)
    parser.add_argument("--output", type=Path, default=None, help="keep the runs here (default: a temporary folder)")
    options = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data is small and in memory
    warnings.filterwarnings("ignore", ".*LeafSpec.*")  # Lightning's own use of torch
    usual = options.adamw_lr
    runs = ((torch.optim.AdamW, usual), (torch.optim.AdamW, usual / 10), (PopRiskAdamW, usual))
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.output or Path(temporary)
        print("clean test accuracy, % (40% of the training labels are wrong)")
        for optimizer, lr in runs:
            values = [100 * value for value in fit(optimizer, lr, options.steps, folder).accuracies]
            print(f"{optimizer.__name__:<13} lr {lr:<7g} last {values[-1]:.1f}   best {max(values):.1f}")
        run = folder / PopRiskAdamW.__name__ / f"lr_{usual:g}"
        last = json.loads((run / METERS_FILE).read_text())["readings"][-1]
        print("meters of the last log line:", {name: float(f"{value:.3g}") for name, value in last.items()})
        if options.output:
            print(f"all of them: {run / METERS_FILE}, and beside the loss in {run / 'metrics.csv'}")


if __name__ == "__main__":
    main()
