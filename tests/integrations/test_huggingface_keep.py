"""KeepBest in the real Trainer and in TRL's: the trainer's own losses, the best weights at the end, exact resuming."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import tiny_classifier
import torch
from tiny_qwen import arguments, model, sequences, trainer, weights
from tiny_text import COMMON, dpo, network, pairs, tokenizer
from torch.testing import assert_close
from transformers import DataCollatorWithPadding, Trainer
from trl import SFTConfig, SFTTrainer

from poprisk import KeepBest, hold_back
from poprisk.errors import DataError, HyperparameterError, RunError
from poprisk.integrations.huggingface import KeepBestCallback, keep_best
from poprisk.integrations.huggingface_keep import STATE_FILE

HERE = Path(__file__).parent
pytestmark = [pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")]
TAILS = {"tail": (0.2, 0.5), "every": 2}


def held_loss(run, held):
    """The trainer's own mean loss of the held-back examples, for the model as it is."""
    run.model.eval()
    collate = run.data_collator
    if hasattr(held, "column_names"):
        held = run._remove_unused_columns(held)
    with torch.no_grad():
        batch = run._prepare_inputs(collate([held[i] for i in range(len(held))]))
        return float(run.compute_loss(run.model, batch))


def test_a_training_ends_with_the_best_weights_that_were_measured(tmp_path):
    run = trainer(tmp_path, max_steps=12)
    kept = keep_best(run, 0.2, **TAILS)
    assert len(run.train_dataset) == 51
    run.train()
    means = [float(each.losses.mean()) for each in kept.keeper.curve.moments]
    assert len(means) == 2 * 6
    assert kept.risk.valid
    assert 0 < kept.risk.step <= 12
    assert_close(held_loss(run, kept.held), min(means), rtol=1e-4, atol=1e-5)
    lines = [line for line in run.state.log_history if "poprisk/held_back_loss" in line]
    assert [line["step"] for line in lines] == [2, 4, 6, 8, 10, 12]
    assert run.state.log_history[-1]["poprisk/held_back_risk"] == kept.risk.value
    run.save_model(tmp_path / "final")
    saved = type(run.model).from_pretrained(tmp_path / "final")
    assert_close(weights(saved), weights(run.model), rtol=0, atol=0)


def test_training_itself_does_not_change(tmp_path, monkeypatch):
    data, held = hold_back(sequences(), 0.2)
    plain, kept = (Trainer(model(), arguments(tmp_path), train_dataset=data) for _ in range(2))
    last = {}
    keep_best(kept, held, every=1)
    original = KeepBest.finish

    def finish(self):
        last.update(weights(self._model))
        return original(self)

    monkeypatch.setattr(KeepBest, "finish", finish)
    kept.train()
    plain.train()
    assert_close(last, weights(plain.model), rtol=0, atol=0)


def test_gradient_accumulation_counts_optimizer_steps(tmp_path):
    run = trainer(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4)
    kept = keep_best(run, 0.2, tail=None, every=2)
    run.train()
    assert [each.step for each in kept.keeper.curve.moments] == [2, 4, 6, 8]


def test_kill_and_resume_gives_the_same_bits(tmp_path):
    """A process killed by SIGKILL after step 6, whose last checkpoint is of step 4."""
    code = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
from tiny_qwen import KillAt, trainer
from poprisk.integrations.huggingface import keep_best
run = trainer(sys.argv[1], callbacks=[KillAt(6)], save_strategy="steps", save_steps=4)
keep_best(run, 0.2, tail=(0.2, 0.5), every=1)
run.train()
"""
    killed = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, timeout=600, check=False
    )
    assert killed.returncode == -9, killed.stderr.decode()
    assert (tmp_path / "run" / "checkpoint-4" / STATE_FILE).exists()
    assert not list((tmp_path / "run").glob("*.pt"))
    ended = []
    for folder, resume in (("run", True), ("whole", False)):
        run = trainer(tmp_path / folder, save_strategy="steps", save_steps=4)
        kept = keep_best(run, 0.2, tail=(0.2, 0.5), every=1)
        run.train(resume_from_checkpoint=resume)
        ended.append((weights(run.model), kept.risk, kept.keeper.curve.state()))
    assert_close(ended[0][0], ended[1][0], rtol=0, atol=0)
    assert (ended[0][1].value, ended[0][1].step) == (ended[1][1].value, ended[1][1].step)
    assert_close(ended[0][2]["losses"], ended[1][2]["losses"], rtol=0, atol=0)


def test_a_kill_between_the_two_files_of_a_checkpoint_can_be_resumed(tmp_path):
    run = trainer(tmp_path / "run", max_steps=4, save_strategy="steps", save_steps=4)
    keep_best(run, 0.2)
    run.train()
    (tmp_path / "run" / "checkpoint-4" / STATE_FILE).replace(tmp_path / "run" / "poprisk_keep_best-4.pt")
    again = trainer(tmp_path / "run", save_strategy="no")
    kept = keep_best(again, 0.2)
    again.train(resume_from_checkpoint=True)
    assert kept.keeper.steps == 8
    elsewhere = trainer(tmp_path / "other", save_strategy="no")
    keep_best(elsewhere, 0.2)
    with pytest.raises(RunError, match="resume_from="):
        elsewhere.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))


@pytest.mark.parametrize("ragged", [False, True])
def test_classes_are_chosen_by_accuracy_as_a_plain_callback(tmp_path, ragged):
    data = tiny_classifier.sentences(60, ragged=ragged)
    callback = KeepBestCallback(data[:20], every=2)
    collator = DataCollatorWithPadding(tokenizer()) if ragged else None
    args = arguments(tmp_path, max_steps=10)
    run = Trainer(
        tiny_classifier.classifier(), args, train_dataset=data[20:], callbacks=[callback], data_collator=collator
    )
    run.train()
    assert callback.risk.accuracy == pytest.approx(1 - float(callback.keeper.curve.best.scores.mean()))
    assert run.state.log_history[-1]["poprisk/held_back_accuracy"] == callback.risk.accuracy
    assert any("poprisk/held_back_accuracy" in line for line in run.state.log_history[:-1])


def test_a_loss_that_outputs_do_not_explain_is_measured_example_by_example(tmp_path):
    run = trainer(tmp_path, label_smoothing_factor=0.2)
    kept = keep_best(run, 0.2, tail=None, every=4)
    run.train()
    assert_close(
        held_loss(run, kept.held), min(float(e.losses.mean()) for e in kept.keeper.curve.moments), rtol=1e-4, atol=1e-5
    )
    assert kept.keeper._block.one_at_a_time


def test_sft_keeps_the_best_and_leaves_its_metrics_alone(tmp_path):
    columns = ["prompt", "chosen", "rejected"]
    texts = pairs().map(lambda row: {"text": row["prompt"] + row["chosen"]}, remove_columns=columns)
    args = SFTConfig(str(tmp_path), **COMMON, max_length=32)
    run = SFTTrainer(network(), args=args, train_dataset=texts, processing_class=tokenizer())
    kept = keep_best(run, 0.25, every=2)
    run.train()
    assert kept.risk.valid
    assert not kept.keeper._block.one_at_a_time  # from the log-probabilities of the tokens
    assert not run._metrics["eval"]
    assert_close(
        held_loss(run, kept.held), min(float(e.losses.mean()) for e in kept.keeper.curve.moments), rtol=1e-4, atol=1e-5
    )


def test_dpo_keeps_the_best_adapter_by_its_own_loss(tmp_path):
    run = dpo(tmp_path)
    kept = keep_best(run, 0.25, every=4)
    run.train()
    assert kept.risk.valid
    assert math.isnan(kept.risk.accuracy)
    assert kept.keeper._block.one_at_a_time
    assert {each.step for each in kept.keeper.curve.moments} == {4, 8}
    assert not run._metrics["eval"]
    measured = min(float(e.losses.mean()) for e in kept.keeper.curve.moments)
    assert_close(held_loss(run, kept.held), measured, rtol=1e-4, atol=1e-5)


def test_what_cannot_work_is_refused(tmp_path):
    run = trainer(tmp_path)
    run.args.load_best_model_at_end = True
    keep_best(run)
    with pytest.raises(HyperparameterError, match="load_best_model_at_end"):
        run.train()
    with pytest.raises(HyperparameterError, match=r"use 0\.05"):
        keep_best(trainer(tmp_path), 0)
    run = trainer(tmp_path)
    keep_best(run, 0.2, metric="accuracy", every=1)
    with pytest.raises(DataError, match="use metric"):
        run.train()
