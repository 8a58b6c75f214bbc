"""Use cleanlab on an audit: its inputs, its label issues, and a Datalab."""

from typing import Any

import numpy as np

from poprisk.errors import DataError, MissingExtraError
from poprisk.risk import AuditTable, OutOfSample


def cleanlab_inputs(table: AuditTable | OutOfSample) -> dict[str, np.ndarray]:
    """The arguments of cleanlab's functions: ``labels`` and ``pred_probs``.

    cleanlab expects out-of-sample probabilities: those of an audit, or what :func:`poprisk.out_of_sample_probabilities`
    returns. Where a run allows none without training, an audit has averages over training, with which cleanlab's count
    of wrong labels is too low: allow folds with ``audit(run, retrain_budget=5)``.

    >>> import torch
    >>> from functools import partial
    >>> from poprisk import audit
    >>> from poprisk.runs import Problem, train
    >>> problem = Problem(torch.nn.Linear, "cross_entropy", torch.eye(3), torch.arange(3),
    ...                   arguments={"in_features": 3, "out_features": 3})
    >>> table = audit(train(problem, partial(torch.optim.SGD, lr=1.0), 9, progress=False), progress=False)
    >>> inputs = cleanlab_inputs(table)  # cleanlab.filter.find_label_issues(**inputs)
    >>> inputs["labels"], inputs["pred_probs"].shape
    (array([0, 1, 2]), (3, 3))

    Raises:
        DataError: The audit is not of class labels.
    """
    if isinstance(table, OutOfSample):
        given, found = table.labels, table.probabilities
    elif table.probabilities is None:
        raise DataError(f"cleanlab needs one class label per example, but this is an audit of kind {table.kind!r}")
    else:
        given, found = table["given_label"], table.probabilities
    probabilities = found.double()
    probabilities = probabilities / probabilities.sum(1, keepdim=True)  # float32 sums are not 1 to double precision
    return {"labels": given.numpy(), "pred_probs": probabilities.numpy()}


def cleanlab_columns(table: AuditTable | OutOfSample, **options: Any) -> dict[str, np.ndarray]:
    """The columns ``cleanlab_is_issue`` and ``cleanlab_quality`` (1 is good), with one entry per example.

    Args:
        table: Out-of-sample probabilities, or an audit of class labels.
        options: Options of ``cleanlab.filter.find_label_issues``, e.g. ``filter_by="both"``.

    Raises:
        MissingExtraError: cleanlab is not installed.
        DataError: The audit is not of class labels.
    """
    inputs = cleanlab_inputs(table)
    try:
        from cleanlab.filter import find_label_issues
        from cleanlab.rank import get_label_quality_scores
    except ImportError:
        raise MissingExtraError("cleanlab", "cleanlab", "cleanlab's label issues") from None
    return {
        "cleanlab_is_issue": np.asarray(find_label_issues(**inputs, **options)),
        "cleanlab_quality": np.asarray(get_label_quality_scores(inputs["labels"], inputs["pred_probs"])),
    }


def to_datalab(table: AuditTable, **find_issues: Any) -> Any:
    """A ``cleanlab.Datalab`` over the audit's columns, after ``find_issues``.

    Args:
        table: An audit of class labels.
        find_issues: Further arguments of ``Datalab.find_issues``, e.g. ``features=`` for outliers and duplicates.

    Raises:
        MissingExtraError: cleanlab with its Datalab is not installed.
        DataError: The audit is not of class labels.
    """
    inputs = cleanlab_inputs(table)
    try:
        from cleanlab.datalab.datalab import Datalab
    except ImportError:
        raise MissingExtraError("cleanlab[datalab]", "cleanlab", "a cleanlab Datalab") from None
    lab = Datalab(data=table.to_dict(), label_name="given_label")
    lab.find_issues(pred_probs=inputs["pred_probs"], **find_issues)
    return lab
