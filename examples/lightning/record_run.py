"""Record a Lightning training, then ask the run which labels are wrong. Made-up data, under half a minute on a CPU."""

import argparse
import logging
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from poprisk import PopRiskAdamW, Problem, Run, audit
from poprisk.integrations.lightning_record import RecordRun

EXAMPLES, CLASSES, WRONG = 300, 5, 0.1


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(10, 32), nn.Tanh(), nn.Linear(32, CLASSES))


def clouds() -> tuple[Tensor, Tensor, Tensor]:
    """Points around five centres, their labels, and which of these are wrong."""
    generator = torch.Generator().manual_seed(0)
    right = torch.randint(CLASSES, (EXAMPLES,), generator=generator)
    centres = 1.5 * torch.randn(CLASSES, 10, generator=generator)
    inputs = centres[right] + 0.7 * torch.randn(EXAMPLES, 10, generator=generator)
    wrong = torch.rand(EXAMPLES, generator=generator) < WRONG
    shifted = (right + torch.randint(1, CLASSES, (EXAMPLES,), generator=generator)) % CLASSES
    return inputs, torch.where(wrong, shifted, right), wrong


class Classifier(pl.LightningModule):
    """Nothing in it knows of the recording."""

    def __init__(self) -> None:
        super().__init__()
        self.network = network()

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        """The mean cross entropy of the batch."""
        return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Any optimizer that a Recorder knows."""
        return PopRiskAdamW(self.parameters())


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--output", type=Path, default=None, help="keep the run here (default: a temporary folder)")
    options = parser.parse_args(arguments)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", ".*does not have many workers.*")  # the data is small and in memory
    warnings.filterwarnings("ignore", ".*LeafSpec.*")  # Lightning's own use of torch
    inputs, labels, wrong = clouds()
    problem = Problem(network, "cross_entropy", inputs, labels, name="clouds")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.output or Path(temporary) / "run"
        pl.seed_everything(0, verbose=False)
        record = RecordRun(folder, problem, every=10)  # the recording: this line,
        loader = DataLoader(TensorDataset(inputs, labels), batch_size=30, shuffle=True)
        trainer = pl.Trainer(
            max_steps=options.steps,
            callbacks=[record],  # this one,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Classifier(), record.watch(loader))  # and the loader, watched
        run = Run.load(folder, problem=problem)
        print(f"recorded by poprisk: {run}")
        print(f"loss of a batch {run.losses[0]:.3f} → {run.losses[-1]:.3f}")
        table = audit(run, tier="any", progress=False)
        print(table)
        found = int(wrong[table.order()[: int(wrong.sum())]].sum())
        print(f"of {int(wrong.sum())} wrong labels {found} are among the {int(wrong.sum())} most suspicious")


if __name__ == "__main__":
    main()
