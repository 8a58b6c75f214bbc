"""cleanlab on an audit: its inputs, its label issues beside ours, and a Datalab, if the package is there."""

from typing import Any

import numpy as np

from poprisk.errors import DataError, MissingExtraError
from poprisk.risk import AuditTable


def cleanlab_inputs(table: AuditTable) -> dict[str, np.ndarray]:
    """What cleanlab's functions take: ``labels`` and ``pred_probs``.

    The probabilities are the audit's: averaged over training, or those it was given as out-of-fold. cleanlab asks for
    the latter; with the former its ranking is good, and its count of wrong labels too low the longer one trained
    (``table.wrong_labels`` is made for them).

    >>> import torch
    >>> from functools import partial
    >>> from poprisk import audit
    >>> from poprisk.runs import Problem
    >>> from poprisk.runs import train
    >>> problem = Problem(torch.nn.Linear, "cross_entropy", torch.eye(3), torch.arange(3),
    ...                   arguments={"in_features": 3, "out_features": 3})
    >>> table = audit(train(problem, partial(torch.optim.SGD, lr=1.0), 9, progress=False), progress=False)
    >>> inputs = cleanlab_inputs(table)  # cleanlab.filter.find_label_issues(**inputs)
    >>> inputs["labels"], inputs["pred_probs"].shape
    (array([0, 1, 2]), (3, 3))

    Raises:
        DataError: the audit is not of classes.
    """
    if table.probabilities is None:
        raise DataError(f"cleanlab needs one class for each example, and this audit is of {table.kind}")
    probabilities = table.probabilities.double()
    probabilities = probabilities / probabilities.sum(1, keepdim=True)  # float32 sums are not 1 to double precision
    return {"labels": table["given_label"].numpy(), "pred_probs": probabilities.numpy()}


def cleanlab_columns(table: AuditTable, **options: Any) -> dict[str, np.ndarray]:
    """Cleanlab's own columns: ``cleanlab_is_issue`` and ``cleanlab_quality`` (1 is good), one entry for each example.

    Args:
        table: Of classes.
        options: For ``cleanlab.filter.find_label_issues``, e.g. ``filter_by="both"``.

    Raises:
        MissingExtraError: cleanlab is not installed.
        DataError: the audit is not of classes.
    """
    inputs = cleanlab_inputs(table)
    try:
        from cleanlab.filter import find_label_issues
        from cleanlab.rank import get_label_quality_scores
    except ImportError:
        raise MissingExtraError("cleanlab", "cleanlab", "cleanlab's label issues") from None
    return {
        "cleanlab_is_issue": np.asarray(find_label_issues(**inputs, **options)),
        "cleanlab_quality": np.asarray(get_label_quality_scores(**inputs)),
    }


def to_datalab(table: AuditTable, **find_issues: Any) -> Any:
    """A ``cleanlab.Datalab`` over the audit's columns, with its issues already looked for.

    Args:
        table: Of classes.
        find_issues: Further arguments of ``Datalab.find_issues``, e.g. ``features=`` for outliers and duplicates.

    Raises:
        MissingExtraError: cleanlab with its Datalab is not installed.
        DataError: the audit is not of classes.
    """
    inputs = cleanlab_inputs(table)
    try:
        from cleanlab import Datalab
    except ImportError:
        raise MissingExtraError("cleanlab[datalab]", "cleanlab", "a cleanlab Datalab") from None
    lab = Datalab(data=table.to_dict(), label_name="given_label")
    lab.find_issues(pred_probs=inputs["pred_probs"], **find_issues)
    return lab
