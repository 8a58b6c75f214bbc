"""Recording in the real Trainer, offline: the run is the training that happened, and the rest is refused."""

import runpy
from pathlib import Path

import pytest
import torch
from tiny_classifier import classifier, problem, sentences
from torch.testing import assert_close
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from poprisk import Problem, Run, analyze, population_risk, replay
from poprisk.errors import DataError, HyperparameterError, RunError, UnexplainedGradientWarning
from poprisk.integrations.huggingface import KeepBestCallback, use_poprisk
from poprisk.integrations.huggingface_record import RecordRun, classification_problem
from poprisk.risk._audit.run_audit import audit

STEPS = 20
QUIET = {"save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_steps": 1, "seed": 3}
QUIET |= {"learning_rate": 3e-2, "max_steps": STEPS, "per_device_train_batch_size": 8}


def padded(rows):
    """What a collator with padding does."""
    longest = max(len(row["input_ids"]) for row in rows)
    batch = {
        name: torch.tensor([row[name] + [0] * (longest - len(row[name])) for row in rows])
        for name in ("input_ids", "attention_mask")
    }
    return {**batch, "labels": torch.tensor([row["labels"] for row in rows])}


def trainer(folder, *callbacks, model=None, data=None, **options):
    args = TrainingArguments(str(folder), **(QUIET | options))
    made = classifier() if model is None else model
    rows = sentences() if data is None else data
    return Trainer(made, args, train_dataset=rows, data_collator=padded, callbacks=list(callbacks))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    path = tmp_path_factory.mktemp("trainer")
    record = RecordRun(path / "run", Problem.build(problem))
    made = trainer(path, record)
    made.train()
    return made, path / "run"


def test_the_run_is_the_training(recorded, tmp_path):
    made, path = recorded
    run = Run.load(path)
    assert run.manifest["closed"]
    assert run.num_steps == STEPS
    logged = [line["loss"] for line in made.state.log_history if "loss" in line]
    assert_close(run.losses, torch.tensor(logged, dtype=torch.float64), rtol=1e-6, atol=1e-7)
    for epoch in range(4):
        drawn = torch.cat([run.batch(k) for k in range(5 * epoch, 5 * epoch + 5)])
        assert drawn.sort().values.tolist() == list(range(40))
    assert_close(run.weights(STEPS), torch.cat([p.detach().flatten() for p in made.model.parameters()]), rtol=0, atol=0)
    alone = trainer(tmp_path)
    alone.train()
    assert_close(alone.model.state_dict(), made.model.state_dict(), rtol=0, atol=0)  # as without the callback


def test_replay_verifies_and_the_audit_finds_the_wrong_labels(recorded):
    run = Run.load(recorded[1])
    assert replay(run).exact
    table = audit(run, tier="any", progress=False)
    assert {row["example"] for row in table.worst(2)} == {0, 1}


def test_padded_batches_and_the_gate_and_sparse_recording(tmp_path):
    record = RecordRun(None, problem(ragged=True), every=6)
    made = use_poprisk(trainer(tmp_path, record, data=sentences(ragged=True), max_steps=13))
    made.train()
    run = record.run
    assert run.manifest["optimizer"]["name"].endswith("PopRiskAdamW")
    assert run.checkpoints == [0, 6, 12, 13]
    assert max(replay(run, tolerate=True).deviations.values()) < 1e-4  # batches are padded to other lengths
    assert len(audit(run, tier="any", progress=False)) == 40


def test_an_interrupted_training_keeps_whole_steps(tmp_path):
    class Interrupting(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise KeyError("enough")

    record = RecordRun(tmp_path / "run", problem())
    made = trainer(tmp_path / "out", record, Interrupting(), save_strategy="steps", save_steps=3, save_only_model=True)
    with pytest.raises(KeyError, match="enough"):
        made.train()
    assert Run.load(tmp_path / "run").num_steps == 3  # up to the Trainer's last checkpoint
    record.close()
    run = Run.load(tmp_path / "run", problem=problem())
    assert run.num_steps == 5
    assert replay(run).exact


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_exact_tier_takes_eager_attention(tmp_path, attention):
    """The masks of the other kind look at their own numbers, which no derivative by examples can follow."""
    rows = sentences(12)
    record = RecordRun(None, classification_problem(classifier, rows, arguments={"attention": attention}))
    trainer(tmp_path, record, model=classifier(attention=attention), data=rows, max_steps=2).train()
    table = audit(record.run, progress=False)
    assert ("loo_loss" in table.columns) == (attention == "eager")
    reasons = [note for note in table.notes if note.startswith("no exact columns")]
    followed = "the model decides by its values in Python (data-dependent control flow), which torch.func cannot follow"
    assert reasons == ([] if attention == "eager" else [f"no exact columns: {followed}"])
    left_out = analyze(record.run, progress=False).left_out
    assert left_out.get("operators") == left_out.get("kernel") == (None if attention == "eager" else followed)
    if attention == "sdpa":
        assert left_out["risk"] == f"{followed}. Or use population_risk(run, retrain_budget=10)."


def test_a_penalty_that_begins_later_is_found_and_the_run_is_kept(tmp_path):
    class Penalized(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            begun = self.state.global_step >= 5
            return loss + 0.01 * sum(p.square().sum() for p in model.parameters()) if begun else loss

    record = RecordRun(None, Problem.build(problem))
    args = TrainingArguments(str(tmp_path), **QUIET)
    made = Penalized(classifier(), args, train_dataset=sentences(), data_collator=padded, callbacks=[record])
    with pytest.warns(UnexplainedGradientWarning, match=r"at step 8 .*an L2 penalty whose gradient is 0.02 times"):
        made.train()
    assert record.run.num_steps == STEPS
    assert record.run.unexplained.step == 2


def test_without_a_problem_there_are_batches_and_losses(tmp_path):
    record = RecordRun(tmp_path / "run")
    trainer(tmp_path / "out", record, max_steps=3).train()
    run = Run.load(tmp_path / "run")
    assert bool(run.losses.isfinite().all())
    assert [len(run.batch(k)) for k in range(3)] == [8, 8, 8]
    with pytest.raises(RunError, match="recorded without a problem"):
        audit(run, progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2"),
        ({"bf16": True}, "bf16=True gives other gradients"),
        ({"label_smoothing_factor": 0.1}, "label smoothing"),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_the_first_step(tmp_path, options, message):
    made = trainer(tmp_path, RecordRun(None, problem()), **options)
    with pytest.raises(RunError, match=message):
        made.train()
    assert made.state.global_step == 0


class Stream(IterableDataset):
    def __iter__(self):
        return iter(sentences())


def test_more_that_is_refused(tmp_path):
    rows = sentences()
    swapped = [{**row, "labels": 1 - row["labels"]} for row in rows]
    turned = [{**row, "input_ids": row["input_ids"][::-1]} for row in rows]
    cases = [
        ({"data": Stream()}, problem(), "Stream does not tell which examples"),
        ({}, classification_problem(classifier, rows[:30]), "30 examples, .* dataset 40: .* after keep_best"),
        ({}, classification_problem(classifier, swapped), "targets of the batch are not those of the problem"),
        ({}, classification_problem(classifier, turned), "gradient of step 0 is not that"),
        ({"model": classifier(dropout=0.1)}, problem(), r"attention_dropout=0.1 .*applies dropout"),
    ]
    for options, given, message in cases:
        made = trainer(tmp_path, RecordRun(None, given), **options)
        with pytest.raises(RunError, match=message):
            made.train()
        assert made.state.global_step == 0
    record = RecordRun(None, problem(), augmentation="unseeded")
    trainer(tmp_path, record, model=classifier(dropout=0.1), max_steps=2).train()
    assert record.run.obstacles
    with pytest.raises(RunError, match="nothing has been recorded yet"):
        RecordRun(None).run


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"input_ids": [1]}], "mappings with labels or label, got"),
        ([(1, 2)], "mappings with labels or label, got tuple"),
        ([], "got"),
        ([{"input_ids": [1], "label": 0}, {"label": 1}], "example 1 has"),
        ([{"input_ids": [1], "label": 0}, {"input_ids": [1, 2], "label": 1}], "there is no attention_mask"),
        ([{"input_ids": [1], "label": -100}], "classes from 0, got -100"),
        ([{"input_ids": [1], "label": "sport"}], "classes from 0, got 'sport': give"),
        ([{"input_ids": [1], "label": [0, 1]}], r"classes from 0, got \[0, 1\]: give"),
        ([{"input_ids": [1], "label": torch.tensor([0, 1])}], "classes from 0, got tensor"),
        ([{"input_ids": [1], "label": None}], "classes from 0, got None"),
        ([{"text": "a", "label": 0}], r"inputs such as input_ids, got \['text', 'label'\]: tokenize"),
        (DataLoader([{"input_ids": [1], "label": 0}]), "the Trainer trains on, got DataLoader: pass that"),
        ({"train": [{"input_ids": [1], "label": 0}]}, "the Trainer trains on, got dict: pass that"),
    ],
)
def test_data_that_are_no_classification_are_refused(rows, message):
    with pytest.raises(DataError, match=message):
        classification_problem(classifier, rows)


def test_what_else_is_no_classification_is_refused():
    rows = sentences()
    counted = [{**row, "labels": 1 + row["labels"]} for row in rows]
    with pytest.raises(DataError, match=r"padding must be a token's number, got object: use tokenizer\.pad_token_id"):
        classification_problem(classifier, rows, padding=object())
    with pytest.raises(DataError, match="classes from 0 to 1, as the model has num_labels=2, got 2"):
        classification_problem(classifier(), counted)
    with pytest.raises(DataError, match="as the model has num_labels=2"):
        classification_problem(classifier(), rows, test=counted)
    tensors = [{"input_ids": [1], "label": torch.tensor(i)} for i in range(2)]
    assert classification_problem(classifier(), tensors).targets.tolist() == [0, 1]


def test_a_recording_takes_a_folder_and_a_problem(tmp_path):
    with pytest.raises(HyperparameterError, match="got Problem and NoneType: write RecordRun"):
        RecordRun(problem())
    with pytest.raises(HyperparameterError, match="got Problem and str"):
        RecordRun(problem(), "runs/first")
    assert RecordRun(tmp_path, problem()).path == tmp_path


def test_the_example_runs(capsys):
    script = Path(__file__).parents[2] / "examples/huggingface/record_run.py"
    runpy.run_path(str(script))["main"](["--steps", "12"])
    said = capsys.readouterr().out
    assert "Run(12 steps" in said
    assert "wrong labels" in said


@pytest.mark.parametrize("record_first", [True, False])
def test_with_held_back_examples_the_run_has_the_kept_weights(record_first, tmp_path):
    data = sentences()
    record = RecordRun(tmp_path / "run", classification_problem(classifier, data[:28]))
    keep = KeepBestCallback(data[28:], every=4)
    made = trainer(tmp_path, *((record, keep) if record_first else (keep, record)), data=data[:28])
    made.train()
    run = Run.load(tmp_path / "run", problem=record.problem)
    assert run.num_steps == STEPS
    assert run.kept.risk.value == keep.risk.value
    found = population_risk(run)
    assert (found.method, found.value, found.standard_error) == ("held_back", keep.risk.value, keep.risk.standard_error)
    assert_close(run.kept.weights, {f"model.{k}": x for k, x in made.model.state_dict().items()}, rtol=0, atol=0)
    assert not torch.equal(run.weights(STEPS), torch.cat([p.detach().flatten() for p in made.model.parameters()]))
