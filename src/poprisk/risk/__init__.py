r"""Know: population risk with a verdict, the influence of every example, and an audit of the labels, from one run.

>>> import torch
>>> from functools import partial
>>> from poprisk import Problem, audit, train
>>> inputs, labels = torch.eye(3).repeat(12, 1), torch.arange(3).repeat(12)
>>> labels[4] = 2  # really a 1
>>> problem = Problem(torch.nn.Linear, "cross_entropy", inputs, labels,
...                   arguments={"in_features": 3, "out_features": 3})
>>> run = train(problem, partial(torch.optim.SGD, lr=1.0), 40, progress=False)
>>> table = audit(run, progress=False)
>>> int(table.order()[0]), int(table["suggested_label"][4]), table.cleaned_targets([4])[4]
(4, 1, tensor(1))
"""

from poprisk._core.arguments import guard
from poprisk._core.estimate import Estimate
from poprisk.risk._audit.run_audit import audit
from poprisk.risk._audit.table import AuditTable
from poprisk.risk._exclusion import Exclusion, exclusion, exclusion_risk
from poprisk.risk._first_order import first_order_risk, generalization_gap
from poprisk.risk._influence.matrix import influence_matrix, influence_on, influence_operator, self_influence
from poprisk.risk._influence.sensitivity import Unrolled
from poprisk.risk._k_fold import k_fold
from poprisk.risk._meter import Reading, RiskMeter
from poprisk.risk._out_of_sample import OutOfSample, out_of_sample_probabilities
from poprisk.risk._resampled import Resampled
from poprisk.risk._resampling import cross_validation_risk, holdouts, leave_one_out, subsets
from poprisk.risk._retraining.retrain import retrain
from poprisk.risk._risk import population_risk
from poprisk.risk._verdict import RiskEstimate

# isort: split
# For the rooms above: not public, and not in __all__.
from poprisk.risk._audit.decisions import (
    Decisions,
    check_targets_format,
    corrected_targets,
    data_fingerprint,
    run_id,
    write_targets,
)
from poprisk.risk._audit.exact import exact_obstacle, seconds
from poprisk.risk._audit.kept import BUDGET, KeptParts, Part, kept_audit
from poprisk.risk._audit.run_audit import example_losses
from poprisk.risk._audit.table import DESCRIPTIONS, check_format
from poprisk.risk._exclusion import MOST_EXAMPLES
from poprisk.risk._influence.matrix import cast_inputs
from poprisk.risk._k_fold import k_fold_members, k_fold_of_weights
from poprisk.risk._leverage.controlled import controls_work
from poprisk.risk._leverage.leverage import leverage_work
from poprisk.risk._moments import Network, choose_moments, evaluate, has_changing_buffers
from poprisk.risk._retraining.members import Members, cast, moved
from poprisk.risk._under_training import STILL_FALLING, under_training
from poprisk.risk._verdict import FEWEST_FOLDS

__all__ = [
    "AuditTable", "Estimate", "Exclusion", "OutOfSample", "Reading", "Resampled", "RiskEstimate", "RiskMeter",
    "Unrolled", "audit", "cross_validation_risk", "exclusion", "exclusion_risk", "first_order_risk",
    "generalization_gap", "holdouts", "influence_matrix", "influence_on", "influence_operator", "k_fold",
    "leave_one_out", "out_of_sample_probabilities", "population_risk", "retrain", "self_influence", "subsets",
]  # fmt: skip
guard(globals(), __all__)
