"""The paper's noisy DPO with TRL: Qwen2.5-0.5B-Instruct, 4-bit base, LoRA of rank 16, UltraFeedback, 30% swapped.

With --rehearse the same code runs offline on a CPU in a minute, with a tiny network and made-up pairs.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars, load_dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    TrainerCallback,
)
from trl import DPOConfig, DPOTrainer

from poprisk.integrations.huggingface import use_poprisk


@dataclass(frozen=True)
class Configuration:
    """The paper gives model, quantization, rank, data, share of swaps and seeds; the rest are common choices."""

    model: str | None = "Qwen/Qwen2.5-0.5B-Instruct"
    dataset: str = "trl-lib/ultrafeedback_binarized"
    four_bit: bool = True
    rank: int = 16
    lora_alpha: int = 32
    swapped: float = 0.3
    seeds: tuple[int, ...] = (0, 1, 2)
    lr: float = 5e-5
    beta: float = 0.1
    steps: int = 400
    evaluate_every: int = 25
    batch: int = 8
    train_pairs: int = 4000
    evaluation_pairs: int = 500
    max_length: int = 512
    rules: tuple[str, ...] = ("AdamW", "paper's rule", "PopRiskAdamW")


PAPER = Configuration()
REHEARSAL = replace(
    PAPER,
    model=None,
    four_bit=False,
    rank=2,
    seeds=(0,),
    lr=3e-3,
    steps=8,
    evaluate_every=4,
    train_pairs=64,
    evaluation_pairs=16,
    max_length=24,
)


def tokenizer(config: Configuration) -> Any:
    if config.model is not None:
        return AutoTokenizer.from_pretrained(config.model)
    words = ["<pad>", "<eos>", "<unk>", "say", *(f"{kind}{i}" for kind in ("kind", "rude", "noun") for i in range(20))]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def network(config: Configuration) -> Any:
    if config.model is None:
        torch.manual_seed(0)
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        return Qwen2ForCausalLM(
            Qwen2Config(vocab_size=64, num_key_value_heads=2, pad_token_id=0, eos_token_id=1, **sizes)
        )
    four_bit = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    quantized = {"quantization_config": four_bit} if config.four_bit else {}
    return AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.bfloat16, **quantized)


def pairs(config: Configuration, seed: int) -> tuple[Dataset, Dataset]:
    """Training pairs, a share of them swapped, and evaluation pairs, none of them swapped."""
    if config.model is None:
        train, evaluation = made_up(config.train_pairs, 1), made_up(config.evaluation_pairs, 2)
    else:
        train = load_dataset(config.dataset, split="train").shuffle(seed=0).select(range(config.train_pairs))
        evaluation = load_dataset(config.dataset, split="test").shuffle(seed=0).select(range(config.evaluation_pairs))
    count = len(train)
    swapped = set(random.Random(seed).sample(range(count), round(config.swapped * count)))

    def swap(row: dict[str, Any], index: int) -> dict[str, Any]:
        return {"chosen": row["rejected"], "rejected": row["chosen"]} if index in swapped else {}

    return train.map(swap, with_indices=True), evaluation


def made_up(count: int, seed: int) -> Dataset:
    rng = random.Random(seed)

    def answer(tone: str) -> str:
        return " " + " ".join(f"{tone}{rng.randrange(20)}" for _ in range(4))

    rows = [
        {"prompt": f"say noun{rng.randrange(20)}", "chosen": answer("kind"), "rejected": answer("rude")}
        for _ in range(count)
    ]
    return Dataset.from_list(rows)


class Rewards(TrainerCallback):
    """Accuracy and drift of the rewards on the evaluation pairs, every so many steps.

    TRL logs the mean reward of chosen and of rejected answers; drift needs the mean of their absolute values.
    """

    def __init__(self, config: Configuration) -> None:
        self.config, self.trainer, self.reference = config, None, None
        self.curves: dict[str, list[float]] = {"step": [], "accuracy": [], "margin": [], "drift": []}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Measures where it is time to."""
        if state.global_step % self.config.evaluate_every and state.global_step != self.config.steps:
            return
        if self.reference is None:
            self.reference = torch.cat(list(self.log_probabilities(adapters=False)))
        policy = torch.cat(list(self.log_probabilities(adapters=True)))
        reward = self.config.beta * (policy - self.reference)
        margin = reward[:, 0] - reward[:, 1]
        values = {"accuracy": (margin > 0).float(), "margin": margin, "drift": reward.abs()}
        self.curves["step"].append(state.global_step)
        for name, value in values.items():
            self.curves[name].append(value.mean().item())

    @torch.no_grad()
    def log_probabilities(self, adapters: bool) -> Iterator[torch.Tensor]:
        """Of chosen and rejected answers [pairs, 2], batch by batch."""
        model: Any = self.trainer.accelerator.unwrap_model(self.trainer.model)
        training = model.training
        model.eval()
        with nullcontext() if adapters else model.disable_adapter():
            for batch in self.trainer.get_eval_dataloader():
                tokens, counted = batch["input_ids"][:, 1:], batch["completion_mask"][:, 1:]
                logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
                each = logits.float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
                yield (each * counted).sum(-1).view(2, -1).T.cpu()  # TRL puts all chosen before all rejected
        model.train(training)


def prepare(config: Configuration, rule: str, seed: int, folder: str) -> tuple[DPOTrainer, Rewards]:
    training, evaluation = pairs(config, seed)
    measured = Rewards(config)
    arguments = DPOConfig(
        output_dir=folder,
        learning_rate=config.lr,
        lr_scheduler_type="constant",
        max_steps=config.steps,
        per_device_train_batch_size=config.batch,
        per_device_eval_batch_size=4,
        beta=config.beta,
        max_length=config.max_length,
        seed=seed,
        bf16=config.model is not None,
        use_cpu=config.model is None,
        logging_steps=config.evaluate_every,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    torch.manual_seed(seed)
    trainer = DPOTrainer(
        network(config),
        args=arguments,
        train_dataset=training,
        eval_dataset=evaluation,
        processing_class=tokenizer(config),
        peft_config=LoraConfig(
            r=config.rank, lora_alpha=config.lora_alpha, target_modules="all-linear", task_type="CAUSAL_LM"
        ),
        callbacks=[measured],
    )
    measured.trainer = trainer
    if rule == "paper's rule":  # Algorithm 1, everything else shared with AdamW
        use_poprisk(trainer, gate="soft", alpha=1.0, strength=1.0, rho=0.99)
    elif rule == "PopRiskAdamW":  # as the library recommends it
        use_poprisk(trainer, lr=config.lr)
    return trainer, measured


def train(config: Configuration, rule: str, seed: int, folder: str) -> dict[str, list[float]]:
    trainer, measured = prepare(config, rule, seed, folder)
    trainer.train()
    return measured.curves


def print_table(config: Configuration, curves: dict[str, list[dict[str, list[float]]]]) -> None:
    measures = {
        "final reward accuracy": lambda c: c["accuracy"][-1],
        "mean trajectory accuracy": lambda c: sum(c["accuracy"]) / len(c["accuracy"]),
        "worst-step accuracy": lambda c: min(c["accuracy"]),
        "mean absolute reward drift": lambda c: sum(c["drift"]) / len(c["drift"]),
    }
    print(f"\n{config.swapped:.0%} of the training pairs swapped, {len(config.seeds)} seeds, means")
    print(" " * 28 + "".join(f"{rule:>15}" for rule in curves))
    for name, measure in measures.items():
        means = [sum(measure(c) for c in found) / len(found) for found in curves.values()]
        print(f"{name:<28}" + "".join(f"{mean:15.3f}" for mean in means))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="tiny network, made-up pairs, CPU, nothing downloaded")
    parser.add_argument("--lr", type=float, help="shared by AdamW and the paper's rule")
    parser.add_argument("--steps", type=int, help="of the optimizer")
    parser.add_argument("--output", help="a JSON file for the curves")
    options = parser.parse_args()
    config = REHEARSAL if options.rehearse else PAPER
    given = {name: getattr(options, name) for name in ("lr", "steps") if getattr(options, name) is not None}
    config = replace(config, **given)
    disable_progress_bars()
    with tempfile.TemporaryDirectory() as folder:
        curves = {rule: [train(config, rule, seed, folder) for seed in config.seeds] for rule in config.rules}
    print_table(config, curves)
    if options.output:
        environment = {name: version(name) for name in ("poprisk", "torch", "transformers", "trl")}
        kept = {"kind": "dpo_paper", "environment": environment, "config": asdict(config), "result": {"curves": curves}}
        Path(options.output).write_text(json.dumps(kept, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
