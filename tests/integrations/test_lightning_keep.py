"""KeepBest in the real Lightning: training is left alone, the best weights are there at the end, resuming is exact."""

import copy
import csv

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from poprisk import KeepBest, hold_back
from poprisk.errors import HyperparameterError, RunError
from poprisk.integrations.lightning_keep import KeepBestCallback

QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),  # tiny data in memory
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),  # it is resumed from
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # Lightning's use of torch
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*:FutureWarning"),
]


def data():
    """160 points of two classes, a quarter of the labels wrong; 32 of them are held back."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(160, 8, generator=generator)
    wrong = torch.rand(len(x), generator=generator) < 0.25
    return hold_back((x, (x[:, 0] + x[:, 1] > 0).long() ^ wrong.long()), 0.2)


class Parts(pl.LightningModule):
    """A module without forward."""

    def __init__(self, optimizers=1):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 2))
        self.optimizers_made = optimizers

    def training_step(self, batch, index):
        torch.manual_seed(1000 + self.global_step)  # dropout depends on the step alone
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return [torch.optim.AdamW(self.net.parameters(), lr=1e-2) for _ in range(self.optimizers_made)]


class Whole(Parts):
    def forward(self, x):
        return self.net(x)


class Stream:
    """The batches over and over, as one long epoch that knows where it is."""

    def __init__(self, batch=16):
        train, _ = data()
        self.batches, self.position = list(DataLoader(TensorDataset(*train), batch_size=batch)), 0

    def __len__(self):
        return 1000

    def __iter__(self):
        while True:
            self.position += 1
            yield self.batches[(self.position - 1) % len(self.batches)]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def fit(folder, module, callback, steps=24, ckpt=None, saves=False, loader=None, **options):
    callbacks = [callback] if callback else []
    if saves:
        callbacks.append(ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1, every_n_train_steps=8))
    given = {"logger": False, "log_every_n_steps": 4, "enable_checkpointing": saves} | QUIET | options
    trainer = pl.Trainer(default_root_dir=folder, max_steps=steps, max_epochs=-1, callbacks=callbacks, **given)
    trainer.fit(module, loader or Stream(), ckpt_path=ckpt)
    return trainer


def keeping(**options):
    return KeepBestCallback(data()[1], F.cross_entropy, **({"every": 3, "tail": (0.2, 0.5)} | options))


@pytest.mark.parametrize(("module", "network"), [(Whole, None), (Parts, "net")])
def test_a_training_ends_with_the_best_weights_and_is_left_alone(tmp_path, monkeypatch, module, network):
    last, finish = {}, KeepBest.finish

    def noting(self):
        last.update(copy.deepcopy(self._model.state_dict()))
        return finish(self)

    monkeypatch.setattr(KeepBest, "finish", noting)
    plain, kept, callback = module(), module(), keeping(network=network, metric="accuracy")
    fit(tmp_path, plain, None)
    trainer = fit(tmp_path, kept, callback)
    assert_close(last, plain.state_dict(), rtol=0, atol=0)
    assert len(callback.keeper.curve.moments) == 2 * 8
    x, y = data()[1]
    with torch.no_grad():
        right = float((kept.net.eval()(x).argmax(1) == y).float().mean())
    assert right == pytest.approx(1 - float(callback.keeper.curve.best.scores.mean()))
    assert right == pytest.approx(callback.risk.accuracy)
    trainer.save_checkpoint(tmp_path / "final.ckpt")
    saved = torch.load(tmp_path / "final.ckpt", weights_only=False)["state_dict"]
    assert_close(saved, dict(kept.state_dict()), rtol=0, atol=0)


def test_resuming_from_a_checkpoint_gives_the_same_bits(tmp_path):
    ended = []
    for folder, resumes in (("whole", False), ("parts", True)):
        module, callback, ckpt = Whole(), keeping(), None
        if resumes:
            fit(tmp_path / folder, Whole(), keeping(), steps=16, saves=True)
            ckpt = tmp_path / folder / "step=16.ckpt"
        fit(tmp_path / folder, module, callback, saves=True, ckpt=ckpt)
        ended.append((module.state_dict(), callback.risk.value, callback.keeper.curve.state()["losses"]))
    assert_close(dict(ended[0][0]), dict(ended[1][0]), rtol=0, atol=0)
    assert ended[0][1] == ended[1][1]
    assert_close(ended[0][2], ended[1][2], rtol=0, atol=0)


def test_accumulation_counts_steps_and_examples(tmp_path):
    callback = keeping(every=None, tail=0.2)
    fit(tmp_path, Whole(), callback, steps=30, loader=Stream(4), accumulate_grad_batches=4)
    assert callback.keeper.steps == 30
    assert callback.keeper._budget.counted == 16
    assert callback.risk.measured >= 2


def test_measurements_are_logged(tmp_path):
    callback = keeping(tail=0.2, every=4)
    logger = CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    trainer = fit(tmp_path, Whole(), callback, logger=logger, precision="bf16-mixed")
    with open(f"{logger.log_dir}/metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["poprisk/held_back_loss"]]
    means = [float(each.losses.mean()) for each in callback.keeper.curve.moments]
    assert [float(row["poprisk/held_back_loss"]) for row in rows] == pytest.approx(means, rel=1e-4)
    assert "poprisk/kept_step" in trainer.callback_metrics


def test_what_cannot_work_is_refused(tmp_path):
    with pytest.raises(RunError, match="network= with the part"):
        fit(tmp_path, Parts(), keeping())

    class Two(Whole):
        def __init__(self):
            super().__init__(2)
            self.automatic_optimization = False

    with pytest.raises(HyperparameterError, match="follows one optimizer"):
        fit(tmp_path, Two(), keeping())
