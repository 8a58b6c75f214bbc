"""Our Llama against transformers, our adapters against peft, our DPO loss and its gradient against TRL's trainer."""

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from tiny_text import COMMON, WORDS, tokenizer
from torch.testing import assert_close
from transformers import LlamaConfig, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer

from poprisk_lab.data.llama import Lora, StackedLlama
from poprisk_lab.data.llama_weights import load_llama
from poprisk_lab.paper.dpo.task import dpo_losses, rewards

LORA = Lora(rank=4, alpha=8.0)
PEFT = LoraConfig(
    r=4,
    lora_alpha=8,
    target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    lora_dropout=0.0,
    task_type="CAUSAL_LM",
)


def llama(tied=True):
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            rope_parameters={"rope_type": "default", "rope_theta": 3000.0},
            rms_norm_eps=1e-4,
            tie_word_embeddings=tied,
            initializer_range=0.3,
            pad_token_id=0,
            eos_token_id=1,
        )
    ).eval()


def peft_adapters(model):
    """A peft model's adapters under our names, with a member's axis; B drawn, as it starts at zero."""
    torch.manual_seed(1)
    ours = {}
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.2)
            layer, target = name.split("layers.")[1].split(".")[0], name.split("_proj")[0].split(".")[-1]
            ours[f"layer{layer}.{target}.{'A' if 'lora_A' in name else 'B'}"] = parameter
    return ours


def stacked(parameters):
    return {name: p.detach().clone().unsqueeze(0).requires_grad_() for name, p in parameters.items()}


@pytest.mark.parametrize("tied", [True, False])
def test_hidden_states_and_logits_are_those_of_transformers(tmp_path, tied):
    reference = llama(tied)
    reference.save_pretrained(tmp_path)
    ours = StackedLlama(load_llama(tmp_path))
    assert (ours.llama.head is ours.llama.embedding) == tied
    tokens = torch.randint(len(WORDS), (3, 12))
    with torch.no_grad():
        wanted = reference(tokens, output_hidden_states=True)
        hidden = ours.hidden(None, tokens[None])[0]
    assert_close(hidden, wanted.hidden_states[-1], rtol=1e-5, atol=1e-5)
    assert_close(hidden @ ours.llama.head.T, wanted.logits, rtol=1e-5, atol=1e-4)


def test_adapters_and_their_gradients_are_those_of_peft(tmp_path):
    base = llama()
    base.save_pretrained(tmp_path)
    model = get_peft_model(base, PEFT)
    theirs = peft_adapters(model)
    ours = stacked(theirs)
    assert set(ours) == set(LORA.initial(load_llama(tmp_path).shape, torch.Generator()))
    tokens = torch.randint(len(WORDS), (3, 12))
    mask = torch.arange(12).expand(3, 12) >= torch.tensor([[3], [5], [1]])
    each = model(tokens).logits[:, :-1].log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    wanted = (each * mask[:, 1:]).sum(-1)
    got = StackedLlama(load_llama(tmp_path), LORA).log_probability(ours, tokens[None], mask[None])[0]
    assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    want = torch.autograd.grad(wanted.sin().sum(), list(theirs.values()))
    have = torch.autograd.grad(got.sin().sum(), list(ours.values()))
    assert_close([g[0] for g in have], list(want), rtol=1e-4, atol=1e-5)


@pytest.fixture
def trainer(tmp_path):
    base = llama()
    base.save_pretrained(tmp_path / "base")
    things = ["sky", "grass", "sun", "rose"]
    rows = [
        {"prompt": f"what colour is the {t} ?", "chosen": f" the {t} is blue .", "rejected": " red ."} for t in things
    ]
    options = COMMON | {"per_device_train_batch_size": 4, "beta": 0.3}
    made = DPOTrainer(
        base,
        args=DPOConfig(str(tmp_path / "run"), **options),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
        peft_config=PEFT,
    )
    made.model.eval()
    return made, StackedLlama(load_llama(tmp_path / "base"), LORA)


def test_the_loss_of_a_batch_and_its_gradient_are_those_of_trl(trainer):
    """The whole step: tokens, log-probabilities, reference without adapters, loss, gradient of every adapter."""
    theirs, model = trainer
    parameters = peft_adapters(theirs.model)
    ours = stacked(parameters)
    inputs = next(iter(theirs.get_train_dataloader()))
    wanted = theirs.compute_loss(theirs.model, inputs)
    want = torch.autograd.grad(wanted, list(parameters.values()))

    tokens, mask = inputs["input_ids"], inputs["completion_mask"].bool()  # TRL's batch: all chosen, then all rejected
    assert int(mask.sum(1).max()) > int(mask.sum(1).min()), "answers of different lengths, so padding is tested too"
    reference = model.log_probability(None, tokens[None], mask[None])[0].view(2, -1).T
    policy = model.log_probability(ours, tokens[None], mask[None])[0].view(2, -1).T
    loss = dpo_losses(rewards(policy, reference, beta=0.3), torch.zeros(len(policy), dtype=torch.bool)).mean()
    assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    have = torch.autograd.grad(loss, list(ours.values()))
    assert_close([g[0] for g in have], list(want), rtol=1e-4, atol=1e-5)
    assert max(float(g.abs().max()) for g in want) > 1e-2, "there is something to compare"


def test_a_swapped_pair_is_one_whose_answers_changed_places(trainer):
    theirs, model = trainer
    ours = stacked(peft_adapters(theirs.model))
    inputs = next(iter(theirs.get_train_dataloader()))
    half = len(inputs["input_ids"]) // 2
    exchanged = {name: torch.cat((x[half:], x[:half])) for name, x in inputs.items()}
    wanted = theirs.compute_loss(theirs.model, exchanged).detach()
    tokens, mask = inputs["input_ids"], inputs["completion_mask"].bool()
    with torch.no_grad():
        policy, reference = (model.log_probability(a, tokens[None], mask[None])[0].view(2, -1).T for a in (ours, None))
    loss = dpo_losses(rewards(policy, reference, beta=0.3), torch.ones(half, dtype=torch.bool)).mean()
    assert_close(loss, wanted, rtol=1e-5, atol=1e-6)


def example():
    path = Path(__file__).parents[3] / "examples" / "dpo_paper" / "noisy_dpo.py"
    spec = importlib.util.spec_from_file_location("noisy_dpo_example", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_paper_sized_example_measures_what_trl_measures(tmp_path, capsys):
    """Rehearsed offline: its rewards on evaluation pairs are TRL's, and its swaps are the exact share."""
    script = example()
    config = replace(script.REHEARSAL, steps=4, evaluate_every=2)
    trainer, measured = script.prepare(config, "paper's rule", 0, str(tmp_path))
    trainer.train()
    wanted = trainer.evaluate()
    assert measured.curves["step"] == [2, 4]
    assert measured.curves["margin"][-1] == pytest.approx(wanted["eval_rewards/margins"], rel=1e-4, abs=1e-7)
    assert measured.curves["accuracy"][-1] == pytest.approx(wanted["eval_rewards/accuracies"])
    assert measured.curves["drift"][-1] > 0
    assert type(trainer.optimizer.optimizer).__name__ == "PopRiskAdamW"
    clean, noisy = (script.pairs(replace(config, swapped=share), 0)[0] for share in (0.0, 0.3))
    changed = [a != b for a, b in zip(clean["chosen"], noisy["chosen"], strict=True)]
    assert sum(changed) == round(0.3 * config.train_pairs)
    assert [b for b, c in zip(noisy["rejected"], changed, strict=True) if c] == [
        a for a, c in zip(clean["chosen"], changed, strict=True) if c
    ]
    script.print_table(config, {"paper's rule": [measured.curves]})
    assert "mean absolute reward drift" in capsys.readouterr().out
    assert (script.PAPER.model, script.PAPER.rank, script.PAPER.swapped, script.PAPER.four_bit) == (
        "Qwen/Qwen2.5-0.5B-Instruct",
        16,
        0.3,
        True,
    )
