"""Watching a loop by hand: it changes nothing, sees the step's own gradients, and real packages read the result."""

import json
import math
import os
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from poprisk.errors import DataError, HyperparameterError
from poprisk.integrations._readings import Readings
from poprisk.integrations.loggers import sampled_gates, watch
from poprisk.integrations.sinks import JsonLinesSink, Sink, TensorBoardSink, WandbSink
from poprisk.optim import join_gate
from poprisk.optim._adamw import PopRiskAdamW

METERS = {"active_fraction", "mean_gate", "noise_scale", "population_rate", "training_rate", "self_fit"}
NAMED = {f"poprisk/{name}" for name in METERS}


class Recorder:
    """A sink of one's own: no base class is needed."""

    def __init__(self):
        self.lines, self.drawn = [], {}

    def scalars(self, values, step):
        assert all(math.isfinite(value) for value in values.values())
        self.lines.append((step, dict(values)))

    def histogram(self, name, values, step):
        assert values.numel() > 0
        assert values.isfinite().all()
        assert values.device.type == "cpu"
        self.drawn.setdefault(step, {})[name] = values

    @property
    def steps(self):
        return [step for step, _ in self.lines]


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def loss_at(net, step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(16, 4, generator=generator)
    return (net(x)[:, 0] - x[:, 0] - 0.3 * torch.randn(16, generator=generator)).square().mean()


def train(net, optimizer, steps, first=0, scaler=None, closure=False):
    for step in range(first, first + steps):

        def backward(step=step):
            optimizer.zero_grad(set_to_none=False)
            loss = loss_at(net, step)
            (loss if scaler is None else scaler.scale(loss)).backward()
            return loss

        if closure:
            optimizer.step(backward)
            continue
        backward()
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()


def watched(steps=20, every=4, options=None, **how):
    net, sink = network(), Recorder()
    optimizer = PopRiskAdamW(net.parameters(), **join_gate(options or {}))
    with watch(optimizer, sink, model=net, every=every):
        train(net, optimizer, steps, **how)
    return net, sink


def readings_by_hand(steps=20, every=4):
    net = network()
    optimizer = PopRiskAdamW(net.parameters())
    readings, lines = Readings(), []
    for step in range(steps):
        optimizer.zero_grad()
        loss_at(net, step).backward()
        readings.take(optimizer)
        optimizer.step()
        if (step + 1) % every == 0:
            lines.append((step + 1, readings.flush()))
    return net, lines


def test_the_loop_stays_as_it_is_and_the_lines_are_its_meters():
    net, sink = watched()
    expected, lines = readings_by_hand()
    assert_close(list(net.parameters()), list(expected.parameters()), rtol=0, atol=0)
    assert sink.lines == lines
    assert set(sink.lines[-1][1]) == NAMED


def test_a_closure_is_read_after_it_has_run():
    """Before it, the gradients of the last step, zeroed in place, would pass for fresh ones with rates of nil."""
    net, sink = watched(closure=True)
    expected, lines = readings_by_hand()
    assert_close(list(net.parameters()), list(expected.parameters()), rtol=0, atol=0)
    assert sink.lines == lines


@pytest.mark.parametrize("fused", [False, True])
def test_the_gradient_scale_is_taken_out(fused):
    """A fused step unscales by itself, so that the hook finds gradients a thousand times too large."""
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    _, sink = watched(options={"fused": fused}, scaler=scaler)
    _, lines = readings_by_hand()
    assert sink.steps == [step for step, _ in lines]
    for (_, line), (_, expected) in zip(sink.lines, lines, strict=True):
        assert line == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("fused", [False, True])
def test_an_overflow_counts_as_no_step(fused):
    net, sink = network(), Recorder()
    optimizer = PopRiskAdamW(net.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    with watch(optimizer, sink, every=4):
        for step in range(19):
            optimizer.zero_grad()
            loss = loss_at(net, step) * (math.inf if step in (3, 4, 9) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    assert sink.steps == [4, 8, 12, 16]
    assert {p["step"].item() for p in optimizer.state.values()} == {16}


def test_resuming_goes_on_with_the_curve(tmp_path):
    net = network()
    optimizer = PopRiskAdamW(net.parameters())
    path = tmp_path / "meters.jsonl"
    with watch(optimizer, JsonLinesSink(path), every=4):
        train(net, optimizer, 10)
        saved = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
        saved = torch.load(_saved(saved, tmp_path / "checkpoint.pt"))
        train(net, optimizer, 5, first=10)  # lost: the run goes back to the checkpoint
    assert [line["step"] for line in JsonLinesSink.read(path)] == [4, 8, 12, 15]

    again = network()
    resumed = PopRiskAdamW(again.parameters())
    with watch(resumed, JsonLinesSink(path), every=4):  # before loading or after, it does not matter
        again.load_state_dict(saved["net"])
        resumed.load_state_dict(saved["optimizer"])
        train(again, resumed, 10, first=10)
    _, lines = readings_by_hand(20)
    read = JsonLinesSink.read(path)
    assert [line["step"] for line in read] == [4, 8, 12, 16, 20]
    assert {k: v for k, v in read[-1].items() if k in NAMED} == lines[-1][1]


def _saved(value, path):
    torch.save(value, path)
    return path


def test_removing_writes_the_rest_and_leaves_nothing_behind():
    net, sink = network(), Recorder()
    optimizer = PopRiskAdamW(net.parameters())
    handle = watch(optimizer, sink, every=50)
    train(net, optimizer, 17)
    assert sink.lines == []
    handle.remove()
    handle.remove()
    assert sink.steps == [15]  # the last of the readings, which come every five steps
    assert optimizer._optimizer_step_pre_hooks == optimizer._optimizer_load_state_dict_post_hooks == {}
    train(net, optimizer, 50, first=17)
    assert sink.steps == [15]


def test_groups_have_their_own_meters_and_joining_ones_too():
    net, sink = network(), Recorder()
    optimizer = PopRiskAdamW([{"params": net[0].parameters(), "name": "body"}])
    with watch(optimizer, sink, every=5, prefix="gate/"):
        train(net, optimizer, 5)
        optimizer.add_param_group({"params": net[2].parameters(), "gate": None, "lr": 1e-3})
        train(net, optimizer, 10, first=5)
    first, *_, last = (values for _, values in sink.lines)
    assert set(first) == {f"gate/{name}" for name in METERS}
    assert {f"gate/group_body/{name}" for name in METERS} <= set(last)
    assert last["gate/group_1/mean_gate"] == 1.0  # AdamW's
    assert last["gate/mean_gate"] == last["gate/group_body/mean_gate"]
    rates = last["gate/group_body/training_rate"] + last["gate/group_1/training_rate"]
    assert rates == pytest.approx(last["gate/training_rate"])
    assert not any("2." in name for names in sink.drawn.values() for name in names)  # no gate, no histogram


def test_histograms_come_at_the_first_line_and_then_now_and_then():
    def steps_drawn(histograms):
        net, sink = network(), Recorder()
        optimizer = PopRiskAdamW(net.named_parameters())
        with watch(optimizer, sink, every=2, histograms=histograms):
            train(net, optimizer, 50)
        return sorted(sink.drawn)

    assert steps_drawn(False) == []
    assert steps_drawn(True) == [4, 20, 40]  # at line 2 there was only the first step, decided beforehand
    assert steps_drawn(7) == [4, 8, 14, 22, 28, 36, 42, 50]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gate": "hard"},
        {"gate": "snr", "granularity": "row"},
        {"gate": "soft", "alpha": "calibrated", "normalize_gate": True},
        {"state": "shared", "betas": (0.9, 0.9), "rho": 0.9},
        {"state_dtype": torch.bfloat16},
        {"fused": True},
    ],
    ids=str,
)
def test_histograms_hold_the_gates_and_the_ratios_behind_them(options):
    net = network()
    optimizer = PopRiskAdamW(net.parameters(), **join_gate(options))
    train(net, optimizer, 30)
    gates = optimizer.gates()
    drawn = {p: (gate, log_snr) for p, gate, log_snr in sampled_gates(optimizer)}
    assert set(drawn) == set(net.parameters())
    for p, (gate, log_snr) in drawn.items():
        assert_close(gate, gates[p].reshape(-1))
        state = optimizer.state[p]
        m = state["exp_avg"].double().reshape(-1) / (1 - optimizer.defaults["betas"][0] ** 30)
        if options.get("state") == "shared":
            s = (state["exp_avg_sq"].double().reshape(-1) - state["exp_avg"].double().reshape(-1) ** 2) / 0.9
        else:
            s = state["exp_var"].double().reshape(-1)
        s = s / (1 - optimizer.defaults["rho"] ** 30)
        assert_close(log_snr.double(), (m.square() / s).log10(), rtol=1e-4, atol=1e-3)


def test_coordinates_that_never_had_a_gradient_have_no_ratio():
    table = nn.Embedding(6, 3)
    optimizer = PopRiskAdamW(table.parameters())
    for step in range(4):
        optimizer.zero_grad()
        (table(torch.tensor([1, 2])) * (step + 1)).square().sum().backward()
        optimizer.step()
    ((_, gate, log_snr),) = sampled_gates(optimizer)
    assert (gate.numel(), log_snr.numel()) == (18, 6)
    assert log_snr.isfinite().all()


def test_large_tensors_are_sampled_in_every_column():
    weight = nn.Parameter(torch.zeros(1000, 100))
    optimizer = PopRiskAdamW([weight], gate="snr")
    column = torch.arange(1.0, 101)
    for step in range(3):  # each column has a gate of its own
        weight.grad = (column / 50 + step % 2).expand_as(weight).contiguous()
        optimizer.step()
    ((_, gate, log_snr),) = sampled_gates(optimizer)
    assert 5000 < gate.numel() <= 10_000
    assert log_snr.numel() == gate.numel()
    assert gate.unique().numel() == optimizer.gates()[weight].unique().numel()


def test_names_come_from_the_model_the_optimizer_or_the_place():
    def names(parameters, model=None):
        net, sink = network(), Recorder()
        optimizer = PopRiskAdamW(parameters(net))
        with watch(optimizer, sink, model=net if model else None, every=4):
            train(net, optimizer, 4)
        return {name.removeprefix("poprisk/gate/") for name in sink.drawn[4] if "/gate/" in name}

    own = {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert names(lambda net: net.parameters(), model=True) == own
    assert names(lambda net: net.named_parameters()) == own
    assert names(lambda net: net.parameters()) == {"0.0", "0.1", "0.2", "0.3"}


def test_tensorboard_reads_back_what_was_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    net = network()
    optimizer = PopRiskAdamW(net.parameters())
    with SummaryWriter(tmp_path) as writer, watch(optimizer, writer, model=net, every=4):
        train(net, optimizer, 20)
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert set(events.Tags()["scalars"]) >= NAMED
    curve = [(event.step, event.value) for event in events.Scalars("poprisk/mean_gate")]
    assert curve == [(s, pytest.approx(line["poprisk/mean_gate"])) for s, line in readings_by_hand()[1]]
    expected = {f"poprisk/{kind}/{name}" for kind in ("gate", "log10_snr") for name, _ in net.named_parameters()}
    assert set(events.Tags()["histograms"]) == expected
    (drawn,) = events.Histograms("poprisk/gate/0.weight")
    assert (drawn.step, drawn.histogram_value.num) == (4, 32)


def test_tensorboard_by_directory(tmp_path):
    sink = TensorBoardSink(tmp_path / "runs")
    sink.scalars({"poprisk/mean_gate": 0.5}, 1)
    sink.close()
    assert isinstance(sink, Sink)
    assert any(path.name.startswith("events.out") for path in (tmp_path / "runs").iterdir())


@pytest.fixture(scope="module")
def no_network():
    """A server in the place of every proxy and of W&B itself, which nobody must call."""
    calls = []
    with socket.socket() as server, pytest.MonkeyPatch.context() as patch:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "ALL_PROXY", "WANDB_BASE_URL"):
            patch.setenv(name, address)
        patch.setenv("NO_PROXY", "")
        patch.setenv("no_proxy", "")
        patch.setenv("WANDB_SILENT", "true")

        def listen():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                calls.append(connection.recv(100))
                connection.close()

        threading.Thread(target=listen, daemon=True).start()
        yield calls


def test_wandb_offline_keeps_everything_here(tmp_path, no_network):
    import wandb

    net = network()
    optimizer = PopRiskAdamW(net.parameters())
    run = wandb.init(mode="offline", dir=tmp_path, project="poprisk")
    with watch(optimizer, wandb, model=net, every=4):
        for step in range(20):
            train(net, optimizer, 1, first=step)
            run.log({"loss": float(step)})  # its own rhythm; the meters have an axis of their own
    _, lines = readings_by_hand()
    summary = {name: run.summary[name] for name in (*NAMED, "poprisk/step", "loss")}
    histogram = run.summary["poprisk/gate/0.weight"]
    assert summary == pytest.approx(lines[-1][1] | {"poprisk/step": 20, "loss": 19.0})
    assert sum(histogram["values"]) == 32
    run.finish()
    file = next(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))
    while (content := file.read_bytes()).count(b"poprisk/mean_gate") < 5:  # another process writes it, at its own pace
        time.sleep(0.05)
    assert b"poprisk/log10_snr/2.bias" in content
    assert no_network == []


def test_wandb_begins_a_run_of_its_own(tmp_path, no_network):
    sink = WandbSink(mode="offline", dir=tmp_path, project="poprisk")
    sink.histogram("gate/w", torch.rand(100), 3)
    sink.scalars({"mean_gate": 0.5}, 3)
    assert (sink.run.summary["mean_gate"], sink.run.summary["poprisk/step"]) == (0.5, 3)
    with pytest.raises(HyperparameterError, match="a wandb run or arguments for a new one"):
        WandbSink(sink.run, project="other")
    sink.close()
    assert len(list(tmp_path.glob("wandb/offline-run-*/run-*.wandb"))) == 1
    assert no_network == []


def test_json_lines_are_whole_or_left_out(tmp_path):
    path = tmp_path / "run" / "meters.jsonl"
    sink = JsonLinesSink(path)
    sink.histogram("gate/w", torch.tensor([0.0, 0.5, 1.0]), 10)
    sink.scalars({"mean_gate": 0.5, "noise_scale": math.inf}, 10)
    sink.scalars({"mean_gate": 0.25}, 20)
    whole = path.read_bytes()
    read = JsonLinesSink.read(path)
    assert read[0]["mean_gate"] == 0.5
    assert read[0]["noise_scale"] is None
    assert sum(read[0]["histograms"]["gate/w"]["counts"]) == 3
    assert read[1] == {"step": 20, "mean_gate": 0.25}
    for cut in range(len(whole)):  # killed anywhere
        path.write_bytes(whole[:cut])
        assert JsonLinesSink.read(path) == read[: whole[:cut].count(b"\n")]
    JsonLinesSink(path).scalars({"mean_gate": 0.125}, 20)
    assert JsonLinesSink.read(path) == [read[0], {"step": 20, "mean_gate": 0.125}]


def test_a_full_disk_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "meters.jsonl"
    sink = JsonLinesSink(path)
    sink.scalars({"mean_gate": 0.5}, 10)
    before = path.read_bytes()

    def full(_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            sink.scalars({"mean_gate": 0.25}, 20)
    assert path.read_bytes() == before


@pytest.mark.parametrize("line", [b"not json", b"[1, 2]", b'{"mean_gate": 0.5}', b'{"step": "4"}'])
def test_a_file_of_something_else_is_refused(tmp_path, line):
    path = tmp_path / "meters.jsonl"
    path.write_bytes(json.dumps({"step": 1}).encode() + b"\n" + line + b"\n")
    with pytest.raises(DataError, match=r"line 2 of .* must be a JSON object with a step"):
        JsonLinesSink.read(path)


@pytest.mark.parametrize("writer", [None, "runs/x", print, Recorder, object()])
def test_what_cannot_be_written_to_is_refused(writer):
    optimizer = PopRiskAdamW(network().parameters())
    with pytest.raises(HyperparameterError, match=r"TensorBoard SummaryWriter, a wandb run, or a Sink .* got "):
        watch(optimizer, writer)
    assert optimizer._optimizer_step_pre_hooks == {}


def test_wandb_without_a_run_is_refused():
    import wandb

    with pytest.raises(HyperparameterError, match="wandb has no run yet"):
        watch(PopRiskAdamW(network().parameters()), wandb)


def test_an_optimizer_without_a_gate_is_refused():
    with pytest.raises(HyperparameterError, match="watch needs a PopRiskAdamW, got AdamW"):
        watch(torch.optim.AdamW(network().parameters()), Recorder())


@pytest.mark.parametrize("wrong", [0, -1, 2.5, "10", None])
@pytest.mark.parametrize("name", ["every", "histograms"])
def test_a_wrong_interval_is_refused(name, wrong):
    with pytest.raises(HyperparameterError, match=f"{name}.* a number of steps ≥ 1, got"):
        watch(PopRiskAdamW(network().parameters()), Recorder(), **{name: wrong})


def test_missing_packages_are_named_with_their_extras():
    code = (
        "import sys; sys.modules['tensorboard'] = sys.modules['wandb'] = None\n"
        "from poprisk.errors import MissingExtraError\n"
        "from poprisk.integrations.loggers import TensorBoardSink, WandbSink\n"
        "for make in (lambda: TensorBoardSink('unused'), WandbSink):\n"
        "    try:\n        make()\n"
        "    except MissingExtraError as error:\n        print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.splitlines() == [
        "logging to TensorBoard needs tensorboard, which is not installed: pip install 'poprisk[tensorboard]'",
        "logging to Weights & Biases needs wandb, which is not installed: pip install 'poprisk[wandb]'",
    ]


@pytest.mark.parametrize("content", ['{"a": 1}', '{"a": 1}\n{"b": 2}', "notes\n"])
def test_a_file_of_something_else_is_refused_and_left_alone(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(DataError):
        JsonLinesSink(path)
    assert path.read_text() == content
