"""What the page on knowing at scale shows, from the stored results."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from poprisk._core.store import load_result

CIFAR, LORA, RANKING = "at_scale_cifar", "at_scale_lora", "influence_ranking"
BAR_POINTS, BAR_TIME, BAR_COST, BAR_SECONDS = 0.005, 0.1, 0.25, 600
_PLANNED = ("worse", "random1")
_SCORES = ("self-confidence", "normalized margin")
_LABELS = {"worse": "worst, 40% wrong", "random1": "random 1, 17% wrong", "aggre": "aggregate, 9% wrong"}
Row = Mapping[str, Any]


def page_slots(results: Path) -> dict[str, Any]:
    """The slots of ``page.md.jinja``."""
    cifar = load_result(results / f"{CIFAR}.json", CIFAR)["result"]
    place = results / f"{LORA}.json"
    lora = lora_slots(load_result(place, LORA)["result"]) if place.exists() else {}
    ranking = load_result(results / f"{RANKING}.json", RANKING)
    return {**cifar_slots(cifar), **ranking_slots(ranking), "has_lora": bool(lora), **lora}


def cifar_slots(found: Row) -> dict[str, Any]:
    """The part about CIFAR-10N."""
    first = next(iter(found["runs"].values()))
    moments = {name: moment_gap(run) for name, run in found["runs"].items()}
    judged = found["confident_learning"]
    timed = found.get("alone", first)  # where other programs ran beside the first one
    seconds, bare = timed["seconds"], timed["bare_seconds"]
    share = (seconds["training"] + seconds["finish"]) / bare - 1
    folds = judged[first["config"]["labels"]]["seconds"] * timed["config"]["epochs"] / first["config"]["epochs"]
    whole = (seconds["training"] + seconds["finish"] + seconds["probabilities"]) / folds
    better = {name: at_or_above(found["runs"][name], judged[name]) for name in judged}
    return {
        "device": found["versions"]["device"],
        "runs": len(found["runs"]),
        "cifar_note": found.get("note", ""),
        "left_out": [_LABELS[name] for name in _PLANNED if name not in judged],
        "epochs": first["config"]["epochs"],
        "moments": [_moment_row(name, run) for name, run in found["runs"].items()],
        "largest_gap": f"{100 * max(moments.values()):.2f}",
        "gap_met": max(moments.values()) <= BAR_POINTS,
        "all_valid": all(row["valid"] for run in found["runs"].values() for row in run["curve"]),
        "readings": sum(len(run["curve"]) for run in found["runs"].values()),
        "bare": f"{bare:.0f}",
        "timed_epochs": timed["config"]["epochs"],
        "share": f"{100 * share:.1f}",
        "risk_share": f"{100 * seconds['risk'] / bare:.1f}",
        "share_met": share <= BAR_TIME,
        "areas": [row for name in judged for row in _area_rows(name, found["runs"][name], judged[name])],
        "area_met": all(better.values()),
        "verdicts": [
            [_LABELS[name], "valid" if run["probabilities"]["valid"] else "not valid", run["probabilities"]["reason"]]
            for name, run in found["runs"].items()
        ],
        "probabilities_seconds": f"{seconds['probabilities']:.1f}",
        "folds_seconds": f"{folds:.0f}",
        "cost": f"{100 * seconds['probabilities'] / folds:.1f}",
        "whole_cost": f"{100 * whole:.0f}",
        "cost_met": seconds["probabilities"] <= BAR_COST * folds,
    }


def moment_gap(run: Row) -> float:
    """How far the test accuracy at the kept moment is below that of the best moment of the averaged weights."""
    best = max(row["test_accuracy"] for row in run["curve"])
    return best - run["kept"]["test_accuracy"]


def at_or_above(run: Row, judged: Row) -> bool:
    """Whether both scores rank wrong labels at least as well as those of the folds by their last weights."""
    own, folds = run["auc"]["features, left out"], judged["auc"]["5 folds, last weights"]
    return all(own[score] >= folds[score] for score in _SCORES)


def _moment_row(name: str, run: Row) -> list[str]:
    curve = run["curve"]
    least = min(curve, key=lambda row: row["value"])
    most = max(curve, key=lambda row: row["accuracy"])
    best, raw = (max(row[key] for row in curve) for key in ("test_accuracy", "raw_test_accuracy"))
    cells = (best, run["kept"]["test_accuracy"], most["test_accuracy"], least["test_accuracy"])
    last = curve[-1]
    return [
        _LABELS[name],
        *(f"{100 * x:.2f}" for x in cells),
        f"{100 * (best - run['kept']['test_accuracy']):.2f}",
        f"{100 * raw:.2f}",
        f"{100 * last['raw_test_accuracy']:.2f}",
    ]


def _area_rows(name: str, run: Row, judged: Row) -> list[list[str]]:
    found = {**run["auc"], **judged["auc"]}
    rows = []
    for way, areas in found.items():
        cells = [f"{areas[score]:.4f}" if score in areas else "–" for score in _SCORES]
        if "area under margin" in areas:
            cells = [f"{areas['area under margin']:.4f}", "–"]
        rows.append([_LABELS[name], _WAYS.get(way, way), *cells])
    return rows


_WAYS = {
    "features, left out": "**`out_of_sample_probabilities(keeper, data=…)`**",
    "kept weights, seen": "the kept weights' own probabilities",
    "last weights, seen": "last loss",
    "margins along the run": "area under the margin (AUM)",
}


def lora_slots(found: Row) -> dict[str, Any]:
    """The part about the language model."""
    if "influence" not in found:
        return {
            "unfinished": f"{found['influence_unfinished_after']:.0f}",
            "pairs": found["pairs"],
            "lora_weights": f"{found['weights']:,}",
            "lora_steps": found["steps"],
            "lora_device": found["versions"]["device"],
            "training_seconds": f"{found['training_seconds']:.0f}",
        }
    total = found["training_seconds"] + found["influence_seconds"]
    return {
        "unfinished": "",
        "pairs": found["pairs"],
        "lora_weights": f"{found['weights']:,}",
        "lora_steps": found["steps"],
        "queries": len(found["influence"]),
        "lora_device": found["versions"]["device"],
        "training_seconds": f"{found['training_seconds']:.0f}",
        "influence_seconds": f"{found['influence_seconds']:.0f}",
        "lora_minutes": f"{total / 60:.2f}",
        "lora_met": total <= BAR_SECONDS,
        "query_loss": f"{float(torch.tensor(found['query_losses']).mean()):.3f}",
        **(_removal_slots(found["removals"]) if found["removals"] else {"removal_rows": []}),
    }


def _removal_slots(groups: Sequence[Row]) -> dict[str, Any]:
    """Predicted and measured changes of the groups that were removed."""
    predicted, measured = (
        torch.tensor([row[key] for row in groups], dtype=torch.float64) for key in ("predicted", "measured")
    )
    means = {row["group"]: float(measured[i].mean()) for i, row in enumerate(groups)}
    random = [value for name, value in means.items() if name.startswith("random")]
    chosen = means.get("most helpful"), means.get("most harmful")
    both = torch.corrcoef(torch.stack([predicted.flatten(), measured.flatten()]))[0, 1]
    ends = None not in chosen and bool(random)
    return {
        "removal_count": groups[0]["removed"],
        "removal_rows": [
            [row["group"], f"{predicted[i].mean():+.4f}", f"{measured[i].mean():+.4f}"] for i, row in enumerate(groups)
        ],
        "removal_correlation": f"{float(both):.2f}",
        "removal_slope": f"{float((predicted * measured).sum() / predicted.square().sum()):.2f}",
        "removal_ends": ends and chosen[0] > max(random) and chosen[1] < min(random),  # type: ignore[operator]
    }


def ranking_slots(saved: Row) -> dict[str, Any]:
    """The part about restrictions on small tasks."""
    rows: Sequence[Row] = saved["result"]["rows"]
    table = []
    for task in dict.fromkeys(row["task"] for row in rows):
        mine = [row for row in rows if row["task"] == task]
        shares = list(mine[0]["shares"])
        for way in mine[0]["shares"][shares[0]]:
            cells = []
            for share in shares:
                values = [row["shares"][share][way] for row in mine]
                scores = [value["lds"] for value in values]
                cells.append(f"{sum(scores) / len(scores):.2f}")
                slopes = [value["slope"] for value in values]
                cells.append("–" if way == "gradient products" else f"{sum(slopes) / len(slopes):.2f}")
            table.append([task, way, *cells])
    shares = [f"{100 * share:.0f}%" for share in saved["config"]["shares"]]
    return {
        "ranking_rows": table,
        "ranking_columns": ["task", "influence through"]
        + [f"{w}, {s} removed" for s in shares for w in ("LDS", "slope")],
        "ranking_seeds": len(saved["config"]["seeds"]),
        "ranking_sets": saved["config"]["sets"],
        "ranking_examples": saved["config"]["examples"],
    }
