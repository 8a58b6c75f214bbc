"""A function replayed on still copies of its arguments gives what it gives on the arguments themselves."""

import pytest
import torch
from torch.testing import assert_close

from poprisk._core.autodiff.replayed import Replayed


def test_still_copies_by_shape_and_only_where_asked():
    calls: list[tuple] = []

    def function(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append((a.data_ptr(), tuple(a.shape)))
        return a @ b, a.sum()

    replayed = Replayed(function, capture=False, only=lambda arguments: arguments[0].shape[0] != 5)
    generator = torch.Generator().manual_seed(0)
    kept = []
    for rows in (2, 3, 2, 3, 2, 3, 5, 2, 5):
        a, b = torch.randn(rows, 4, generator=generator), torch.randn(4, 2, generator=generator)
        kept.append(a)  # so that no address comes twice
        product, total = replayed(a, b)
        assert_close(product, a @ b)
        assert_close(total, a.sum())
    twos = [place for place, shape in calls if shape[0] == 2]
    assert twos[2] == twos[3]  # the third and the fourth ran on one still copy
    assert len({*twos[:3]}) == 3
    assert len({place for place, shape in calls if shape[0] == 5}) == 2


@pytest.mark.gpu
def test_captured_and_refused():
    weight = torch.randn(6, 6, device="cuda")
    replayed = Replayed(torch.func.vmap(torch.func.grad(lambda v: (weight @ v).tanh().sum())), capture=True)
    waiting = Replayed(lambda x: x * float(x.sum()), capture=True)
    for _ in range(5):
        x = torch.randn(3, 6, device="cuda")
        expected = (1 - (x @ weight.T).tanh().square()) @ weight
        assert_close(replayed(x), expected, rtol=1e-4, atol=1e-5)
        assert_close(waiting(x), x * x.sum(), rtol=1e-4, atol=1e-5)
    assert replayed.refused is None
    assert waiting.refused is not None
    assert_close(weight @ weight, torch.mm(weight, weight))  # and the stream works on


@pytest.mark.gpu
def test_a_capture_that_fails_leaves_random_numbers_and_memory_as_they_were():
    """The function waits only while it is captured: no rehearsal can know."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum()) if torch.cuda.is_current_stream_capturing() else x * x.sum()

    torch.manual_seed(3)
    sudden, drawn = Replayed(function, capture=True), []
    for _ in range(5):
        drawn.append(torch.randn(4, device="cuda"))
        assert_close(sudden(drawn[-1]), drawn[-1] * drawn[-1].sum())
    assert sudden.refused is not None
    torch.manual_seed(3)
    again = torch.stack([torch.randn(4, device="cuda") for _ in range(5)])
    assert torch.equal(torch.stack(drawn), again)
    torch.cuda.empty_cache()
    replayed = Replayed(torch.sin, capture=True)
    for row in drawn:
        assert_close(replayed(row), row.sin())
    assert replayed.refused is None
