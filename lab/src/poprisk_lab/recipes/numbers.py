"""What the page on recipes shows: tables, counts and verdicts of the stored trainings, for ``page.md.jinja``."""

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from poprisk_lab.pages.wording import bullets, table
from poprisk_lab.paper.dpo.recipe_numbers import recipe_slots
from poprisk_lab.recipes.cifar_numbers import TAIL, control_rows, recipe_rows, stored
from poprisk_lab.recipes.judging import (
    CONTROLS,
    Judged,
    Recipe,
    TaskGain,
    controls,
    gain_over,
    judge,
    judge_all,
    swap_test,
)
from poprisk_lab.recipes.label_wave import outcome
from poprisk_lab.recipes.public_numbers import public_slots
from poprisk_lab.recipes.stored_tasks import StoredTask, read, stored_tasks
from poprisk_lab.recipes.wording import arm_words, gain_words, recipe_words, task_words, value_words

SHOWN = 10
"""Recipes in the table of the ranking, besides those shown for comparison."""
KEEPER = Recipe("adamw", "tail 0.2", "kept")
"""What KeepBest gives with its usual mean."""
PLAIN = (
    Recipe("adamw"),
    Recipe("adamw_cosine"),
    Recipe("adamw", moment="error"),
    Recipe("adamw", moment="loss"),
    Recipe("adamw", "ema 0.999"),
    Recipe("adamw", moment="kept"),
    Recipe("adamw", "tail 0.1", "kept"),
    KEEPER,
    Recipe("literal"),
    Recipe("relative"),
)
"""Shown beside the best recipes, wherever they rank."""
PUBLISHED = {
    "cross-entropy, ResNet-34, best epoch": {"aggregate": 87.8, "random 1": 85.0, "worst": 77.7},
    "ELR, ResNet-34": {"aggregate": 92.4, "random 1": 91.5, "worst": 83.6},
    "SGD with weight averaging": {"worst": 86.7},
}
"""Accuracies on CIFAR-10N as published, in %: Wei et al. 2022 (arXiv 2110.12088) for the first two."""
SOURCES = {
    "schedule_free": "schedule-free AdamW, measured at its average (Defazio et al. 2024, arXiv 2405.15682)",
    "casmo": "CASMO 0.4",
    "magma": "Magma (arXiv 2602.15322)",
    "rm3": "RM3, the median of three micro-batch gradients (arXiv 2003.07422)",
    "sam": "SAM with ρ = 0.05 (arXiv 2010.01412)",
}
"""Arms that the engine has from other papers."""
NOISY_BAR, RESNET_BAR, SWAP_BAR = 0.8, 83.0, 5.0


def page_slots(results: Path) -> dict[str, Any]:
    """The slots of the page from the folder of results."""
    tasks = stored_tasks(results)
    ranked, others = judge_all(tasks)
    winner = ranked[0]
    waves = _wave(results, tasks)
    least = min(ranked, key=lambda each: each.regret)
    arms = {row.arm for task in tasks for row in task.rows}
    return {
        "winner": recipe_words(winner.recipe),
        "recipe": winner.recipe,
        "regret": _regret(winner.regret),
        "qualified": winner.clean_losses == 0,
        "lost_clean": winner.clean_losses,
        "least": least_slots(least) if least is not winner and least.recipe != KEEPER else None,
        "keeper": keeper_slots(tasks) if winner.recipe != KEEPER else None,
        "counts": _counts(tasks),
        "judged": len(ranked),
        "ranking": ranking_table(ranked, tasks),
        "noisy": task_table(winner, tasks, clean=False),
        "clean": task_table(winner, tasks, clean=True),
        "unsearched": any(not task.searched for task in tasks),
        "bars": bullets(bar_words(winner)),
        "arms": arm_table(winner, tasks),
        "ahead": _ahead(winner, others),
        "controls": control_table(tasks),
        "control_counts": control_counts(tasks),
        "swap": swap_table(tasks),
        "swap_words": swap_words(tasks),
        "sources": [words for arm, words in SOURCES.items() if arm in arms],
        "untrained": [words for arm, words in SOURCES.items() if arm not in arms],
        "published": published_table(winner, tasks),
        "cifar": cifar_table(results),
        "cifar_tail": f"{TAIL:.0%}",
        "cifar_controls": cifar_control_table(results),
        "fine_tuning": recipe_slots(results),
        "waves": waves,
        "public": public_slots(results, tasks),
    }


def ranking_table(ranked: Sequence[Judged], tasks: Sequence[StoredTask]) -> str:
    """The best recipes by the rule, and plain ones for comparison."""
    best = list(ranked[:SHOWN])
    there = {each.recipe for each in best}
    plain = [judge(recipe, tasks) for recipe in PLAIN if recipe not in there]
    head = ["recipe", "mean regret", "clean tasks lost", "noisy tasks at or above the oracle"]
    rows = [_ranking_row(each, str(k)) for k, each in enumerate(best, start=1)]
    rows += [_ranking_row(each, "") for each in plain if each.noisy]
    return table(["", *head], rows, words=2)


def _ranking_row(each: Judged, place: str) -> list[str]:
    ranked = [gain for gain in each.gains.values() if gain.task.ranked]
    clean, noisy = [g for g in ranked if g.task.clean], [g for g in ranked if not g.task.clean]
    reached = sum(gain.at_oracle for gain in noisy)
    counts = f"{each.clean_losses} of {len(clean)}", f"{reached} of {len(noisy)}"
    return [place, recipe_words(each.recipe), _regret(each.regret), *counts]


def least_slots(least: Judged) -> dict[str, str]:
    """The recipe with the least regret where it does not win: what it loses on clean tasks."""
    return {"words": recipe_words(least.recipe), "regret": _regret(least.regret), "lost": _lost_words(least)}


def keeper_slots(tasks: Sequence[StoredTask]) -> dict[str, Any]:
    """The same figures for what KeepBest gives by default, where it does not win."""
    keeper = judge(KEEPER, tasks)
    return {
        "words": recipe_words(KEEPER),
        "regret": _regret(keeper.regret),
        "lost": _lost_words(keeper),
        "bars": bullets(bar_words(keeper)),
        "noisy": task_table(keeper, tasks, clean=False),
        "clean": task_table(keeper, tasks, clean=True),
    }


def _lost_words(judged: Judged) -> str:
    lost = [gain for gain in judged.clean if gain.task.ranked and not gain.qualifies]
    return ", ".join(f"{task_words(gain.task)} ({gain_words(gain.usual)})" for gain in lost if gain.usual)


def task_table(winner: Judged, tasks: Sequence[StoredTask], clean: bool) -> str:
    """The winner beside AdamW on each noisy or each clean task."""
    head = ["task", "AdamW, lr 1e-3, last", "tuned AdamW, last", "tuned AdamW, best on test", "recipe"]
    head += ["gain over tuned last", "gain over best on test", "held" if clean else "at or above best"]
    rows = []
    for task in tasks:
        gain = winner.gains.get(task.name)
        if gain is None or task.clean != clean:
            continue
        usual = Recipe("adamw").values(task)
        tuned = [mean(values.values()) for values in (task.tuned_last, task.tuned_best)]
        star = "" if task.searched else " *"
        held = gain.within_bar if clean else gain.at_oracle
        rows.append(
            [
                task_words(task) + star,
                value_words(task, mean(usual.values())) if usual else "–",
                *(value_words(task, value) for value in tuned),
                f"**{value_words(task, gain.value)}**",
                gain_words(gain.last),
                gain_words(gain.oracle),
                "yes" if held else "**no**",
            ]
        )
    return table(head, rows)


def bar_words(winner: Judged) -> list[str]:
    """Each bar, met or missed, with its figures."""
    noisy, clean = winner.noisy, winner.clean
    reached = [gain for gain in noisy if gain.at_oracle]
    above = [gain for gain in noisy if gain.above_last]
    within = [gain for gain in clean if gain.within_bar]
    found = [
        _bar(
            len(reached) >= NOISY_BAR * len(noisy),
            f"at or above tuned AdamW's best checkpoint on {len(reached)} of {len(noisy)} noisy tasks "
            f"(bar: {NOISY_BAR:.0%}){_missed(noisy, reached, 'oracle')}",
        ),
        _bar(
            len(above) == len(noisy),
            f"above tuned AdamW's last step on {len(above)} of {len(noisy)} noisy tasks (bar: all)"
            f"{_missed(noisy, above, 'last')}",
        ),
        _bar(
            len(within) == len(clean),
            f"within 0.5 points or 1% of tuned AdamW's last step on {len(within)} of {len(clean)} clean tasks "
            f"(bar: all){_missed(clean, within, 'last')}",
        ),
    ]
    return found + _resnet_bars(winner)


def _resnet_bars(winner: Judged) -> list[str]:
    found = []
    for gain in winner.gains.values():
        if "ResNet-18" in gain.task.name and not gain.task.clean:
            value = 100 * gain.value
            words = f"{task_words(gain.task)}: {value:.2f}% at the end (bar: {RESNET_BAR:.0f}%)"
            found.append(_bar(value >= RESNET_BAR, words))
        elif "ResNet-18" in gain.task.name:
            cosine = Recipe("adamw_cosine").values(gain.task)
            if cosine:
                difference = 100 * (gain.value - mean(cosine.values()))
                words = f"{task_words(gain.task)}: {difference:+.1f} points to AdamW with cosine (bar: −0.5)"
                found.append(_bar(difference >= -0.5, words.replace("-", "−").replace("ResNet−", "ResNet-")))
    return [words.replace("CIFAR−", "CIFAR-") for words in found]


def swap_words(tasks: Sequence[StoredTask]) -> str:
    """How many pairs of a task and a learning rate are far below AdamW, and the lowest accuracy."""
    found = swap_test(tasks)
    if not found:
        return ""
    points = [each for each in found if each[0].unit == "points"]
    bad = [each for each in found if each[2].value < -SWAP_BAR]
    task, lr, gain = min(points or found, key=lambda each: each[2].value)
    return (
        f"{len(bad)} of {len(found)} pairs of a task and a learning rate are more than {SWAP_BAR:g} points or percent "
        f"below AdamW; the lowest is {gain_words(gain)} on {task_words(task)} at lr {lr:g}"
    )


def arm_table(winner: Judged, tasks: Sequence[StoredTask]) -> str:
    """Every other arm: plain, and with the winner's mean and moment, beside the winner on the same tasks."""
    arms = dict.fromkeys(row.arm for task in tasks for row in task.rows)
    head = ["arm", "last step", "with the recipe's mean and moment", "recipe on the same tasks", "noisy tasks"]
    head += ["clean tasks lost"]
    rows = []
    for arm in arms:
        plain = judge(Recipe(arm), tasks)
        mixed = judge(Recipe(arm, winner.recipe.average, winner.recipe.moment), tasks)
        names = [name for name in plain.gains if name in winner.gains]
        noisy = [name for name in names if not plain.gains[name].task.clean and plain.gains[name].task.ranked]
        if not noisy or arm == winner.recipe.arm:
            continue
        same = set(noisy) <= set(mixed.gains)
        clean = [gain for gain in plain.clean if gain.task.ranked]
        rows.append(
            [
                arm_words(arm),
                _regret(plain.regret_on(noisy)),
                _regret(mixed.regret_on(noisy)) if same else "–",
                _regret(winner.regret_on(noisy)),
                str(len(noisy)),
                f"{(mixed if same else plain).clean_losses} of {len(clean)}",
            ]
        )
    return table(head, rows)


def control_table(tasks: Sequence[StoredTask]) -> str:
    """What the choice of coordinates adds: the gate minus each control."""
    rows = [
        [task_words(task), *(gain_words(gains[label]) if label in gains else "–" for label in CONTROLS)]
        for task, gains in controls(tasks)
    ]
    return table(["gate minus", *CONTROLS], rows) if rows else ""


def control_counts(tasks: Sequence[StoredTask]) -> dict[str, Any]:
    """Tasks on which the gate is above all its controls by intervals that exclude zero, and below one of them."""
    found = controls(tasks)
    above = sum(all(gain.verdict == "above" for gain in gains.values()) for _, gains in found)
    below = sum(any(gain.verdict == "below" for gain in gains.values()) for _, gains in found)
    return {"tasks": len(found), "above": above, "below": below}


def swap_table(tasks: Sequence[StoredTask]) -> str:
    """The lowest gain of the relative gate over AdamW at the same rate, for each task."""
    found = swap_test(tasks)
    names = dict.fromkeys(task.name for task, _, _ in found)
    rows = []
    for name in names:
        own = [each for each in found if each[0].name == name]
        task, lr, gain = min(own, key=lambda each: each[2].value)
        at = " at ".join([gain_words(gain), f"{lr:g}"])
        rows.append([task_words(task), str(len(own)), at, "yes" if gain.value >= -SWAP_BAR else "**no**"])
    return table(["task", "rates", "lowest gain, at lr", "within 5"], rows) if rows else ""


def published_table(winner: Judged, tasks: Sequence[StoredTask]) -> str:
    """CIFAR-10N as published, beside the stored trainings with augmentation."""
    sets = ("aggregate", "random 1", "worst", "clean")
    own = [task for task in tasks if task.name.startswith("CIFAR-10N ")]
    rows = [[name, *(f"{values[s]:.1f}" if s in values else "–" for s in sets)] for name, values in PUBLISHED.items()]
    for ending in dict.fromkeys(task.name.partition(", ")[2] for task in own):
        found = {s: t for t in own for s in sets if t.name == f"CIFAR-10N {s}, {ending}"}
        values = {s: winner.recipe.values(task) for s, task in found.items()}
        cells = [f"**{100 * mean(v.values()):.1f}**" if (v := values.get(s)) else "–" for s in sets]
        rows.append([f"**{ending}: the recipe**", *cells])
    return table(["", *sets], rows)


def cifar_table(results: Path) -> str:
    """CIFAR-10N in detail: AdamW at lr 1e-3, with cosine, and the mean at both moments."""
    columns = {
        "adamw_last": "AdamW, last",
        "adamw_best": "AdamW, best on test",
        "cosine_last": "cosine, last",
        "cosine_best": "cosine, best on test",
        "mean_last": "mean, last",
        "mean_chosen": "mean, block's choice",
    }
    found = recipe_rows(stored(results))
    return table(["", *columns.values()], [[row["task"], *(str(row[name]) for name in columns)] for row in found])


def cifar_control_table(results: Path) -> str:
    """The gate and its controls on CIFAR-10N with 40% wrong labels; empty if not stored."""
    found = control_rows(stored(results))
    rows = [[row["title"], *(str(row[name]) for name in ("last", "best", "mean_last"))] for row in found]
    return table(["", "last step", "best on test", "mean of the last 10%"], rows) if rows else ""


def _wave(results: Path, tasks: Sequence[StoredTask]) -> dict[str, Any]:
    """Label Wave's stopping on AdamW's run, beside KeepBest on the same tasks; empty if it is not stored."""
    keeper = judge(KEEPER, tasks)
    waves = read(results / "label_wave.json")
    by_name = {task.name: task for task in tasks}
    rows, regrets = [], []
    for name, one in (waves or {"tasks": {}})["tasks"].items():
        task = by_name.get(name)
        if task is None or name not in keeper.gains:
            continue
        values = outcome(one)
        gain = gain_over(task, values, task.tuned_best)
        own = keeper.gains[name].oracle
        rows.append([task_words(task), value_words(task, mean(values.values())), gain_words(gain), gain_words(own)])
        if not task.clean:
            regrets.append((-gain.value, -own.value))
    if not rows or waves is None:
        return {}
    head = ["task", "Label Wave", "gain over tuned AdamW's best", "KeepBest's gain"]
    means = [_regret(mean(column)) for column in zip(*regrets, strict=True)] if regrets else ["–", "–"]
    return {"table": table(head, rows), "regret": means[0], "own": means[1], "window": waves["window"]}


def _ahead(winner: Judged, others: Sequence[Judged]) -> list[str]:
    """Recipes that not every task has, and that beat the winner on the noisy tasks they have without losing more."""
    found = []
    for each in others:
        names = [name for name, gain in each.gains.items() if not gain.task.clean and gain.task.ranked]
        if names and set(names) <= set(winner.gains):
            own, base = each.regret_on(names), winner.regret_on(names)
            if own < base - 0.1 and each.clean_losses <= winner.clean_losses:
                found.append(
                    (
                        own - base,
                        f"{recipe_words(each.recipe)}: {_regret(own)} against {_regret(base)} on {len(names)} tasks",
                    )
                )
    return [words for _, words in sorted(found)[:5]]


def _counts(tasks: Sequence[StoredTask]) -> dict[str, int]:
    ranked = [task for task in tasks if task.ranked]
    return {
        "noisy": sum(not task.clean for task in ranked),
        "clean": sum(task.clean for task in ranked),
        "extra": len(tasks) - len(ranked),
    }


def _bar(met: bool, words: str) -> str:
    return f"{'met' if met else '**missed**'}: {words}"


def _missed(every: Sequence[TaskGain], good: Sequence[TaskGain], kind: str) -> str:
    bad = [gain for gain in every if not any(gain is one for one in good)]
    if not bad:
        return ""
    return "; not on " + ", ".join(f"{task_words(gain.task)} ({gain_words(getattr(gain, kind))})" for gain in bad)


def _regret(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")
