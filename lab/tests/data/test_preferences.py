"""Preference pairs: reading, formatting, cutting, splitting, storing, swapping."""

import json

import pytest
import torch
from torch.testing import assert_close

from poprisk.errors import DataError, HyperparameterError
from poprisk_lab.data.preferences import (
    Pair,
    encode_preferences,
    is_held_out,
    load_preferences,
    read_pairs,
    save_preferences,
    swapped_pairs,
    synthetic_preferences,
)


class Letters:
    """A tokenizer of one token a character, and a template with marks around each turn."""

    def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt):
        assert not tokenize
        turns = "".join(f"[{turn['role'][0]}{turn['content']}]" for turn in conversation)
        return turns + ("[a" if add_generation_prompt else "")

    def __call__(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": [ord(letter) for letter in text]}

    def __len__(self):
        return 256


def write(path, *rows):
    path.write_text(
        "\n".join(x if isinstance(x, str) else json.dumps(x, ensure_ascii=False) for x in rows), encoding="utf-8"
    )
    return path


def row(prompt="p", chosen="good", rejected="bad", **more):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected, **more}


def pairs(count=40):
    return [Pair(f"question {i}", f"yes {i}", "no") for i in range(count)]


def texts(side):
    """Prompt and answers of each pair, back as text."""
    for tokens, mask, prompt in zip(side.tokens, side.mask, side.prompts, strict=True):
        whole = ["".join(map(chr, line.tolist())) for line in tokens]
        yield whole[0][:prompt], *("".join(chr(c) for c in t[m].tolist()) for t, m in zip(tokens, mask, strict=True))


def test_files_are_read_in_order_and_equal_answers_left_out(tmp_path):
    first = write(tmp_path / "a.jsonl", row("1", score=3), "", row("2", "same", "same"))
    second = write(tmp_path / "b.jsonl", row("3", chosen="línea\u2028zwei"))
    assert read_pairs(first, second) == [Pair("1", "good", "bad"), Pair("3", "línea\u2028zwei", "bad")]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{not json", "line 2: expected a JSON object, got '{not json'"),
        ("[1]", "line 2: expected a JSON object, got a list"),
        ({"prompt": "p", "chosen": "c"}, "line 2: 'rejected' must be a string, got nothing"),
        ({"prompt": "p", "chosen": ["c"], "rejected": "r"}, "line 2: 'chosen' must be a string, got a list"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, words):
    path = write(tmp_path / "pairs.jsonl", row(), line)
    with pytest.raises(DataError) as caught:
        read_pairs(path)
    assert words in str(caught.value)
    assert "pairs.jsonl" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_empty_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.jsonl is missing"):
        read_pairs(tmp_path / "nowhere.jsonl")
    with pytest.raises(DataError, match="got none"):
        read_pairs(write(tmp_path / "same.jsonl", row(chosen="bad")))


def test_pairs_become_chats():
    made = encode_preferences(pairs(), Letters(), max_prompt=50, max_length=100, evaluation_share=0.4)
    both = [*texts(made.train), *texts(made.evaluation)]
    assert sorted(both) == sorted((f"[uquestion {i}][a", f"yes {i}]", "no]") for i in range(40))
    assert made.train.tokens.dtype == torch.int32
    assert made.train.tokens.shape[-1] == int(made.train.lengths.max()), "no more padding than needed"
    assert made.vocabulary == 256


def test_prompts_lose_their_start_and_answers_their_end():
    made = encode_preferences(pairs(), Letters(), max_prompt=5, max_length=8, evaluation_share=0.4)
    for prompt, chosen, rejected in texts(made.train):
        assert prompt.endswith("][a")
        assert (len(prompt), chosen, rejected) == (5, "yes", "no]")
    assert made.train.tokens.shape[-1] == 8


def test_answers_that_no_longer_differ_are_left_out():
    alike = [*pairs(), *(Pair(f"other {i}", "the same start, one end", "the same start") for i in range(9))]
    cut = encode_preferences(alike, Letters(), max_prompt=8, max_length=18, evaluation_share=0.4)
    assert len(cut.train) + len(cut.evaluation) == 40


def test_the_split_goes_by_prompt_alone():
    twice = [*pairs(), *(Pair(p.prompt, "another", "answer") for p in pairs())]
    made = encode_preferences(twice, Letters(), max_prompt=50, max_length=100, evaluation_share=0.4)
    sides = [{prompt for prompt, _, _ in texts(side)} for side in (made.train, made.evaluation)]
    assert not sides[0] & sides[1]
    assert {p.prompt for p in pairs() if is_held_out(p.prompt, 0.4)} == {p[2:-3] for p in sides[1]}
    half = encode_preferences(twice[::2], Letters(), max_prompt=50, max_length=100, evaluation_share=0.4)
    assert {prompt for prompt, _, _ in texts(half.evaluation)} <= sides[1], "other rows do not matter"


def test_settings_that_leave_nothing_are_refused():
    with pytest.raises(HyperparameterError, match="max_prompt < max_length"):
        encode_preferences(pairs(), Letters(), max_prompt=8, max_length=8)
    with pytest.raises(HyperparameterError, match="evaluation_share"):
        encode_preferences(pairs(), Letters(), evaluation_share=1.0)
    with pytest.raises(DataError, match="both sides"):
        encode_preferences(pairs(1), Letters())


def test_a_template_that_rewrites_the_prompt_is_refused():
    class Rewrites(Letters):
        def apply_chat_template(self, conversation, *, tokenize, add_generation_prompt):
            text = super().apply_chat_template(conversation, tokenize=tokenize, add_generation_prompt=False)
            return text if add_generation_prompt else text.upper()

    with pytest.raises(DataError, match="only appends"):
        encode_preferences(pairs(), Rewrites())


def test_tokens_survive_the_disk(tmp_path):
    made = encode_preferences(pairs(), Letters())
    path = save_preferences(tmp_path / "pairs.safetensors", made)
    back = load_preferences(path)
    for side in ("train", "evaluation"):
        for name in ("tokens", "prompts", "lengths", "mask"):
            assert_close(getattr(getattr(back, side), name), getattr(getattr(made, side), name), rtol=0, atol=0)
    assert back.vocabulary == made.vocabulary
    content = path.read_bytes()
    save_preferences(path, back)
    assert path.read_bytes() == content, "the same tokens, the same file"


def test_files_that_are_something_else_are_named(tmp_path):
    from safetensors.torch import save_file

    path = tmp_path / "pairs.safetensors"
    with pytest.raises(DataError, match="missing"):
        load_preferences(path)
    save_file({"x": torch.zeros(2)}, path)
    with pytest.raises(DataError, match="should contain preferences of format 1, got None"):
        load_preferences(path)
    path.write_bytes(save_preferences(path, synthetic_preferences(4, 4)).read_bytes()[:-5])
    with pytest.raises(DataError, match="not a whole safetensors file"):
        load_preferences(path)


def test_an_exact_share_is_swapped_and_each_seed_swaps_others():
    first, again, other = (swapped_pairs(676, 0.3, seed) for seed in (0, 0, 1))
    assert int(first.sum()) == int(other.sum()) == round(0.3 * 676)
    assert first.equal(again)
    assert not first.equal(other)
    assert int(swapped_pairs(10, 0.0, 0).sum()) == 0
    counts = sum(swapped_pairs(20, 0.3, seed).int() for seed in range(300))
    assert int(counts.min()) > 60, "no pair is spared"
    assert int(counts.max()) < 120, "no pair is swapped always"
    with pytest.raises(HyperparameterError, match="share"):
        swapped_pairs(10, 1.5, 0)


def test_made_up_pairs_prefer_something():
    made = synthetic_preferences(200, 50)
    counts = [((made.train.tokens == token) & made.train.mask).sum((0, 2)) for token in (1, 2)]
    assert counts[0][1] == counts[1][0] == 0, "outside the shared prompt each answer has a mark of its own"
    assert counts[0][0] > 200
    assert made.train.tokens[:, 0, 0].equal(made.train.tokens[:, 1, 0])
    assert bool((made.train.mask.sum(-1) > 0).all())
