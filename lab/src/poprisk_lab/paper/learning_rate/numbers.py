"""Numbers of the guide to the learning rate: the measured parts of ``docs/learning_rate.md``."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from poprisk._core.statistics import mean_over_seeds
from poprisk.optim._learning_rate import FACTOR
from poprisk.runs._digits import NUM_CLASSES
from poprisk_lab.engine import reading
from poprisk_lab.engine.arms import ARMS
from poprisk_lab.pages.comparison import DEFAULTS_LABEL
from poprisk_lab.pages.wording import power_of_ten, scaled
from poprisk_lab.paper.learning_rate import factors
from poprisk_lab.paper.learning_rate.study import GuideConfig

LITERAL = ARMS["defaults"].fixed
"""The literal SNR gate of strength 100 and its learning rate, which were the library's defaults in version 0.1."""
GATES = {
    "default": "the defaults",
    "soft": "Algorithm 1 (soft, α = 1)",
    "calibrated": '`alpha="calibrated"`',
    "snr": '`gate="snr"`',
}
WEAK = tuple(name for name in GATES if name != "default")
"""The gates of strength 1, which share a factor of their own."""
Rows = Sequence[Any]


def page_slots(results: Path) -> dict[str, Any]:
    """The slots of ``page.md.jinja``, from the folder of results."""
    guide = _load(results, "learning_rate_guide")
    rows = factors.evidence(guide, _load(results, "clean_lm"))
    config, runs = guide["config"], guide["result"]["runs"]
    return {
        "factor": FACTOR,
        "weak_factor": suggested(rows, WEAK[0]),
        "default": _default(rows, results),
        "swap": _swap(rows),
        "trainer": config["trainer"],
        "digits": config["digits"],
        "text": config["language_model"],
        "seeds": len({run["seed"] for run in runs}),
        "default_seeds": len({run["seed"] for run in runs if run["optimizer"] == "default"}),
        "cost": _cost(rows),
        "noisy_task": trainer_tasks(rows)[0],
        "transfer": _transfer(rows),
        "gate": _gate(rows),
        "regret": _regret(rows),
        "grids": _grids(rows),
        "runs": len(runs),
        "minutes": sum(run["seconds"] for run in runs) / 60,
    }


def _load(results: Path, name: str) -> dict[str, Any]:
    return json.loads((results / f"{name}.json").read_text(encoding="utf-8"))


def trainer_tasks(rows: Rows) -> list[str]:
    """The tasks of the Trainer."""
    return [task for task in factors.tasks_of(rows) if task != factors.CONSTANT_LR]


def suggested(rows: Rows, name: str) -> int:
    """The factor for AdamW's learning rate: 60 for a strength of 100, or what was found for a strength of 1."""
    return FACTOR if name == "default" else factors.recommended_factor(rows, name)


def metric(row: Any, *, gate: bool = False) -> str:
    """The last step with its standard error, and the mean gate behind it if asked for."""
    if row is None:
        return ""
    value = scaled(row["last"], 1, 2) if row["metric"] == "loss" else f"{scaled(row['last'], 100)} %"
    return f"{value} ({row['mean_gate']['value']:.4f})" if gate and row["mean_gate"] else value


def _swap(rows: Rows) -> list[list[str]]:
    """Every gate at AdamW's learning rate, at the suggested one, and at the best of its grid."""
    lines = []
    for task in trainer_tasks(rows):
        reference = power_of_ten(factors.reference_lr(rows, task))
        adamw = metric(factors.cell_at(rows, task, "AdamW", 1))
        lines.append([f"**{task}**: AdamW, lr {reference}", f"**{adamw}**", "", ""])
        for name, words in GATES.items():
            cells = factors.cells_of(rows, task, name)
            best = max(cells, key=lambda lr, cells=cells: factors.progress(rows, cells[lr]))
            measured = [metric(factors.cell_at(rows, task, name, f)) for f in (1, suggested(rows, name))]
            lines.append([words, *measured, f"{metric(cells[best])} (lr {power_of_ten(best)})"])
    return lines


def _cost(rows: Rows) -> dict[str, dict[str, Any]]:
    """How far each gate is behind AdamW on clean text: at the best of its grid, and at the suggested rate."""
    text = next(task for task in trainer_tasks(rows) if _cell(rows, task, "AdamW", 1)["metric"] == "loss")
    adamw = _cell(rows, text, "AdamW", 1)["last"]["value"]
    grids = {name: factors.cells_of(rows, text, name).values() for name in GATES}
    return {
        "best": {name: min(row["last"]["value"] for row in grid) - adamw for name, grid in grids.items()},
        "rates": {name: len(grid) for name, grid in grids.items()},
        "at": {name: _cell(rows, text, name, suggested(rows, name))["last"]["value"] - adamw for name in GATES},
    }


def _cell(rows: Rows, task: str, name: str, factor: float) -> Any:
    found = factors.cell_at(rows, task, name, factor)
    assert found is not None, (task, name, factor)
    return found


def _default(rows: Rows, results: Path) -> dict[str, Any]:
    """What the guide, and the studies that trained the defaults at the suggested rate too, say about the factor."""
    noisy = trainer_tasks(rows)[0]
    at, grid = _cell(rows, noisy, "default", FACTOR), factors.cells_of(rows, noisy, "default")
    own, reference = grid[LITERAL["lr"]], factors.reference_lr(rows, noisy)
    elsewhere = (("dpo", "dpo_30_swapped", "reward accuracy"), ("sft", "sft_0_replaced", "nats"))
    return {
        "tried": list(factors.mean_regrets(rows, "default")),
        "seeds": at["last"]["count"],
        "best": factors.recommended_factor(rows, "default"),
        "noise": noisy.split(", ")[1],
        "at_factor": 100 * at["last"]["value"],
        "reference": power_of_ten(reference),
        "own": 100 * own["last"]["value"],
        "lr": LITERAL["lr"],
        "ratio": round(own["lr"] / reference),
        "weight_decay": LITERAL["weight_decay"],
        "elsewhere": [_elsewhere(results, *each) for each in elsewhere],
    }


def _elsewhere(results: Path, name: str, task: str, unit: str) -> dict[str, Any]:
    study = _load(results, name)["result"]["studies"][task]
    metric_name = reading.primary(study)["name"]
    labels = {
        "suggested": "PopRiskAdamW at the suggested lr",
        "defaults": DEFAULTS_LABEL,
        "adamw": "AdamW at the shared lr",
    }
    found = {key: reading.row(study, label) for key, label in labels.items()}
    ends = {key: mean_over_seeds(reading.final(row, metric_name)).value for key, row in found.items()}
    rates = {key: row["hyper"]["lr"] for key, row in found.items()}
    return {
        "result": name,
        "task": task,
        "unit": unit,
        "shared": power_of_ten(rates["adamw"]),
        "low": rates["suggested"],
        "high": rates["defaults"],
        **ends,
    }


def _transfer(rows: Rows) -> list[list[str]]:
    """The learning rate that is AdamW's best on clean labels, used on the wrong ones."""
    noisy, clean = trainer_tasks(rows)[:2]
    reference = factors.reference_lr(rows, clean)
    cells = [("AdamW", "AdamW", 1), ("default", GATES["default"], FACTOR)]
    cells += [(name, GATES[name], factor) for name in WEAK for factor in (1, suggested(rows, name))]
    lines = []
    for name, words, factor in cells:
        grid = factors.cells_of(rows, noisy, name)
        row = grid[min(grid, key=lambda lr, wanted=factor * reference: abs(lr - wanted))]
        shares = [f"{scaled(row[key], 100)} %" for key in ("best", "memorized")]
        lines.append([f"{words}, lr {power_of_ten(row['lr'])}", metric(row), *shares])
    return lines


def _regret(rows: Rows) -> dict[str, Any]:
    """What each factor loses on each task, and its mean; the best mean in bold."""
    lines = []
    for name, words in GATES.items():
        for task in factors.tasks_of(rows):
            if not factors.cells_of(rows, task, name):
                continue
            found = [factors.regret(rows, task, name, factor) for factor in factors.FACTORS]
            lines.append([f"{words}: {task}", *("" if r is None else f"{100 * r:.1f}" for r in found)])
        means = factors.mean_regrets(rows, name)
        cells = [f"{100 * means[factor]:.1f}" if factor in means else "" for factor in factors.FACTORS]
        best = factors.FACTORS.index(factors.recommended_factor(rows, name))
        lines.append([f"**{words}: mean**", *(f"**{c}**" if i == best else c for i, c in enumerate(cells))])
    return {"head": ["regret, % of AdamW's progress", *(f"× {factor}" for factor in factors.FACTORS)], "rows": lines}


def _grids(rows: Rows) -> list[dict[str, Any]]:
    """Every optimizer at every learning rate, a table for each task."""
    tables = []
    for task in trainer_tasks(rows):
        grids = {name: factors.cells_of(rows, task, name) for name in ("AdamW", *GATES)}
        rates = sorted({lr for cells in grids.values() for lr in cells})
        lines = [[GATES.get(n, n), *(metric(cells.get(lr), gate=True) for lr in rates)] for n, cells in grids.items()]
        tables.append({"head": [f"{task}, lr", *map(power_of_ten, rates)], "rows": lines})
    return tables


def _gate(rows: Rows) -> dict[str, Any]:
    """The mean gate and the last training loss, and the loss of a model that knows the truth and nothing else."""
    shown, lines = (1, 10, 30, FACTOR), []
    for task in trainer_tasks(rows):
        for name, words in GATES.items():
            found = [factors.cell_at(rows, task, name, factor) for factor in shown]
            cells = [f"{r['mean_gate']['value']:.4f} · {r['train_loss']['value']:.2f}" if r else "" for r in found]
            lines.append([f"{task}: {words}", *cells])
    wrong, others = max(sweep.noise or 0.0 for sweep in GuideConfig().sweeps), NUM_CLASSES - 1
    return {
        "head": ["mean gate · training loss at the end", *(f"× {factor}" for factor in shown)],
        "rows": lines,
        "wrong": wrong,
        "others": others,
        "floor": -(1 - wrong) * math.log(1 - wrong) - wrong * math.log(wrong / others),
    }
