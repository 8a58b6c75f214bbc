"""Many trainings as one stacked computation."""

from poprisk.ensembles.members import Members as Members
from poprisk.ensembles.retraining import Retrained as Retrained
from poprisk.ensembles.retraining import example_losses as example_losses
from poprisk.ensembles.retraining import member_outputs as member_outputs
from poprisk.ensembles.retraining import retrain as retrain
from poprisk.ensembles.stacked import MLPShape as MLPShape
from poprisk.ensembles.stacked import StackedMLP as StackedMLP
from poprisk.ensembles.training import StackedTraining as StackedTraining
from poprisk.ensembles.training import epoch_batches as epoch_batches
from poprisk.ensembles.training import learning_rate_groups as learning_rate_groups
