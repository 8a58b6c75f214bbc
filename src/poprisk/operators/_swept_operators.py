r"""The operators of consecutive steps as products: each is one or two sweeps through the steps."""

from collections.abc import Callable, Sequence
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel
from poprisk._core.linalg import LinearOperator, from_functions
from poprisk.operators._reach import effective_preconditioners
from poprisk.operators._step_maps import Block, StepMaps
from poprisk.operators._sweeps import backward_sweep, forward_sweep

Product = Callable[[Block], Block]


class SweptOperators:
    """P, F, D, G and W of some steps, known by their products; a subclass makes the steps."""

    model: FlatModel
    steps: Sequence[StepMaps]
    start_outputs: Float[Tensor, "n p"]
    """Outputs of the training examples before the first step."""
    num_test_outputs: int
    """Rows of the test transfer."""
    memory: int
    """Bytes that a product with W may hold on to."""
    dtype: torch.dtype
    device: torch.device

    @property
    def num_examples(self) -> int:
        """N."""
        return self.start_outputs.shape[0]

    @property
    def num_outputs(self) -> int:
        """N = n p, the length of an output gradient."""
        return self.start_outputs.numel()

    @cached_property
    def effective_preconditioners(self) -> list[Float[Tensor, "d"]]:
        r""":math:`\tilde M_j` of each step; see :mod:`poprisk.operators._reach`."""
        return [m.to(self.dtype) for m in effective_preconditioners([maps.step for maps in self.steps])]

    @property
    def propagator(self) -> LinearOperator:
        """P_g(T, s): the output gradient at the end from the one at the start (``eq:force_propagator``)."""
        return self._operator(
            lambda H: forward_sweep(self.steps, H, test=False).gradient,
            lambda A: backward_sweep(self.steps, like=A, gradient=A),
            self.num_outputs,
        )

    @property
    def train_completion(self) -> LinearOperator:
        r""":math:`F_{SS} = I - P_g` (``eq:train_complement``): what of an output gradient the window has worked off."""
        P = self.propagator
        return self._operator(lambda H: H - P @ H, lambda A: A - P.T @ A, self.num_outputs)

    @property
    def augmented_propagator(self) -> LinearOperator:
        r"""The propagator of gradient and momentum together, [N + d, N + d]; it composes where :math:`P_g` does not.

        .. math:: \begin{pmatrix} g(T) \\ v_{T-1} \end{pmatrix} =
                  \mathsf P(T, s) \begin{pmatrix} g(s) \\ v_{s-1} \end{pmatrix} + \text{source}, \qquad
                  \mathsf P(T, s) = \mathsf P(T, r)\, \mathsf P(r, s)

        Differs from the paper, whose flow has no momentum: with it the gradient alone is not a state, and
        :math:`P_g(T, s) \ne P_g(T, r) P_g(r, s)`. The first N rows and columns are :math:`P_g`.
        """
        N, size = self.num_outputs, self.num_outputs + self.model.size

        def forward(X: Block) -> Block:
            swept = forward_sweep(self.steps, X[:N], momentum=X[N:], test=False)
            return torch.cat([swept.gradient, swept.momentum])

        def backward(Y: Block) -> Block:
            kept: list[Block] = []
            dz = backward_sweep(self.steps, like=Y[:N], gradient=Y[:N], momentum=Y[N:], on_momentum=kept.append)
            return torch.cat([dz, *kept])

        return from_functions(forward, backward, (size, size), dtype=self.dtype, device=self.device)

    @property
    def train_transfer(self) -> LinearOperator:
        """D (``eq:train_disp_def``)."""
        return self._operator(
            lambda H: forward_sweep(self.steps, H, test=False).train,
            lambda A: backward_sweep(self.steps, like=A, train=A),
            self.num_outputs,
        )

    @property
    def test_transfer(self) -> LinearOperator:
        """G (``def:test_transfer``)."""
        return self._operator(
            lambda H: forward_sweep(self.steps, H).test,
            lambda C: backward_sweep(self.steps, like=C.new_zeros(self.num_outputs, C.shape[1]), test=C),
            self.num_test_outputs,
        )

    @property
    def dissipation_gramian(self) -> LinearOperator:
        r"""W (``def:signal_channel``): :math:`\sum_j F_j^\top \tilde M_j F_j`, one forward and one backward sweep.

        This is the paper's :math:`\mathcal W_S^M`: the preconditioner of every step is inside, as it is in P, D and G
        (its superscript M). For plain SGD, :math:`M = \eta I`, it is :math:`\mathcal W_S` in the time Ση.
        There is no second one without M: :math:`\ker W \subseteq \ker G` needs the same M on both sides.
        """
        N = self.num_outputs
        return from_functions(self._dissipate, None, (N, N), self.dtype, self.device, symmetric=True)

    def _dissipate(self, H: Block) -> Block:
        room = self.memory // (H.shape[1] * H.element_size() or 1)
        if len(self.steps) * self.model.size <= room:
            return self._dissipate_block(H, keep_gradients=True)
        rows = sum(len(maps.step.batch) for maps in self.steps) * (self.num_outputs // self.num_examples)
        size = max(1, room * H.shape[1] // max(rows, 1))
        blocks = [self._dissipate_block(part, keep_gradients=False) for part in H.split(size, dim=1)]
        return torch.cat(blocks, dim=1)

    def _dissipate_block(self, H: Block, *, keep_gradients: bool) -> Block:
        """One forward and one backward sweep; between them each F_j H is kept, or formed again from what it read."""
        kept: list[Block] = []

        def keep(_: int, block: Block) -> None:
            kept.append(block)

        watch, watch_rows = (keep, None) if keep_gradients else (None, keep)
        forward_sweep(self.steps, H, test=False, watch=watch, watch_rows=watch_rows)

        def weighed(j: int) -> Block:
            F = kept.pop()  # the last step comes first
            F = F if keep_gradients else self.steps[j].pull_gathered(F)
            return self.effective_preconditioners[j][:, None] * F

        return backward_sweep(self.steps, like=H, on_gradients=weighed)

    def _operator(self, matmat: Product, rmatmat: Product, rows: int) -> LinearOperator:
        shape = (rows, self.num_outputs)
        return from_functions(matmat, rmatmat, shape, dtype=self.dtype, device=self.device)
