"""KeepBest in trainers with two processes (DDP, gloo): both end with the same weights, the first one writes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
TRAINER = """
import sys

import torch
from tiny_qwen import trainer
from torch import distributed

from poprisk.integrations.huggingface_keep import keep_best

run = trainer(sys.argv[1], max_steps=6, per_device_train_batch_size=4, save_strategy="steps", save_steps=3)
kept = keep_best(run, 0.2, every=2)
run.train()
module = run.model
"""
LIGHTNING = """
import sys

import lightning.pytorch as pl
import torch
from test_lightning_keep import QUIET, Whole, data
from torch import distributed
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from poprisk.integrations.lightning_keep import KeepBestCallback

kept, module = KeepBestCallback(data()[1], F.cross_entropy, every=3), Whole()
trainer = pl.Trainer(
    max_epochs=3, devices=2, strategy="ddp", callbacks=[kept], logger=False, enable_checkpointing=False, **QUIET
)
trainer.fit(module, DataLoader(TensorDataset(*data()[0]), batch_size=16))
"""
SAME = """
flat = torch.cat([p.detach().flatten() for p in module.parameters()])
both = [torch.empty_like(flat) for _ in range(2)]
distributed.all_gather(both, flat)
assert torch.equal(*both)
assert kept.risk.measured >= 3
if distributed.get_rank() == 0:
    print("the same", kept.risk.step)
"""


@pytest.mark.slow
@pytest.mark.parametrize("script", [TRAINER, LIGHTNING], ids=["trainer", "lightning"])
def test_two_processes_keep_the_same_weights(script, tmp_path):
    (tmp_path / "script.py").write_text(script + SAME)
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*start, str(tmp_path / "script.py"), str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the same" in done.stdout
    if script is TRAINER:
        written = sorted(str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("poprisk_keep*"))
        assert written == ["checkpoint-3/poprisk_keep_best.pt", "checkpoint-6/poprisk_keep_best.pt"]
