"""See: the operators of a run (signal channel and reservoir, coupling, drift and diffusion) and its tangent kernels."""

from typing import Any

from poprisk import _moved
from poprisk._core.arguments import guard
from poprisk._core.linalg import top_eigenpairs
from poprisk.operators._bound import Bound
from poprisk.operators._channels import DissipationChannels, dissipation_channels
from poprisk.operators._coupling import Coupling
from poprisk.operators._cumulative import CumulativeError, cumulative_error
from poprisk.operators._decomposition import ErrorCells, error_cells
from poprisk.operators._dense import Operators
from poprisk.operators._drift_diffusion import DriftDiffusion, drift_diffusion
from poprisk.operators._evaluation import evaluation_model
from poprisk.operators._gradient_flow import FlowPath, flow_path, gradient_flow_operators
from poprisk.operators._kernels.drift import KernelDrift, kernel_drift
from poprisk.operators._kernels.method import method_costs
from poprisk.operators._kernels.precision import Precision
from poprisk.operators._kernels.products import kernel_operator
from poprisk.operators._kernels.rounded_kernel import rounded_kernel
from poprisk.operators._kernels.tangent import cross_kernel, kernel_tiles, train_kernel
from poprisk.operators._kernels.timescales import Timescales, timescales
from poprisk.operators._sharded import ShardedKernel
from poprisk.operators._top_space import TopChannels, top_channels
from poprisk.operators._window import Window

# isort: split
# For the rooms above: not public, and not in __all__.
from poprisk.operators._batch_law import Sampling
from poprisk.operators._bound import MARGIN, Form, eps_of, rounding_of_test_transfer
from poprisk.operators._channels import Transfer, operator_norm, require_length, require_shape
from poprisk.operators._coupling import path_error, whitened_error
from poprisk.operators._dense import RealizedWindow
from poprisk.operators._evaluation import Evaluation, evaluation_of
from poprisk.operators._kernels.method import Method
from poprisk.operators._kernels.plan import plan_tiles
from poprisk.operators._kernels.precision import check_supported, numerics_here, pinned
from poprisk.operators._kernels.tiles import Side, TileMaker, aligned
from poprisk.operators._kernels.validation import Diagonal
from poprisk.operators._loss_terms import loss_terms, loss_weights
from poprisk.operators._probes import PROBES, REPEATED, ProbedOperators, probe_operators
from poprisk.operators._stretches import RunPath, StretchedWindow

__all__ = [
    "Bound", "Coupling", "CumulativeError", "DissipationChannels", "DriftDiffusion", "ErrorCells", "FlowPath",
    "KernelDrift", "Operators", "Precision", "ShardedKernel", "Timescales", "TopChannels", "Window", "cross_kernel",
    "cumulative_error", "dissipation_channels", "drift_diffusion", "error_cells", "evaluation_model", "flow_path",
    "gradient_flow_operators", "kernel_drift", "kernel_operator", "kernel_tiles", "method_costs", "rounded_kernel",
    "timescales", "top_channels", "top_eigenpairs", "train_kernel",
]  # fmt: skip
guard(globals(), ["Window", "cross_kernel", "train_kernel"])


def __getattr__(name: str) -> Any:
    return _moved.facade_attribute(__name__, name)
