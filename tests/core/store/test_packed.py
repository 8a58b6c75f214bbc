"""Dataclasses as JSON and tensors, and back."""

import json
import math
from dataclasses import dataclass, field

import pytest
import torch

from poprisk._core.store.packed import pack, unpack
from poprisk.errors import DataError


@dataclass
class Leaf:
    x: torch.Tensor
    pairs: list[tuple[int, float]]


@dataclass(frozen=True)
class Tree:
    leaves: dict[int, Leaf]
    numbers: tuple[float, ...] = ()
    nothing: None = None
    flags: list[bool] = field(default_factory=list)


def test_every_value_comes_back_as_it_was():
    x = torch.randn(3, 2, dtype=torch.float64)
    tree = Tree({2: Leaf(x, [(1, 0.1)]), 0: Leaf(x[:1], [])}, (1 / 3, math.inf, -0.0), None, [True, False])
    form, tensors = pack(tree)
    again = unpack(json.loads(json.dumps(form)), tensors, (Tree, Leaf))
    assert list(again.leaves) == [2, 0]
    assert torch.equal(again.leaves[2].x, x)
    assert torch.equal(again.leaves[0].x, x[:1])
    assert again.leaves[2].pairs == [(1, 0.1)]
    assert again.numbers == tree.numbers
    assert math.copysign(1, again.numbers[2]) == -1
    assert (again.nothing, again.flags) == (None, [True, False])
    tensors["0"].zero_()
    assert x.abs().sum() > 0  # they are copies: files take no views


def test_what_cannot_be_kept_is_refused():
    with pytest.raises(DataError, match="got set"):
        pack({"a": [{1, 2}]})
    form, tensors = pack(Leaf(torch.ones(1), []))
    with pytest.raises(DataError, match="expected Tree, got a 'Leaf'"):
        unpack(form, tensors, (Tree,))
    del form["fields"]["pairs"]
    with pytest.raises(DataError, match="the Leaf was saved by another version"):
        unpack(form, tensors, (Leaf,))
