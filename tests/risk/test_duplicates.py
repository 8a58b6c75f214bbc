"""Examples with exactly equal inputs share a group, whatever their type, shape or number of parts."""

import pytest
import torch

from poprisk.risk._duplicates import duplicate_groups, same_group


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_equal_rows_of_any_type_and_shape(dtype):
    x = torch.tensor([[[1, 0], [0, 1]], [[1, 1], [0, 1]], [[1, 0], [0, 1]], [[0, 0], [0, 0]]]).to(dtype)
    assert duplicate_groups(x).tolist() == [0, 1, 0, 2]
    assert duplicate_groups(x.transpose(0, 1).contiguous().transpose(0, 1)).tolist() == [0, 1, 0, 2]


def test_every_part_must_be_equal():
    a, b = torch.tensor([1.0, 1.0, 1.0, 2.0]), torch.tensor([[5], [6], [5], [5]])
    assert duplicate_groups((a, b)).tolist() == [0, 1, 0, 2]
    assert duplicate_groups(a).tolist() == [0, 0, 0, 1]


def test_rounding_makes_a_difference():
    x = torch.randn(400, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(duplicate_groups(x), torch.arange(400))
    near = torch.cat([x, x.nextafter(torch.tensor(9.0))])
    assert torch.equal(duplicate_groups(near), torch.arange(800))
    assert torch.equal(duplicate_groups(torch.cat([x, x])), torch.arange(400).repeat(2))


def test_an_example_is_in_its_own_group():
    groups = torch.tensor([0, 1, 0, 2, 1])
    assert [each.tolist() for each in same_group(groups, torch.tensor([4, 3]))] == [[1, 4], [3]]
