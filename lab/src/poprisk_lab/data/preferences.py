"""Preference pairs as padded tokens, the training data of DPO, of which a share can be swapped."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from poprisk._core.store import write_tensors
from poprisk.errors import DataError, HyperparameterError, MissingExtraError

KIND = "preferences"
FORMAT_VERSION = 1
_FIELDS = ("prompt", "chosen", "rejected")


@dataclass(frozen=True)
class Pair:
    """A prompt and two answers to it, as text."""

    prompt: str
    chosen: str
    rejected: str


@dataclass(frozen=True)
class PairTokens:
    """Pairs as tokens, padded on the right; index 0 of the second axis is the preferred answer."""

    tokens: Int[Tensor, "pairs 2 time"]
    prompts: Int[Tensor, "pairs"]
    """Number of tokens of the prompt."""
    lengths: Int[Tensor, "pairs 2"]
    """Number of tokens of prompt and answer together; the rest is padding."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def mask(self) -> Bool[Tensor, "pairs 2 time"]:
        """Mask of the tokens of the answer.

        >>> one = PairTokens(torch.zeros(1, 2, 4, dtype=torch.int32), torch.tensor([1]), torch.tensor([[3, 2]]))
        >>> one.mask.int().tolist()
        [[[0, 1, 1, 0], [0, 1, 0, 0]]]
        """
        place = torch.arange(self.tokens.shape[-1], device=self.tokens.device)
        return (place >= self.prompts[:, None, None]) & (place < self.lengths[:, :, None])


@dataclass(frozen=True)
class Preferences:
    """Training and evaluation pairs, without a prompt in common."""

    train: PairTokens
    evaluation: PairTokens
    vocabulary: int
    """Size of the vocabulary; tokens are below this number."""


@runtime_checkable
class ChatTokenizer(Protocol):
    """The required methods of a tokenizer; those of transformers with a chat template have them."""

    def apply_chat_template(self, conversation: Any, *, tokenize: bool, add_generation_prompt: bool) -> Any:
        """Format a conversation as text."""
        ...

    def __call__(self, text: str, *, add_special_tokens: bool) -> Any:
        """Tokenize text into ``{"input_ids": [...]}``."""
        ...

    def __len__(self) -> int: ...


def read_pairs(*paths: str | Path) -> list[Pair]:
    """Read pairs from files with one JSON object per line, with the keys ``prompt``, ``chosen`` and ``rejected``.

    Pairs of two equal answers are left out.

    Raises:
        DataError: a file is missing, a line is not such an object, or no pair is left; the message has file and line.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "pairs.jsonl"
    ...     _ = path.write_text('{"prompt": "2+2?", "chosen": "4", "rejected": "5"}')
    ...     read_pairs(path)
    [Pair(prompt='2+2?', chosen='4', rejected='5')]
    """
    pairs = [pair for path in paths for pair in _read_file(Path(path))]
    kept = [pair for pair in pairs if pair.chosen != pair.rejected]
    if not kept:
        names = ", ".join(str(path) for path in paths) or "no file"
        raise DataError(f"expected pairs of different answers, got none from {names}; give files that have some")
    return kept


def _read_file(path: Path) -> Iterable[Pair]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")  # not splitlines: text may contain rarer line ends
    except OSError:
        raise DataError(f"{path} is missing: give a file with one preference pair (JSON) per line") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}, line {number}: expected a JSON object, got {line[:40]!r} ({error})") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: expected a JSON object, got a {type(row).__name__}")
        for name in _FIELDS:
            if not isinstance(row.get(name), str):
                got = "nothing" if name not in row else f"a {type(row[name]).__name__}"
                raise DataError(f"{path}, line {number}: {name!r} must be a string, got {got}")
        yield Pair(*(row[name] for name in _FIELDS))


def is_held_out(prompt: str, share: float) -> bool:
    """Whether pairs with this prompt are for evaluation: depends on the prompt alone, true for about this share.

    >>> sum(is_held_out(f"prompt {i}", 0.4) for i in range(1000))
    398
    """
    digest = hashlib.sha256(prompt.encode()).digest()[:8]
    return int.from_bytes(digest, "big") < share * 2**64


def load_tokenizer(name: str | Path) -> ChatTokenizer:
    """Load a tokenizer with a chat template, by hub name or folder.

    Raises:
        MissingExtraError: transformers is not installed.
        DataError: the tokenizer has no chat template.
    """
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise MissingExtraError("transformers", "hf", "turning preferences into tokens") from None
    tokenizer: Any = AutoTokenizer.from_pretrained(str(name))
    if not getattr(tokenizer, "chat_template", None):
        raise DataError(f"the tokenizer of {name} has no chat template: use that of an instruction-tuned model")
    return tokenizer


def encode_preferences(
    pairs: Sequence[Pair],
    tokenizer: ChatTokenizer,
    *,
    max_prompt: int = 128,
    max_length: int = 256,
    evaluation_share: float = 0.42,
) -> Preferences:
    """Format pairs as chat, tokenize, truncate, split by prompt, and pad.

    Args:
        pairs: Pairs, as returned by :func:`read_pairs`.
        tokenizer: Tokenizer, as returned by :func:`load_tokenizer`.
        max_prompt: Maximum number of prompt tokens; longer prompts are truncated at the start.
        max_length: Maximum number of tokens; longer sequences are truncated at the end. Pairs whose answers no longer
            differ are left out.
        evaluation_share: Share of the prompts for evaluation, see :func:`is_held_out`.

    Raises:
        HyperparameterError: the limits leave no room for an answer, or the share is not between 0 and 1.
        DataError: one side of the split is empty.
    """
    if not 1 <= max_prompt < max_length:
        raise HyperparameterError(f"expected 1 ≤ max_prompt < max_length, got {max_prompt} and {max_length}")
    if not 0 < evaluation_share < 1:
        raise HyperparameterError(f"evaluation_share must lie between 0 and 1, got {evaluation_share}")
    sides: dict[bool, list[tuple[list[int], list[list[int]]]]] = {False: [], True: []}
    for pair in pairs:
        prompt, answers = _encode(pair, tokenizer)
        prompt = prompt[-max_prompt:]
        answers = [answer[: max_length - len(prompt)] for answer in answers]
        if answers[0] != answers[1]:
            sides[is_held_out(pair.prompt, evaluation_share)].append((prompt, answers))
    if not sides[False] or not sides[True]:
        raise DataError(
            f"expected pairs on both sides of the split, got {len(sides[False])} to train and {len(sides[True])} to "
            "evaluate; give more pairs or another evaluation_share"
        )
    return Preferences(_padded(sides[False], max_length), _padded(sides[True], max_length), len(tokenizer))


def _encode(pair: Pair, tokenizer: ChatTokenizer) -> tuple[list[int], list[list[int]]]:
    """Tokens of prompt and answers, which are separated as text because a token could span the two."""
    asked = [{"role": "user", "content": pair.prompt}]
    before = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    answers = []
    for answer in (pair.chosen, pair.rejected):
        whole = [*asked, {"role": "assistant", "content": answer}]
        text = tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=False)
        if not text.startswith(before):
            raise DataError(
                f"the chat template must append the answer to the prompt, got {text[:40]!r} for the prompt "
                f"{before[-40:]!r}; use a tokenizer whose template only appends"
            )
        answers.append(_ids(tokenizer, text[len(before) :]))
    return _ids(tokenizer, before), answers


def _ids(tokenizer: ChatTokenizer, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _padded(rows: Sequence[tuple[list[int], list[list[int]]]], max_length: int) -> PairTokens:
    lengths = torch.tensor([[len(prompt) + len(answer) for answer in answers] for prompt, answers in rows])
    tokens = torch.zeros(len(rows), 2, min(max_length, int(lengths.max())), dtype=torch.int32)
    for i, (prompt, answers) in enumerate(rows):
        for j, answer in enumerate(answers):
            tokens[i, j, : len(prompt) + len(answer)] = torch.tensor(prompt + answer, dtype=torch.int32)
    prompts = torch.tensor([len(prompt) for prompt, _ in rows], dtype=torch.int32)
    return PairTokens(tokens, prompts, lengths.int())


def save_preferences(path: str | Path, preferences: Preferences) -> Path:
    """Write all tokens as one safetensors file, so that training needs no tokenizer."""
    tensors = {
        f"{side}.{name}": getattr(getattr(preferences, side), name)
        for side in ("train", "evaluation")
        for name in ("tokens", "prompts", "lengths")
    }
    write_tensors(path, tensors, {"kind": KIND, "format_version": FORMAT_VERSION, "vocabulary": preferences.vocabulary})
    return Path(path)


def load_preferences(path: str | Path) -> Preferences:
    """Read preferences onto the CPU.

    Raises:
        DataError: the file is missing or damaged, or contains something else.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            notes = json.loads((file.metadata() or {}).get("poprisk", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError:
        raise DataError(f"{path} is missing: write it with save_preferences") from None
    except (SafetensorError, OSError) as error:
        raise DataError(f"{path} is not a whole safetensors file ({error}); rewrite it with save_preferences") from None
    if not isinstance(notes, Mapping) or notes.get("kind") != KIND or notes.get("format_version") != FORMAT_VERSION:
        raise DataError(
            f"{path} should contain {KIND} of format {FORMAT_VERSION}, got {notes}; write it with save_preferences"
        )
    train, evaluation = (
        PairTokens(*(tensors[f"{side}.{name}"] for name in ("tokens", "prompts", "lengths")))
        for side in ("train", "evaluation")
    )
    return Preferences(train, evaluation, notes["vocabulary"])


def swapped_pairs(count: int, share: float, seed: int) -> Bool[Tensor, "count"]:
    """Choose which pairs are swapped: exactly ``round(share * count)`` of them, drawn uniformly.

    >>> int(swapped_pairs(10, 0.3, seed=0).sum())
    3
    """
    if not 0 <= share <= 1:
        raise HyperparameterError(f"the share of swapped pairs must lie in [0, 1], got {share}")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    swapped = torch.zeros(count, dtype=torch.bool)
    swapped[order[: round(share * count)]] = True
    return swapped


def synthetic_preferences(
    train: int, evaluation: int, *, vocabulary: int = 64, max_length: int = 12, seed: int = 0
) -> Preferences:
    """Synthetic pairs: the preferred answer contains more of token 1, the other more of token 2.

    >>> made = synthetic_preferences(5, 4)
    >>> tuple(made.train.tokens.shape), len(made.evaluation)
    ((5, 2, 12), 4)
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int, *sizes: int) -> Tensor:
        return torch.randint(low, high, sizes, generator=generator)

    def side(count: int) -> PairTokens:
        tokens, marked = (
            draw(3, vocabulary, count, 2, max_length),
            torch.rand(count, 2, max_length, generator=generator),
        )
        tokens = torch.where(marked < 0.4, torch.tensor([1, 2])[:, None], tokens)
        prompts, lengths = draw(1, 3, count), draw(max_length // 2, max_length + 1, count, 2)
        place = torch.arange(max_length)
        tokens[:, 1] = torch.where(place < prompts[:, None], tokens[:, 0], tokens[:, 1])
        padding = place >= lengths[:, :, None]
        return PairTokens(tokens.masked_fill(padding, 0).int(), prompts.int(), lengths.int())

    return Preferences(side(train), side(evaluation), vocabulary)
