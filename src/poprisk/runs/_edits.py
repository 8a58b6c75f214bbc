"""What was changed in a problem after its function made it: targets corrected, examples held back. A run saves this."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from poprisk.errors import DataError
from poprisk.runs._data_check import check_finite, check_targets
from poprisk.runs._formats import as_tensor


def new_targets(problem: Any, targets: Any) -> tuple[Tensor, dict[str, list[Any]]]:
    """Other targets for a problem, checked, and which of them differ as JSON values.

    Raises:
        DataError: Their shape or kind is not that of the problem's targets, or they do not fit the loss.
    """
    given, old = as_tensor("the targets", targets), problem.targets
    if given.shape != old.shape or given.is_floating_point() != old.is_floating_point():
        raise DataError(
            f"the targets must be as in the problem, {old.dtype} {list(old.shape)}, got {given.dtype} "
            f"{list(given.shape)}"
        )
    given = given.to(old)
    check_finite("training", {"targets": given}, allow=False)
    check_targets("training", given, problem.loss)
    rows = (given != old).reshape(len(given), -1).any(1).nonzero().squeeze(1)
    return given, {"changed": rows.tolist(), "targets": given[rows].tolist()}


def edited(problem: Any, edits: Iterable[Mapping[str, Any]]) -> Any:
    """The problem with the changes that a run saved.

    Raises:
        DataError: They do not fit the problem.
    """
    for edit in edits:
        try:
            problem = _edited(problem, edit)
        except (IndexError, RuntimeError, TypeError, ValueError) as error:
            raise DataError(f"the changes of problem {problem.name!r} that the run saved do not fit: {error}") from None
    return problem


def _edited(problem: Any, edit: Mapping[str, Any]) -> Any:
    if "changed" in edit:
        if not edit["changed"] or not max(edit["changed"]) < len(problem):
            raise DataError(f"the run changed targets that are not among the {len(problem)} of its problem")
        targets = problem.targets.clone()
        targets[edit["changed"]] = torch.tensor(edit["targets"]).to(targets)
        return problem.with_targets(targets)
    held = torch.tensor(edit["without"] if "without" in edit else edit["only"], device=problem.device)
    if not len(held) or not 0 <= int(held.min()) <= int(held.max()) < len(problem):
        raise DataError(f"the run was split at examples that are not among the {len(problem)} of its problem")
    kept = torch.ones(len(problem), dtype=torch.bool, device=problem.device)
    kept[held] = False
    return problem.held_back(kept.nonzero().squeeze(1), held)["only" in edit]
