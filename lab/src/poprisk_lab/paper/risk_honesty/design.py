"""The settings of the honesty study: disjoint splits, each drawn by a seeded design that covers every factor.

Limits are set on "tune" and on "seen", which was reported once before they were set. They were judged on "report",
whose answers led to further changes, and are judged on "fresh".

Each factor has a deck of its levels. A level is dealt from the deck that fits the setting's other factors, and a deck
is shuffled anew only when it is empty: every level comes up equally often. The levels of the splits differ
wherever they can: other teachers, other rows of real data, other widths, rates, sizes and seeds.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from poprisk_lab.paper.risk_honesty import networks, sources
from poprisk_lab.paper.risk_honesty.task import GATES, LITERAL, Setting

Split = Literal["tune", "seen", "report", "fresh"]
REGIMES = ("under-trained", "early", "trained", "long")
_REGRESSION = ("squared", "absolute", "huber")
_LINEAR = ("linear", "softmax", "logistic")
_FOR_LINEAR: dict[str, tuple[str, ...]] = {
    "tune": ("linear",),
    "seen": ("sparse", "relu"),
    "report": ("cubic", "steps"),
    "fresh": ("hinges", "largest"),
}
"""Teachers for linear regression."""
_LONGEST = 2_000_000
"""Largest product of steps and weights: what a recording keeps of each step."""


@dataclass(frozen=True)
class Levels:
    """What distinguishes one split from the others."""

    seed: int
    counts: dict[str, int]
    """Number of settings of each model."""
    held_back: int
    """Number of further settings with a held-back block."""
    teachers: tuple[str, ...]
    real: tuple[str, ...]
    sizes: tuple[int, ...]
    widths: tuple[int, ...]
    rates: tuple[float, ...]
    wrong: tuple[float, ...]
    """Shares of wrong labels."""
    spread: tuple[float, ...]
    """Standard deviations of the noise in targets."""
    features: tuple[int, ...]
    """Numbers of inputs of a network."""
    linear_features: tuple[int, ...]
    """The same for linear models, up to about as many as there are examples in the smaller sets."""
    steps: dict[str, tuple[int, ...]]


_SEEN_COUNTS = {
    "linear": 20,
    "softmax": 16,
    "logistic": 14,
    "relu": 26,
    "gelu": 16,
    "tanh": 16,
    "layernorm": 14,
    "dropout": 14,
    "batchnorm": 16,
    "cnn": 18,
    "cnn_batchnorm": 14,
    "transformer": 12,
    "gru": 12,
}
SPLITS: dict[Split, Levels] = {
    "tune": Levels(
        seed=1,
        counts={model: count // 2 for model, count in _SEEN_COUNTS.items()},
        held_back=8,
        teachers=("tanh", "linear", "sines"),
        real=("digits", "cancer", "iris"),
        sizes=(40, 80, 150, 250, 600, 1500, 4000),
        widths=(12, 24, 48),
        rates=(0.4, 1.0, 2.5),
        wrong=(0.0, 0.15, 0.25, 0.45),
        spread=(0.2, 0.6, 1.2),
        features=(6, 12, 20),
        linear_features=(6, 12, 20, 38),
        steps={"under-trained": (12, 25), "early": (60, 90), "trained": (180, 250), "long": (400, 600)},
    ),
    "seen": Levels(
        seed=2,
        counts=_SEEN_COUNTS,
        held_back=12,
        teachers=("relu", "products", "sparse"),
        real=("digits", "cancer", "wine", "diabetes"),
        sizes=(30, 60, 100, 200, 300, 400, 1000, 2000, 5000),
        widths=(16, 32, 64),
        rates=(0.5, 1.3, 2.0),
        wrong=(0.0, 0.1, 0.2, 0.3, 0.5),
        spread=(0.1, 0.4, 1.0),
        features=(8, 16, 24),
        linear_features=(8, 16, 28, 58),
        steps={"under-trained": (15, 30), "early": (50, 100), "trained": (150, 300), "long": (450, 700)},
    ),
    "report": Levels(
        seed=3,
        counts={**_SEEN_COUNTS, "batchnorm": 18, "cnn_batchnorm": 16},
        held_back=12,
        teachers=("prototypes", "steps", "cubic"),
        real=("parity", "pairs", "severity", "alcohol", "petals", "concavity"),
        sizes=(30, 50, 90, 120, 180, 350, 800, 1200, 5000),
        widths=(20, 40, 56),
        rates=(0.45, 1.2, 2.2),
        wrong=(0.0, 0.05, 0.2, 0.35, 0.5),
        spread=(0.15, 0.5, 0.9),
        features=(7, 14, 22),
        linear_features=(7, 14, 26, 48),
        steps={"under-trained": (18, 28), "early": (45, 80), "trained": (160, 280), "long": (420, 650)},
    ),
    "fresh": Levels(
        seed=4,
        counts={**_SEEN_COUNTS, "batchnorm": 18, "cnn_batchnorm": 16},
        held_back=36,
        teachers=("waves", "largest", "hinges"),
        real=("upper", "thirds", "obesity", "hue", "sepals", "texture"),
        sizes=(30, 45, 85, 110, 160, 240, 500, 1300, 5000),
        widths=(18, 36, 60),
        rates=(0.55, 1.1, 1.8),
        wrong=(0.0, 0.08, 0.25, 0.4, 0.5),
        spread=(0.12, 0.45, 1.1),
        features=(9, 15, 21),
        linear_features=(9, 15, 29, 52),
        steps={"under-trained": (16, 32), "early": (55, 90), "trained": (170, 260), "long": (430, 680)},
    ),
}


def settings(split: Split) -> list[Setting]:
    """All settings of a split, always the same.

    >>> [len(settings(split)) for split in SPLITS]
    [112, 220, 224, 248]
    """
    levels = SPLITS[split]
    design = _Design(split, levels)
    models = [model for model, count in levels.counts.items() for _ in range(count)]
    made = [design.setting(model, hold_back=False) for model in models]
    held = [design.cards.deal("held-back model", tuple(levels.counts)) for _ in range(levels.held_back)]
    return made + [design.setting(model, hold_back=True) for model in held]


class _Cards:
    """Decks of levels, dealt without replacement and shuffled anew when empty."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._decks: dict[Any, list[Any]] = {}

    def deal(self, name: str, levels: Sequence[Any]) -> Any:
        """The next level from the deck of this name and these levels."""
        deck = self._decks.setdefault((name, tuple(levels)), [])
        if not deck:
            deck += self._random.sample(levels, len(levels))
        return deck.pop()

    def rarely(self, name: str, one_in: int) -> bool:
        """True once in so many deals."""
        return self.deal(name, (True, *[False] * (one_in - 1)))


class _Design:
    """Deals the levels of one setting after the other."""

    def __init__(self, split: Split, levels: Levels) -> None:
        self.split: Split = split
        self.levels, self.cards, self.made = levels, _Cards(levels.seed), 0

    def setting(self, model: str, *, hold_back: bool) -> Setting:
        cards, levels = self.cards, self.levels
        loss = self._loss(model)
        source, shape, classes = self._source(model, loss)
        n = self._size(source, hold_back)
        regime = cards.deal(f"regime of {model}", REGIMES)
        optimizer = cards.deal("optimizer", ("sgd", "momentum", "adamw", "adamw", *GATES))
        batch = min(n, cards.deal("batch", (20, 32, 50, 64, 100)))
        width = self._width(model)
        seed = 1000 * levels.seed + self.made
        self.made += 1
        wrong = cards.deal("wrong", levels.wrong) if classes else cards.deal("spread", levels.spread)
        return Setting(
            name=f"{self.split} {self.made:03d}: {model}, {loss}, {source}, n={n}, {optimizer}, {regime}",
            split=self.split,
            model=model,
            width=width,
            loss=loss,
            source=source,
            shape=shape,
            classes=classes,
            n=n,
            noise=0.0 if source == "diabetes" else wrong,
            tails="normal" if classes or source == "diabetes" else self._tails(loss),
            imbalance=self._imbalance(source, classes),
            duplicates=cards.deal("duplicates", (0.0,) * 6 + (0.3, 0.5)),
            optimizer=optimizer,
            lr=self._rate(model, loss, optimizer),
            weight_decay=cards.deal("weight decay", (0.0, 1e-2)) * (1 if optimizer not in ("sgd", "momentum") else 0.1),
            cosine=cards.rarely("cosine", 4),
            batch=self._smaller(batch, n, hold_back),
            steps=self._steps(model, regime, shape, width, classes),
            regime=regime,
            augmented=model.startswith("cnn") and cards.rarely("augmented", 6),
            hold_back=cards.deal("held back", (0.1, 0.2)) if hold_back else 0.0,
            double=cards.rarely("double", 5),
            seed=seed,
        )

    def _loss(self, model: str) -> str:
        only = {"softmax": "cross_entropy", "logistic": "logistic"}
        if model in only:
            return only[model]
        if model == "linear":
            return self.cards.deal("loss of linear", ("squared", "squared", "absolute", "huber"))
        return self.cards.deal("loss", ("cross_entropy", "cross_entropy", "cross_entropy", "logistic", *_REGRESSION))

    def _source(self, model: str, loss: str) -> tuple[str, tuple[int, ...], int]:
        """Source, shape of an input, number of classes."""
        regression, image = loss in _REGRESSION, model.startswith("cnn")
        sequence = model in ("transformer", "gru")
        fits = {
            name
            for name in self.levels.real
            if (sources.REAL[name][0] == "regression") == regression
            and (loss != "logistic" or sources.REAL[name][1] == 2)
            and (name in sources.IMAGES or not (image or sequence))
        }
        teachers = _FOR_LINEAR[self.split] if model == "linear" else self.levels.teachers
        real = tuple(sorted(fits)) * (2 if len(fits) == 1 else 1)
        source = self.cards.deal(f"source {image} {sequence}", (*teachers, *real))
        classes = 0 if regression else 2 if loss == "logistic" else self.cards.deal("classes", (2, 3, 5))
        if source in sources.REAL:
            kind, outputs, shape = sources.REAL[source]
            shape = (1, 8, 8) if image else (8, 8) if sequence else shape
            return source, shape, outputs if kind == "classes" else 0
        if image:
            return source, (1, 8, 8), classes
        if sequence:
            return source, (sources.PLACES, sources.SIGNALS), classes
        features = self.levels.linear_features if model in _LINEAR else self.levels.features
        return source, (self.cards.deal("features", features),), classes

    def _size(self, source: str, hold_back: bool) -> int:
        sizes = [n for n in self.levels.sizes if not hold_back or n >= 80]
        if source in sources.REAL:
            sizes = [n for n in sizes if n <= 0.65 * sources.available(source)]
        return self.cards.deal("size", tuple(sizes))

    def _width(self, model: str) -> int:
        width = self.cards.deal("width", self.levels.widths)
        middle = self.levels.widths[1]
        if model.startswith("cnn"):
            return min(width, middle) // 2
        return min(width, middle) if model in ("transformer", "gru") else width

    def _tails(self, loss: str) -> str:
        student = "student6" if loss == "squared" else "student3"
        return self.cards.deal(f"tails {student}", ("normal", "normal", student, "contaminated"))

    def _imbalance(self, source: str, classes: int) -> float:
        # Real data sets are too small to be thinned out, and keep the frequencies they have.
        return self.cards.deal("imbalance", (1.0, 1.0, 1.0, 8.0)) if classes and source not in sources.REAL else 1.0

    def _rate(self, model: str, loss: str, optimizer: str) -> float:
        factor = self.cards.deal("rate", self.levels.rates)
        if optimizer in ("sgd", "momentum"):
            base = {"squared": 0.02, "absolute": 0.02, "huber": 0.03}.get(loss, 0.1)
            base *= 0.3 if optimizer == "momentum" else 1.0
            return factor * base * (2.0 if model in ("softmax", "logistic") else 1.0)
        base = 0.01 if model in _LINEAR else 0.006
        return factor * base * (10.0 if optimizer in LITERAL else 1.0)

    def _steps(self, model: str, regime: str, shape: tuple[int, ...], width: int, classes: int) -> int:
        steps = self.cards.deal(f"steps of {regime}", self.levels.steps[regime])
        steps = round(1.5 * steps) if model in _LINEAR else steps
        module = networks.build(model, shape, width, max(classes, 1))
        size = sum(p.numel() for p in module.parameters())
        limit = _LONGEST // size // (2 if model in ("transformer", "gru", "cnn", "cnn_batchnorm") else 1)
        return max(10, min(steps, limit))

    def _smaller(self, batch: int, n: int, hold_back: bool) -> int:
        return min(batch, math.floor(0.7 * n)) if hold_back else batch
