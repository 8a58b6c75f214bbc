"""What the page on population risk shows: the judged answers of the stored settings, as slots of ``page.md.jinja``."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from poprisk._core.store import load_result
from poprisk_lab.pages.wording import short
from poprisk_lab.paper.risk_honesty.design import SPLITS, Split
from poprisk_lab.paper.risk_honesty.design import settings as designed
from poprisk_lab.paper.risk_honesty.judging import KIND, by_factor, judge, truth_of
from poprisk_lab.paper.risk_honesty.methods import JUDGED
from poprisk_lab.paper.risk_honesty.sources import REAL

NAMES = {
    "exclusion": "exclusion",
    "first_order": "first order, the paper's L_pop",
    "leverage": "leverage",
    "leverage_alone": "leverage, `controls=0`",
    "held_back": "held-back block",
    "k_fold": "10-fold (10 trainings)",
    "auto": '`method="auto"`, no budget',
    "auto10": '`method="auto"`, `retrain_budget=10`',
    "holdout": "a held-out fifth (one training on the rest)",
    "gcv": "GCV on the final tangent kernel (squared loss)",
    "takeuchi": "Takeuchi's criterion (squared loss, cross-entropy)",
}
MODELS = {
    "linear": "linear regression",
    "softmax": "softmax regression",
    "logistic": "logistic regression",
    "relu": "ReLU",
    "gelu": "GELU",
    "tanh": "tanh",
    "layernorm": "LayerNorm and GELU",
    "dropout": "Dropout and ReLU",
    "batchnorm": "BatchNorm and ReLU",
    "cnn": "CNN",
    "cnn_batchnorm": "CNN with BatchNorm",
    "transformer": "transformer encoder",
    "gru": "GRU",
}
_OPTIMIZERS = {
    "sgd": "SGD",
    "momentum": "SGD with momentum",
    "adamw": "AdamW",
    "snr": "PopRiskAdamW, SNR gate (default)",
    "soft": "PopRiskAdamW, soft gate",
    "hard": "PopRiskAdamW, hard gate",
    "paper": "PopRiskAdamW, Algorithm 1 as published",
    "snr, literal": "PopRiskAdamW, literal SNR gate",
    "hard, literal": "PopRiskAdamW, literal hard gate",
}
_BARS = {"wrong": "valid and wrong", "covered": "covered"}
Factors = Mapping[str, Any]


_REGIMES = ("under-trained", "early", "trained", "long")
_LOSSES = {"squared": "squared", "cross_entropy": "cross-entropy", "logistic": "logistic", "absolute": "absolute"}
_SIZES = {100: "n up to 100", 400: "n = 101 to 400", 10**9: "n above 400"}
_SHARES = {0.0: "clean labels", 0.2: "up to 20% wrong labels", 1.0: "30 to 50% wrong labels"}


def _noise(factors: Factors) -> str:
    if factors["classes"]:
        return next(words for edge, words in _SHARES.items() if factors["noise"] <= edge)
    return "targets with heavy tails" if factors["tails"] != "normal" else "targets without heavy tails"


FACTORS: dict[str, tuple[Callable[[Factors], str], Sequence[str]]] = {
    "model": (lambda factors: MODELS[factors["model"]], list(MODELS.values())),
    "loss": (lambda factors: _LOSSES.get(factors["loss"], "Huber"), list(_LOSSES.values())),
    "optimizer": (lambda factors: _OPTIMIZERS[factors["optimizer"]], list(_OPTIMIZERS.values())),
    "length": (lambda factors: factors["regime"], _REGIMES),
    "examples": (lambda f: next(words for edge, words in _SIZES.items() if f["n"] <= edge), list(_SIZES.values())),
    "noise": (_noise, list(_SHARES.values())),
    "copies": (lambda factors: "exact duplicates" if factors["duplicates"] else "no duplicates", ()),
    "classes": (lambda f: "imbalanced, 8 to 1" if f["imbalance"] > 1 else "as they are, or none", ()),
    "data": (lambda f: f["source"] if f["source"] in REAL else "synthetic", list(REAL)),
}
"""Each factor of the table: its level in a setting in words, and the order of the levels, as far as it matters."""


def page_slots(results: Path) -> dict[str, Any]:
    """The slots from the stored ``risk_honesty.json``."""
    return slots(load_result(results / "risk_honesty.json", KIND))


def commits(by_method: Mapping[str, Mapping[str, int]]) -> str:
    """Which methods' answers are from which commit; with their number where a method has answers from several.

    >>> commits({"auto": {"b12": 2}, "truth": {"a12": 2}, "exclusion": {"a12": 1, "b12": 1}})
    'a12 (truth, 1 of exclusion) and b12 (auto, 1 of exclusion)'
    """
    found: dict[str, list[str]] = {}
    for method, counts in sorted(by_method.items(), key=lambda item: len(item[1])):
        for commit, count in counts.items():
            found.setdefault(commit[:9], []).append(method if len(counts) == 1 else f"{count} of {method}")
    return " and ".join(f"{commit} ({', '.join(methods)})" for commit, methods in sorted(found.items()))


def slots(saved: Mapping[str, Any]) -> dict[str, Any]:
    """What the results part of ``page.md.jinja`` asks for."""
    split, report = shown_split(saved)
    summary, settings = report["summary"], report["settings"]
    methods = summary["methods"]
    splits = list(SPLITS)
    earlier = splits[: splits.index(split)]
    return {
        "fresh": split == "fresh",
        "settings": summary["settings"],
        "tuned_on": sum(len(designed(other)) for other in earlier),
        "designed": len(designed(split)),
        "missing": missing(settings, split),
        "commits": commits(report["commits"]),
        "rows": [_row(NAMES[name], methods[name]) for name in NAMES if name in JUDGED and name in methods],
        "others": [_other(NAMES[name], methods[name]) for name in NAMES if name not in JUDGED and name in methods],
        "bars": [_bar(bar) for bar in summary["bars"]],
        "missed": sum(not bar["met"] for bar in summary["bars"]),
        "wrong": wrong_answers(settings),
        "before": [_before(saved["result"][other]) for other in earlier if other in saved["result"]],
        "factors": factor_rows(settings),
        "auto": methods["auto"],
        "auto10": methods["auto10"],
        "ways": ways(settings),
        "stopping": "; ".join(
            f"{name}: {100 * found['mean']:.0f}% (median {100 * found['median']:.0f}%)"
            for name, found in summary["stopping"].items()
        ),
        "stopped": max((found["runs"] for found in summary["stopping"].values()), default=0),
    }


def shown_split(saved: Mapping[str, Any]) -> tuple[Split, Mapping[str, Any]]:
    """The split that the page and the figure show, with its settings: the last of those that have been run."""
    split: Split = next(each for each in reversed(get_args(Split)) if each in saved["result"])
    return split, saved["result"][split]


def _before(found: Mapping[str, Any]) -> dict[str, Any]:
    """What the automatic choice says of settings that were reported before, and each answer that is wrong."""
    methods = found["summary"]["methods"]
    kinds = {name: {key: methods[name][key] for key in ("valid", "wrong")} for name in ("auto", "auto10")}
    made = " and ".join(f"commit {commit[:9]}" for commit in sorted(found["commits"]["auto"]))
    about = {"settings": found["summary"]["settings"], "commits": made}
    return {**about, **kinds, "named": wrong_answers(found["settings"])}


def missing(settings: Sequence[Mapping[str, Any]], split: Split) -> str:
    """How many settings of the design have no answers yet, by model; empty if all have."""
    there = {setting["name"] for setting in settings}
    lacking = Counter(MODELS[s.model] for s in designed(split) if s.name not in there)
    return ", ".join(f"{count} with {model}" for model, count in lacking.items())


def ways(settings: Sequence[Mapping[str, Any]]) -> str:
    """Which methods the valid answers of the automatic choice are from, without a budget of trainings."""
    found = Counter()
    for answer in (s["answers"]["auto"] for s in settings):
        if answer["valid"]:
            checked = answer["by"] == "leverage" and "real deletions" in answer["reason"]
            found[f"{NAMES[answer['by']]}{' with real deletions' if checked else ''}"] += 1
    return ", ".join(f"{count} from {way}" for way, count in found.most_common())


def share(count: int, of: int, interval: Sequence[float] | None = None) -> str:
    """A share in words, with its interval.

    >>> share(1, 100, (0.0, 0.05)), share(0, 0)
    ('1 of 100 (1%; 0 to 5%)', '–')
    """
    if not of:
        return "–"
    between = "" if interval is None else f"; {100 * interval[0]:.0f} to {100 * interval[1]:.0f}%"
    return f"{count} of {of} ({_percent(count / of)}{between})"


def _percent(x: float) -> str:
    """Percent, with a digit more where the bars are."""
    close = not 0.1 <= x <= 0.9 and round(1000 * x) % 10
    return f"{100 * x:.{1 if close else 0}f}%"


def _row(words: str, found: Mapping[str, Any]) -> list[str]:
    off = found["median_off_valid"]
    return [
        words,
        share(found["valid"], found["asked"]),
        share(found["wrong"], found["valid"], found["wrong_interval"]),
        share(found["covered"], found["valid"], found["covered_interval"]),
        "–" if off is None else f"{100 * off:.0f}%",
    ]


def _other(words: str, found: Mapping[str, Any]) -> list[str]:
    off = found["median_off"]
    wrong = share(found["wrong_if_believed"], found["asked"])
    return [words, str(found["asked"]), wrong, "–" if off is None else f"{100 * off:.0f}%"]


def _told(answer: Mapping[str, Any]) -> str:
    parts = (answer["value"], answer["standard_error"])
    return " ± ".join("not finite" if x is None else short(x) for x in parts)


def _bar(bar: Mapping[str, Any]) -> list[str]:
    needed = f"{'at most' if bar['at_most'] else 'at least'} {_percent(bar['bar'])}"
    what: str = _BARS.get(bar["what"]) or bar["what"]
    return [NAMES[bar["method"]], what, needed, share(bar["count"], bar["of"]), "yes" if bar["met"] else "**no**"]


def factor_rows(settings: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """One row for each level of each factor: how often the automatic choice is valid, and valid and wrong."""
    rows = []
    for factor, (level, order) in FACTORS.items():
        found = by_factor(settings, level, ("auto", "auto10"))
        keys = sorted(found, key=lambda key: (order.index(key) if key in order else len(order), key))
        for i, key in enumerate(keys):
            auto, trained = found[key]["auto"], found[key]["auto10"]
            counts = [auto["valid"], auto["wrong"], trained["valid"], trained["wrong"]]
            rows.append(["" if i else f"**{factor}**", key, str(found[key]["settings"]), *map(str, counts)])
    return rows


def wrong_answers(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each setting in which a judged method was valid and wrong."""
    lines = []
    for setting in settings:
        wrong = [name for name in JUDGED if judge([setting], name)["wrong"]]
        if wrong:
            answers = [(name, setting["answers"][name]) for name in wrong]
            told = "; ".join(f"{name} {_told(a)} (truth {short(truth_of(setting, a)[0])})" for name, a in answers)
            lines.append(f"{setting['name'].partition(' ')[2]}: {told}")
    return lines
