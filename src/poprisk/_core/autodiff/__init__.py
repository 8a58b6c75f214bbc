"""A model as functions of its flat parameters, losses of one example, and derivatives averaged over a step."""

from poprisk._core.autodiff.blocks import slices
from poprisk._core.autodiff.curvature import SegmentCurvature
from poprisk._core.autodiff.flat import FlatModel
from poprisk._core.autodiff.function import call_module
from poprisk._core.autodiff.independence import check_independence, draws_at_random
from poprisk._core.autodiff.loss_derivatives import flatten_outputs, loss_gradients, loss_hessians
from poprisk._core.autodiff.losses import (
    IGNORED,
    ExampleLoss,
    check_same_shape,
    cross_entropy_loss,
    logistic_loss,
    resolve_loss,
    scalar_loss,
    squared_loss,
)
from poprisk._core.autodiff.precision import EXACT_DTYPES, check_precision, exact_kernels
from poprisk._core.autodiff.probing import probe
from poprisk._core.autodiff.products import Inputs, count_examples, parts_of, take_examples
from poprisk._core.autodiff.quadrature import gauss_legendre
from poprisk._core.autodiff.recurrent import plain_operations
from poprisk._core.autodiff.replayed import Replayed, capture_graph
from poprisk._core.autodiff.segment import SegmentJacobian
from poprisk._core.autodiff.ways import (
    JacobianWay,
    OfWeights,
    double_backward,
    forward_mode,
    load_forward_mode,
    take_first_way,
)
