"""PopRiskAdamW in the real Trainer, offline: the same as a loop by hand, through accumulation, kill and resume."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from tiny_qwen import arguments, model, sequences, trainer, weights
from torch import nn
from torch.testing import assert_close
from transformers import Trainer, TrainerCallback

from poprisk.errors import HyperparameterError, PopRiskWarning, StateDictError
from poprisk.integrations._readings import find_poprisk
from poprisk.integrations.huggingface import (
    METERS_FILE,
    PopRiskCallback,
    PopRiskFactory,
    poprisk_optimizer,
    use_poprisk,
)
from poprisk.optim import Gate
from poprisk.optim._adamw import PopRiskAdamW

HERE = Path(__file__).parent
METERS = {"active_fraction", "mean_gate", "noise_scale", "population_rate", "training_rate", "self_fit"}
pytestmark = [
    # the tokenizer-free Trainer, and torch's remark on a scheduler that a skipped step overtook
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning"),
]


def loop(steps, *, max_norm=1.0, lr=1e-2, batch=8):
    """What the Trainer does, by hand: groups, order, clipping, linear schedule with two steps of warm-up."""
    network = model()
    args = arguments("unused")
    helper = Trainer(network, args, train_dataset=sequences())
    torch.manual_seed(args.seed)
    decay = set(helper.get_decay_parameter_names(network))
    groups = [
        {"params": [p for n, p in network.named_parameters() if (n in decay) == wanted], "weight_decay": 0.1 * wanted}
        for wanted in (True, False)
    ]
    optimizer = PopRiskAdamW(groups, lr=lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda t: t / 2 if t < 2 else max(0.0, (steps - t) / (steps - 2))
    )
    batches = iter(helper.get_train_dataloader())
    network.train()
    for _ in range(steps):
        network(**next(batches)).loss.backward()
        if max_norm:
            nn.utils.clip_grad_norm_(network.parameters(), max_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return network, optimizer


def test_the_one_line_equals_a_loop_by_hand(tmp_path):
    args = arguments(tmp_path)
    run = trainer(tmp_path, pair=poprisk_optimizer(args))
    run.train()
    expected, _ = loop(8)
    assert_close(weights(run.model), weights(expected), rtol=0, atol=1e-7)
    optimizer = find_poprisk(run.optimizer)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert all("norm" in n or "bias" in n for n, p in run.model.named_parameters() if _in(p, optimizer.param_groups[1]))


def _in(p, group):
    return any(p is q for q in group["params"])


def test_every_way_in_gives_the_same_run(tmp_path):
    """Class and kwargs, text in optim_args, the factory, an optimizer by hand, and use_poprisk after construction."""
    text = "gate=soft,alpha=0.5,betas=(0.9,0.99),strength=2"
    gate = {"gate": Gate("soft", alpha=0.5, strength=2.0)}
    options = {**gate, "betas": (0.9, 0.99)}
    named = {"adam_beta1": 0.9, "adam_beta2": 0.99}
    ways = {
        "pair": lambda: trainer(tmp_path, pair=(PopRiskAdamW, {"lr": 1e-2, **options})),
        "text": lambda: trainer(tmp_path, pair=poprisk_optimizer(arguments(tmp_path, optim_args=text))),
        "factory": lambda: trainer(tmp_path, pair=(PopRiskFactory, {"lr": "1e-2", "weight_decay": 0.1, **options})),
        "after": lambda: use_poprisk(trainer(tmp_path, **named), gate="soft", alpha="0.5", strength=2),
        "over text": lambda: use_poprisk(trainer(tmp_path, **named, optim_args="gate=hard,rho=0.5"), **gate),
    }
    results = {}
    for name, way in ways.items():
        run = way()
        run.train()
        results[name] = weights(run.model)
    for name, result in results.items():
        assert_close(result, results["pair"], rtol=0, atol=0, msg=lambda m, name=name: f"{name}: {m}")


def test_four_micro_batches_equal_one_batch(tmp_path):
    whole = use_poprisk(trainer(tmp_path))
    split = use_poprisk(trainer(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4))
    whole.train()
    split.train()
    assert whole.state.global_step == split.state.global_step == 8
    assert_close(weights(split.model), weights(whole.model), rtol=0, atol=2e-6)


def test_kill_and_resume_gives_the_same_bits(tmp_path):
    """A process killed by SIGKILL after step 6, whose last checkpoint is of step 4."""
    code = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
from tiny_qwen import KillAt, trainer
from poprisk.integrations.huggingface import use_poprisk
use_poprisk(trainer(sys.argv[1], callbacks=[KillAt(6)], save_strategy="steps", save_steps=4)).train()
"""
    killed = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, timeout=600, check=False
    )
    assert killed.returncode == -9, killed.stderr.decode()
    resumed = use_poprisk(trainer(tmp_path / "run", save_strategy="steps", save_steps=4))
    resumed.train(resume_from_checkpoint=True)
    whole = use_poprisk(trainer(tmp_path / "whole"))
    whole.train()
    assert_close(weights(resumed.model), weights(whole.model), rtol=0, atol=0)
    ours, theirs = (find_poprisk(t.optimizer).state_dict()["state"] for t in (resumed, whole))
    assert_close(ours, theirs, rtol=0, atol=0)
    lines = [[line for line in t.state.log_history if "poprisk/mean_gate" in line] for t in (resumed, whole)]
    assert [line["poprisk/mean_gate"] for line in lines[0]] == [line["poprisk/mean_gate"] for line in lines[1]]
    stored = json.loads((tmp_path / "run" / METERS_FILE).read_text())["readings"]
    assert [r["step"] for r in stored] == [line["step"] for line in lines[1]]


def test_meters_are_logged_reported_and_stored(tmp_path):
    seen = []

    class Reporter(TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            seen.append(dict(logs))

    run = use_poprisk(
        trainer(tmp_path, callbacks=[Reporter()], logging_steps=2, save_strategy="steps", save_steps=4), every=1
    )
    run.train()
    lines = [line for line in run.state.log_history if "loss" in line]
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    for line, reported in zip(lines, seen, strict=False):
        assert {k.removeprefix("poprisk/") for k in line if k.startswith("poprisk/")} <= METERS
        assert {"poprisk/mean_gate", "poprisk/training_rate", "poprisk/population_rate"} <= set(line)
        assert {k: v for k, v in reported.items() if "poprisk" in k} == {
            k: v for k, v in line.items() if "poprisk" in k
        }
    stored = json.loads((tmp_path / METERS_FILE).read_text())
    assert stored["format_version"] == 1
    assert [r["mean_gate"] for r in stored["readings"]] == [line["poprisk/mean_gate"] for line in lines]
    saved = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    assert saved[1]["poprisk/mean_gate"] == lines[1]["poprisk/mean_gate"]


def test_looking_does_not_change_the_run(tmp_path):
    watched, alone = use_poprisk(trainer(tmp_path), every=1), use_poprisk(trainer(tmp_path), callback=False)
    watched.train()
    alone.train()
    assert_close(weights(watched.model), weights(alone.model), rtol=0, atol=0)


def test_the_last_line_is_the_last_reading(tmp_path):
    """Logged at step t: the gate of step t - 1, and the rates on the gradients of step t, as by hand."""
    run = use_poprisk(trainer(tmp_path, max_steps=5))
    run.train()
    _, optimizer = loop(5)
    logged = run.state.log_history[-2]
    assert logged["step"] == 5
    q = torch.cat([q.flatten() for q in optimizer.gates().values()])
    after = optimizer.overall_diagnostics()
    assert_close(after.mean_gate.item(), q.double().mean().item(), rtol=1e-6, atol=0)
    shorter = use_poprisk(trainer(tmp_path, max_steps=5))
    taken = []
    shorter.add_callback(_Before(taken))
    shorter.train()
    assert_close(logged["poprisk/mean_gate"], taken[-1], rtol=1e-6, atol=0)


class _Before(TrainerCallback):
    def __init__(self, taken):
        self.taken = taken

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        q = [q.flatten() for q in find_poprisk(optimizer).gates().values()]
        self.taken.append(torch.cat(q).double().mean().item() if q else math.nan)


def test_clipping_leaves_s_finite_and_the_gate_about_the_same(tmp_path):
    """Measured over many runs the mean gate moves by about a tenth (results/clipping.json)."""
    gates, norms = {}, []
    for max_norm in (0.0, 1.0, 0.1):
        run = trainer(tmp_path, max_steps=40, max_grad_norm=max_norm)
        use_poprisk(run, every=4, gate="soft", strength=1.0, alpha=0.1)
        run.train()
        optimizer = find_poprisk(run.optimizer)
        assert all(s["exp_var"].isfinite().all() for s in optimizer.state.values())
        lines = [line for line in run.state.log_history if "poprisk/mean_gate" in line][2:]
        gates[max_norm] = sum(line["poprisk/mean_gate"] for line in lines) / len(lines)
        norms += [line["grad_norm"] for line in lines if max_norm]
    assert max(norms) > 0.1, "something was clipped"
    assert gates[0.0] > 0.01
    for max_norm in (1.0, 0.1):
        assert abs(gates[max_norm] / gates[0.0] - 1) < 0.1, gates


@pytest.mark.parametrize("fused", [None, True], ids=["plain", "fused"])
@pytest.mark.parametrize("clip", [True, False], ids=["clipped", "unclipped"])
def test_fp16_scaling_skips_an_overflow_and_leaves_s_finite(clip, fused):
    """Trainer refuses fp16 on a CPU, so this is accelerate's part of it: prepare, scale, clip, the callback, step."""
    torch.manual_seed(0)
    network = nn.Linear(4, 3)
    inner = PopRiskAdamW.paper(network.parameters(), lr=1e-2, weight_decay=0.0, fused=fused)
    Accelerator(cpu=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=4)
    optimizer = AcceleratedOptimizer(inner, device_placement=True, scaler=scaler)
    callback = PopRiskCallback(every=1)
    x = torch.randn(16, 4)
    for step in range(12):
        with torch.autocast("cpu", dtype=torch.float16):
            loss = nn.functional.cross_entropy(network(x).float(), torch.arange(16) % 3)
        before = weights(network)
        scaler.scale(loss * (1e38 if step == 6 else 1.0)).backward()
        if clip:
            scaler.unscale_(inner)
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        callback.on_pre_optimizer_step(_Args, _State(step), None, optimizer=optimizer)
        optimizer.step()
        same = all(torch.equal(new, before[name]) for name, new in weights(network).items())
        assert same == (step in (0, 6)), "the gate is closed at the first step, and an overflow is skipped"
        assert optimizer.step_was_skipped == (step == 6 and not fused), "a fused step skips on its own, as torch's does"
        network.zero_grad()
    assert all(torch.isfinite(v).all() for state in inner.state.values() for v in state.values())
    assert all(state["step"] == 11 for state in inner.state.values())
    meters = callback.readings.flush()
    assert 0 < meters["poprisk/training_rate"] < 1, "of unscaled gradients"
    assert set(meters) == {"poprisk/" + name for name in METERS}


class _Args:
    logging_first_step, logging_strategy = False, "steps"


class _State:
    def __init__(self, step):
        self.global_step, self.logging_steps = step, 1


def test_the_round_trip_at_prepare_keeps_every_dtype():
    network = nn.Linear(3, 2).bfloat16()
    optimizer = PopRiskAdamW(network.parameters(), state_dtype={"s": torch.bfloat16})
    network(torch.ones(4, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    before = optimizer.state_dict()
    Accelerator(cpu=True)
    prepared = AcceleratedOptimizer(optimizer, device_placement=True)
    assert_close(prepared.state_dict()["state"], before["state"], rtol=0, atol=0)
    state = optimizer.state[network.weight]
    assert (state["exp_avg"].dtype, state["exp_avg_sq"].dtype, state["exp_var"].dtype) == (
        torch.float32,
        torch.float32,
        torch.bfloat16,
    )
    assert state["step"].device.type == "cpu"


def test_names_opt_out_of_the_gate(tmp_path):
    run = use_poprisk(trainer(tmp_path), ungated=("embed_tokens",), ungated_lr=1e-3)
    run.train()
    groups = find_poprisk(run.optimizer).param_groups
    assert [(g["gate"], g["weight_decay"], g["initial_lr"]) for g in groups] == [
        ("snr", 0.1, 1e-2),
        ("snr", 0.0, 1e-2),
        (None, 0.1, 1e-3),
    ]
    assert groups[2]["params"][0] is run.model.get_input_embeddings().weight
    sizes = sum(p.numel() for g in groups for p in g["params"])
    assert sizes == sum(p.numel() for p in run.model.parameters())
    assert PopRiskFactory()(model(), ungated=["embed"], lr=0.5).param_groups[2]["lr"] == 0.5


def test_going_on_from_an_adamw_checkpoint_keeps_the_new_lr(tmp_path):
    """The restored schedule carries AdamW's lr; the run's own, at the schedule's place, is what counts."""
    run = trainer(tmp_path, learning_rate=1e-3, save_strategy="steps", save_steps=4, max_steps=4)
    run.train()
    resumed = use_poprisk(trainer(tmp_path, max_steps=6))
    resumed.train(resume_from_checkpoint=True)
    state = find_poprisk(resumed.optimizer).state[resumed.model.get_input_embeddings().weight]
    assert state["step"] == 6
    assert state["var_step"] == 2
    rates = [line["learning_rate"] for line in resumed.state.log_history if "learning_rate" in line]
    assert rates[:4] == pytest.approx([0, 5e-4, 1e-3, 5e-4])
    assert rates[5] == pytest.approx(1e-2 / 4), "step 6 of 6 after 2 of warm-up"


def test_the_state_of_another_optimizer_is_refused(tmp_path):
    run = trainer(tmp_path, optim="sgd", save_strategy="steps", save_steps=4, max_steps=4)
    run.train()
    with pytest.raises(StateDictError, match="another optimizer, neither PopRiskAdamW nor"):
        use_poprisk(trainer(tmp_path, max_steps=6)).train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optim_args": "alhpa=1"}, "did you mean 'alpha'"),
        ({"optim_args": "alpha=much"}, "alpha must be a number or calibrated"),
        ({"optim_args": "betas=0.9,0.95"}, "name=value"),
        ({"optim_args": "rho"}, "name=value"),
    ],
)
def test_bad_optim_args_are_refused_in_one_line(tmp_path, options, message):
    with pytest.raises(HyperparameterError, match=message) as caught:
        use_poprisk(trainer(tmp_path, **options))
    assert "\n" not in str(caught.value)


def test_other_bad_input(tmp_path):
    run = trainer(tmp_path)
    run.create_optimizer()
    with pytest.raises(HyperparameterError, match="already has the optimizer"):
        use_poprisk(run)
    with pytest.raises(HyperparameterError, match="matches no trainable parameter"):
        use_poprisk(trainer(tmp_path), ungated=("router",)).train()
    with pytest.raises(HyperparameterError, match="ungated_lr needs the names of the ungated parameters"):
        poprisk_optimizer(ungated_lr=1e-3)
    with pytest.raises(HyperparameterError, match="every must be an integer"):
        PopRiskCallback(every=0)
    _, kwargs = poprisk_optimizer(arguments(tmp_path, learning_rate=5e-5))  # AdamW's units: nothing to warn of
    assert kwargs["lr"] == 5e-5
    with pytest.warns(PopRiskWarning, match="needs PopRiskAdamW, found AdamW"):
        trainer(tmp_path, callbacks=[PopRiskCallback()], max_steps=1).train()


def test_a_missing_package_names_the_extra():
    code = "import sys; sys.modules['transformers'] = None\nimport poprisk.integrations.huggingface"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert "MissingExtraError" in last
    assert "needs transformers, which is not installed: pip install 'poprisk[hf]'" in last


def test_one_pattern_may_be_given_alone():
    groups = PopRiskFactory()(nn.Linear(2, 2), ungated="bias").param_groups
    assert [(g["gate"], len(g["params"])) for g in groups] == [("snr", 1), (None, 1)]


@pytest.mark.parametrize("way", ["keyword", "text"])
def test_a_weight_decay_that_is_given_is_used(tmp_path, way):
    run = trainer(tmp_path, **({"optim_args": "weight_decay=0.3"} if way == "text" else {}))
    use_poprisk(run, **({"weight_decay": 0.3} if way == "keyword" else {}))
    assert [g["weight_decay"] for g in run.create_optimizer().param_groups] == [0.3, 0.0]


def test_options_from_several_places_are_checked_together(tmp_path):
    run = trainer(tmp_path, adam_beta1=0.95, adam_beta2=0.95, optim_args="state=shared")
    group = use_poprisk(run, rho=0.95).create_optimizer().param_groups[0]
    assert (group["state"], group["betas"], group["rho"]) == ("shared", (0.95, 0.95), 0.95)


@pytest.mark.parametrize("strategy", ["epoch", "no"])
def test_meters_are_kept_whatever_the_logging_strategy(tmp_path, strategy):
    use_poprisk(trainer(tmp_path, logging_strategy=strategy, max_steps=16)).train()
    steps = [r["step"] for r in json.loads((tmp_path / METERS_FILE).read_text())["readings"]]
    assert steps == ([8, 16] if strategy == "epoch" else list(range(2, 17)))


def test_an_own_callback_is_put_first_and_told_how_often(tmp_path):
    own = PopRiskCallback()
    run = use_poprisk(trainer(tmp_path, callbacks=[own]), every=3)
    assert run.callback_handler.callbacks[0] is own
    assert own.every == 3
    assert sum(isinstance(c, PopRiskCallback) for c in run.callback_handler.callbacks) == 1


def test_a_variance_source_is_passed_on():
    from poprisk import MicrobatchVariance

    source = MicrobatchVariance(nn.Linear(2, 1).parameters())
    cls, options = poprisk_optimizer(lr=1e-2, variance=source)
    assert (cls, options["variance"]) == (PopRiskAdamW, source)
