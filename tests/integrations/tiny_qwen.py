"""A tiny Qwen2-configured model, data and trainer, the same in every process: nothing comes from a hub."""

import os
import signal

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainerCallback, TrainingArguments

VOCABULARY, LENGTH = 32, 10


def model(seed=0):
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        attention_dropout=0.0,
    )
    return Qwen2ForCausalLM(config)


def sequences(count=64, seed=1):
    """Noisy counting: each token is the one before plus one, or, one time in ten, any other."""
    generator = torch.Generator().manual_seed(seed)
    start = torch.randint(VOCABULARY, (count, 1), generator=generator)
    tokens = (start + torch.arange(LENGTH)) % VOCABULARY
    wrong = torch.rand(tokens.shape, generator=generator) < 0.1
    tokens = torch.where(wrong, torch.randint(VOCABULARY, tokens.shape, generator=generator), tokens)
    return [{"input_ids": row, "labels": row} for row in tokens.tolist()]


def arguments(folder, **options):
    defaults = {
        "max_steps": 8,
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "lr_scheduler_type": "linear",
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 3,
    }
    return TrainingArguments(str(folder), **(defaults | options))


def trainer(folder, *, network=None, pair=None, callbacks=(), **options):
    return Trainer(
        network or model(),
        arguments(folder, **options),
        train_dataset=sequences(),
        optimizer_cls_and_kwargs=pair,
        callbacks=list(callbacks),
    )


def weights(network):
    return {name: p.detach().clone() for name, p in network.named_parameters()}


class KillAt(TrainerCallback):
    """Dies like a pre-empted machine: no handler, no clean-up."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)
