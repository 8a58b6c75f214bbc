"""Record what a Hugging Face Trainer does, then ask the run which labels are wrong. Offline, a minute on a CPU."""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification, Trainer, TrainingArguments

from poprisk import Run, audit
from poprisk.integrations.huggingface_record import RecordRun, classification_problem

EXAMPLES, LENGTH, WORDS, CLASSES, WRONG = 240, 12, 40, 4, 0.1


def sentences() -> tuple[list[dict[str, list[int] | int]], torch.Tensor]:
    """Word lists of four topics with their labels, and which of these are wrong."""
    generator = torch.Generator().manual_seed(1)
    topic = torch.randint(CLASSES, (EXAMPLES,), generator=generator)
    each = WORDS // CLASSES
    own = topic[:, None] * each + torch.randint(each, (EXAMPLES, LENGTH), generator=generator)
    other = torch.randint(WORDS, (EXAMPLES, LENGTH), generator=generator)
    words = 1 + torch.where(torch.rand(EXAMPLES, LENGTH, generator=generator) < 0.6, own, other)
    wrong = torch.rand(EXAMPLES, generator=generator) < WRONG
    labels = torch.where(wrong, (topic + torch.randint(1, CLASSES, (EXAMPLES,), generator=generator)) % CLASSES, topic)
    return [{"input_ids": w, "labels": y} for w, y in zip(words.tolist(), labels.tolist(), strict=True)], wrong


def classifier() -> Qwen2ForSequenceClassification:
    """A small Qwen2-configured network, made from nothing."""
    config = Qwen2Config(
        vocab_size=WORDS + 1,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        num_labels=CLASSES,
        pad_token_id=0,
    )
    return Qwen2ForSequenceClassification(config)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--output", type=Path, default=None, help="keep the run here (default: a temporary folder)")
    options = parser.parse_args(arguments)
    data, wrong = sentences()
    problem = classification_problem(classifier, data, name="topics")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.output or Path(temporary) / "run"
        args = TrainingArguments(
            f"{temporary}/trainer",
            learning_rate=1e-3,
            max_steps=options.steps,
            per_device_train_batch_size=24,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=not torch.cuda.is_available(),
        )
        torch.manual_seed(0)
        record = RecordRun(folder, problem, every=10)  # the recording: this line and the callback
        Trainer(classifier(), args, train_dataset=data, callbacks=[record]).train()
        run = Run.load(folder, problem=problem)
        print(f"recorded by poprisk: {run}")
        print(f"loss of a batch {run.losses[0]:.3f} → {run.losses[-1]:.3f}")
        table = audit(run, tier="any", progress=False)
        print(table)
        found = int(wrong[table.order()[: int(wrong.sum())]].sum())
        print(f"of {int(wrong.sum())} wrong labels {found} are among the {int(wrong.sum())} most suspicious")


if __name__ == "__main__":
    main()
