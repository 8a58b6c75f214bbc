"""A model as functions of its flat parameters, and losses of one example."""

from poprisk.autodiff.flat import FlatModel as FlatModel
from poprisk.autodiff.losses import ExampleLoss as ExampleLoss
from poprisk.autodiff.losses import cross_entropy_loss as cross_entropy_loss
from poprisk.autodiff.losses import resolve_loss as resolve_loss
from poprisk.autodiff.losses import squared_loss as squared_loss
