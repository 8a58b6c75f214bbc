r"""Audits of trainings whose wrong labels are known: is the count covered, is the ranking better than others'?

``python -m poprisk_lab.audits.study --data FOLDER --output FILE``; rows that are in ``FILE.rows`` are not done again.
The limits of the count were set on 50 settings drawn with seed 1. Those reported here are drawn with other seeds:
audits that train nothing, and audits of small data that may train five folds.
"""

import argparse
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poprisk._core.store import save_result
from poprisk.risk import AuditTable, audit, out_of_sample_probabilities
from poprisk.runs import Run
from poprisk_lab.audits.task import SOURCES, Labelled, Setting, draw_settings, labelled, trained

KIND = "audits of labels"
FOLDS = 5
TIE = 0.005
"""Areas under the ROC curve that differ by less are equal."""


@dataclass(frozen=True)
class AuditConfig:
    """Which settings are audited."""

    number: int = 150
    seed: int = 2
    sources: tuple[str, ...] = SOURCES
    folds_every: int = 3
    """Each how many settings confident learning gets five folds, where that is cheap."""
    budgeted: int = 40
    """Number of audits that may train five folds."""
    budgeted_seed: int = 4
    budgeted_sources: tuple[str, ...] = ("digits", "wine", "cancer", "clusters")


SMOKE = AuditConfig(3, 3, ("wine",), 2, 1, 5, ("wine",))


def audit_row(setting: Setting, fashion: str | Path, *, folds: bool = False, budget: int = 0) -> dict[str, Any]:
    """One training, its audit, and how far both are from the truth.

    Args:
        setting: The training.
        fashion: Folder of Fashion-MNIST.
        folds: Whether confident learning with five folds is compared.
        budget: Number of trainings that the audit may spend.
    """
    data = labelled(setting, fashion)
    run = trained(setting, data)
    table = audit(run, tier="any", retrain_budget=budget, progress=False)
    wrong = data.wrong
    scores = {"suspicion": table["suspicion"], "last loss": table["loss"], "AUM": -table["aum"]}
    row: dict[str, Any] = {
        "setting": asdict(setting),
        "budget": budget,
        "wrong": int(wrong.sum()),
        "count": table.wrong_labels.to_dict(),
        "suspects": int(table.is_suspect.sum()),
        "suspects_wrong": int((table.is_suspect & wrong).sum()),
        "suggested_right": int((table["suggested_label"] == data.true)[wrong].sum()),
        "auc": {name: area(score, wrong) for name, score in scores.items()},
        "cleanlab": confident_count(table["given_label"], _rows_of(table)),
    }
    return row | (_folds(run, data) if folds else {})


def area(scores: Tensor, wrong: Tensor) -> float | None:
    """Probability that a wrong label scores higher than a right one; None where all are wrong or right.

    >>> area(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([True, False, False]))
    1.0
    """
    if not bool(wrong.any()) or bool(wrong.all()):
        return None
    difference = scores[wrong].double()[:, None] - scores[~wrong].double()
    return float(((difference > 0).double() + 0.5 * (difference == 0)).mean())


def confident_count(labels: Tensor, probabilities: Tensor) -> float | None:
    """Cleanlab's number of label issues; None where cleanlab is not installed."""
    try:
        from cleanlab.count import num_label_issues
    except ImportError:
        return None
    p = probabilities.double()
    return float(num_label_issues(labels.numpy(), (p / p.sum(1, keepdim=True)).numpy()))


def _folds(run: Run, data: Labelled) -> dict[str, Any]:
    """Confident learning with the probabilities of five folds."""
    found = out_of_sample_probabilities(run, "k_fold", FOLDS)
    p, labels = found.probabilities.double(), data.given
    own = p.gather(1, labels[:, None])[:, 0]
    other = p.scatter(1, labels[:, None], -1).max(1).values
    return {"folds": {"auc": area(other - own, data.wrong), "cleanlab": confident_count(labels, p)}}


def _rows_of(table: AuditTable) -> Tensor:
    assert table.probabilities is not None
    return table.probabilities


def run_study(config: AuditConfig, fashion: str | Path, stored: Path) -> list[dict[str, Any]]:
    """All rows; each is written to ``stored`` when it is done, and read where it was done before."""
    done = [json.loads(line) for line in stored.read_text().splitlines()] if stored.exists() else []
    known = {row["setting"]["seed"] for row in done}
    for setting, options in planned(config):
        if setting.seed in known:
            continue
        row = audit_row(setting, fashion, **options)
        done.append(row)
        with stored.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{len(done)}: {setting}: {row['count']}, {row['wrong']} wrong", flush=True)
    return done


def planned(config: AuditConfig) -> Iterator[tuple[Setting, dict[str, Any]]]:
    """Every setting, with the options of its row; no two have the same seed."""
    for i, setting in enumerate(draw_settings(config.number, config.seed, config.sources)):
        yield setting, {"folds": _cheap(setting) and i % config.folds_every == 0}
    for setting in draw_settings(config.budgeted, config.budgeted_seed, config.budgeted_sources):
        if _cheap(setting):
            yield setting, {"budget": FOLDS}


def _cheap(setting: Setting) -> bool:
    return setting.model != "cnn" and setting.n * setting.epochs <= 40_000


def covered(count: Mapping[str, Any], wrong: int) -> bool:
    """Whether two standard errors reach the truth."""
    return count["value"] is not None and abs(count["value"] - wrong) <= 2 * count["standard_error"]


def summarize(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Coverage of valid counts, and how often the ranking is at or above others."""
    valid = [row for row in rows if row["count"]["valid"]]
    ranked = [row["auc"] for row in rows if row["auc"]["suspicion"] is not None]
    at = [auc["suspicion"] >= max(auc["last loss"], auc["AUM"]) - TIE for auc in ranked]
    off = [abs(row["count"]["value"] - row["wrong"]) for row in valid]
    confidently = [
        gap > 0.2 * max(row["wrong"], 1) and gap > 2.5 * row["count"]["standard_error"]
        for gap, row in zip(off, valid, strict=True)
    ]
    return {
        "audits": len(rows),
        "valid": len(valid),
        "covered": sum(covered(row["count"], row["wrong"]) for row in valid),
        "confidently_wrong": sum(confidently),
        "ranked": len(ranked),
        "at_or_above": sum(at),
        "mean_auc": {name: sum(auc[name] for auc in ranked) / max(len(ranked), 1) for name in ranked[0]}
        if ranked
        else {},
        "median_error_share": _median([2 * row["count"]["standard_error"] / row["setting"]["n"] for row in valid]),
    }


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else math.nan


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study from the command line."""
    parser = argparse.ArgumentParser(prog="python -m poprisk_lab.audits.study", description=__doc__)
    parser.add_argument(
        "--data", default="data", type=Path, help="folder with a folder fashion of Fashion-MNIST's files"
    )
    parser.add_argument("--output", required=True, type=Path, help="file to write")
    parser.add_argument("--smoke", action="store_true", help="a few seconds at a tiny size")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    config = SMOKE if given.smoke else AuditConfig()
    try:
        from cleanlab.version import __version__ as version
    except ImportError:
        version = None
    rows = run_study(config, given.data / "fashion", given.output.with_suffix(".rows"))
    free, budgeted = ([row for row in rows if bool(row["budget"]) is paid] for paid in (False, True))
    result = {"free": summarize(free), "budgeted": summarize(budgeted), "rows": rows}
    print(f"Wrote {save_result(given.output, KIND, asdict(config) | {'cleanlab': version}, result)}")


if __name__ == "__main__":
    main()
