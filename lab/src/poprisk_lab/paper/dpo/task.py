r"""Direct preference optimization with LoRA on a language model, a share of the training pairs swapped.

With answers :math:`y_w` preferred to :math:`y_l` the loss of a pair is

.. math:: -\log\sigma\bigl(r(y_w) - r(y_l)\bigr), \qquad r(y) = \beta\,\log\frac{\pi(y \mid x)}{\pi_{ref}(y \mid x)},

where :math:`\pi_{ref}` is the model without adapters, which is also where training starts. Swapping a pair changes the
sign inside the logistic function and nothing else.

Cost on one H200 with SmolLM2-135M, 8 pairs per step, sequences cut at 256 tokens: 2.5 TFLOP and 2.6 GB per member and
step by count; a forward pass of the 519 evaluation pairs is 60 TFLOP per member.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from poprisk._core.seeds import stream
from poprisk.errors import DataError, HyperparameterError
from poprisk_lab.data.llama import Lora, StackedAdapters, StackedLlama
from poprisk_lab.data.llama_weights import Llama, LlamaShape, load_llama, random_llama, read_shape
from poprisk_lab.data.preferences import (
    PairTokens,
    Preferences,
    encode_preferences,
    load_preferences,
    load_tokenizer,
    read_pairs,
    swapped_pairs,
    synthetic_preferences,
)
from poprisk_lab.engine.task import StackedBatch, StackedWeights, TaskMetric

ACCURACY, MARGIN, DRIFT, LOSS = "reward accuracy", "reward margin", "reward drift", "evaluation loss"
TINY = LlamaShape(vocabulary=64, width=32, hidden=64, layers=2, heads=4, key_heads=2, head_width=8)
"""The network of the smoke test: random weights, no files."""
_TINY_PAIRS = (48, 32)
_TOKENS_AT_ONCE = 2**17
"""Tokens in one forward pass of an evaluation: 1.5 GB of activations at the widths of SmolLM2-135M."""
HOW_TO_GET = (
    "fetch the model HuggingFaceTB/SmolLM2-135M-Instruct into a folder, and pairs such as "
    "trl-lib/ultrafeedback_binarized as .jsonl files with prompt, chosen and rejected"
)


@dataclass(frozen=True)
class FineTuning:
    """A language model, its adapters and its text.

    Attributes:
        folder: Folder of a Llama as Hugging Face saves it; ``None`` for a tiny random one with synthetic text.
        data: One ``.safetensors`` written by :func:`poprisk_lab.data.preferences.save_preferences`, or ``.jsonl``
            files, which the tokenizer in ``folder`` turns into tokens.
        rank: Rank of the adapters, which are on every projection of every layer.
        lora_alpha: The product of the adapters is multiplied by lora_alpha / rank.
        recompute: See :class:`poprisk_lab.data.llama.StackedLlama`.
        compiled: See there; used for training only.
    """

    folder: str | None = None
    data: tuple[str, ...] = ()
    rank: int = 16
    lora_alpha: float = 32.0
    recompute: bool = False
    compiled: bool = False

    def __post_init__(self) -> None:
        if (self.folder is None) != (not self.data):
            raise HyperparameterError(
                f"folder and data go together, got folder={self.folder!r} and data={self.data}: {HOW_TO_GET}"
            )

    @property
    def lora(self) -> Lora:
        """The adapters."""
        return Lora(self.rank, self.lora_alpha)

    def preferences(self) -> Preferences:
        """The tokens, read once."""
        return _preferences(self.folder, self.data)

    def initial(self, seed: int) -> dict[str, Tensor]:
        """Initial adapters."""
        shape = TINY if self.folder is None else read_shape(self.folder)
        return self.lora.initial(shape, torch.Generator().manual_seed(stream(seed, "adapters")))

    def models(self, device: torch.device) -> tuple[StackedLlama, StackedLlama]:
        """The models for training and for measuring: the same weights, in bfloat16 on a GPU."""
        base = _base(self.folder).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        training = StackedLlama(base, self.lora, recompute=self.recompute, compiled=self.compiled)
        return training, StackedLlama(base, self.lora)


def _base(folder: str | None) -> Llama:
    return random_llama(TINY, seed=0) if folder is None else load_llama(folder)


@lru_cache(maxsize=4)
def _preferences(folder: str | None, data: tuple[str, ...]) -> Preferences:
    if folder is None:
        return synthetic_preferences(*_TINY_PAIRS, vocabulary=TINY.vocabulary)
    if not Path(folder).is_dir():
        raise DataError(f"the folder {folder} is missing: {HOW_TO_GET}")
    suffixes = {Path(path).suffix for path in data}
    if suffixes == {".safetensors"} and len(data) == 1:
        found = load_preferences(data[0])
    elif suffixes == {".jsonl"}:
        found = encode_preferences(read_pairs(*data), load_tokenizer(folder))
    else:
        raise DataError(f"data must be one .safetensors file or .jsonl files, got {data}: {HOW_TO_GET}")
    size = read_shape(folder).vocabulary
    if found.vocabulary > size:
        raise DataError(f"{data[0]} has tokens up to {found.vocabulary}, but the model in {folder} knows {size}")
    return found


def rewards(
    policy: Float[Tensor, "*pairs 2"], reference: Float[Tensor, "*pairs 2"], beta: float
) -> Float[Tensor, "*pairs 2"]:
    r""":math:`\beta (\log\pi - \log\pi_{ref})` of the preferred answer and of the other."""
    return beta * (policy - reference)


def dpo_losses(reward: Float[Tensor, "*pairs 2"], swapped: Bool[Tensor, "*pairs"]) -> Float[Tensor, "*pairs"]:
    r""":math:`-\log\sigma(r_w - r_l)`, with the two exchanged where a pair is swapped.

    >>> dpo_losses(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([False, True]))
    tensor([0.3133, 1.3133])
    """
    margin = reward[..., 0] - reward[..., 1]
    return -F.logsigmoid(torch.where(swapped, -margin, margin))


def preference_metrics(reward: Float[Tensor, "members pairs 2"]) -> dict[str, Float[Tensor, "members"]]:
    """The metrics on pairs that are not swapped; a tie counts half, so that an unchanged model has accuracy 0.5.

    TRL counts a tie as wrong; without ties the two agree.
    """
    margin = reward[..., 0] - reward[..., 1]
    return {
        ACCURACY: ((margin > 0).float() + 0.5 * (margin == 0).float()).mean(-1),
        MARGIN: margin.mean(-1),
        DRIFT: reward.abs().mean((-2, -1)),
        LOSS: -F.logsigmoid(margin).mean(-1),
    }


def measured_log_probability(
    model: StackedLlama,
    adapters: StackedAdapters | None,
    tokens: Int[Tensor, "sequences time"],
    mask: Bool[Tensor, "sequences time"],
    members: int,
) -> Float[Tensor, "members sequences"]:
    """Log-probabilities of all answers for all members, without gradients, in chunks of answers of similar length.

    Args:
        model: Model of the members.
        adapters: Adapters of the members; ``None`` for the base model, as a single member.
        tokens: Input tokens of all members, on the device of the model.
        mask: Mask of the tokens of the answer.
        members: Number of members.
    """
    ends, order = (mask * torch.arange(1, mask.shape[1] + 1, device=mask.device)).amax(1).sort()
    count = max(1, _TOKENS_AT_ONCE // (members * mask.shape[1]))
    found = torch.empty(members, len(tokens), device=tokens.device)
    with torch.no_grad():
        for rows, lengths in zip(order.split(count), ends.split(count), strict=True):
            read, counted = (x[rows, : int(lengths[-1])].expand(members, -1, -1) for x in (tokens, mask))
            found[:, rows] = model.log_probability(adapters, read, counted).float()
    return found


def pair_log_probability(
    model: StackedLlama, adapters: StackedAdapters | None, pairs: PairTokens, members: int
) -> Float[Tensor, "members pairs 2"]:
    """Log-probabilities of both answers of each pair."""
    tokens, mask = pairs.tokens.flatten(0, 1), pairs.mask.flatten(0, 1)
    return measured_log_probability(model, adapters, tokens, mask, members).unflatten(1, (len(pairs), 2))


@dataclass(frozen=True)
class DpoTask:
    """DPO on training pairs of which some are swapped; evaluation pairs are not.

    Attributes:
        model: Model, adapters and pairs.
        noise: Share of the training pairs that is swapped, drawn separately for each seed.
        beta: Strength of the penalty towards the reference.
        batch: Number of pairs per step.
        steps: Number of optimizer steps.
        evaluations: Number of measurements.
    """

    model: FineTuning = field(default_factory=FineTuning)
    noise: float = 0.3
    beta: float = 0.1
    batch: int = 8
    steps: int = 200
    evaluations: int = 8

    @property
    def name(self) -> str:
        """The share of swapped pairs in percent."""
        return f"dpo_{round(100 * self.noise)}_swapped"

    @property
    def description(self) -> str:
        """Model, adapters, pairs and noise in one sentence."""
        model = "a tiny random Llama" if self.model.folder is None else Path(self.model.folder).name
        return (
            f"DPO (β = {self.beta:g}) of {model} with LoRA of rank {self.model.rank} on every projection, "
            f"{len(self.model.preferences().train)} training pairs of which {self.noise:.0%} are swapped, "
            f"{len(self.model.preferences().evaluation)} clean evaluation pairs"
        )

    @property
    def metrics(self) -> tuple[TaskMetric, ...]:
        """The paper's accuracy and drift, then margin and loss."""
        return (
            TaskMetric(ACCURACY, True),
            TaskMetric(MARGIN, True),
            TaskMetric(DRIFT, False),
            TaskMetric(LOSS, False, spec=".4f"),
        )

    @property
    def streams(self) -> Mapping[str, tuple[int, int]]:
        """Training pairs."""
        return {"pairs": (len(self.model.preferences().train), self.batch)}

    def initial(self, seed: int) -> dict[str, Tensor]:
        """Initial adapters, which do not change the model."""
        return self.model.initial(seed)

    def swapped(self, seed: int) -> Bool[Tensor, "pairs"]:
        """Mask of the training pairs that are swapped for a seed."""
        return swapped_pairs(len(self.model.preferences().train), self.noise, stream(seed, "swaps"))

    def portrait(self, weights: Mapping[str, Tensor], seed: int) -> Mapping[str, list[float]]:
        """Reward margin of every evaluation pair for one trained member, for a bootstrap over pairs."""
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        _, model = self.model.models(device)
        pairs = on_device(self.model.preferences().evaluation, device)
        adapters = {name: weight.to(device).unsqueeze(0) for name, weight in weights.items()}
        policy, reference = (pair_log_probability(model, each, pairs, 1)[0] for each in (adapters, None))
        reward = rewards(policy, reference, self.beta)
        return {"margins": [float(f"{x:.4g}") for x in (reward[:, 0] - reward[:, 1]).tolist()]}

    def cohort(self, seeds: Sequence[int], device: torch.device) -> "DpoCohort":
        """Members with these seeds; the reference is computed here, once for all."""
        return DpoCohort(self, seeds, device)


class DpoCohort:
    """Members that share the model and the pairs, each with the swaps of its seed."""

    def __init__(self, task: DpoTask, seeds: Sequence[int], device: torch.device) -> None:
        self._beta, self._members = task.beta, len(seeds)
        unique = sorted(set(seeds))
        self._seed_index = torch.tensor([unique.index(seed) for seed in seeds], device=device)
        self._swapped = torch.stack([task.swapped(seed) for seed in unique]).to(device)
        self._training, self._measuring = task.model.models(device)
        preferences = task.model.preferences()
        self._train, self._evaluation = (on_device(p, device) for p in (preferences.train, preferences.evaluation))
        self._mask = self._train.mask
        self._reference = pair_log_probability(self._measuring, None, self._train, 1)[0]
        self._evaluation_reference = pair_log_probability(self._measuring, None, self._evaluation, 1)[0]

    def losses(self, weights: StackedWeights, batch: StackedBatch) -> Float[Tensor, "members"]:
        """Mean DPO loss on the pairs of each member."""
        pairs = batch["pairs"]
        tokens, mask = (x[pairs].flatten(1, 2) for x in (self._train.tokens, self._mask))
        policy = self._training.log_probability(weights, tokens, mask).unflatten(1, (pairs.shape[1], 2))
        swapped = self._swapped[self._seed_index.unsqueeze(1), pairs]
        return dpo_losses(rewards(policy, self._reference[pairs], self._beta), swapped).mean(1)

    def measure(self, weights: StackedWeights) -> dict[str, Float[Tensor, "members"]]:
        """The metrics on the evaluation pairs."""
        policy = pair_log_probability(self._measuring, weights, self._evaluation, self._members)
        return preference_metrics(rewards(policy, self._evaluation_reference, self._beta))


def on_device(pairs: PairTokens, device: torch.device) -> PairTokens:
    """The same pairs on another device."""
    return PairTokens(pairs.tokens.to(device), pairs.prompts.to(device), pairs.lengths.to(device))
