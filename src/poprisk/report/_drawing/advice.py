"""The first screen of a report as rules: facts of a run in, a judgement, three numbers and what to do next out.

Nothing is computed here, and nothing is drawn. Every rule rests on a verdict that exists: whether the risk is valid,
whether the run ended too early, which moment the held-back examples chose, how many labels the audit counts as wrong.
"""

import math
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from poprisk.report._drawing.svg_chart import number
from poprisk.report._drawing.wording import as_command, percent, share_words, size_of
from poprisk.risk import Estimate, RiskEstimate

EARLY = 0.8
"""Share of the steps before which a chosen moment means that the rest of the run did not help."""
MOSTLY = 0.5
"""Share of the drop in training loss beyond which a run mostly memorized."""
UNCERTAIN = 0.1
"""Standard error of a held-back risk, as a share of it, beyond which more examples should be held back."""
MOST_HELD = 0.3
"""Largest share of the examples that is advised to be held back."""
MOST_ACTIONS = 4
_NEEDS = "this needs the examples and the model; see below"
CORRECTED = "corrected"
"""The name of a training on corrected labels."""


@dataclass(frozen=True)
class Facts:
    """What the rules look at; a part that is not known is None, 0 or empty."""

    examples: int
    steps: int
    path: str = "RUN"
    """Directory of the run."""
    first_loss: float | None = None
    last_loss: float | None = None
    """Training loss before the first step and at the last one."""
    risk: RiskEstimate | None = None
    """Of the weights to use: the kept ones, if examples were held back, otherwise those of the last step."""
    why_no_risk: str = ""
    held: int = 0
    """Number of held-back examples."""
    kept_step: int | None = None
    best_step: int | None = None
    """The step with the lowest valid risk, if the risk at the last step is clearly higher."""
    unfinished: str = ""
    """How fast the loss is still falling, if the run ended too early."""
    memorized: float | None = None
    memorized_error: float = math.nan
    why_not_memorized: str = ""
    wrong: Estimate | None = None
    """Number of wrong labels."""
    suspects: int = 0
    kind: str = "classes"
    """Kind of the audit's table."""
    reviewable: bool = True
    """Whether the page can show a suggestion for each label; not for targets of several numbers."""
    test_loss: float | None = None
    """Of the weights that ``risk`` is about."""
    test_error: float = math.nan
    no_problem: bool = False
    """Whether the examples and the model are missing because only the program that trained has them."""

    @property
    def run(self) -> str:
        """The run as a word of a command line."""
        return shlex.quote(self.path)

    @property
    def failed(self) -> bool:
        """Whether the training loss did not fall."""
        if self.first_loss is None or self.last_loss is None:
            return False
        return not math.isfinite(self.last_loss) or self.last_loss >= self.first_loss

    @property
    def some_wrong(self) -> bool:
        """Whether the number of wrong labels is known, and clearly not zero."""
        wrong = self.wrong
        return wrong is not None and wrong.valid and float(wrong.value) > 2 * float(wrong.standard_error)

    @property
    def test_is_harder(self) -> bool:
        """Whether the test loss is clearly above the risk of the same weights, which then says too little."""
        return self._test_apart(-1)

    @property
    def test_is_easier(self) -> bool:
        """Whether the test loss is clearly below the risk of the same weights."""
        return self._test_apart(1)

    def _test_apart(self, sign: int) -> bool:
        if self.risk is None or not self.risk.valid or self.test_loss is None:
            return False
        error = math.hypot(float(self.risk.standard_error), 0.0 if math.isnan(self.test_error) else self.test_error)
        return sign * (float(self.risk.value) - self.test_loss) > 2 * error


@dataclass(frozen=True)
class Number:
    """One of the three numbers, with its meaning."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True)
class Action:
    """Something to do next."""

    key: str
    """Which rule asked for it."""
    title: str
    why: str
    call: tuple[str, dict[str, object]] | None = None
    """A change of the training: the name of the new run, and the arguments of ``train`` that differ."""
    command: str = ""
    """A command, if it is not a training."""


def judgement(f: Facts) -> str:
    """The run in one or two sentences.

    >>> judgement(Facts(100, 500, first_loss=2.3, last_loss=0.6, best_step=49))
    'Training went on too long: on new data the network was best at step 49 of 500.'
    """
    return " ".join(filter(None, (next(_course(f)), _labels(f))))


def _course(f: Facts) -> Iterator[str]:
    """Sentences that apply, the most important first."""
    first, last = f.first_loss, f.last_loss
    if first is None or last is None:
        yield "Only the recorded losses can be shown: the examples and the model of this run are not available."
        return
    if f.failed:
        yield f"Training did not work: the training loss went from {number(first)} to {number(last)}."
    if f.unfinished:
        yield f"This run ended too early: {f.unfinished}."
    if f.kept_step is not None and f.kept_step < EARLY * f.steps:
        yield (
            f"The network was best at step {f.kept_step} of {f.steps}, on examples that were held back; the later "
            "steps did not help."
        )
    if f.test_is_harder:
        yield "On the test set, this network is clearly worse than the estimate from the run says; trust the test set."
    if f.best_step is not None and f.kept_step is None:
        yield f"Training went on too long: on new data the network was best at step {f.best_step} of {f.steps}."
    if f.memorized is not None:
        yield _carried(f.memorized, f.memorized_error)
    if f.risk is not None and f.risk.valid:
        yield f"On new data, the loss of this network is expected to be {size_of(f.risk)}."
    yield "How this network does on new data is not known yet."


def _carried(share: float, error: float) -> str:
    if share < 2 * error and share + 2 * error >= MOSTLY:
        size = share_words(share, error)
        return f"It is not clear how much this run memorized: {size} of the drop in training loss."
    if share > 1:
        return "This run memorized: on new data the network does worse than before training."
    if share >= MOSTLY:
        return (
            f"This run mostly memorized: {percent(share)} of the drop in training loss does not carry over to new data."
        )
    if share < 2 * error or share <= 0:
        return "This run generalizes: what it learned carries over to new data, as far as can be measured."
    return f"This run generalizes: {percent(1 - share)} of the drop in training loss carries over to new data."


def _labels(f: Facts) -> str:
    if f.some_wrong and f.wrong is not None:
        return f"About {float(f.wrong.value):.0f} of the {f.examples} labels are wrong."
    if f.suspects and f.wrong is not None and not f.wrong.valid and f.kind != "loss":
        return f"{f.suspects} of the {f.examples} labels look wrong."
    return ""


def numbers(f: Facts) -> tuple[Number, Number, Number]:
    """Risk, memorization and wrong labels, each with its meaning or the reason why it is not known."""
    return _risk_number(f), _memorized_number(f), _label_number(f)


def _risk_number(f: Facts) -> Number:
    name = "Loss on new data"
    if f.risk is None and f.no_problem:
        return Number(name, "not known", _NEEDS)
    if f.risk is None or not f.risk.valid:
        why = f.why_no_risk if f.risk is None else f.risk.reason
        return Number(name, "not known", f"population risk: {as_command(why) or 'it was not computed'}")
    which = f"the kept weights, step {f.kept_step}" if f.kept_step is not None else "the last weights"
    doubt = "; but the test set contradicts it" if f.test_is_harder else ""
    return Number(name, size_of(f.risk), f"population risk of {which}, on data with the same label noise{doubt}")


def _memorized_number(f: Facts) -> Number:
    name = "Memorized"
    if f.memorized is None and f.no_problem:
        return Number(name, "not known", _NEEDS)
    if f.memorized is None or f.first_loss is None or f.last_loss is None:
        return Number(name, "not known", as_command(f.why_not_memorized) or "it was not computed")
    if f.test_is_harder:
        return Number(name, "not known", "the test set contradicts the estimated loss on new data")
    drop = f"of the drop in training loss by step {f.steps}, {number(f.first_loss)} → {number(f.last_loss)},"
    more = "; over 100% means: worse on new data than before training" if f.memorized > 1 else ""
    return Number(name, share_words(f.memorized, f.memorized_error), f"{drop} does not help on new data{more}")


def _label_number(f: Facts) -> Number:
    if f.wrong is None and f.no_problem:
        return Number("Wrong labels", "not known", _NEEDS)
    if f.wrong is None or f.kind == "loss":
        return Number("Wrong labels", "not known", "this needs targets that are classes or numbers, and the examples")
    if f.wrong.valid:
        value = f"{float(f.wrong.value):.0f} ± {float(f.wrong.standard_error):.0f} of {f.examples}"
        return Number("Wrong labels", value, "estimated from models that have not seen the example")
    value = f"{f.suspects} of {f.examples}"
    return Number("Suspicious labels", value, f"how many are wrong is not known: {as_command(f.wrong.reason)}")


def actions(f: Facts) -> list[Action]:
    """What to do next, the most useful first; never empty."""
    if f.no_problem and f.first_loss is None:
        return list(_opening_actions(f))
    found = list(_training_actions(f)) + list(_label_actions(f)) + list(_risk_actions(f))
    return found[:MOST_ACTIONS] or [
        Action(
            "nothing", "Keep these weights", "nothing here asks for a change", command=f"poprisk compare {f.run} OTHER"
        )
    ]


def _opening_actions(f: Facts) -> Iterator[Action]:
    why = "at the end of the program that trained: the analysis is kept with the run, and this page shows all of it"
    yield Action("analyze", "Analyze the run", why, command="poprisk.analyze(recorder.run)")
    why = "it returns the poprisk.Problem that was trained: the model, the loss and the same examples"
    command = f"poprisk report {f.run} --problem script.py:function"
    yield Action("problem", "Or name a function that makes the problem", why, command=command)


def _training_actions(f: Facts) -> Iterator[Action]:
    if f.failed:
        yield Action("lower_lr", "Lower the learning rate", "the training loss did not fall", ("slower", {"lr": 0.1}))
    elif f.unfinished:
        why = f"{f.unfinished}; every figure below describes an unfinished run"
        yield Action("train_longer", "Train longer", why, ("longer", {"steps": 2 * f.steps}))
    elif f.kept_step is not None and f.kept_step < EARLY * f.steps:
        why = f"they were kept because they did best on the {f.held} held-back examples"
        command = f"model.load_state_dict(poprisk.Run.load({f.path!r}).kept.weights)"
        yield Action("stop", f"Use the weights of step {f.kept_step}", why, command=command)
    elif f.best_step is not None:
        why = "the estimated loss on new data rose afterwards"
        yield Action("stop", f"Stop at step {f.best_step}", why, ("shorter", {"steps": f.best_step}))


def _label_actions(f: Facts) -> Iterator[Action]:
    if f.suspects and f.kind != "loss" and f.reviewable and not f.failed:
        why = (
            "accept the suggestion (key A) or keep the given label (key R) for each example below, export your "
            "decisions, then train on the corrected labels"
        )
        yield Action("review", f"Review {f.suspects} labels", why, (CORRECTED, {}))
    if f.test_is_easier and f.some_wrong:
        command = f"poprisk audit {f.run} --output audit.csv"
        yield Action("noise_gap", "Do not try to close the gap to the test set", gap_words(f), command=command)


def _risk_actions(f: Facts) -> Iterator[Action]:
    if f.failed:
        return
    known = f.risk is not None and f.risk.valid
    why = "" if known else f.why_no_risk if f.risk is None else f.risk.reason
    if "--budget " in why:
        seconds = why.rpartition("--budget ")[2].split()[0]
        yield Action(
            "budget", "Allow more time", "to estimate the loss on new data", command=_report(f, f"--budget {seconds}")
        )
    elif "retrain_budget=" in why:
        folds = why.partition("retrain_budget=")[2].split(")")[0].split(",")[0]
        words = f"{folds} trainings estimate the loss on new data, which the run alone does not show"
        yield Action("retrain", f"Train {folds} folds", words, command=_report(f, f"--retrain {folds}"))
    if not known and not f.held:
        words = "they measure the loss on new data, and choose the weights to keep"
        yield Action("hold_back", "Hold examples back", words, ("held", {"hold_back": 0.1}))
    elif f.held and f.risk is not None and f.held < MOST_HELD / 2 * f.examples:
        error = float(f.risk.standard_error) / max(abs(float(f.risk.value)), math.ulp(0)) if known else math.inf
        if error > UNCERTAIN:
            left = f"leave it uncertain by {percent(error)}" if known else "are too few to know it"
            words = f"{f.held} held-back examples measure the loss on new data and {left}"
            if known and f.risk.method == "held_back":
                folds = "10 trainings, each without a tenth of the examples, estimate it more closely"
                yield Action("retrain", "Train 10 folds", folds, command=_report(f, "--retrain 10"))
            share = min(MOST_HELD, round(4 * f.held / f.examples, 2))
            yield Action("hold_back", "Hold more examples back", words, ("held", {"hold_back": share}))


def gap_words(f: Facts) -> str:
    """How population risk and test loss differ, where both appear; empty if one of them is not known."""
    if f.risk is None or not f.risk.valid or f.test_loss is None:
        return ""
    both = f"the test loss, {number(f.test_loss)}, and the population risk, {size_of(f.risk)}"
    if f.test_is_easier and f.some_wrong:
        return (
            f"{both}, differ by label noise: new data like the training set have wrong labels, too, which no network "
            "can predict; the labels of the test set are cleaner"
        )
    if f.test_is_easier:
        return f"{both}, differ: the test set is easier than new data like the training set, or its labels are cleaner"
    if f.test_is_harder:
        return (
            f"{both}, contradict each other: either the test set is drawn from other data, or the estimate from the "
            "run is too low; trust the test set"
        )
    return f"{both}, measure the same weights: the first on the test set, the second on new data like the training set"


def _report(f: Facts, options: str) -> str:
    return f"poprisk report {f.run} {options}"
