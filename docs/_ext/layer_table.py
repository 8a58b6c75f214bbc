"""The page on layers: what the library does for tiny models of every layer that classifiers use.

``python docs/_ext/layer_table.py`` writes ``docs/layers.md``; ``tests/docs/test_layers.py`` runs every row again.
"""

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from poprisk import Problem, Run, Window, population_risk, replay, train
from poprisk._core.autodiff import Inputs
from poprisk.errors import RunError
from poprisk.operators import evaluation_model, train_kernel

PAGE = Path(__file__).resolve().parents[1] / "layers.md"
N, CLASSES = 24, 3
HEAD = """# Layers

What the library does for a small network with each of these layers, in training mode. The table is written by
`python docs/_ext/layer_table.py` from a run of each, and a test runs every row again.

- *Replay*: whether `replay` executes the run again, bit by bit, on the machine that recorded it. Dropout and
  augmentation are replayed from their seeds if `train` recorded the run.
- *Windows*: the operators of the run, {py:class}`~poprisk.Window`. *Exact* is the network as the steps saw it; the
  *evaluation form* is explained below. Either way, the displacements that follow are checked against the network's;
  [Operators](operators.md) says what kinks such as ReLU's mean for the operators themselves.
- *Kernels*: tangent kernels, checked against the product of full Jacobians; in the evaluation form by
  `poprisk.operators.evaluation_model(run)`.
- *Without retraining*: the method of `population_risk(run)`; or that it is refused, and what for. Whether the
  estimate is valid depends on the run, not on the layer.
- *Folds*: how `retrain_budget=10` trains where K-fold is needed. All members of a stacked training are one
  computation; others are trained one after another, from the recorded recipe.

| layer | replay | windows | kernels | risk without retraining | risk by folds |
| --- | --- | --- | --- | --- | --- |
"""
FOOT = """
## The evaluation form

Operators describe one function of the weights. Where the steps of a run saw another one each, `Window.of_run` and
`poprisk report` take the network in its evaluation form: dropout is off, training inputs are not augmented, weights are
not rounded to bfloat16, and batch normalization uses the statistics of 128 fixed training examples, computed again at
every weight vector and differentiated with it (not the running averages, which lag behind). A step is then a gradient
of this function plus a source: whatever else the recorded step did. So the displacements still follow to rounding, and
`window.note` says what was put in place of what, and how large the sources are beside the steps. The larger they are,
the less the operators alone say.

Refused are models that have no such form: instance normalization with `track_running_stats=True` (leave it out), and
layers that always draw at random or mix the examples of a batch (let them act on one example each, or be switched by
`self.training`).
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


class LowRank(nn.Module):
    """A frozen linear layer, and what is learned beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(8, 8), nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of both."""
        return self.base(x) + self.up(self.down(x))


def jitter(inputs: Inputs, generator: torch.Generator) -> Inputs:
    """Inputs with noise."""
    assert isinstance(inputs, torch.Tensor)
    return inputs + 0.1 * torch.randn(inputs.shape, generator=generator)


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
    "LoRA": ("plain", lambda: _plain(LowRank())),
    "bfloat16 weights": ("plain", lambda: _plain().to(torch.bfloat16)),
    "augmentation, seeded": ("augmented", _plain),
    "Softmax head": ("plain", lambda: _head(nn.Softmax(1))),
    "LogSoftmax head": ("plain", lambda: _head(nn.LogSoftmax(1))),
}
_SHAPES = {"plain": (8,), "augmented": (8,), "row": (2, 4), "image": (1, 4, 4), "sequence": (4, 4)}


def recorded(name: str) -> Run:
    """A short run of a tiny model with this layer."""
    kind, make = LAYERS[name]
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(9, (N, 4), generator=generator)
    x = words if kind == "words" else torch.randn(N, *_SHAPES[kind], generator=generator)
    augment = jitter if kind == "augmented" else None
    problem = Problem(make, "cross_entropy", x, torch.arange(N) % CLASSES, augment=augment)
    return train(problem, partial(torch.optim.AdamW, lr=0.01), 6, batch_size=8, progress=False)


def row(name: str) -> str:
    """What the library does for this layer, as a row of the table."""
    try:
        run = recorded(name)
    except RunError as error:
        return f"| `{name}` | not recorded: {_brief(str(error))} |" + " not recorded |" * 4
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
        again = "bit by bit" if replay(run).exact else "not exactly"
        return f"| `{name}` | {again} | {_windows(run)} | {_kernels(run)} | {without} | {folds} |"


def _windows(run: Run) -> str:
    """Whether the operators of a window predict where the outputs went, and of which form of the network."""
    window = Window.of_run(run, test_inputs=run.problem.batch(torch.arange(3))[0], dense=False)
    moved = -(window.test_transfer @ window.output_gradient) + window.sources().test
    torch.testing.assert_close(moved, window.test_displacement(), rtol=1e-4, atol=1e-6)
    return "evaluation form" if window.note else "exact"


def _kernels(run: Run) -> str:
    """Whether the kernel is the product of Jacobians, and of which form of the network."""
    model = evaluation_model(run, torch.float64)
    x, _ = run.problem.batch(torch.arange(3), dtype=torch.float64)
    w = run.weights(run.num_steps).double()
    J = model.output_jacobian(w, x).flatten(0, 1)
    torch.testing.assert_close(train_kernel(model, w, x), J @ J.T)
    return "evaluation form" if run.obstacles or run.augmented else "exact"


def _brief(text: str) -> str:
    text = text.removeprefix("no exact analysis of this run is possible: ")
    return text.rpartition(" but ")[2].partition(": ")[0].partition(", so ")[0].partition(". ")[0]


def page() -> str:
    """The whole page."""
    return HEAD + "\n".join(row(name) for name in LAYERS) + "\n" + FOOT


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
