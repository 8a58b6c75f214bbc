"""The digits and the text: what they are, split how."""

import builtins

import pytest
import torch

from poprisk.errors import DataError, MissingExtraError
from poprisk.runs._digits import digits_split
from poprisk_lab.data.char_lm import CharTransformer, all_windows, help_topics, next_character_loss, random_windows


def test_digits_split_is_a_partition_in_the_unit_interval():
    split = digits_split(0, 1200)
    assert split.train_inputs.shape == (1200, 64)
    assert split.test_inputs.shape == (597, 64)
    everything = torch.cat([split.train_inputs, split.test_inputs])
    assert everything.min() == 0
    assert everything.max() == 1
    other = digits_split(1, 1200)
    both = torch.cat([other.train_inputs, other.test_inputs])
    torch.testing.assert_close(both.sum(0), everything.sum(0))
    assert not torch.equal(split.train_labels, other.train_labels)
    torch.testing.assert_close(split.train_inputs, digits_split(0, 1200).train_inputs)


@pytest.mark.parametrize("size", [0, 9, 1698, 5000])
def test_digits_sizes_out_of_range(size):
    with pytest.raises(DataError, match=f"between 10 and 1697 .* got {size}"):
        digits_split(0, size)


def test_missing_scikit_learn_names_the_extra(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtraError, match=r"poprisk\[data\]"):
        digits_split(0, 1200)


def test_text_windows_follow_the_text():
    text = help_topics()
    assert len(text.sha256) == 64
    assert len(text.train) > 8 * len(text.held_out) > 0
    cut = all_windows(torch.arange(10), 3)
    assert cut.tolist() == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9]]
    drawn = random_windows(torch.arange(10), 50, 4, torch.Generator().manual_seed(0))
    torch.testing.assert_close(drawn - drawn[:, :1], torch.arange(5).expand(50, 5))
    assert drawn.min() == 0
    assert drawn.max() == 9


def test_transformer_cannot_see_the_future():
    torch.manual_seed(0)
    model = CharTransformer(vocabulary=11, width=16, heads=2, layers=2, context=8).double()
    codes = torch.randint(11, (3, 8))
    changed = codes.clone()
    changed[:, 5:] = (changed[:, 5:] + 1) % 11
    torch.testing.assert_close(model(codes)[:, :5], model(changed)[:, :5], rtol=1e-10, atol=1e-12)
    assert (model(codes)[:, 5:] - model(changed)[:, 5:]).abs().max() > 1e-3


def test_untrained_loss_is_near_uniform():
    torch.manual_seed(0)
    model = CharTransformer(vocabulary=11, width=16, heads=2, layers=1, context=8)
    loss = next_character_loss(model, torch.randint(11, (64, 9)))
    # embeddings of width 16 with std 0.02: logits of a normalised vector stay within about 0.1
    torch.testing.assert_close(loss, torch.tensor(11.0).log(), atol=0.1, rtol=0)
