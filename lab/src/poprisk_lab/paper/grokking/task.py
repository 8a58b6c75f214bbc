r"""Modular division with a small transformer, the task on which networks generalize long after they memorized.

The network sees the three tokens :math:`a, b, {=}` and names :math:`a \cdot b^{-1} \bmod p` at the last of them. It is
the transformer of Power et al. (2022, "Grokking: generalization beyond overfitting on small algorithmic datasets"):
causal, with layer norms *after* the residual sums (post-LN), ReLU, no dropout. Positions are learned, all layers have
biases and PyTorch's default initialization, as in the public suites; the constant division sign is left out.

Labels are clean by default (``wrong_share=0``), as in the usual setting of grokking.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from poprisk._core.seeds import stream
from poprisk.errors import HyperparameterError
from poprisk.runs import replace_labels
from poprisk_lab.engine.task import StackedBatch, StackedWeights, TaskMetric

TEST_ACCURACY = TaskMetric("test accuracy", higher_is_better=True, target=0.95)
TRAIN_ACCURACY = TaskMetric("train accuracy", higher_is_better=True)
TEST_LOSS = TaskMetric("test loss", higher_is_better=False)
_TOKENS = 3  # a, b and the equals sign
_PAIRS_AT_ONCE = 400_000  # for all members together in a measurement: some GB of activations at the paper's width


class ModularTransformer(nn.Module):
    """One network as plain modules, which defines the initial weights and their names.

    >>> ModularTransformer(modulus=5, width=8, heads=2, hidden=16, layers=2)(torch.tensor([[1, 2], [3, 4]])).shape
    torch.Size([2, 5])
    """

    def __init__(self, modulus: int, width: int, heads: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(modulus + 1, width)
        self.position = nn.Embedding(_TOKENS, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, hidden, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, modulus)

    def forward(self, pairs: Int[Tensor, "batch 2"]) -> Float[Tensor, "batch modulus"]:
        """Compute the logits of the quotient."""
        equals = torch.full_like(pairs[:, :1], self.token.num_embeddings - 1)
        x = self.token(torch.cat([pairs, equals], dim=1)) + self.position.weight
        causal = nn.Transformer.generate_square_subsequent_mask(_TOKENS, dtype=x.dtype)
        for layer in self.layers:
            x = layer(x, src_mask=causal)
        return self.head(x[:, -1])


@dataclass(frozen=True)
class GrokkingTask:
    """Division modulo a prime, learned from a share of its table.

    Attributes:
        modulus: The prime p.
        train_share: Share of the p (p - 1) pairs for training, drawn for each seed; the rest is the test set.
        wrong_share: Share of the training labels that is replaced by a wrong number.
        width: Width of the residual stream.
        heads: Number of attention heads.
        hidden: Number of hidden units of the MLP of a layer.
        layers: Number of layers.
        batch_size: Number of pairs per step.
        steps: Number of optimizer steps.
        evaluations: Number of measurements, evenly spaced.
        name: Name of the study, which can be part of a file name.

    >>> task = GrokkingTask(modulus=5, width=8, heads=2, hidden=16, batch_size=4, steps=10, evaluations=2)
    >>> task.train_size, task.test_size, len(task.initial(seed=0))
    (5, 15, 28)
    """

    modulus: int = 97
    train_share: float = 0.25
    wrong_share: float = 0.0
    width: int = 128
    heads: int = 4
    hidden: int = 512
    layers: int = 2
    batch_size: int = 512
    steps: int = 10_000
    evaluations: int = 200
    name: str = "grokking"

    def __post_init__(self) -> None:
        _require(is_prime(self.modulus), "modulus must be a prime, so that every b ≠ 0 has an inverse", self.modulus)
        _require(0 < self.train_share < 1, "train_share must lie between 0 and 1, both excluded", self.train_share)
        _require(0 <= self.wrong_share < 1, "wrong_share must lie in [0, 1)", self.wrong_share)
        for name in ("width", "heads", "hidden", "layers", "batch_size", "steps", "evaluations"):
            _require(getattr(self, name) >= 1, f"{name} must be at least 1", getattr(self, name))
        _require(self.width % self.heads == 0, f"width must be a multiple of heads = {self.heads}", self.width)
        _require(self.train_size >= 1 and self.test_size >= 1, "train_share must leave pairs for both sets", self)
        most = self.train_size
        _require(self.batch_size <= most, f"batch_size must be at most the {most} training pairs", self.batch_size)

    @property
    def pairs(self) -> int:
        """Number of pairs (a, b) with b ≠ 0."""
        return self.modulus * (self.modulus - 1)

    @property
    def train_size(self) -> int:
        """Number of training pairs."""
        return round(self.train_share * self.pairs)

    @property
    def test_size(self) -> int:
        """Number of test pairs."""
        return self.pairs - self.train_size

    @property
    def description(self) -> str:
        """Task, labels, network and loss in one sentence."""
        labels = f"{100 * self.wrong_share:g}% of the training labels wrong" if self.wrong_share else "clean labels"
        return (
            f"a·b⁻¹ mod {self.modulus} from {100 * self.train_share:g}% of the pairs ({self.train_size} of {self.pairs}"
            f"), {labels}; causal transformer, post-LN, {self.layers} layers, width {self.width}, {self.heads} heads, "
            f"MLP {self.hidden}; cross-entropy, batches of {self.batch_size}"
        )

    @property
    def metrics(self) -> tuple[TaskMetric, ...]:
        """Test accuracy first; the training accuracy is measured with the given labels."""
        return TEST_ACCURACY, TRAIN_ACCURACY, TEST_LOSS

    @property
    def streams(self) -> Mapping[str, tuple[int, int]]:
        """One stream: the training pairs."""
        return {"train": (self.train_size, self.batch_size)}

    def initial(self, seed: int) -> dict[str, Tensor]:
        """PyTorch's default initialization of the modules, from the seed alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stream(seed, "grokking weights"))
            network = ModularTransformer(self.modulus, self.width, self.heads, self.hidden, self.layers)
        return {name: weight.detach() for name, weight in network.named_parameters()}

    def cohort(self, seeds: Sequence[int], device: torch.device) -> "GrokkingCohort":
        """Members with these seeds, with their splits on the device."""
        return GrokkingCohort(self, seeds, device)


@dataclass(frozen=True)
class DivisionTable:
    """The split of the division table for a seed; a row is (a, b, answer), and a training answer may be wrong."""

    train: Int[Tensor, "train 3"]
    test: Int[Tensor, "test 3"]


def division_table(task: GrokkingTask, seed: int) -> DivisionTable:
    """All pairs in the order of the seed, the first ones for training.

    >>> a, b, answer = division_table(GrokkingTask(modulus=7, batch_size=4), seed=0).test[0].tolist()
    >>> (answer * b - a) % 7
    0
    """
    p = task.modulus
    inverses = torch.tensor([0] + [pow(b, -1, p) for b in range(1, p)])
    a, b = torch.cartesian_prod(torch.arange(p), torch.arange(1, p)).unbind(dim=1)
    table = torch.stack([a, b, a * inverses[b] % p], dim=1)
    order = torch.randperm(task.pairs, generator=torch.Generator().manual_seed(stream(seed, "grokking split")))
    train, test = table[order[: task.train_size]], table[order[task.train_size :]]
    generator = torch.Generator().manual_seed(stream(seed, "grokking labels"))
    answers = replace_labels(train[:, 2], task.wrong_share, p, generator).labels
    return DivisionTable(torch.cat([train[:, :2], answers[:, None]], dim=1), test)


class GrokkingCohort:
    """Many transformers at once: every matrix product runs over all members, the tiny attention is elementwise."""

    def __init__(self, task: GrokkingTask, seeds: Sequence[int], device: torch.device) -> None:
        unique = sorted(set(seeds))
        tables = [division_table(task, seed) for seed in unique]
        self._task = task
        self._train = torch.stack([table.train for table in tables]).to(device)
        self._test = torch.stack([table.test for table in tables]).to(device)
        self._seed_index = torch.tensor([unique.index(seed) for seed in seeds], device=device)
        later = torch.full((_TOKENS, _TOKENS), -math.inf, device=device).triu(diagonal=1)
        self._causal = later[:, :, None]  # [queries, keys, heads]

    def losses(self, weights: StackedWeights, batch: StackedBatch) -> Float[Tensor, "members"]:
        """The mean cross-entropy of each member on its batch."""
        rows = self._train[self._seed_index[:, None], batch["train"]]
        return _cross_entropy(self.logits(weights, rows[..., :2]), rows[..., 2]).mean(dim=1)

    @torch.no_grad()
    def measure(self, weights: StackedWeights) -> dict[str, Float[Tensor, "members"]]:
        """Accuracy and loss on the whole test table, accuracy on all training pairs."""
        test_accuracy, test_loss = self._score(weights, self._test)
        train_accuracy, _ = self._score(weights, self._train)
        return {
            TEST_ACCURACY.name: test_accuracy,
            TRAIN_ACCURACY.name: train_accuracy,
            TEST_LOSS.name: test_loss,
        }

    def _score(self, weights: StackedWeights, tables: Int[Tensor, "seeds pairs 3"]) -> tuple[Tensor, Tensor]:
        members, pairs = len(self._seed_index), tables.shape[1]
        right = torch.zeros(members, device=tables.device)
        loss = torch.zeros(members, device=tables.device)
        for chunk in tables.split(max(1, _PAIRS_AT_ONCE // members), dim=1):
            rows = chunk[self._seed_index]
            logits, answers = self.logits(weights, rows[..., :2]), rows[..., 2]
            right += (logits.argmax(dim=-1) == answers).sum(dim=1)
            loss += _cross_entropy(logits, answers).sum(dim=1)
        return right / pairs, loss / pairs

    def logits(
        self, weights: StackedWeights, pairs: Int[Tensor, "members batch 2"]
    ) -> Float[Tensor, "members batch modulus"]:
        """The output of :class:`ModularTransformer` for all members at once.

        Only the last token has an answer, so the queries and the MLP of the last layer are computed for it alone.
        """
        x = self._embedded(weights, pairs)
        for layer in range(self._task.layers):
            queried = 1 if layer == self._task.layers - 1 else _TOKENS
            x = self._layer(_under(weights, f"layers.{layer}."), x, queried)
        return _linear(x.flatten(1, 2), weights["head.weight"], weights["head.bias"])

    def _embedded(self, weights: StackedWeights, pairs: Int[Tensor, "members batch 2"]) -> Tensor:
        members, batch, numbers = pairs.shape
        token, width = weights["token.weight"], self._task.width
        index = pairs.flatten(1)[..., None].expand(-1, -1, width)
        embedded = token.gather(1, index).unflatten(1, (batch, numbers))
        equals = token[:, -1:, None].expand(members, batch, 1, width)  # not gathered: slow gradient
        return torch.cat([embedded, equals], dim=2) + weights["position.weight"][:, None]

    def _layer(self, weights: StackedWeights, x: Float[Tensor, "members batch tokens width"], queried: int) -> Tensor:
        """A post-LN layer, evaluated for the last ``queried`` tokens."""
        asked = x if queried == _TOKENS else x[:, :, -queried:]  # a full slice would copy in the backward pass
        x = _layer_norm(asked + self._attention(weights, x, asked), weights, "norm1")
        hidden = F.relu(_linear(x.flatten(1, 2), weights["linear1.weight"], weights["linear1.bias"]))
        out = _linear(hidden, weights["linear2.weight"], weights["linear2.bias"])
        return _layer_norm(x + out.view_as(x), weights, "norm2")

    def _attention(self, weights: StackedWeights, x: Tensor, asked: Tensor) -> Tensor:
        """Causal attention by sums of products: the matrices of three tokens are too small for a matrix product."""
        width, heads = self._task.width, self._task.heads
        to_q, to_kv = weights["self_attn.in_proj_weight"].split([width, 2 * width], dim=1)
        q_bias, kv_bias = weights["self_attn.in_proj_bias"].split([width, 2 * width], dim=1)
        q = _linear(asked.flatten(1, 2), to_q, q_bias)
        kv = _linear(x.flatten(1, 2), to_kv, kv_bias)
        q = q.view(*asked.shape[:3], 1, heads, -1)  # [members, batch, queries, 1, heads, entries]
        k, v = kv.view(*x.shape[:2], 1, _TOKENS, 2, heads, width // heads).unbind(dim=4)
        scores = (q * k).sum(dim=-1) * (width // heads) ** -0.5 + self._causal[-asked.shape[2] :]
        attended = (scores.softmax(dim=3)[..., None] * v).sum(dim=3).flatten(3)
        out = _linear(attended.flatten(1, 2), weights["self_attn.out_proj.weight"], weights["self_attn.out_proj.bias"])
        return out.view_as(asked)


def is_prime(number: int) -> bool:
    """Whether a number is prime.

    >>> [n for n in range(15) if is_prime(n)]
    [2, 3, 5, 7, 11, 13]
    """
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


def _under(weights: StackedWeights, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}


def _linear(
    x: Float[Tensor, "members rows inputs"],
    weight: Float[Tensor, "members outputs inputs"],
    bias: Float[Tensor, "members outputs"],
) -> Float[Tensor, "members rows outputs"]:
    return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))


def _layer_norm(x: Float[Tensor, "members batch tokens width"], weights: StackedWeights, name: str) -> Tensor:
    normed = F.layer_norm(x, x.shape[-1:])
    return torch.addcmul(weights[f"{name}.bias"][:, None, None], normed, weights[f"{name}.weight"][:, None, None])


def _cross_entropy(
    logits: Float[Tensor, "members batch classes"], answers: Int[Tensor, "members batch"]
) -> Float[Tensor, "members batch"]:
    return F.cross_entropy(logits.flatten(0, 1), answers.flatten(), reduction="none").view_as(answers)


def _require(condition: bool, expected: str, got: object) -> None:
    if not condition:
        raise HyperparameterError(f"{expected}, got {got}")
