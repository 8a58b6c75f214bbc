r"""The leave-one-out risk of one optimizer step, by taking every step without its example."""

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs, take_examples
from poprisk._core.linalg import Preconditioner, precondition
from poprisk._core.types import Scalar
from poprisk.errors import DataError


def one_step_loo_risk(
    model: FlatModel, w: Float[Tensor, "d"], inputs: Inputs, targets: Tensor, M: Preconditioner, lr: Scalar
) -> Float[Tensor, ""]:
    r"""Average loss of each example at the weights stepped without it, Theorem ``thm:kernel_increment``.

    .. math:: R = b^{-1}\sum_a \ell_a(w_{-a}^+), \qquad w_{-a}^+ = w - \eta M \bar g_{-a}, \qquad
        R = \hat L_B(w) - \eta \operatorname{tr}(M A_B) + O(\eta^2)

    The b stepped models are real: nothing is linearized, and the result holds at every learning rate. It is the
    population risk, in expectation, of one step on b-1 fresh examples if M was fixed before the batch was seen.

    Args:
        model: The model; ``model.chunk_size`` bounds how many stepped weights exist at a time.
        w: Weights before the step.
        inputs: One batch.
        targets: Its targets.
        M: The step's preconditioner: a number, a diagonal, a matrix, or a low-rank matrix.
        lr: Step size η.

    Raises:
        DataError: fewer than two examples, or an M of another size.

    >>> module = torch.nn.Linear(1, 1, bias=False)
    >>> model = FlatModel(module, "squared")
    >>> x, y = torch.ones(2, 1), torch.tensor([[1.0], [3.0]])
    >>> one_step_loo_risk(model, torch.zeros(1), x, y, 1.0, lr=1.0)  # each is predicted by the other: (3 - 1)²/2
    tensor(2.)
    """
    b = targets.shape[0] if targets.dim() else 0
    if b < 2:
        raise DataError(f"leave-one-out needs at least 2 examples, got {b}: pass a larger batch")
    G = model.per_example_gradients(w, inputs, targets)
    total = G.sum(dim=0)
    losses = []
    for rows in torch.arange(b, device=G.device).split(model.chunk_size or b):
        stepped = w - lr * precondition(M, (total - G[rows]) / (b - 1))
        losses.append(model.per_example_losses(stepped, take_examples(inputs, rows), targets[rows]))
    return torch.cat(losses).mean()
