r"""A training problem with a frozen kernel and squared loss: one singular value decomposition tells everything.

.. math:: J_S = U \Sigma V^\top, \qquad C_0 = J_Q V \Sigma^{-1} = K_{QS} U \Sigma^{-2}, \qquad \Gamma_0 = C_0^\top C_0

Every way to fit it that acts on singular directions is a filter M, :math:`0 \preceq M \preceq I`
(``thm:unified_bias_variance``):

.. math:: U_Q^M = U_Q(0) + C_0 M U^\top (y - U_S(0)), \qquad \delta_M = V \Sigma^{-1} M U^\top (y - U_S(0))

The loss is the mean over n examples, :math:`\Phi_S(u) = \|u - y\|^2 / 2n`, so that gradient flow runs at rates σ²/n.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from poprisk._core.autodiff import FlatModel, Inputs
from poprisk.errors import DataError, HyperparameterError
from poprisk.operators import cross_kernel, require_length, train_kernel

Filter = Float[Tensor, "*r"]
"""A filter: its diagonal [r] in the singular directions, or a matrix [r, r]."""


@dataclass(frozen=True, eq=False)
class FrozenProblem:
    r"""Kernel, test map and starting outputs. Made by ``frozen_problem``, ``frozen_problem_of_features`` or ``…_from``.

    >>> problem = frozen_problem(torch.diag(torch.tensor([4.0, 1.0])), torch.tensor([[2.0, 1.0]]))
    >>> problem.predict(torch.ones(2), torch.tensor([3.0, 5.0]))  # interpolation: 2·3/4 + 1·5/1
    tensor([6.5000])
    """

    left: Float[Tensor, "N r"]
    """U."""
    roots: Float[Tensor, "r"]
    """σ, largest first."""
    test_map: Float[Tensor, "M r"]
    """C_0."""
    num_examples: int
    """n: what the loss is a mean over."""
    start_train: Float[Tensor, "N"]
    """U_S(0)."""
    start_test: Float[Tensor, "M"]
    """U_Q(0)."""
    right: Float[Tensor, "d r"] | None = None
    """V; None where only kernels are known."""

    @property
    def rank(self) -> int:
        """Singular directions, r."""
        return len(self.roots)

    @property
    def mobility(self) -> Float[Tensor, "r"]:
        """σ², how fast each direction is fitted."""
        return self.roots.square()

    @property
    def visibility(self) -> Float[Tensor, "r r"]:
        r""":math:`\Gamma_0`."""
        return self.test_map.T @ self.test_map

    def coordinates(self, y: Float[Tensor, "N"]) -> Float[Tensor, "r"]:
        r""":math:`U^\top (y - U_S(0))`."""
        require_length(y, len(self.start_train), "targets")
        return self.left.T @ (y - self.start_train)

    def predict(self, M: Filter, y: Float[Tensor, "N"]) -> Float[Tensor, "M"]:
        """U_Q^M: the test outputs after a filtered fit of the targets."""
        return self.start_test + self.test_map @ apply_filter(M, self.coordinates(y))

    def interpolant(self, y: Float[Tensor, "N"]) -> Float[Tensor, "M"]:
        r""":math:`\bar U_Q = U_Q(0) + C_0 U^\top (y - U_S(0))`: what full interpolation of these targets predicts."""
        return self.start_test + self.test_map @ self.coordinates(y)

    def displacement(self, M: Filter, y: Float[Tensor, "N"]) -> Float[Tensor, "d"]:
        r"""The parameter displacement :math:`\delta_M`.

        Raises:
            DataError: the problem was made of kernels, which do not know the parameters.

        >>> problem = frozen_problem_of_features(torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 1.0]]))
        >>> problem.displacement(torch.ones(1), torch.tensor([6.0]))  # the least-norm interpolant
        tensor([3., 0.])
        """
        if self.right is None:
            raise DataError("parameter displacements need the features: use frozen_problem_of_features")
        return self.right @ (apply_filter(M, self.coordinates(y)) / self.roots)


def apply_filter(M: Filter, x: Float[Tensor, "*columns"]) -> Float[Tensor, "*columns"]:
    """M x for a diagonal or a matrix; x is a vector [r] or a matrix [r, k].

    >>> apply_filter(torch.tensor([1.0, 0.5]), torch.tensor([2.0, 2.0]))
    tensor([2., 1.])
    """
    if M.dim() == 2:
        return M @ x
    return M * x if x.dim() == 1 else M[:, None] * x


def frozen_problem(
    K_SS: Float[Tensor, "N N"],
    K_QS: Float[Tensor, "M N"],
    *,
    outputs: int = 1,
    start_train: Float[Tensor, "N"] | None = None,
    start_test: Float[Tensor, "M"] | None = None,
    cutoff: float | None = None,
) -> FrozenProblem:
    r"""A problem from plain kernels.

    Args:
        K_SS: The train kernel, symmetric and positive semidefinite.
        K_QS: The kernel between test and training outputs.
        outputs: p, outputs per example; N = n·p.
        start_train: U_S(0); default: 0.
        start_test: U_Q(0); default: 0.
        cutoff: Eigenvalues at most this share of the largest one are left out; by default N·eps. The division by σ²
            makes the last directions kept uncertain by eps·σ_1²/σ²: features resolve twice as many digits.

    Raises:
        DataError: shapes do not fit, a kernel that is not symmetric or has negative eigenvalues, or is zero.

    >>> frozen_problem(torch.eye(2), torch.ones(1, 2)).visibility
    tensor([[1., 1.],
            [1., 1.]])
    """
    N, eps = _check_kernels(K_SS, K_QS), torch.finfo(K_SS.dtype).eps
    values, U = torch.linalg.eigh((K_SS + K_SS.T) / 2)
    values, U = values.flip(0), U.flip(1)
    size = values.abs().max().item()
    if values[-1].item() < -10 * N * eps * size:
        raise DataError(
            f"a kernel must be positive semidefinite, got an eigenvalue of {values[-1].item():.3g} beside {size:.3g}"
        )
    keep = values > _share(cutoff, N * eps) * size
    values, U = values[keep], U[:, keep]
    return _assembled(U, values.sqrt(), K_QS @ U / values, outputs, start_train, start_test, None)


def frozen_problem_of_features(
    features: Float[Tensor, "N d"],
    test_features: Float[Tensor, "M d"],
    *,
    outputs: int = 1,
    start_train: Float[Tensor, "N"] | None = None,
    start_test: Float[Tensor, "M"] | None = None,
    cutoff: float | None = None,
) -> FrozenProblem:
    r"""A problem from features: Jacobians :math:`J_S, J_Q` of a model, random features, or the data of a linear model.

    Args:
        features: J_S, one row per training output.
        test_features: J_Q.
        outputs: p, outputs per example; N = n·p.
        start_train: U_S(0); default: 0.
        start_test: U_Q(0); default: 0.
        cutoff: Singular values at most this share of the largest one are left out; by default max(N, d)·eps.

    Raises:
        DataError: shapes do not fit, or features that are zero or not finite.

    >>> frozen_problem_of_features(torch.eye(2), torch.ones(1, 2)).rank
    2
    """
    if features.dim() != 2 or test_features.dim() != 2 or features.shape[1] != test_features.shape[1]:
        raise DataError(
            f"features must be matrices with the same columns, got {list(features.shape)} and "
            f"{list(test_features.shape)}"
        )
    if not (torch.isfinite(features).all() and torch.isfinite(test_features).all()):
        raise DataError("features must be finite, got NaN or infinity: check the model behind them")
    U, roots, Vt = torch.linalg.svd(features, full_matrices=False)
    least = _share(cutoff, max(features.shape) * torch.finfo(features.dtype).eps) * roots.max().item()
    keep = roots > least
    U, roots, V = U[:, keep], roots[keep], Vt[keep].T
    return _assembled(U, roots, test_features @ V / roots, outputs, start_train, start_test, V)


def frozen_problem_from(
    model: FlatModel,
    w: Float[Tensor, "d"],
    inputs: Inputs,
    test_inputs: Inputs,
    *,
    parameters: bool = False,
    preconditioner: float | Float[Tensor, "d"] | None = None,
    cutoff: float | None = None,
) -> FrozenProblem:
    r"""The problem that a model's kernel would be if it stayed what it is at given weights.

    Args:
        model: The model; only its outputs are used, the loss is the squared one.
        w: Weights, for instance ``run.weights(k)`` of a recorded run.
        inputs: The training inputs.
        test_inputs: The test inputs.
        parameters: Form the Jacobians, so that parameter displacements are known; else the kernels, whatever d.
        preconditioner: The diagonal of M in :math:`K^M = J M J^\top`. With ``parameters`` displacements are then in
            the coordinates :math:`M^{-1/2} w`.
        cutoff: As in ``frozen_problem`` or ``frozen_problem_of_features``.

    Raises:
        DataError: weights or inputs do not fit.

    >>> model = FlatModel(torch.nn.Linear(2, 1, bias=False).double(), "squared")
    >>> x = torch.eye(2, dtype=torch.float64)
    >>> problem = frozen_problem_from(model, model.weights, x, x[:1])
    >>> torch.allclose(problem.predict(torch.ones(2).double(), torch.tensor([3.0, 4.0]).double()), 3 * x[0, :1])
    True
    """
    u_S, u_Q = model.outputs(w, inputs), model.outputs(w, test_inputs)
    options = {
        "outputs": u_S.shape[1],
        "start_train": u_S.reshape(-1),
        "start_test": u_Q.reshape(-1),
        "cutoff": cutoff,
    }
    if parameters:
        root = 1.0 if preconditioner is None else torch.as_tensor(preconditioner, dtype=w.dtype).sqrt()
        J_S, J_Q = (model.output_jacobian(w, x).flatten(0, 1) * root for x in (inputs, test_inputs))
        return frozen_problem_of_features(J_S, J_Q, **options)
    K_SS = train_kernel(model, w, inputs, preconditioner=preconditioner)
    return frozen_problem(K_SS, cross_kernel(model, w, test_inputs, inputs, preconditioner=preconditioner), **options)


def _assembled(
    U: Tensor,
    roots: Tensor,
    test_map: Tensor,
    outputs: int,
    start_train: Tensor | None,
    start_test: Tensor | None,
    right: Tensor | None,
) -> FrozenProblem:
    N, M = U.shape[0], test_map.shape[0]
    if outputs < 1 or N % outputs:
        raise DataError(f"{N} training outputs are no multiple of {outputs} per example: check outputs")
    if not len(roots):
        raise DataError("a frozen problem needs a kernel that is not zero: no output can move")
    start_train = roots.new_zeros(N) if start_train is None else start_train
    start_test = roots.new_zeros(M) if start_test is None else start_test
    require_length(start_train, N, "start_train")
    require_length(start_test, M, "start_test")
    return FrozenProblem(U, roots, test_map, N // outputs, start_train, start_test, right)


def _check_kernels(K_SS: Tensor, K_QS: Tensor) -> int:
    N = K_SS.shape[0]
    if K_SS.dim() != 2 or K_QS.dim() != 2 or K_SS.shape[1] != N or K_QS.shape[1] != N:
        raise DataError(f"kernels must be [N, N] and [M, N], got {list(K_SS.shape)} and {list(K_QS.shape)}")
    if not (torch.isfinite(K_SS).all() and torch.isfinite(K_QS).all()):
        raise DataError("kernels must be finite, got NaN or infinity: check the model behind them")
    if (K_SS - K_SS.T).abs().max() > torch.finfo(K_SS.dtype).eps ** 0.5 * K_SS.abs().max():
        raise DataError("the train kernel must be symmetric: check that rows and columns are the same examples")
    return N


def _share(cutoff: float | None, default: float) -> float:
    if cutoff is None:
        return default
    if not 0 <= cutoff < 1:
        raise HyperparameterError(f"cutoff must lie in [0, 1), relative to the largest value, got {cutoff}")
    return cutoff
