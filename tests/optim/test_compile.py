"""torch.compile of a whole training step: the step runs between the compiled parts and is never compiled itself."""

import pytest
import torch
from torch import nn

from poprisk.optim import Gate
from poprisk.optim._adamw import PopRiskAdamW

pytestmark = pytest.mark.usefixtures("one_thread")


def trained(compiled: bool) -> tuple[list[torch.Tensor], list[int]]:
    """The weights after some steps with a changing lr, and how many graphs there were after each."""
    from torch._dynamo.utils import counters

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))
    optimizer = PopRiskAdamW.paper(model.parameters(), gate=Gate.paper(alpha=0.3), fused=True)

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        (model(x) - 1).square().mean().backward()
        optimizer.step()

    run = torch.compile(step) if compiled else step
    generator, graphs = torch.Generator().manual_seed(1), []
    for number in range(8):
        optimizer.param_groups[0]["lr"] = 0.01 / (1 + number)
        run(torch.randn(8, 6, generator=generator))
        graphs.append(counters["stats"]["unique_graphs"])
    return [p.detach() for p in model.parameters()], graphs


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.compile's own imports
def test_a_compiled_training_step_is_the_eager_one_and_compiles_once():
    torch._dynamo.reset()
    expected, before = trained(compiled=False)
    weights, graphs = trained(compiled=True)
    for got, want in zip(weights, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert graphs[0] == before[-1] + 1  # the forward pass (its backward belongs to it), and nothing of the optimizer
    assert len(set(graphs)) == 1
