# type: ignore
"""The examples of docs/trainers.md run as they stand, on tiny models and data."""

from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
from test_lightning_keep import Whole, data
from tiny_classifier import classifier, sentences
from tiny_qwen import arguments, model, sequences
from tiny_text import COMMON, lora, network, pairs, tokenizer
from torch.utils.data import TensorDataset
from transformers import Trainer, TrainingArguments
from trl import DPOConfig

from poprisk import Run, cli, population_risk
from poprisk.report import KeptAnalysis
from readme_code import blocks

PAGE = (Path(__file__).parents[2] / "docs/trainers.md").read_text(encoding="utf-8")
RECORD, RECORD_LIGHTNING, TRAINER, BOTH, TRL, LIGHTNING, OPTAX, TRAIN = blocks(PAGE)
QUICKSTART = (Path(__file__).parents[2] / "docs/quickstart.md").read_text(encoding="utf-8")
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*does not have many workers.*"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec.*:FutureWarning"),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(code, **names):
    exec(code, names)
    return names


def recorded_by_the_trainer(code, more=""):
    """A page's block on a tiny classifier; the opened run, and the texts that its report shows."""
    rows = sentences()
    args = TrainingArguments("out", max_steps=4, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True)
    made, texts = classifier(), [f"text {i}" for i in range(len(rows))]
    names = {"model": made, "data": rows, "train_set": rows, "test_data": sentences(8), "args": args, "texts": texts}
    names |= {"tokenizer": SimpleNamespace(pad_token_id=0), "trainer": Trainer(made, args, train_dataset=rows)}
    run(f"{code}\n{more}", **names)
    opened = Run.load("runs/first")
    assert cli_code("report", "runs/first", "--output", "page.html") == 0
    return opened, [text for text in texts if text in Path("page.html").read_text(encoding="utf-8")]


def cli_code(*arguments):
    with pytest.raises(SystemExit) as caught:
        cli.main(list(arguments))
    return caught.value.code


@pytest.mark.parametrize(
    ("code", "more"), [(RECORD, ""), (blocks(QUICKSTART)[1], "trainer.train()")], ids=["trainers", "quickstart"]
)
def test_a_recorded_trainer_is_opened_by_the_command(folder, code, more):
    found, texts = recorded_by_the_trainer(code, more)
    assert found.num_steps == 4
    assert len(texts) == 40
    assert (KeptAnalysis(found).get("curves").value.test is None) == ("test_data" not in code)


def test_a_recorded_lightning_training_is_opened_by_the_command(folder, monkeypatch):
    monkeypatch.setattr(pl, "Trainer", quiet_trainer())
    module = Whole()
    inputs, labels = data()[0]
    names = {"module": module, "network": module.net, "inputs": inputs, "labels": labels}
    run(RECORD_LIGHTNING, **names, dataset=TensorDataset(inputs, labels))
    assert cli_code("audit", "runs/first", "--top", "3") == 0


def quiet_trainer():
    class Quiet(pl.Trainer):
        def __init__(self, **options):
            quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
            super().__init__(**options, **quiet, enable_checkpointing=False, log_every_n_steps=1)

    return Quiet


def test_the_page_shows_the_test_set():
    assert "test=test_data" in RECORD


def test_the_hugging_face_trainer(folder):
    found = run(TRAINER, model=model(), args=arguments("run"), data=sequences())
    assert found["kept"].risk.measured >= 1
    assert (folder / "final").is_dir()


def test_the_hugging_face_trainer_with_both_callbacks(folder):
    rows = sentences()
    args = TrainingArguments("out", max_steps=8, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True)
    words = SimpleNamespace(pad_token_id=0, decode=lambda tokens: f"words {tokens}")
    found = run(BOTH, model=classifier(), data=rows, args=args, tokenizer=words)
    opened = Run.load("runs/kept")
    assert opened.num_examples == len(found["rest"]) == 36
    assert opened.kept.risk.value == found["kept"].risk.value
    assert found["problem"].show(0) == f"words {found['rest'][0]['input_ids']}"
    assert population_risk(found["record"].run).value == opened.kept.risk.value


def test_trl(folder):
    args = DPOConfig("run", **COMMON)
    code, given = TRL.replace("every=50", "every=5"), {"model": network(), "tokenizer": tokenizer(), "lora": lora()}
    found = run(code, args=args, pairs=pairs(), **given)
    assert [each.step for each in found["kept"].keeper.curve.moments] == [5, 8]


def test_lightning(folder, monkeypatch):
    monkeypatch.setattr(pl, "Trainer", quiet_trainer())
    found = run(LIGHTNING, module=Whole(), dataset=TensorDataset(*data()[0]))
    assert found["kept"].risk.measured >= 2
    assert (folder / "final.ckpt").exists()


def test_optax():
    assert "averaged_params" in run(OPTAX)


TASK = """
import torch

from poprisk import Problem


def make_task():
    x = torch.randn(80, 3, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0).long()
    return Problem(torch.nn.Linear, "cross_entropy", x, y, arguments={"in_features": 3, "out_features": 2})
"""


def test_train():
    names = {}
    exec(TASK, names)
    assert len(run(TRAIN, problem=names["make_task"]())["run"].kept.held) == 4


def test_the_commands(folder, capsys):
    (folder / "task.py").write_text(TASK)
    commands = [line.removeprefix("$ poprisk ").split() for line in PAGE.splitlines() if line.startswith("$ poprisk ")]
    assert len(commands) == 2
    for command in commands:
        with pytest.raises(SystemExit) as ended:
            cli.main(command)
        assert ended.value.code == 0, capsys.readouterr().err
    assert "report.html" in capsys.readouterr().out
