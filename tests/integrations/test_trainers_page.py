"""The examples of docs/trainers.md run as they stand, on tiny models and data."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
from test_lightning_keep import Whole, data
from tiny_qwen import arguments, model, sequences
from tiny_text import COMMON, lora, network, pairs, tokenizer
from torch.utils.data import TensorDataset
from trl import DPOConfig

from poprisk import cli
from readme_code import blocks

PAGE = (Path(__file__).parents[2] / "docs/trainers.md").read_text(encoding="utf-8")
TRAINER, TRL, LIGHTNING, OPTAX, TRAIN = blocks(PAGE)
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


def test_the_hugging_face_trainer(folder):
    found = run(TRAINER, model=model(), args=arguments("run"), data=sequences())
    assert found["kept"].risk.measured >= 1
    assert (folder / "final").is_dir()


def test_trl(folder):
    args = DPOConfig("run", **COMMON)
    code, given = TRL.replace("every=50", "every=5"), {"model": network(), "tokenizer": tokenizer(), "lora": lora()}
    found = run(code, args=args, pairs=pairs(), **given)
    assert [each.step for each in found["kept"].keeper.curve.moments] == [5, 8]


def test_lightning(folder, monkeypatch):
    class Quiet(pl.Trainer):
        def __init__(self, **options):
            quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False, "logger": False}
            super().__init__(**options, **quiet, enable_checkpointing=False, log_every_n_steps=1)

    monkeypatch.setattr(pl, "Trainer", Quiet)
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
