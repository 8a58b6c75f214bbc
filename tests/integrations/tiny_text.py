"""A word-level tokenizer, preference pairs and a Qwen2-configured model for TRL: nothing comes from a hub."""

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM
from trl import DPOConfig, DPOTrainer

THINGS = {"sky": "blue", "grass": "green", "sun": "yellow", "rose": "red"}
WORDS = ["<pad>", "<eos>", "<unk>", "what", "colour", "is", "the", "?", ".", *THINGS, *THINGS.values()]
COMMON = {
    "max_steps": 8,
    "per_device_train_batch_size": 8,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "disable_tqdm": True,
    "seed": 3,
}


def tokenizer():
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def network(seed=0):
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
    )
    return Qwen2ForCausalLM(config)


def lora():
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")


def pairs(count=64):
    """Right colour against another one; every fifth pair is swapped."""
    things, colours = list(THINGS), list(THINGS.values())
    rows = []
    for i in range(count):
        thing = things[i % 4]
        answers = [f" the {thing} is {colour} ." for colour in (THINGS[thing], colours[(i + 1 + i // 4 % 3) % 4])]
        chosen, rejected = answers[:: -1 if i % 5 == 0 else 1]
        rows.append({"prompt": f"what colour is the {thing} ?", "chosen": chosen, "rejected": rejected})
    return Dataset.from_list(rows)


def dpo(folder, *, callbacks=(), **options):
    args = DPOConfig(str(folder), **(COMMON | options))
    return DPOTrainer(
        network(),
        args=args,
        train_dataset=pairs(),
        processing_class=tokenizer(),
        peft_config=lora(),
        callbacks=list(callbacks),
    )
