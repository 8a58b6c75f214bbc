"""A model as functions of its flat parameters, losses of one example, and derivatives averaged over a step."""

from poprisk.autodiff.curvature import SegmentCurvature as SegmentCurvature
from poprisk.autodiff.flat import FlatModel as FlatModel
from poprisk.autodiff.loss_derivatives import loss_gradients as loss_gradients
from poprisk.autodiff.loss_derivatives import loss_hessians as loss_hessians
from poprisk.autodiff.losses import ExampleLoss as ExampleLoss
from poprisk.autodiff.losses import cross_entropy_loss as cross_entropy_loss
from poprisk.autodiff.losses import logistic_loss as logistic_loss
from poprisk.autodiff.losses import resolve_loss as resolve_loss
from poprisk.autodiff.losses import squared_loss as squared_loss
from poprisk.autodiff.segment import SegmentJacobian as SegmentJacobian
from poprisk.autodiff.ways import JacobianWay as JacobianWay
