"""The page on layers: what population_risk does for tiny models of every layer that classifiers use.

``python docs/_ext/layer_table.py`` writes ``docs/layers.md``; ``tests/docs/test_layers.py`` runs every row again.
"""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from poprisk import Problem, Run, population_risk, train
from poprisk.errors import RunError

PAGE = Path(__file__).resolve().parents[1] / "layers.md"
N, CLASSES = 24, 3
HEAD = """# Layers

What `population_risk` does for a small network with each of these layers, in training mode. The table is written by
`python docs/_ext/layer_table.py` from a run of each, and a test runs every row again.

- *Without retraining*: the method of `population_risk(run)`; or that it is refused, and what for. Whether the
  estimate is valid depends on the run, not on the layer.
- *Folds*: how `retrain_budget=10` trains where K-fold is needed. All members of a stacked training are one
  computation; others are trained one after another, from the recorded recipe.

| layer | without retraining | folds |
| --- | --- | --- |
"""


class Last(nn.Module):
    """A recurrent layer's outputs at the last time, or attention's at the first place."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The outputs of one time."""
        attends = isinstance(self.layer, nn.MultiheadAttention)
        found = self.layer(x, x, x, need_weights=False) if attends else self.layer(x)
        return (found[0] if isinstance(found, tuple) else found)[:, -1]


class Pair(nn.Module):
    """Bilinear in two halves of the features."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Bilinear(4, 4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The form of both halves."""
        return self.layer(x[:, :4], x[:, 4:])


def _plain(*layers: nn.Module, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(width, CLASSES))


def _image(*layers: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), *layers, nn.Flatten(), nn.Linear(width, CLASSES))


def _row(*layers: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(nn.Conv1d(2, 4, 3, padding=1), *layers, nn.Flatten(), nn.Linear(width, CLASSES))


def _head(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(8, CLASSES), layer)


def _words(layer: nn.Module, *more: nn.Module, width: int) -> nn.Module:
    return nn.Sequential(layer, *more, nn.Linear(width, CLASSES))


def _sequence(layer: nn.Module) -> nn.Module:
    return nn.Sequential(Last(layer), nn.Linear(4, CLASSES))


_ACTIVATIONS = [nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Tanh, nn.Sigmoid]
_ACTIVATIONS += [nn.Softplus]
_encoder = partial(nn.TransformerEncoderLayer, 4, 2, 8, batch_first=True)
LAYERS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "Linear": ("plain", _plain),
    "Bilinear": ("plain", lambda: _plain(Pair())),
    **{kind.__name__: ("plain", lambda kind=kind: _plain(kind())) for kind in _ACTIVATIONS},
    "Conv1d": ("row", lambda: _row(width=16)),
    "Conv2d": ("image", lambda: _image(width=64)),
    "ConvTranspose2d": ("image", lambda: _image(nn.ConvTranspose2d(4, 2, 2), width=50)),
    "MaxPool2d": ("image", lambda: _image(nn.MaxPool2d(2), width=16)),
    "AvgPool2d": ("image", lambda: _image(nn.AvgPool2d(2), width=16)),
    "AdaptiveAvgPool2d": ("image", lambda: _image(nn.AdaptiveAvgPool2d(1), width=4)),
    "BatchNorm1d": ("plain", lambda: _plain(nn.BatchNorm1d(8))),
    "BatchNorm2d": ("image", lambda: _image(nn.BatchNorm2d(4), width=64)),
    "LayerNorm": ("plain", lambda: _plain(nn.LayerNorm(8))),
    "GroupNorm": ("image", lambda: _image(nn.GroupNorm(2, 4), width=64)),
    "InstanceNorm2d": ("image", lambda: _image(nn.InstanceNorm2d(4), width=64)),
    "Dropout": ("plain", lambda: _plain(nn.Dropout(0.2))),
    "Dropout2d": ("image", lambda: _image(nn.Dropout2d(0.2), width=64)),
    "Embedding": ("words", lambda: _words(nn.Embedding(9, 2), nn.Flatten(), width=8)),
    "EmbeddingBag": ("words", lambda: _words(nn.EmbeddingBag(9, 4), width=4)),
    "RNN": ("sequence", lambda: _sequence(nn.RNN(4, 4, batch_first=True))),
    "GRU": ("sequence", lambda: _sequence(nn.GRU(4, 4, batch_first=True))),
    "LSTM": ("sequence", lambda: _sequence(nn.LSTM(4, 4, batch_first=True))),
    "MultiheadAttention": ("sequence", lambda: _sequence(nn.MultiheadAttention(4, 2, batch_first=True))),
    "TransformerEncoderLayer": ("sequence", lambda: _sequence(_encoder(dropout=0.0))),
    "TransformerEncoderLayer, dropout": ("sequence", lambda: _sequence(_encoder(dropout=0.1))),
    "weight_norm": ("plain", lambda: _plain(weight_norm(nn.Linear(8, 8)))),
    "spectral_norm": ("plain", lambda: _plain(spectral_norm(nn.Linear(8, 8)))),
    "Softmax head": ("plain", lambda: _head(nn.Softmax(1))),
    "LogSoftmax head": ("plain", lambda: _head(nn.LogSoftmax(1))),
}
_SHAPES = {"plain": (8,), "row": (2, 4), "image": (1, 4, 4), "sequence": (4, 4)}


def recorded(name: str) -> Run:
    """A short run of a tiny model with this layer."""
    kind, make = LAYERS[name]
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(9, (N, 4), generator=generator)
    x = words if kind == "words" else torch.randn(N, *_SHAPES[kind], generator=generator)
    problem = Problem(make, "cross_entropy", x, torch.arange(N) % CLASSES)
    return train(problem, partial(torch.optim.AdamW, lr=0.01), 6, batch_size=8, progress=False)


def row(name: str) -> str:
    """What the library does for this layer, as a row of the table."""
    try:
        run = recorded(name)
    except RunError as error:
        return f"| `{name}` | not recorded: {_brief(str(error))} | not recorded |"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is slow is not the subject here
        try:
            trained = population_risk(run, "k_fold", 3).reason
            folds = "one after another" if "one after another" in trained else "stacked"
        except RunError as error:
            folds = f"refused: {_brief(str(error))}"
        try:
            without = {"exclusion": "exactly, by exclusion"}.get(found := population_risk(run).method, f"by {found}")
        except RunError as error:
            without = f"refused: {_brief(str(error))}"
    return f"| `{name}` | {without} | {folds} |"


def _brief(text: str) -> str:
    text = text.removeprefix("no exact analysis of this run is possible: ")
    return text.rpartition(" but ")[2].partition(": ")[0].partition(", so ")[0].partition(". ")[0]


def page() -> str:
    """The whole page."""
    return HEAD + "\n".join(row(name) for name in LAYERS) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
