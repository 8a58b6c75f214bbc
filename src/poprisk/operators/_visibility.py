r"""An upper bound on the visibility of a window from products alone: what its steps could show, whatever drove them.

The displacement of test outputs is :math:`G h = \sum_j L_j \tilde M_j^{1/2} F_j h` with the lifted maps :math:`L_j` of
:mod:`poprisk.operators._cumulative`, and :math:`h^\top W h = \sum_j \|\tilde M_j^{1/2} F_j h\|^2`, so

.. math:: \|G h\|^2 \le \Bigl\|\sum_j L_j L_j^\top\Bigr\|\; h^\top W h, \qquad
   \|\Gamma_Q\| \le \mu_Q = \Bigl\|\sum_j L_j L_j^\top\Bigr\|

and likewise for D with the training outputs in place of the test outputs. Where :math:`\Gamma_Q` is known on a leading
part of the signal channel only, this bounds it on all the rest.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.linalg import LinearOperator, from_functions, top_eigenpairs
from poprisk.errors import DataError
from poprisk.operators._step_maps import Block, scale_rows
from poprisk.operators._sweeps import step_direction
from poprisk.operators._window import Window


def visibility_limit(window: Window, *, test: bool = True, tolerance: float = 0.01) -> float:
    r""":math:`\mu_Q`, an upper bound on :math:`\|\Gamma_Q\|`, or for ``test=False`` the same for the training outputs.

    >>> from poprisk._core.autodiff import FlatModel
    >>> from poprisk.operators._gradient_descent import gradient_descent
    >>> model = FlatModel(torch.nn.Linear(2, 1, bias=False).double(), "squared")
    >>> x, y = torch.eye(2, dtype=torch.float64), torch.ones(2, 1, dtype=torch.float64)
    >>> window = Window(gradient_descent(model, x, y, lr=0.5, steps=3), model, x, y)
    >>> round(visibility_limit(window, test=False), 6)  # three steps of 0.5 with the kernel I
    1.5
    """
    pairs = top_eigenpairs(lifted_gramian(window, test=test), 1, tolerance=tolerance, oversampling=1)
    return max(pairs.values[0].item(), 0.0) + pairs.residuals[0].item()


def lifted_gramian(window: Window, *, test: bool = True) -> LinearOperator:
    r""":math:`\sum_j L_j L_j^\top` on test (or training) outputs, by a backward and a forward pass over the steps."""
    if test and window.test_inputs is None:
        raise DataError("what a test set can see needs a test set: pass test_inputs=… to the window")
    rows = window.num_test_outputs if test else window.num_outputs
    per_column = len(window.steps) * window.model.size * window.dtype.itemsize

    def matmat(C: Block) -> Block:
        parts = C.split(max(1, window.memory // per_column), dim=1)
        return torch.cat([_lowered(window, _lifted(window, part, test=test), test=test) for part in parts], dim=1)

    return from_functions(matmat, None, (rows, rows), window.dtype, window.device, symmetric=True)


def _lifted(window: Window, C: Float[Tensor, "M k"], *, test: bool) -> list[Block]:
    r""":math:`\tilde M_j^{\dagger/2} L_j^\top C` of each step, the last one first."""
    reversed_result: list[Block] = []
    through_buffer: Block | None = None
    for maps, M_tilde in zip(reversed(window.steps), reversed(window.effective_preconditioners), strict=True):
        step = maps.step
        moved = step.preconditioner[:, None] * (maps.push_test_adjoint(C) if test else maps.push_adjoint(C))
        shared = scale_rows(step.buffer_share, moved)
        through_buffer = shared if through_buffer is None else through_buffer + shared
        weighed = scale_rows(step.new_gradient, through_buffer) + scale_rows(step.direct_share, moved)
        # Where a gradient acts at no step, the map is 0 as well: 0/0 is 0 here.
        reversed_result.append(torch.where(M_tilde > 0, 1 / M_tilde, 0.0)[:, None] * weighed)
        through_buffer = scale_rows(step.momentum, through_buffer)
    return reversed_result


def _lowered(window: Window, reversed_gradients: list[Block], *, test: bool) -> Block:
    r""":math:`\sum_j L_j \tilde M_j^{1/2} Y_j`: the displacement if the gradient of step j changes by :math:`Y_j`."""
    momentum: Block | None = None
    total: Block | None = None
    for maps in window.steps:
        X, momentum = step_direction(maps.step, reversed_gradients.pop(), momentum)
        moved = maps.push_test(X) if test else maps.push(X)
        total = moved if total is None else total + moved
    assert total is not None, "a window has at least one step"
    return total
