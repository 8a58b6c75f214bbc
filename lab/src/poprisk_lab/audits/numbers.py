"""What the page on label audits shows: the numbers of the stored audits, as slots of ``page.md.jinja``."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from poprisk._core.store import load_result
from poprisk_lab.audits.study import KIND, TIE, covered, summarize
from poprisk_lab.audits.task import KINDS, MODELS, SOURCES

Row = Mapping[str, Any]
_WORDS = {"cancer": "breast cancer", "fashion": "Fashion-MNIST", "tuned": "fine-tuned", "mlp": "MLP", "cnn": "CNN"}


def page_slots(results: Path) -> dict[str, Any]:
    """The slots from the stored ``audits.json``."""
    return slots(load_result(results / "audits.json", KIND))


def slots(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What ``page.md.jinja`` asks for."""
    rows: Sequence[Row] = saved["result"]["rows"]
    free, budgeted = ([row for row in rows if bool(row["budget"]) is paid] for paid in (False, True))
    total, paid = summarize(free), summarize(budgeted)
    parts = {
        "kind": KINDS,
        "source": SOURCES,
        "model": MODELS,
        "optimizer": ("sgd", "adamw"),
    }
    table = [
        _line(str(_WORDS.get(name, name)), [row for row in free if row["setting"][part] == name])
        for part, names in parts.items()
        for name in names
    ]
    return {
        "config": saved["config"],
        "total": total,
        "coverage": _percent(total["covered"], total["valid"]),
        "ranking": _percent(total["at_or_above"], total["ranked"]),
        "rows": [_line("all", free), *table],
        "budgeted": paid,
        "budgeted_coverage": _percent(paid["covered"], paid["valid"]),
        "unknown": sum(row["count"]["value"] is None for row in free),
        "wide": _wide(free),
        "counts": _counts(free),
        "folds": _folds(free),
        "below": [_below(row) for row in free if _is_below(row)],
    }


def _line(words: str, rows: Sequence[Row]) -> list[str]:
    found = summarize(rows)
    means = [f"{found['mean_auc'][name]:.3f}" for name in ("suspicion", "last loss", "AUM")] if found["ranked"] else []
    valid, at = f"{found['valid']} of {found['audits']}", f"{found['at_or_above']} of {found['ranked']}"
    return [words, valid, f"{found['covered']} of {found['valid']}", *(means or ["–"] * 3), at]


def _wide(rows: Sequence[Row]) -> dict[str, int]:
    """Counts that are not valid but have an interval."""
    found = [row for row in rows if not row["count"]["valid"] and row["count"]["value"] is not None]
    return {"number": len(found), "covered": sum(covered(row["count"], row["wrong"]) for row in found)}


def _counts(rows: Sequence[Row]) -> list[list[str]]:
    """Median distance from the truth, as a share of the examples, where the audit's count is valid."""
    valid = [row for row in rows if row["count"]["valid"]]
    with_folds = [row for row in valid if "folds" in row]
    ways: dict[str, tuple[Sequence[Row], Callable[[Row], float | None]]] = {
        "the audit": (valid, lambda row: row["count"]["value"]),
        "cleanlab, with the audit's probabilities": (valid, lambda row: row["cleanlab"]),
        "the audit, where there are five folds": (with_folds, lambda row: row["count"]["value"]),
        "cleanlab, with those of five folds": (with_folds, lambda row: row["folds"]["cleanlab"]),
    }
    lines = []
    for words, (chosen, count) in ways.items():
        off = sorted(
            abs(value - row["wrong"]) / row["setting"]["n"] for row in chosen if (value := count(row)) is not None
        )
        if off:
            far = sum(share > 0.1 for share in off)
            lines.append([words, str(len(off)), f"{100 * off[len(off) // 2]:.1f}%", str(far)])
    return lines


def _folds(rows: Sequence[Row]) -> dict[str, Any]:
    """The ranking against that of five trainings."""
    found = [row for row in rows if "folds" in row and row["folds"]["auc"] is not None]
    n = max(len(found), 1)
    return {
        "number": len(found),
        "mean": f"{sum(row['folds']['auc'] for row in found) / n:.3f}",
        "ours": f"{sum(row['auc']['suspicion'] for row in found) / n:.3f}",
        "at_or_above": sum(row["auc"]["suspicion"] >= row["folds"]["auc"] - TIE for row in found),
    }


def _is_below(row: Row) -> bool:
    auc = row["auc"]
    return auc["suspicion"] is not None and auc["suspicion"] < max(auc["last loss"], auc["AUM"]) - TIE


def _below(row: Row) -> list[str]:
    setting, auc = row["setting"], row["auc"]
    words = f"{_WORDS.get(setting['source'], setting['source'])}, {setting['kind']}, {100 * setting['rate']:.0f}%"
    return [words, *(f"{auc[name]:.3f}" for name in ("suspicion", "last loss", "AUM"))]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.0f}%"
