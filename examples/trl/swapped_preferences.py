"""TRL's DPOTrainer with LoRA on preferences of which some are swapped: AdamW, then PopRiskAdamW. Offline, on a CPU."""

import argparse
import random
import tempfile

import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from poprisk.integrations.huggingface import use_poprisk

NOUNS = [f"noun{i}" for i in range(60)]
POLITE, RUDE = [f"kind{i}" for i in range(12)], [f"rude{i}" for i in range(12)]
WORDS = ["<pad>", "<eos>", "<unk>", "about", "say", "?", ".", *NOUNS, *POLITE, *RUDE]


def tokenizer() -> PreTrainedTokenizerFast:
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def answer(rng: random.Random, noun: str, tone: list[str]) -> str:
    """Three words, two of them of the tone."""
    words = [*rng.sample(tone, 2), rng.choice(POLITE + RUDE)]
    rng.shuffle(words)
    return f" say {noun} {' '.join(words)} ."


def pairs(count: int, swapped: float, seed: int) -> Dataset:
    """The politer answer is preferred, except in the swapped pairs."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        noun = rng.choice(NOUNS)
        both = [answer(rng, noun, POLITE), answer(rng, noun, RUDE)]
        chosen, rejected = both[::-1] if rng.random() < swapped else both
        rows.append({"prompt": f"about {noun} ?", "chosen": chosen, "rejected": rejected})
    return Dataset.from_list(rows)


def common(folder: str, lr: float, steps: int) -> dict:
    return {
        "output_dir": folder,
        "learning_rate": lr,
        "max_steps": steps,
        "per_device_train_batch_size": 32,
        "per_device_eval_batch_size": 100,
        "logging_steps": max(1, steps // 6),
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "bf16": False,
        "use_cpu": not torch.cuda.is_available(),
    }


def base_model(steps: int, folder: str) -> dict[str, torch.Tensor]:
    """A small Qwen2-configured network that has learned to answer in either tone."""
    torch.manual_seed(0)
    texts = pairs(600, swapped=0.5, seed=7)
    texts = Dataset.from_list([{"prompt": row["prompt"], "completion": row["chosen"]} for row in texts])
    args = SFTConfig(**common(folder, 3e-3, steps))
    trainer = SFTTrainer(network(), args=args, train_dataset=texts, processing_class=tokenizer())
    trainer.train()
    return trainer.model.state_dict()


def network() -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        pad_token_id=0,
        eos_token_id=1,
    )
    return Qwen2ForCausalLM(config)


def preference_training(name: str, lr: float, steps: int, weights: dict, folder: str) -> list[float]:
    """Accuracy on held-out pairs, none of them swapped, over training."""
    model = network()
    model.load_state_dict(weights)
    torch.manual_seed(0)
    trainer = DPOTrainer(
        model,
        args=DPOConfig(**common(folder, lr, steps), eval_strategy="steps", eval_steps=max(1, steps // 6)),
        train_dataset=pairs(300, swapped=0.3, seed=1),
        eval_dataset=pairs(300, swapped=0.0, seed=2),
        processing_class=tokenizer(),
        peft_config=LoraConfig(
            r=16, lora_alpha=32, target_modules="all-linear", lora_dropout=0.0, task_type="CAUSAL_LM"
        ),
    )
    if name == "PopRiskAdamW":
        use_poprisk(trainer)  # DPOTrainer takes no optimizer class: set it after construction
    trainer.train()
    return [100 * line["eval_rewards/accuracies"] for line in trainer.state.log_history if "eval_loss" in line]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=180)
    parser.add_argument("--adamw-lr", type=float, default=1e-3)
    options = parser.parse_args()
    disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        weights = base_model(2 * options.steps // 3, folder)
        rows = {
            name: preference_training(name, lr, options.steps, weights, folder)
            for name, lr in (("AdamW", options.adamw_lr), ("PopRiskAdamW", options.adamw_lr))
        }
    print("\nreward accuracy on held-out pairs, % (30% of the training pairs are swapped)")
    for name, values in rows.items():
        print(f"{name:<14} last {values[-1]:5.1f}   best {max(values):5.1f}   over time {[round(v) for v in values]}")


if __name__ == "__main__":
    main()
