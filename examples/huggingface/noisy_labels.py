"""Hugging Face Trainer on noisy labels: AdamW, then PopRiskAdamW in one line. Offline, about a minute on a CPU."""

import argparse
import tempfile

import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification, Trainer, TrainingArguments

from poprisk.integrations.huggingface import use_poprisk

LENGTH, WORDS, CLASSES = 24, 60, 4


def sentences(count: int, wrong: float, seed: int) -> list[dict[str, list[int] | int]]:
    """Word lists of four topics: a third of the words belong to the topic. A share of the labels is wrong."""
    generator = torch.Generator().manual_seed(seed)
    topic = torch.randint(CLASSES, (count,), generator=generator)
    words = torch.randint(1, WORDS, (count, LENGTH), generator=generator)
    own = (
        1 + topic[:, None] * (WORDS // CLASSES) + torch.randint(WORDS // CLASSES, (count, LENGTH), generator=generator)
    )
    words = torch.where(torch.rand(count, LENGTH, generator=generator) < 1 / 3, own.clamp(max=WORDS - 1), words)
    other = (topic + torch.randint(1, CLASSES, (count,), generator=generator)) % CLASSES
    label = torch.where(torch.rand(count, generator=generator) < wrong, other, topic)
    return [{"input_ids": w, "labels": y} for w, y in zip(words.tolist(), label.tolist(), strict=True)]


def classifier(seed: int) -> Qwen2ForSequenceClassification:
    """A small Qwen2-configured network, made from nothing."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=WORDS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
        pad_token_id=0,
    )
    return Qwen2ForSequenceClassification(config)


def accuracy(prediction) -> dict[str, float]:
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


def train(name: str, lr: float, steps: int, folder: str) -> Trainer:
    args = TrainingArguments(
        f"{folder}/{name}",
        learning_rate=lr,
        max_steps=steps,
        per_device_train_batch_size=64,
        eval_strategy="steps",
        eval_steps=max(1, steps // 8),
        logging_steps=max(1, steps // 8),
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    trainer = Trainer(
        classifier(seed=0),
        args,
        train_dataset=sentences(1500, wrong=0.3, seed=1),
        eval_dataset=sentences(1000, wrong=0.0, seed=2),
        compute_metrics=accuracy,
    )
    if name == "PopRiskAdamW":
        use_poprisk(trainer)  # the one line
    trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--adamw-lr", type=float, default=1e-3)
    parser.add_argument("--output", default=None, help="keep the runs here (default: a temporary folder)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.output or temporary
        rows = {}
        for name, lr in (("AdamW", options.adamw_lr), ("PopRiskAdamW", options.adamw_lr)):
            history = train(name, lr, options.steps, folder).state.log_history
            rows[name] = [100 * line["eval_accuracy"] for line in history if "eval_accuracy" in line]
            gates = [line["poprisk/mean_gate"] for line in history if "poprisk/mean_gate" in line]
        print("\nclean test accuracy, % (30% of the training labels are wrong)")
        for name, values in rows.items():
            print(
                f"{name:<14} last {values[-1]:5.1f}   best {max(values):5.1f}   over time {[round(v) for v in values]}"
            )
        print(f"mean gate over time {[round(gate, 4) for gate in gates]}")
        if options.output:
            print(f"meters of the run: {folder}/PopRiskAdamW/poprisk_meters.json")


if __name__ == "__main__":
    main()
