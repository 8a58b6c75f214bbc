"""A tiny Qwen2-configured classifier and data of two topics, importable: nothing comes from a hub."""

import torch
from transformers import Qwen2Config, Qwen2ForSequenceClassification

from poprisk.integrations.huggingface_record import classification_problem

WORDS, LENGTH = 12, 6


def classifier(dropout=0.0, attention="eager"):
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=WORDS,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        num_labels=2,
        pad_token_id=0,
        attention_dropout=dropout,
        attn_implementation=attention,
    )
    return Qwen2ForSequenceClassification(config)


def sentences(count=40, ragged=False):
    """Words of the lower or the upper half; the labels of the first two are wrong."""
    generator = torch.Generator().manual_seed(4)
    rows = []
    for i in range(count):
        topic = i % 2
        words = (1 + 5 * topic + torch.randint(5, (LENGTH - (i % 3 if ragged else 0),), generator=generator)).tolist()
        label = 1 - topic if i < 2 else topic
        rows.append({"input_ids": words, "attention_mask": [1] * len(words), "labels": label})
    return rows


def problem(ragged=False):
    return classification_problem(classifier, sentences(ragged=ragged), name="topics")
