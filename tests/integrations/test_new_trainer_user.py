# type: ignore
"""A text classifier of the Trainer, recorded, reviewed and trained again; its run opens without the program."""

import html
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification, Trainer, TrainingArguments

from poprisk import Run, analyze, audit, write_report
from poprisk.errors import RunError
from poprisk.integrations.huggingface_record import RecordRun, classification_problem
from poprisk.report import analysis_json

sys.path.insert(0, str(Path(__file__).parents[1] / "cli"))
from cli_calls import call

EXAMPLES = 160
WORDS = ["rain", "wind", "cloud", "storm", "sun", "loan", "bank", "coin", "price", "market"]


def texts(count, seed):
    """Sentences about the weather or about money."""
    random = np.random.default_rng(seed)
    topic = random.integers(0, 2, count)
    words = 5 * topic[:, None] + random.integers(0, 5, (count, 6))
    strays = random.random((count, 6)) < 0.2
    words[strays] = random.integers(0, 10, int(strays.sum()))
    return [" ".join(WORDS[w] for w in row) for row in words], topic


class Sentences(torch.utils.data.Dataset):
    """What the Trainer trains on: tokens, a mask, the label and, beside these, the text."""

    def __init__(self, sentences, labels):
        self.sentences, self.labels = sentences, labels

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, i):
        tokens = [1 + WORDS.index(word) for word in self.sentences[i].split()]
        rows = {"input_ids": torch.tensor(tokens), "attention_mask": torch.ones(len(tokens), dtype=torch.int64)}
        return {**rows, "labels": int(self.labels[i]), "text": self.sentences[i]}


def network():
    torch.manual_seed(0)
    size = {"dim": 16, "hidden_dim": 32, "n_layers": 1, "n_heads": 2, "max_position_embeddings": 8}
    return DistilBertForSequenceClassification(DistilBertConfig(vocab_size=11, num_labels=2, **size))


def trained(folder, sentences, labels, test, seed=0, *, path=None):
    """A training with the Trainer; its accuracy on the test set."""
    model, data = network(), Sentences(sentences, labels)
    record = [] if path is None else [RecordRun(path, classification_problem(model, data, test=test))]
    args = TrainingArguments(
        str(folder), max_steps=120, learning_rate=1e-2, per_device_train_batch_size=20, seed=seed, save_strategy="no",
        report_to=[], disable_tqdm=True, use_cpu=True, logging_steps=1000,
    )  # fmt: skip
    trainer = Trainer(model, args, train_dataset=data, callbacks=record)
    trainer.train()
    return trainer.evaluate(test)["eval_loss"]


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("walk")
    sentences, topic = texts(EXAMPLES, 0)
    random = np.random.default_rng(1)
    given = np.where(random.random(EXAMPLES) < 0.2, 1 - topic, topic)
    test = Sentences(*texts(200, 2))
    loss = trained(folder, sentences, given, test, path=folder / "run")
    return folder, sentences, topic, given, test, loss


def test_the_run_of_a_program_opens_by_itself(walked, capsys, monkeypatch):
    folder, sentences, _, given, _, _ = walked
    monkeypatch.chdir(folder)
    with pytest.raises(RunError, match="cannot be rebuilt"):
        _ = Run.load("run").problem  # nothing names code that could be executed
    for command in ("report", "audit", "analyze"):
        options = ("--output", "page.html") if command == "report" else ()
        code, _, err = call(capsys, command, "run", *options)
        assert code == 0, err
    page = html.unescape(Path("page.html").read_text())
    assert "Only the recorded losses" not in page
    assert "poprisk audit run --apply decisions.json --output corrected.npy" in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', Path("page.html").read_text(), re.S).group(1))
    assert {int(i): text for i, text in data["texts"].items()} == dict(enumerate(sentences))
    assert {row[0]: row[1] for row in data["rows"]} == dict(enumerate(given.tolist()))
    code, _, err = call(capsys, "report", "run", "--no-examples", "--output", "bare.html")
    assert code == 0, err
    assert not any(text in Path("bare.html").read_text() for text in sentences)
    code, _, err = call(capsys, "compare", "run", "run", "--output", "compare.html")
    assert code == 0, err
    assert sentences[0] in Path("compare.html").read_text() or "agree" in Path("compare.html").read_text()


def test_python_reads_what_the_command_line_reads(walked, capsys, monkeypatch):
    monkeypatch.chdir(walked[0])
    code, out, err = call(capsys, "audit", "run", "--json")
    assert code == 0, err
    table = audit("run", progress=False)
    assert (table.worst(20), list(table.notes)) == (json.loads(out)["worst"], json.loads(out)["notes"])
    assert "computed where the run was trained, and is kept in run" in table.notes[-1]
    code, out, err = call(capsys, "analyze", "run", "--json")
    assert code == 0, err
    found = analyze("run", progress=False)
    assert json.loads(out) == json.loads(json.dumps(analysis_json(found))) | {"kept": "run/analysis"}
    assert found.curves.train[-1] < found.curves.train[0]
    assert dict(enumerate(walked[1])) == found.contents.texts
    assert analyze("run", budget=0.5, progress=False).curves.train == found.curves.train  # nothing could be computed
    code, _, err = call(capsys, "report", "run", "--output", "page.html")
    assert code == 0, err
    by_python = write_report("run", "python.html", progress=False).read_text()
    written = r"poprisk report run (--output page.html )?--budget 30"
    assert re.sub(written, "", by_python) == re.sub(written, "", Path("page.html").read_text())
    for options in ({"retrain_budget": 3}, {"out_of_fold": torch.full((EXAMPLES, 2), 0.5)}, {"tier": "exact"}):
        with pytest.raises(RunError, match=r"problem=|the exact tier is not possible"):
            audit("run", progress=False, **options)


def test_nothing_is_retrained_without_the_program(walked, capsys, monkeypatch):
    monkeypatch.chdir(walked[0])
    for command in ("audit", "report", "analyze"):
        options = ("--output", "retrained.html") if command == "report" else ()
        code, out, err = call(capsys, command, "run", "--retrain", "5", *options)
        assert (code, out) == (2, "")
        assert "run: --retrain 5 cannot train: this was recorded in a program of your own" in err
        assert "poprisk.analyze(run, retrain=5)" in err
        assert err.count("\n") == 1
    assert not Path("retrained.html").exists()


def test_reviewed_labels_make_the_classifier_better(walked, capsys, monkeypatch):
    folder, sentences, topic, given, test, before = walked
    monkeypatch.chdir(folder)
    code, _, err = call(capsys, "audit", "run", "--output", "audit.csv")
    assert code == 0, err
    call(capsys, "report", "run", "--output", "page.html")
    data = json.loads(re.search(r'id="data">(.*?)</script>', Path("page.html").read_text(), re.S).group(1))
    at = {column["name"]: j for j, column in enumerate(data["columns"])}
    rows = [row for row in data["rows"] if row[at["is_suspect"]]]
    decisions = [
        {"example": i, "given": g, "suggested": s, "decided": int(topic[i])}
        for i, g, s in ([row[at[name]] for name in ("example", "given_label", "suggested_label")] for row in rows)
    ]
    about = {"run": data["run"], "data": data["fingerprint"], "examples": data["examples"], "targets": data["kind"]}
    kind = {"kind": "poprisk label decisions", "version": 1}
    Path("decisions.json").write_text(json.dumps({**kind, **about, "decisions": decisions}))
    code, _, err = call(capsys, "audit", "run", "--apply", "decisions.json", "--output", "corrected.npy")
    assert code == 0, err
    corrected = np.load("corrected.npy")
    assert (corrected != topic).sum() < 0.5 * (given != topic).sum()
    assert trained(folder, sentences, corrected, test) < before
    assert trained(folder, sentences, corrected, test, 1) < trained(folder, sentences, given, test, 1)
