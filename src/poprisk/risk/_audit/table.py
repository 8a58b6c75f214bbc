"""The table of an audit: one row for each training example."""

import csv
import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from poprisk._core.estimate import Estimate
from poprisk._core.html import card, table
from poprisk._core.store import write_bytes, write_text
from poprisk.errors import DataError, MissingExtraError, PopRiskWarning
from poprisk.risk._audit.decisions import Decisions
from poprisk.theory import ExampleGroups

DESCRIPTIONS = {
    "example": "position in the training set",
    "suspicion": "from near 0 to 1, highest for the most suspicious; audit()'s documentation says how it is computed",
    "is_suspect": "whether it is among the most suspicious, as many as labels are wrong; if that is not known, whether "
    "the label is contradicted",
    "given_label": "the label trained on",
    "suggested_label": "the most probable other class, by the mean of out-of-sample and averaged probabilities",
    "label_quality": "(1 + p_given - p_other) / 2 with the same probabilities: 0 contradicted, 1 confirmed",
    "predicted_label": "the last network's prediction",
    "given_target": "the value trained on",
    "suggested_target": "the prediction averaged over training",
    "loss": "loss at the end of training",
    "mean_loss": "loss averaged over training",
    "margin": "logit of the given label minus the largest other logit, at the end of training",
    "aum": "margin averaged over training (area under the margin)",
    "confidence": "probability of the given label, averaged over training",
    "variability": "standard deviation of that probability over training",
    "correctness": "share of the training during which the given label was predicted",
    "forgetting_events": "number of times the prediction changed from right to wrong",
    "residual": "distance between prediction and target at the end of training",
    "mean_residual": "residual averaged over training",
    "residual_z": "mean_residual above its median, in robust standard deviations",
    "self_influence": "change of the example's own loss if it is removed, to first order (exact tier)",
    "loo_loss": "loss at the end of training without the example, by the linearized run (exact tier)",
    "loo_margin": "margin of the given label without the example, by the linearized run (exact tier)",
    "loo_residual": "distance between prediction and target without the example, by the linearized run (exact tier)",
    "loo_doubtful": "whether the linearization is doubtful for this example",
    "displacement": "norm of the transfer from the example's output gradient to test predictions (exact tier)",
    "group": "the signal direction that the example belongs to, counted from 0; -1 for the tail (with_groups)",
    "group_captured": "share of the example's outputs in the signal directions (with_groups)",
    "tail_norm": "norm of its output gradient outside the signal directions (with_groups)",
}
"""Meaning of each column."""
_SHOWN = (
    *("example", "suspicion", "is_suspect", "given_label", "suggested_label", "label_quality"),
    *("given_target", "suggested_target", "loss", "mean_loss", "residual_z", "self_influence", "loo_loss", "group"),
)
"""Columns shown in a notebook."""
_ROWS = 10
"""Rows shown in a notebook."""


@dataclass(frozen=True, eq=False)
class AuditTable:
    """The result of an audit, one row for each training example.

    ``columns`` maps names to tensors with one entry for each example; ``descriptions`` says what each means.
    """

    columns: dict[str, Tensor]
    kind: str
    """``"classes"``, ``"regression"``, or ``"loss"`` where only losses can be compared."""
    wrong_labels: Estimate
    """Number of wrong labels; where it cannot be told it is not valid, and says why and what to do."""
    moments: tuple[int, ...]
    """Steps at which the network was evaluated."""
    losses: Float[Tensor, "moments n"]
    """Loss of each example at each of these steps."""
    targets: Tensor
    """The problem's targets, which were trained on."""
    suggested_targets: Tensor | None
    """Suggested targets in the same form; None where nothing can be suggested."""
    probabilities: Float[Tensor, "n classes"] | None = None
    """Class probabilities by a model that has not seen the example; averaged over training where there is none."""
    notes: tuple[str, ...] = ()
    """What is approximate in this audit, and why columns are missing."""

    def __post_init__(self) -> None:
        if any(column.shape != (len(self.targets),) for column in self.columns.values()):
            raise DataError("every column of an audit must have one entry for each example: compute it again")

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, name: str) -> Tensor:
        """A column by name.

        Raises:
            DataError: there is no such column.
        """
        if name not in self.columns:
            raise DataError(f"column must be one of {', '.join(self.columns)}, got {name!r}")
        return self.columns[name]

    @property
    def descriptions(self) -> dict[str, str]:
        """What each of the table's columns means."""
        return {name: DESCRIPTIONS[name] for name in self.columns if name in DESCRIPTIONS}

    @property
    def is_suspect(self) -> Bool[Tensor, "n"]:
        """Whether each label is suspected to be wrong."""
        return self.columns["is_suspect"]

    def order(self, by: str | None = None) -> Tensor:
        """The suspects by suspicion, then the other examples; or all from the highest value of a column to the lowest.

        Examples with equal values are ordered by position.
        """
        order = self[by or "suspicion"].double().nan_to_num(nan=-torch.inf).argsort(descending=True, stable=True)
        return order if by else order[(~self.is_suspect[order]).byte().argsort(stable=True)]

    def worst(self, k: int = 20, *, by: str | None = None) -> list[dict[str, Any]]:
        """The first k rows of :meth:`order`, as plain values.

        Raises:
            DataError: k is negative, or there is no such column.
        """
        if k < 0:
            raise DataError(f"k must not be negative, got {k}")
        rows = self.order(by)[:k]
        chosen = {name: column[rows].tolist() for name, column in self.columns.items()}
        return [dict(zip(chosen, values, strict=True)) for values in zip(*chosen.values(), strict=True)]

    def with_groups(self, groups: ExampleGroups) -> "AuditTable":
        """A copy of the table with the signal direction that each example belongs to.

        Args:
            groups: Of :func:`poprisk.theory.groups` for the same training set.

        Raises:
            DataError: the groups have another number of examples.
        """
        if len(groups.group) != len(self):
            raise DataError(f"groups must have the table's {len(self)} examples, got {len(groups.group)}")
        added = {"group": groups.group.cpu(), "group_captured": groups.captured.cpu()}
        if groups.tail_norm is not None:
            added["tail_norm"] = groups.tail_norm.cpu()
        return replace(self, columns={**self.columns, **added})

    def cleaned_targets(self, chosen: Sequence[int | bool] | Tensor | str | Path | Decisions | None = None) -> Tensor:
        """A copy of the targets with suggested targets for some of the examples, or with decided ones.

        Args:
            chosen: Positions or a mask of the examples to change; default: the suspects. Or the file of decisions
                (``.json`` or ``.csv``) that was exported from a report after its labels were reviewed.

        Without a choice, a warning says where the count of wrong labels is not valid: many suspects may be right.

        Raises:
            DataError: nothing can be suggested for these targets, a position is out of range, or the decisions are
                about other labels.
        """
        if isinstance(chosen, str | Path):
            chosen = Decisions.load(chosen)
        if isinstance(chosen, Decisions):
            return chosen.apply(self.targets)
        if self.suggested_targets is None:
            raise DataError("there are no suggested targets, because the targets are neither classes nor numbers")
        where = self.is_suspect if chosen is None else torch.as_tensor(chosen)
        if chosen is None and self.kind == "classes" and not self.wrong_labels.valid and bool(where.any()):
            say = "how many labels are wrong is not known, so many suspects may be right: review them, or choose some"
            warnings.warn(say, PopRiskWarning, stacklevel=2)
        if where.dtype == torch.bool and where.shape != (len(self),):
            raise DataError(
                f"a mask must have one entry for each of the {len(self)} examples, got shape {list(where.shape)}"
            )
        if where.dtype != torch.bool and where.numel() and not 0 <= int(where.min()) <= int(where.max()) < len(self):
            raise DataError(f"positions must lie in 0 … {len(self) - 1}, got {int(where.min())} … {int(where.max())}")
        where = where.long() if where.dtype != torch.bool else where
        cleaned = self.targets.clone()
        cleaned[where] = self.suggested_targets[where].to(cleaned.dtype)
        return cleaned

    def to_dict(self) -> dict[str, list[Any]]:
        """Columns as lists."""
        return {name: column.tolist() for name, column in self.columns.items()}

    def to_pandas(self) -> Any:
        """A DataFrame, one row for each example in the order of the training set.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError:
            raise MissingExtraError("pandas", "data", "an audit as a DataFrame") from None
        return pd.DataFrame({name: column.numpy() for name, column in self.columns.items()})

    def save(self, path: str | Path) -> Path:
        """Write the table as ``.csv`` or ``.parquet``, atomically.

        Raises:
            DataError: the name has another ending.
            MissingExtraError: pyarrow is not installed (parquet).
        """
        path = Path(path)
        check_format(path)
        if path.suffix == ".csv":
            return write_text(path, self._csv())
        return write_bytes(path, self._parquet())

    def _csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(zip(*self.to_dict().values(), strict=True))
        return text.getvalue()

    def _parquet(self) -> bytes:
        arrow, parquet = _pyarrow()
        buffer = io.BytesIO()
        parquet.write_table(arrow.table({name: column.numpy() for name, column in self.columns.items()}), buffer)
        return buffer.getvalue()

    def __str__(self) -> str:
        suspects = int(self.is_suspect.sum())
        return f"audit of {len(self)} examples: {suspects} suspects; wrong labels: {self.wrong_labels}"

    def __repr__(self) -> str:
        return f"<{self}>"

    def _repr_html_(self) -> str:
        shown = [name for name in _SHOWN if name in self.columns]
        worst = self.worst(_ROWS)
        rows = {
            "examples": len(self),
            "suspects": int(self.is_suspect.sum()),
            "wrong labels": self.wrong_labels,
            "evaluated at": f"{len(self.moments)} steps of the training, the last one {self.moments[-1]}",
        }
        picture = table({name: DESCRIPTIONS[name] for name in shown}, [[row[name] for name in shown] for row in worst])
        rest = [
            f"The {len(worst)} most suspicious of {len(self)} examples. For all: worst(k), to_pandas(), save(path)."
        ]
        return card("Audit of training labels", rows, picture=picture, notes=[*rest, *self.notes])


def check_format(path: Path) -> None:
    """Refuse a file that a table cannot be written to, before anything slow is computed.

    Raises:
        DataError: the name ends in neither .csv nor .parquet.
        MissingExtraError: pyarrow is not installed (parquet).
    """
    if path.suffix not in (".csv", ".parquet"):
        raise DataError(f"the file ending must be .csv or .parquet, got {path.name!r}")
    if path.suffix == ".parquet":
        _pyarrow()


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("pyarrow", "data", "a table as parquet") from None
    return pyarrow, pyarrow.parquet
