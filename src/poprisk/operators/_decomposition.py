r"""What the test error of a run is made of: clean signal transferred, bias, and label noise, trapped or not."""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk.errors import DataError
from poprisk.operators._channels import require_length
from poprisk.operators._coupling import Coupling


@dataclass(frozen=True, eq=False)
class ErrorCells:
    r"""The parts of :math:`U_Q(T) - f^\star(Q)`, Eq. ``thesis_decomposition``; they add up to it exactly.

    Differs from the paper: the operators belong to the run that happened, noise included, so "noise" is an attribution
    along that run, not what would vanish had the labels been clean; and discrete time adds the source.
    """

    initial: Float[Tensor, "M"]
    r""":math:`U_Q(s) - f^\star(Q)`, the error before the window."""
    transferred: Float[Tensor, "M"]
    r""":math:`\frac1n A_\circ D (f^\star(S) - U_S(s))`, clean signal that came through the training displacement."""
    residual_bias: Float[Tensor, "M"]
    r""":math:`\frac1n (G - A_\circ D)(f^\star(S) - U_S(s))`, clean signal that did not: bounded by ‖R_perp‖."""
    trapped_noise: Float[Tensor, "M"]
    r""":math:`\frac1n G P_{res} \varepsilon`, label noise in the reservoir: 0 but for rounding and the cut-off."""
    signal_noise: Float[Tensor, "M"]
    r""":math:`\frac1n G P_{sig} \varepsilon`, label noise in the signal channel."""
    source: Float[Tensor, "M"]
    """What decay and a momentum buffer carried in did."""

    @property
    def total(self) -> Float[Tensor, "M"]:
        r""":math:`U_Q(T) - f^\star(Q)`."""
        return self.initial + self.clean_change + self.trapped_noise + self.signal_noise + self.source

    @property
    def clean_change(self) -> Float[Tensor, "M"]:
        """What the clean targets alone did to the test outputs, transferred or not."""
        return self.transferred + self.residual_bias

    @property
    def bias(self) -> Float[Tensor, "M"]:
        r"""The paper's :math:`b(T, S)`, and what it would be short of if :math:`R_\perp` were not 0."""
        return self.initial + self.clean_change

    def shares(self, num_test: int) -> dict[str, float]:
        r"""The mean squared test error, split: :math:`\langle cell, total \rangle / |Q|` for each cell.

        The shares add up to :math:`\|total\|^2 / |Q|` exactly, cross terms being halved between their cells; a cell
        that works against the error has a negative share.

        Args:
            num_test: :math:`|Q|`, the number of test inputs (not outputs).

        Raises:
            DataError: the outputs are not a multiple of the inputs.
        """
        total = self.total
        if num_test < 1 or len(total) % num_test:
            raise DataError(f"num_test must divide the {len(total)} test outputs, got {num_test}")
        return {part.name: (getattr(self, part.name) @ total).item() / num_test for part in fields(self)}

    def mean_squares(self, num_test: int) -> dict[str, float]:
        """The mean square of each cell by itself; they do not add up where cells are correlated."""
        return {part.name: getattr(self, part.name).square().sum().item() / num_test for part in fields(self)}


def error_cells(
    coupling: Coupling,
    *,
    train_outputs: Float[Tensor, "N"],
    test_outputs: Float[Tensor, "M"],
    targets: Float[Tensor, "N"],
    clean_train: Float[Tensor, "N"],
    clean_test: Float[Tensor, "M"],
    num_examples: int,
    test_source: Float[Tensor, "M"] | None = None,
) -> ErrorCells:
    r"""The four cells of test error under squared loss, given the clean targets (``thm:bias_variance_decomp``).

    With :math:`y = f^\star(S) + \varepsilon` and :math:`g(s) = (U_S(s) - y)/n`,

    .. math:: U_Q(T) - f^\star(Q) = \underbrace{U_Q(s) - f^\star(Q)}_{initial}
              + \tfrac1n G \bigl(f^\star(S) - U_S(s)\bigr) + \tfrac1n G (P_{sig} + P_{res}) \varepsilon + source_Q

    Args:
        coupling: The window's operators.
        train_outputs: U_S(s), at the start of the window.
        test_outputs: U_Q(s).
        targets: y, as trained on.
        clean_train: f*(S).
        clean_test: f*(Q).
        num_examples: n, the number of training inputs (not outputs).
        test_source: What of the test displacement is not linear in the gradient.

    Raises:
        DataError: vectors of another length, or outputs that are not a multiple of the examples.

    >>> from poprisk.operators import dissipation_channels
    >>> R, D = torch.diag(torch.tensor([1.0, 0.0])), torch.diag(torch.tensor([2.0, 0.0]))
    >>> coupling = Coupling(dissipation_channels(R, D, torch.tensor([[2.0, 0.0]])))
    >>> zero = torch.zeros(2)
    >>> cells = error_cells(coupling, train_outputs=zero, test_outputs=zero[:1], targets=torch.tensor([4.0, 9.0]),
    ...     clean_train=torch.tensor([3.0, 3.0]), clean_test=torch.tensor([3.0]), num_examples=2)
    >>> cells.transferred, cells.signal_noise, cells.trapped_noise, cells.total
    (tensor([3.]), tensor([1.]), tensor([0.]), tensor([1.]))
    """
    channels = coupling.channels
    N, M = channels.vectors.shape[0], channels.test_transfer.shape[0]
    for name, x, length in (
        ("train_outputs", train_outputs, N),
        ("test_outputs", test_outputs, M),
        ("targets", targets, N),
        ("clean_train", clean_train, N),
        ("clean_test", clean_test, M),
    ):
        require_length(x, length, name)
    source = torch.zeros_like(test_outputs) if test_source is None else test_source
    require_length(source, M, "test_source")
    if num_examples < 1 or N % num_examples:
        raise DataError(f"num_examples must divide the {N} train outputs, got {num_examples}")
    G, D = channels.test_transfer, channels.train_transfer
    clean = (clean_train - train_outputs) / num_examples
    noise = (targets - clean_train) / num_examples
    transferred = coupling.predict(D @ clean)
    in_signal = channels.signal @ noise
    return ErrorCells(
        initial=test_outputs - clean_test,
        transferred=transferred,
        residual_bias=G @ clean - transferred,
        trapped_noise=G @ (noise - in_signal),
        signal_noise=G @ in_signal,
        source=source,
    )
