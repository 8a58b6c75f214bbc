"""PopRiskAdamW in TRL's trainers, with LoRA adapters that the trainer itself creates, against the real packages."""

import subprocess
import sys
from pathlib import Path

import pytest
from datasets import Dataset
from tiny_qwen import weights
from tiny_text import COMMON, dpo, lora, network, tokenizer
from torch.testing import assert_close
from trl import SFTConfig, SFTTrainer

from poprisk.integrations._readings import find_poprisk
from poprisk.integrations.huggingface import PopRiskCallback, poprisk_optimizer, use_poprisk

HERE = Path(__file__).parent


def trained(run):
    return {name: w for name, w in weights(run.model).items() if "lora" in name}


def test_dpo_trains_the_adapters_and_nothing_else(tmp_path):
    run = dpo(tmp_path, max_steps=16, lr_scheduler_type="constant")
    use_poprisk(run, gate="soft", strength=1.0, alpha="calibrated", every=1)
    before = weights(run.model)
    run.train()
    optimizer = find_poprisk(run.optimizer)
    owned = {id(p) for g in optimizer.param_groups for p in g["params"]}
    names = {name for name, p in run.model.named_parameters() if id(p) in owned}
    assert len(names) == 8
    assert all("lora" in name for name in names)
    after = weights(run.model)
    moved = {name for name in after if not after[name].equal(before[name])}
    assert {name for name in names if "lora_B" in name} <= moved <= names
    lines = [line for line in run.state.log_history if "rewards/margins" in line]
    assert sum(line["rewards/margins"] for line in lines[-8:]) / 8 > 1e-3, "one pair in five is swapped"
    assert 0 < lines[-1]["poprisk/mean_gate"] < 1


def test_dpo_four_micro_batches_equal_one_batch(tmp_path):
    whole = use_poprisk(dpo(tmp_path))
    split = use_poprisk(dpo(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=4))
    whole.train()
    split.train()
    assert whole.state.global_step == split.state.global_step == 8
    assert_close(trained(split), trained(whole), rtol=0, atol=5e-6)


def test_dpo_kill_and_resume_gives_the_same_bits(tmp_path):
    code = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
from tiny_qwen import KillAt
from tiny_text import dpo
from poprisk.integrations.huggingface import use_poprisk
use_poprisk(dpo(sys.argv[1], callbacks=[KillAt(6)], save_strategy="steps", save_steps=4)).train()
"""
    killed = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "run")], capture_output=True, timeout=600, check=False
    )
    assert killed.returncode == -9, killed.stderr.decode()
    resumed = use_poprisk(dpo(tmp_path / "run", save_strategy="steps", save_steps=4))
    resumed.train(resume_from_checkpoint=True)
    whole = use_poprisk(dpo(tmp_path / "whole"))
    whole.train()
    assert any(w.any() for name, w in trained(whole).items() if "lora_B" in name)
    assert_close(trained(resumed), trained(whole), rtol=0, atol=0)
    states = (find_poprisk(t.optimizer).state_dict()["state"] for t in (resumed, whole))
    assert_close(*states, rtol=0, atol=0)


@pytest.mark.parametrize("way", ["pair", "after"])
def test_sft_with_adapters_made_inside(tmp_path, way):
    """SFTTrainer takes the pair; PopRiskAdamW then sees the adapters, because it is built when training begins."""
    args = SFTConfig(str(tmp_path), **COMMON)
    pair = {"optimizer_cls_and_kwargs": poprisk_optimizer(args), "callbacks": [PopRiskCallback()]}
    run = SFTTrainer(
        network(),
        args=args,
        train_dataset=Dataset.from_list([{"text": "the sky is blue ."}, {"text": "the rose is red ."}] * 32),
        processing_class=tokenizer(),
        peft_config=lora(),
        **(pair if way == "pair" else {}),
    )
    if way == "after":
        use_poprisk(run)
    run.train()
    assert any(w.any() for name, w in trained(run).items() if "lora_B" in name)
    losses = [line["loss"] for line in run.state.log_history if "loss" in line]
    assert losses[-1] < losses[0]
    assert "poprisk/mean_gate" in run.state.log_history[-2]
