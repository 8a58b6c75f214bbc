r"""Fine-tuning a language model on answers, clean and with some of the targets replaced.

The same model, adapters and text as the DPO experiment: LoRA on SmolLM2-135M-Instruct, the preferred answers. The loss
is the mean of :math:`-\log p(y_t \mid x_{<t})` over the tokens of the answers. Where a target is replaced,
the input text stays the same and the target is a random token of the vocabulary: the optimum is unchanged up to a
constant. The metric is measured on clean held-out answers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from poprisk._core.seeds import stream
from poprisk.errors import HyperparameterError
from poprisk_lab.engine.task import StackedBatch, StackedWeights, TaskMetric
from poprisk_lab.paper.dpo.task import FineTuning, measured_log_probability

HELD_OUT = "held-out loss"


@dataclass(frozen=True)
class SftTask:
    """Fine-tuning on the preferred answers.

    Attributes:
        model: Model, adapters and text.
        noise: Share of the tokens whose target is replaced by a random token, drawn separately for each seed.
        batch: Number of answers per step.
        steps: Number of optimizer steps.
        evaluations: Number of measurements.
    """

    model: FineTuning = field(default_factory=FineTuning)
    noise: float = 0.2
    batch: int = 8
    steps: int = 150
    evaluations: int = 6

    def __post_init__(self) -> None:
        if not 0 <= self.noise <= 1:
            raise HyperparameterError(f"the share of replaced targets must lie in [0, 1], got {self.noise}")

    @property
    def name(self) -> str:
        """The share of replaced targets in percent."""
        return f"sft_{round(100 * self.noise)}_replaced"

    @property
    def description(self) -> str:
        """Model, adapters, text and noise in one sentence."""
        model = "a tiny random Llama" if self.model.folder is None else Path(self.model.folder).name
        return (
            f"fine-tuning of {model} with LoRA of rank {self.model.rank} on "
            f"{len(self.model.preferences().train)} answers, {self.noise:.0%} of their tokens with a random target; "
            f"{len(self.model.preferences().evaluation)} clean held-out answers"
        )

    @property
    def metrics(self) -> tuple[TaskMetric, ...]:
        """Nats per token of the held-out answers."""
        return (TaskMetric(HELD_OUT, False),)

    @property
    def streams(self) -> Mapping[str, tuple[int, int]]:
        """Training answers."""
        return {"answers": (len(self.model.preferences().train), self.batch)}

    def initial(self, seed: int) -> dict[str, Tensor]:
        """Initial adapters, which do not change the model."""
        return self.model.initial(seed)

    def targets(self, seed: int) -> Int[Tensor, "answers time"]:
        """The targets of the members with a seed: the answers, with some of their tokens replaced."""
        preferences = self.model.preferences()
        tokens, mask = preferences.train.tokens[:, 0], preferences.train.mask[:, 0]
        generator = torch.Generator().manual_seed(stream(seed, "targets"))
        replaced = mask & (torch.rand(tokens.shape, generator=generator) < self.noise)
        drawn = torch.randint(preferences.vocabulary, tokens.shape, generator=generator, dtype=tokens.dtype)
        return torch.where(replaced, drawn, tokens)

    def cohort(self, seeds: Sequence[int], device: torch.device) -> "SftCohort":
        """Members with these seeds."""
        return SftCohort(self, seeds, device)


class SftCohort:
    """Members that share the model and the text, each with the targets of its seed."""

    def __init__(self, task: SftTask, seeds: Sequence[int], device: torch.device) -> None:
        self._members, unique = len(seeds), sorted(set(seeds))
        self._seed_index = torch.tensor([unique.index(seed) for seed in seeds], device=device)
        self._targets = torch.stack([task.targets(seed) for seed in unique]).to(device)
        self._training, self._measuring = task.model.models(device)
        preferences = task.model.preferences()
        self._tokens, self._mask = (x[:, 0].to(device) for x in (preferences.train.tokens, preferences.train.mask))
        held_out = preferences.evaluation
        self._held_out, self._held_out_mask = (x[:, 0].to(device) for x in (held_out.tokens, held_out.mask))

    def losses(self, weights: StackedWeights, batch: StackedBatch) -> Float[Tensor, "members"]:
        """Mean over all tokens of the answers of each member."""
        answers = batch["answers"]
        mask, targets = self._mask[answers], self._targets[self._seed_index.unsqueeze(1), answers]
        said = self._training.log_probability(weights, self._tokens[answers], mask, targets)
        return -said.sum(1) / mask.sum((1, 2))

    def measure(self, weights: StackedWeights) -> dict[str, Float[Tensor, "members"]]:
        """The loss on the clean held-out answers."""
        said = measured_log_probability(self._measuring, weights, self._held_out, self._held_out_mask, self._members)
        return {HELD_OUT: -said.sum(1) / self._held_out_mask.sum()}
