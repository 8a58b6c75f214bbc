"""PopRiskAdamW in the real Lightning: the same as a loop by hand, through closures, clipping, scaling and a kill."""

import csv
import importlib
import json
import math
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

from poprisk.errors import HyperparameterError, PopRiskWarning
from poprisk.integrations._readings import Readings
from poprisk.integrations.loggers import watch
from poprisk.integrations.sinks import JsonLinesSink
from poprisk.optim import join_gate
from poprisk.optim._adamw import PopRiskAdamW

# the process that is killed below knows Lightning by its other name
pl = importlib.import_module(os.environ.get("POPRISK_TEST_LIGHTNING", "lightning.pytorch"))
MixedPrecision = importlib.import_module(f"{pl.__name__}.plugins.precision").MixedPrecision
CSVLogger = importlib.import_module(f"{pl.__name__}.loggers").CSVLogger
ModelCheckpoint = importlib.import_module(f"{pl.__name__}.callbacks").ModelCheckpoint
from poprisk.integrations.lightning import METERS_FILE, PopRiskCallback  # noqa: E402

METERS = {"active_fraction", "mean_gate", "noise_scale", "population_rate", "training_rate", "self_fit"}
QUIET = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
BATCHES = 8
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),  # tiny data in memory
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),  # it is resumed from
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),  # Lightning's use of torch
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*:FutureWarning"),
]


def data():
    """128 points of two classes, a quarter of the labels wrong."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16 * BATCHES, 8, generator=generator)
    wrong = torch.rand(len(x), generator=generator) < 0.25
    return x, (x[:, 0] + x[:, 1] > 0).long() ^ wrong.long()


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 2))


def loss_of(net, batch):
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


class Automatic(pl.LightningModule):
    def __init__(self, scheduled=False, scale=1.0, **options):
        super().__init__()
        self.net, self.options, self.scheduled, self.scale = network(), options, scheduled, scale

    def training_step(self, batch, index):
        loss = self.scale * loss_of(self.net, batch)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = PopRiskAdamW(self.net.parameters(), **join_gate(self.options))
        if not self.scheduled:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Manual(Automatic):
    """The same by hand, the optimizer toggled as people do who have several; steps at every ``micro``-th batch."""

    def __init__(self, micro=1, max_norm=None, closure=False, **options):
        super().__init__(**options)
        self.automatic_optimization, self.micro, self.max_norm, self.closure = False, micro, max_norm, closure

    def training_step(self, batch, index):
        optimizer = self.optimizers()

        def backward():
            self.manual_backward(loss_of(self.net, batch) / self.micro)
            if self.max_norm:
                self.clip_gradients(optimizer, gradient_clip_val=self.max_norm, gradient_clip_algorithm="norm")

        with optimizer.toggle_model():
            if index % self.micro == 0:
                optimizer.zero_grad()
            if self.closure:
                optimizer.step(backward)
            else:
                backward()
                if (index + 1) % self.micro == 0:
                    optimizer.step()


class Stream:
    """The batches over and over, as one long epoch that knows where it is: resumed, Lightning goes on from there.

    A loader that does not know begins anew, and a resumed run sees other batches than one that was never stopped.
    """

    def __init__(self, batch):
        self.batches, self.position = list(DataLoader(TensorDataset(*data()), batch_size=batch)), 0

    def __len__(self):  # one without a length is read a batch ahead
        return 1000

    def __iter__(self):
        while True:
            self.position += 1
            yield self.batches[(self.position - 1) % len(self.batches)]

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


def warm_up(step):
    return min(1.0, (step + 1) / 10)


def fit(folder, module, steps=24, batch=16, ckpt=None, saves=False, callbacks=(), every=None, **options):
    callback = PopRiskCallback(every)
    callbacks = [callback, *callbacks]
    if saves:
        callbacks.append(ModelCheckpoint(dirpath=folder, filename="{step}", save_top_k=-1, every_n_train_steps=8))
    given = {"logger": False, "log_every_n_steps": 4, "enable_checkpointing": saves} | QUIET | options
    trainer = pl.Trainer(default_root_dir=folder, max_steps=steps, max_epochs=-1, callbacks=callbacks, **given)
    trainer.fit(module, Stream(batch), ckpt_path=ckpt)
    return trainer, callback


def loop(steps=24, max_norm=None, scheduled=False, every=4):
    """What Lightning does, by hand, and the readings of every step, averaged over each ``every``."""
    net = network()
    optimizer = PopRiskAdamW(net.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up) if scheduled else None
    batches = list(DataLoader(TensorDataset(*data()), batch_size=16))
    readings, lines = Readings(), []
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(net, batches[step % BATCHES]).backward()
        if max_norm:
            nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        readings.take(optimizer)
        optimizer.step()
        if schedule:
            schedule.step()
        if (step + 1) % every == 0:
            lines.append(readings.flush())
    return net, lines


def weights(module):
    return list(getattr(module, "net", module).parameters())


def states(trainer):
    return [state for optimizer in trainer.optimizers for state in optimizer.state_dict()["state"].values()]


def mean_gate(callback):
    gates = [line["mean_gate"] for line in callback.lines]
    return sum(gates) / len(gates)


@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_weights_and_meters_are_those_of_a_loop_by_hand(tmp_path, max_norm):
    """The meters too, with most gradients clipped: they are read after clipping, as in every other integration."""
    module = Automatic(scheduled=True)
    _, callback = fit(tmp_path, module, gradient_clip_val=max_norm)
    expected, lines = loop(max_norm=max_norm, scheduled=True)
    assert_close(weights(module), weights(expected), rtol=0, atol=0)
    assert [line["step"] for line in callback.lines] == [4, 8, 12, 16, 20, 24]
    for line, wanted in zip(callback.lines, lines, strict=True):
        assert {f"poprisk/{name}": line[name] for name in METERS} == wanted


@pytest.mark.parametrize("closure", [False, True])
def test_manual_optimization_gives_the_same_run(tmp_path, closure):
    manual, automatic = Manual(max_norm=1.0, closure=closure), Automatic()
    _, by_hand = fit(tmp_path, manual)
    _, by_lightning = fit(tmp_path, automatic, gradient_clip_val=1.0)
    assert_close(weights(manual), weights(automatic), rtol=0, atol=0)
    assert by_hand.lines == by_lightning.lines


@pytest.mark.parametrize("manual", [False, True], ids=["automatic", "manual"])
def test_four_micro_batches_are_one_batch(tmp_path, manual):
    whole = Automatic()
    _, expected = fit(tmp_path, whole)
    parts = Manual(micro=4) if manual else Automatic()
    _, callback = fit(tmp_path, parts, batch=4, **({} if manual else {"accumulate_grad_batches": 4}))
    assert_close(weights(parts), weights(whole), rtol=1e-4, atol=1e-6)
    if not manual:  # there Lightning counts batches, so that its lines come four times as often
        assert [line["step"] for line in callback.lines] == [line["step"] for line in expected.lines]
    last = callback.lines[-4:] if manual else callback.lines[-1:]
    gate = sum(line["mean_gate"] for line in last) / len(last)
    assert gate == pytest.approx(expected.lines[-1]["mean_gate"], rel=1e-3)


class Skipped(pl.Callback):
    """How many steps were asked for, and how often the weights stayed where they were."""

    def __init__(self):
        self.asked, self.still, self.before = 0, 0, None

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.asked += 1
        self.before = [p.detach().clone() for p in weights(module)]

    def on_train_batch_end(self, trainer, module, *_):
        self.still += all(torch.equal(p, q) for p, q in zip(weights(module), self.before, strict=True))


class Clipped(pl.Callback):
    """The share of steps whose gradient has a norm above 1."""

    def __init__(self):
        self.norms = []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.norms.append(nn.utils.get_total_norm([p.grad for p in weights(module)]).item())

    @property
    def share(self):
        return sum(norm > 1 for norm in self.norms) / len(self.norms)


def scaled(scale):
    return {"plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))]}


LOUD = {"scale": 2.0, "gate": "soft", "strength": 1.0, "alpha": "calibrated"}


@pytest.fixture(scope="module")
def plain_gate(tmp_path_factory):
    return mean_gate(fit(tmp_path_factory.mktemp("plain"), Automatic(**LOUD), steps=32)[1])


@pytest.mark.parametrize(
    "options",
    [
        {"gradient_clip_val": 1.0},
        {"precision": "bf16-mixed"},
        scaled(2.0**10),
        {"gradient_clip_val": 1.0} | scaled(2.0**10),
    ],
    ids=["clipped", "bf16", "fp16", "clipped fp16"],
)
def test_clipping_and_half_precision_hardly_move_the_gate(tmp_path, options, plain_gate):
    """Within a tenth, the effect the README documents for clipping."""
    clipped = Clipped()
    trainer, callback = fit(tmp_path, Automatic(**LOUD), steps=32, callbacks=[clipped], **options)
    assert 0.2 < clipped.share < 0.95
    assert mean_gate(callback) == pytest.approx(plain_gate, rel=0.1)
    assert all(state["exp_var"].isfinite().all() and (state["exp_var"] >= 0).all() for state in states(trainer))


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_skips_the_step_and_leaves_s_alone(tmp_path, fused):
    skipped = Skipped()
    trainer, callback = fit(tmp_path, Automatic(fused=fused), callbacks=[skipped], every=1, **scaled(2.0**26))
    scale = trainer.precision_plugin.scaler.get_scale()
    overflows = round(math.log2(2.0**26 / scale))
    assert 0 < overflows < 20
    assert skipped.asked == 24
    # a step that counts moves every weight, by the decay if the gate is closed
    assert skipped.still == overflows
    for state in states(trainer):
        assert state["step"].item() == state["var_step"].item() == 24 - overflows
        assert state["exp_var"].isfinite().all()
    assert all(math.isfinite(value) for line in callback.lines for value in line.values())


def test_a_fused_step_that_unscales_itself_reads_the_same_meters(tmp_path):
    _, plain = fit(tmp_path, Automatic(), **scaled(2.0**10))
    _, fused = fit(tmp_path, Automatic(fused=True), **scaled(2.0**10))
    for line, expected in zip(fused.lines, plain.lines, strict=True):
        assert line == pytest.approx(expected, rel=1e-3)


def test_clipping_what_a_fused_step_has_yet_to_unscale_is_refused_by_lightning(tmp_path):
    with pytest.raises(RuntimeError, match="PopRiskAdamW, does not allow for gradient clipping"):
        fit(tmp_path, Automatic(fused=True), gradient_clip_val=1.0, **scaled(2.0**10))


def test_meters_are_logged_and_stored(tmp_path):
    logger = CSVLogger(tmp_path, name="run", version=0)
    trainer, callback = fit(tmp_path, Automatic(), logger=logger, steps=26)
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["loss"]]
    assert [int(row["step"]) for row in rows] == [3, 7, 11, 15, 19, 23]  # Lightning's loggers count from 0
    for row, line in zip(rows, callback.lines, strict=False):
        for name in METERS:
            assert float(row[f"poprisk/{name}"]) == pytest.approx(line[name], rel=1e-6)
    assert {f"poprisk/{name}" for name in METERS} <= set(trainer.callback_metrics)
    stored = json.loads((Path(logger.log_dir) / METERS_FILE).read_text())
    assert stored == {"format_version": 1, "readings": callback.lines}
    assert [line["step"] for line in callback.lines] == [4, 8, 12, 16, 20, 24, 26]
    assert trainer.optimizers[0]._optimizer_step_pre_hooks == {}


def test_watch_sees_through_lightnings_wrapper(tmp_path):
    class Watches(pl.Callback):
        def on_train_start(self, trainer, module):
            self.watch = watch(module.optimizers(), JsonLinesSink(tmp_path / "meters.jsonl"), model=module, every=4)

        def on_train_end(self, trainer, module):
            self.watch.remove()

    trainer, callback = fit(tmp_path, Automatic(), callbacks=[Watches()], gradient_clip_val=0.1)
    lines = JsonLinesSink.read(tmp_path / "meters.jsonl")
    for line, expected in zip(lines, callback.lines, strict=True):
        assert {name: line[f"poprisk/{name}"] for name in METERS} == {name: expected[name] for name in METERS}
    assert "poprisk/gate/net.0.weight" in lines[0]["histograms"]
    assert trainer.optimizers[0]._optimizer_step_pre_hooks == {}


@pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`.*")
def test_a_meter_without_a_value_is_not_repeated(tmp_path):
    """Lightning would log the last rates again, though there was no gradient to read them from."""

    class Stops(Automatic):
        def training_step(self, batch, index):
            return super().training_step(batch, index) if self.global_step < 4 else None

    logger = CSVLogger(tmp_path, name="run", version=0)
    _, callback = fit(tmp_path, Stops(), steps=8, logger=logger)
    assert "training_rate" in callback.lines[0]
    assert "training_rate" not in callback.lines[1]
    assert "mean_gate" in callback.lines[1]
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        assert [row["poprisk/training_rate"] == "nan" for row in csv.DictReader(file)] == [False, True]


class Two(Manual):
    def __init__(self, first, second):
        super().__init__()
        self.kinds = first, second

    def training_step(self, batch, index):
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            self.manual_backward(loss_of(self.net, batch))
            optimizer.step()

    def configure_optimizers(self):
        return [kind(layer.parameters()) for kind, layer in zip(self.kinds, (self.net[0], self.net[2]), strict=True)]


def test_several_optimizers_have_names_of_their_own(tmp_path):
    trainer, callback = fit(tmp_path, Two(PopRiskAdamW, PopRiskAdamW), steps=16)
    assert {f"poprisk/{i}/{name}" for i in (0, 1) for name in METERS} <= set(trainer.callback_metrics)
    assert callback.lines[-1]["0/mean_gate"] != callback.lines[-1]["1/mean_gate"]
    trainer, callback = fit(tmp_path, Two(torch.optim.AdamW, PopRiskAdamW), steps=48)
    assert set(callback.lines[-1]) >= METERS


def test_no_gate_to_read_is_said_once(tmp_path):
    with pytest.warns(PopRiskWarning, match="needs PopRiskAdamW, found AdamW, AdamW") as caught:
        _, callback = fit(tmp_path, Two(torch.optim.AdamW, torch.optim.AdamW), steps=16)
    assert len([w for w in caught if issubclass(w.category, PopRiskWarning)]) == 1
    assert callback.lines == []
    assert not (tmp_path / METERS_FILE).exists()


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "10"])
def test_a_wrong_interval_is_refused(every):
    with pytest.raises(HyperparameterError, match="every must be an integer"):
        PopRiskCallback(every)


def test_without_log_lines_nothing_is_read(tmp_path):
    _, callback = fit(tmp_path, Automatic(), steps=8, log_every_n_steps=0)
    assert callback.lines == []
    fit(tmp_path, Automatic(), fast_dev_run=4)
    assert not (tmp_path / METERS_FILE).exists()


class Killed(pl.Callback):
    def on_train_batch_end(self, trainer, module, *_):
        if trainer.global_step == 22:  # after the second checkpoint, with a line that is lost
            os.kill(os.getpid(), signal.SIGKILL)


def run_until_killed(folder):
    assert issubclass(PopRiskCallback, pl.Callback)
    warnings.simplefilter("ignore")
    fit(folder, Automatic(scheduled=True), steps=32, saves=True, every=3, callbacks=[Killed()])


def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    """Killed in a process that has Lightning by the name pytorch_lightning only, and resumed here."""
    code = "import sys; sys.modules['lightning'] = None; import test_lightning as t; t.run_until_killed(sys.argv[1])"
    environment = os.environ | {"POPRISK_TEST_LIGHTNING": "pytorch_lightning", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    stored = json.loads((tmp_path / METERS_FILE).read_text())["readings"]
    assert [line["step"] for line in stored] == [4, 8, 12, 16]

    resumed, whole = Automatic(scheduled=True), Automatic(scheduled=True)
    after, callback = fit(tmp_path, resumed, steps=32, saves=True, every=3, ckpt=tmp_path / "step=16.ckpt")
    uninterrupted, expected = fit(tmp_path / "whole", whole, steps=32, every=3)
    assert_close(weights(resumed), weights(whole), rtol=0, atol=0)
    assert_close(states(after), states(uninterrupted), rtol=0, atol=0)
    assert callback.lines == expected.lines
    assert json.loads((tmp_path / METERS_FILE).read_text())["readings"] == expected.lines


def test_low_precision_state_survives_the_checkpoint(tmp_path):
    options = {"state_dtype": {"s": torch.bfloat16}, "gate": "soft", "strength": 1.0, "alpha": "calibrated"}
    resumed, whole = Automatic(**options), Automatic(**options)
    fit(tmp_path, Automatic(**options), steps=8, saves=True)
    after, _ = fit(tmp_path, resumed, steps=16, saves=True, ckpt=tmp_path / "step=8.ckpt")
    fit(tmp_path, whole, steps=16)
    assert states(after)[0]["exp_var"].dtype == torch.bfloat16
    assert_close(weights(resumed), weights(whole), rtol=0, atol=0)


def test_going_on_from_adamw_keeps_our_lr_under_its_schedule(tmp_path):
    class Before(Automatic):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, warm_up)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    with pytest.warns(PopRiskWarning, match="found AdamW"):
        fit(tmp_path, Before(), steps=8, saves=True)
    rates = []

    class Rates(pl.Callback):
        def on_before_optimizer_step(self, trainer, module, optimizer):
            rates.append(optimizer.param_groups[0]["lr"])

    ours = Automatic(scheduled=True, lr=2e-2)
    trainer, _ = fit(tmp_path, ours, steps=12, saves=True, ckpt=tmp_path / "step=8.ckpt", callbacks=[Rates()])
    assert rates == pytest.approx([2e-2 * warm_up(step) for step in range(8, 12)])
    assert states(trainer)[0]["step"].item() == 12
    assert states(trainer)[0]["var_step"].item() == 4


def test_a_missing_package_is_named_with_its_extra():
    code = (
        "import sys; sys.modules['lightning'] = sys.modules['pytorch_lightning'] = None\n"
        "from poprisk.errors import MissingExtraError\n"
        "try:\n    import poprisk.integrations.lightning\n"
        "except MissingExtraError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == (
        "the Lightning integration needs lightning, which is not installed: pip install 'poprisk[lightning]'"
    )
