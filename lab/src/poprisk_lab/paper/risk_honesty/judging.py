"""Judges the answers of the honesty study by RULE.md: valid and wrong, covered, and how often an answer is valid."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from scipy.stats import beta

from poprisk_lab.paper.risk_honesty.methods import JUDGED, STOPPING
from poprisk_lab.paper.risk_honesty.networks import KINKED
from poprisk_lab.paper.risk_honesty.stopping import excess

KIND = "risk honesty"
WRONG_SHARE, WRONG_ERRORS, COVERED_ERRORS = 0.2, 2.5, 2.0
MOST_WRONG, LEAST_COVERED, LEAST_VALID, LEAST_VALID_KINKED, LEAST_VALID_TRAINED = 0.01, 0.93, 0.6, 0.5, 0.97
"""The bars of RULE.md."""
GROUPS: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "all settings": lambda _: True,
    "ReLU": lambda factors: factors["model"] in KINKED,
    "CNN": lambda factors: factors["model"].startswith("cnn"),
    "BatchNorm": lambda factors: factors["model"].endswith("batchnorm"),
}
"""The groups of settings in which ``auto`` is to be valid often enough."""
Answer = Mapping[str, Any]


def clopper_pearson(count: int, of: int, level: float = 0.95) -> tuple[float, float]:
    """The exact two-sided interval for a share.

    >>> [round(x, 3) for x in clopper_pearson(0, 100)]
    [0.0, 0.036]
    """
    tail = (1 - level) / 2
    low = float(beta.ppf(tail, count, of - count + 1)) if count else 0.0
    high = float(beta.ppf(1 - tail, count + 1, of - count)) if count < of else 1.0
    return low, high


def truth_of(setting: Mapping[str, Any], answer: Answer) -> tuple[float, float]:
    """The true risk that an answer is held against, and its standard error: of the kept weights if it is about them.

    A truth that is not finite is stored as None, and infinite here.
    """
    truth = setting["truth"]
    if str(answer.get("target", "")).startswith("the kept weights") and truth.get("kept") is not None:
        truth = truth["kept"]
    value, error = truth.get("value"), truth.get("error")
    return (math.inf, 0.0) if value is None or error is None else (float(value), float(error))


def distance(setting: Mapping[str, Any], answer: Answer) -> tuple[float, float]:
    """How far off an answer is: as a share of the truth, and in standard errors (of both)."""
    truth, error = truth_of(setting, answer)
    if answer["value"] is None or not math.isfinite(truth):
        return math.inf, math.inf
    off = abs(answer["value"] - truth)
    own = answer["standard_error"]
    errors = math.inf if own is None else off / max(math.hypot(own, error), math.ulp(0))
    return off / max(abs(truth), math.ulp(0)), errors


def is_wrong(setting: Mapping[str, Any], answer: Answer) -> bool:
    """Whether an answer is wrong by the rule, valid or not; one without a standard error is wrong beyond 20%."""
    share, errors = distance(setting, answer)
    return share > WRONG_SHARE and errors > WRONG_ERRORS


def is_covered(setting: Mapping[str, Any], answer: Answer) -> bool:
    """Whether the truth lies within two standard errors."""
    return distance(setting, answer)[1] <= COVERED_ERRORS


def judge(settings: Sequence[Mapping[str, Any]], method: str) -> dict[str, Any]:
    """The counts of one method over the settings in which it was asked."""
    asked = [(s, s["answers"][method]) for s in settings if method in s["answers"]]
    valid = [(s, a) for s, a in asked if a["valid"]]
    wrong = [s["name"] for s, a in valid if is_wrong(s, a)]
    covered = sum(is_covered(s, a) for s, a in valid)
    off = [distance(s, a)[0] for s, a in asked]
    return {
        "asked": len(asked),
        "valid": len(valid),
        "valid_interval": clopper_pearson(len(valid), len(asked)) if asked else None,
        "wrong": len(wrong),
        "wrong_interval": clopper_pearson(len(wrong), len(valid)) if valid else None,
        "covered": covered,
        "covered_interval": clopper_pearson(covered, len(valid)) if valid else None,
        "median_off_valid": _median(distance(s, a)[0] for s, a in valid),
        "median_off": _median(off),
        "wrong_if_believed": sum(is_wrong(s, a) for s, a in asked),
        "raised": sum(bool(a.get("raised")) for _, a in asked),
        "median_seconds": _median(a.get("seconds", math.inf) for _, a in asked),
        "wrong_settings": wrong,
    }


def summarize(settings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Every method over all settings, the share of valid answers in each group, and whether the bars are met."""
    names = list(dict.fromkeys(name for s in settings for name in s["answers"] if name != STOPPING))
    methods = {name: judge(settings, name) for name in names}
    groups = {
        group: {
            name: judge([s for s in settings if inside(s["factors"])], name)
            for name in ("auto", "auto10")
            if name in methods
        }
        for group, inside in GROUPS.items()
    }
    watched = [s["answers"][STOPPING] for s in settings if "truth" in s["answers"].get(STOPPING, {})]
    return {
        "settings": len(settings),
        "methods": methods,
        "groups": groups,
        "bars": _bars(methods, groups),
        "stopping": excess(watched),
    }


def _bars(methods: Mapping[str, Any], groups: Mapping[str, Any]) -> list[dict[str, Any]]:
    bars = []
    for name in JUDGED:
        if methods.get(name, {}).get("valid"):
            found = methods[name]
            bars.append(_bar("wrong", name, found["wrong"], found["valid"], MOST_WRONG, at_most=True))
            bars.append(_bar("covered", name, found["covered"], found["valid"], LEAST_COVERED))
    for group, found in groups.items():
        least = LEAST_VALID if group == "all settings" else LEAST_VALID_KINKED
        if "auto" in found and found["auto"]["asked"]:
            bars.append(_bar(f"valid, {group}", "auto", found["auto"]["valid"], found["auto"]["asked"], least))
    if methods.get("auto10", {}).get("asked"):
        found = methods["auto10"]
        bars.append(_bar("valid, all settings", "auto10", found["valid"], found["asked"], LEAST_VALID_TRAINED))
    return bars


def _bar(what: str, method: str, count: int, of: int, bar: float, *, at_most: bool = False) -> dict[str, Any]:
    share = count / of
    met = share <= bar if at_most else share >= bar
    return {"what": what, "method": method, "count": count, "of": of, "bar": bar, "at_most": at_most, "met": met}


def by_factor(
    settings: Sequence[Mapping[str, Any]], level: Callable[[Mapping[str, Any]], Any], methods: Iterable[str]
) -> dict[Any, dict[str, Any]]:
    """The counts of some methods for each level of a factor, with the number of settings."""
    levels: dict[Any, list[Mapping[str, Any]]] = {}
    for setting in settings:
        levels.setdefault(level(setting["factors"]), []).append(setting)
    return {
        key: {"settings": len(some), **{name: judge(some, name) for name in methods}} for key, some in levels.items()
    }


def _median(values: Iterable[float]) -> float | None:
    """The median; None for no values or one that is not finite."""
    found = list(values)
    middle = median(found) if found else math.inf
    return middle if math.isfinite(middle) else None
