"""A character language model for stacked training, on clean text or with a share of the targets replaced."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from poprisk._core.seeds import stream
from poprisk.errors import DataError, HyperparameterError
from poprisk.runs import replace_labels
from poprisk_lab.data.char_lm import CharText, CharTransformer, all_windows, help_topics
from poprisk_lab.engine.task import StackedBatch, StackedWeights, TaskMetric

HELD_OUT = "held-out loss"
TRAIN = "train loss"
_WINDOWS_AT_ONCE = 16_384  # for all members together: 1 GB for the widest activation of a model of width 64


@cache
def _text() -> CharText:
    return help_topics()


@dataclass(frozen=True)
class CharLanguageTask:
    """Next-character prediction on the topics of Python's ``help()``, with a two-layer transformer decoder.

    The text is cut into consecutive windows. A share ``noise`` of the targets is replaced by another character,
    drawn uniformly. The replacements are fixed for each seed, so that the same wrong targets return in every epoch; the
    input characters are not replaced. The held-out text is clean.
    """

    noise: float = 0.0
    width: int = 64
    heads: int = 4
    layers: int = 2
    context: int = 64
    batch_size: int = 16
    steps: int = 2000
    evaluations: int = 20
    target: float = 1.9
    """Target for the held-out loss, in nats per character."""
    measured_windows: int = 512
    """Number of evenly spaced windows of each text on which the loss is measured."""
    text_sha256: str = field(default_factory=lambda: _text().sha256)
    """SHA-256 of the text, which differs slightly between versions of CPython."""

    def __post_init__(self) -> None:
        if not 0 <= self.noise < 1:
            raise HyperparameterError(f"noise must lie in [0, 1), got {self.noise}")
        if self.width < 1 or self.heads < 1 or self.width % self.heads:
            raise HyperparameterError(f"width must be a multiple of heads, got {self.width} and {self.heads}")
        if min(self.layers, self.context, self.batch_size, self.steps, self.evaluations, self.measured_windows) < 1:
            raise HyperparameterError(f"layers, context, batch_size, steps and counts must be at least 1, got {self}")
        if self.text_sha256 != _text().sha256:
            raise DataError(
                f"the text of this task has sha256 {self.text_sha256[:12]}…, that of this Python's help() "
                f"{_text().sha256[:12]}…: leave text_sha256 out, or use the CPython the result was made with"
            )

    @property
    def name(self) -> str:
        """``char_clean`` or ``char_noisy``."""
        return "char_noisy" if self.noise else "char_clean"

    @property
    def description(self) -> str:
        """Data, noise, network and loss in one sentence."""
        spoiled = f"{self.noise:.0%} of the characters to predict replaced" if self.noise else "clean"
        return (
            f"Next character of Python's help() topics ({spoiled}), transformer decoder of {self.layers} layers, "
            f"width {self.width}, context {self.context}; cross-entropy, batches of {self.batch_size}."
        )

    @property
    def metrics(self) -> tuple[TaskMetric, ...]:
        """Nats per character on clean held-out text, and on training windows with the given targets."""
        return (TaskMetric(HELD_OUT, False, self.target), TaskMetric(TRAIN, False))

    @property
    def streams(self) -> dict[str, tuple[int, int]]:
        """Windows of the training text."""
        return {"windows": (len(self.train_windows()), self.batch_size)}

    def train_windows(self) -> Int[Tensor, "windows time"]:
        """The windows of the training text, one character longer than the context."""
        return all_windows(_text().train, self.context)

    def initial(self, seed: int) -> dict[str, Tensor]:
        """The weights of a :class:`CharTransformer` made with this seed."""
        return {name: value.detach().clone() for name, value in self.network(seed).state_dict().items()}

    def network(self, seed: int) -> CharTransformer:
        """The same network as one module."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream(seed, "weights"))
            return CharTransformer(len(_text().vocabulary), self.width, self.heads, self.layers, self.context)

    def given_targets(self, seed: int) -> Int[Tensor, "windows time"]:
        """The targets of a member with this seed in each training window, including the wrong ones."""
        targets = self.train_windows()[:, 1:]
        generator = torch.Generator().manual_seed(stream(seed, "targets"))
        return replace_labels(targets.flatten(), self.noise, len(_text().vocabulary), generator).labels.view_as(targets)

    def cohort(self, seeds: Sequence[int], device: torch.device) -> "CharLanguageCohort":
        """The members with these seeds."""
        return CharLanguageCohort(self, seeds, device)


class CharLanguageCohort:
    """Members of one stacked training. Windows are shared; each seed has its own targets."""

    def __init__(self, task: CharLanguageTask, seeds: Sequence[int], device: torch.device) -> None:
        self._task, self._members = task, len(seeds)
        unique = sorted(set(seeds))
        self._seed_index = torch.tensor([unique.index(seed) for seed in seeds], device=device)
        windows = task.train_windows()
        self._inputs = windows[:, :-1].to(device)
        targets = torch.stack([task.given_targets(seed) for seed in unique])
        self._targets = targets.to(device, torch.int16)  # a quarter of the memory; cast when used
        self._one_hot = torch.eye(len(_text().vocabulary), device=device)
        self._measured = evenly(len(windows), task.measured_windows).to(device)
        held_out = all_windows(_text().held_out, task.context)
        held_out = held_out[evenly(len(held_out), task.measured_windows)].to(device)
        self._held_out_inputs, self._held_out_targets = held_out[:, :-1], held_out[:, 1:]

    def losses(self, weights: StackedWeights, batch: StackedBatch) -> Float[Tensor, "members"]:
        """Nats per character on the windows of each member, with the targets of its seed."""
        return self._nats(weights, *self._given(batch))

    def errors(self, weights: StackedWeights, batch: StackedBatch) -> Float[Tensor, "members"]:
        """The share of the given characters that each member does not predict."""
        codes, targets = self._given(batch)
        return (self._logits(weights, codes).argmax(-1) != targets.flatten(1)).float().mean(1)

    def measure_first(self, weights: StackedWeights) -> Float[Tensor, "members"]:
        """Loss on the held-out text."""
        held_out = []
        for piece in torch.arange(len(self._held_out_inputs), device=self._inputs.device).split(self._per_piece):
            inputs, targets = self._shared(self._held_out_inputs[piece]), self._shared(self._held_out_targets[piece])
            held_out.append(self._nats(weights, inputs, targets) * len(piece))
        return torch.stack(held_out).sum(0) / len(self._held_out_inputs)

    def measure(self, weights: StackedWeights) -> dict[str, Float[Tensor, "members"]]:
        """Held-out and training loss in nats, computed in chunks that fit in memory."""
        train = [
            self.losses(weights, {"windows": self._shared(piece)}) * len(piece)
            for piece in self._measured.split(self._per_piece)
        ]
        return {HELD_OUT: self.measure_first(weights), TRAIN: torch.stack(train).sum(0) / len(self._measured)}

    @property
    def _per_piece(self) -> int:
        """Number of windows that fit in memory for all members at once."""
        return max(1, _WINDOWS_AT_ONCE // self._members)

    def _given(self, batch: StackedBatch) -> tuple[Tensor, Tensor]:
        """Input characters and given targets of each member's windows."""
        index = batch["windows"]
        return self._inputs[index], self._targets[self._seed_index.unsqueeze(1), index].long()

    def _shared(self, values: Tensor) -> Tensor:
        """The same for every member."""
        return values.expand(self._members, *values.shape)

    def _nats(
        self, weights: StackedWeights, codes: Int[Tensor, "members b t"], targets: Int[Tensor, "members b t"]
    ) -> Float[Tensor, "members"]:
        logits = self._logits(weights, codes)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(len(codes), -1).mean(1)

    def _logits(self, weights: StackedWeights, codes: Int[Tensor, "members b t"]) -> Float[Tensor, "members bt v"]:
        """A :class:`CharTransformer` for each member; positions of a window are flattened into rows of a matrix."""
        characters = weights["characters.weight"]
        # A product with one-hot rows: unlike a gather, it has a deterministic gradient on a GPU.
        hidden = torch.bmm(self._one_hot[codes.flatten(1)], characters).unflatten(1, codes.shape[1:])
        hidden = (hidden + weights["positions.weight"].unsqueeze(1)).flatten(1, 2)
        for layer in range(self._task.layers):
            hidden = self._block(weights, f"blocks.{layer}.", hidden)
        return torch.bmm(_normed(weights, "norm", hidden), characters.transpose(1, 2))

    def _block(
        self, weights: StackedWeights, block: str, hidden: Float[Tensor, "members bt w"]
    ) -> Float[Tensor, "members bt w"]:
        members, rows, width = hidden.shape
        parts = _linear(weights, block + "attended", _normed(weights, block + "norm1", hidden))
        parts = parts.view(-1, self._task.context, 3, self._task.heads, width // self._task.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)  # members and windows form the batch of the attention
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed = mixed.transpose(1, 2).reshape(members, rows, width)
        hidden = hidden + _linear(weights, block + "mixed", mixed)
        wide = F.gelu(_linear(weights, block + "up", _normed(weights, block + "norm2", hidden)))
        return hidden + _linear(weights, block + "down", wide)


def _linear(weights: StackedWeights, name: str, x: Float[Tensor, "members rows i"]) -> Float[Tensor, "members rows o"]:
    bias, matrix = weights[name + ".bias"].unsqueeze(1), weights[name + ".weight"]
    return torch.baddbmm(bias, x, matrix.transpose(1, 2))


def _normed(weights: StackedWeights, name: str, x: Float[Tensor, "members rows w"]) -> Float[Tensor, "members rows w"]:
    gain, shift = weights[name + ".weight"].unsqueeze(1), weights[name + ".bias"].unsqueeze(1)
    return torch.addcmul(shift, F.layer_norm(x, x.shape[-1:]), gain)


def evenly(count: int, wanted: int) -> Int[Tensor, "chosen"]:
    """At most as many indices as requested, evenly spaced in 0 … count - 1."""
    chosen = min(count, wanted)
    return torch.arange(chosen) * count // chosen
