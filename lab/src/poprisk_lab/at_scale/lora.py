"""Influence of every preference pair on a language model fine-tuned with LoRA, and a check by real removals.

``python -m poprisk_lab.at_scale.lora --data DATA --output FILE``, with ``blocks.safetensors`` and
``preferences.safetensors`` of SmolLM2-135M-Instruct and 1,000 pairs of UltraFeedback in ``DATA``, on a GPU. ``--smoke``
needs no files. What is compared was written down before, in RULE.md.
"""

import argparse
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from poprisk import Problem, Run, train
from poprisk._core.store import save_result
from poprisk.errors import PopRiskWarning
from poprisk.risk import Unrolled, influence_on
from poprisk_lab.at_scale.blocks import language_model
from poprisk_lab.at_scale.numbers import LORA
from poprisk_lab.data.preferences import PairTokens, load_preferences, synthetic_preferences


@dataclass(frozen=True)
class LoraConfig:
    """One fine-tuning, its queries and its removals."""

    rank: int = 8
    alpha: float = 16.0
    targets: tuple[str, ...] = ("q_proj", "v_proj")
    beta: float = 0.1
    lr: float = 5e-4
    batch: int = 10
    epochs: int = 1
    queries: int = 6
    removed: float = 0.1
    random_groups: int = 3
    seed: int = 0
    limit: float = 480.0
    """Seconds after which no further removal is trained."""


TINY = LoraConfig(rank=2, alpha=4.0, lr=2e-2, batch=8, queries=3, random_groups=2)


class PairModel(nn.Module):
    """Logit of the preferred answer of a pair under DPO: β times the change of the log-ratio of the two answers."""

    def __init__(self, make: Callable[[], nn.Module], config: LoraConfig) -> None:
        super().__init__()
        from peft import LoraConfig as Adapters
        from peft import get_peft_model

        torch.manual_seed(config.seed)
        adapters = Adapters(
            r=config.rank, lora_alpha=int(config.alpha), target_modules=list(config.targets), lora_dropout=0
        )
        self.network: Any = get_peft_model(make(), adapters)  # type: ignore[arg-type]
        self.beta = config.beta

    def ratios(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Log-probability of the first answer less that of the second, for each pair."""
        flat, counted = tokens.flatten(0, 1), mask.flatten(0, 1)[:, 1:]
        llama = self.network.base_model.model
        hidden = llama.model(input_ids=flat, use_cache=False).last_hidden_state[:, :-1]
        said = llama.lm_head(hidden).log_softmax(-1).gather(-1, flat[:, 1:, None]).squeeze(-1)
        sums = (said * counted).sum(-1).unflatten(0, (-1, 2))
        return sums[:, 0] - sums[:, 1]

    def forward(self, tokens: Tensor, mask: Tensor, reference: Tensor) -> Tensor:
        """One logit for each pair."""
        return self.beta * (self.ratios(tokens, mask) - reference).unsqueeze(1)


def examples_of(pairs: PairTokens, model: PairModel, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, mask and the reference's log-ratios; adapters are still without effect."""
    tokens, mask = pairs.tokens.long().to(device), pairs.mask.float().to(device)
    with torch.no_grad():
        parts = [model.ratios(t, m) for t, m in zip(tokens.split(16), mask.split(16), strict=True)]
    return tokens, mask, torch.cat(parts)


def query_losses(model: PairModel, queries: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The DPO loss of each query."""
    with torch.no_grad():
        return F.softplus(-model(*queries).squeeze(1))


def trained_without(run: Run, model: PairModel, kept: Tensor, config: LoraConfig) -> PairModel:
    """The same training, the same batches in the same order, without some of the examples; changes the model."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        for p, first in zip(parameters, run.layout.split(run.weights(0)), strict=True):
            p.copy_(first)
    optimizer = torch.optim.AdamW(parameters, lr=config.lr)
    for k in range(run.num_steps):
        rows = run.batch(k)
        inputs, _ = run.problem.batch(rows)
        losses = F.softplus(-model(*inputs).squeeze(1))
        optimizer.zero_grad()
        (losses * kept[rows].to(losses)).mean().backward()
        optimizer.step()
    return model


def timed(device: torch.device, work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and the result."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    found = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - began, found


def influence_of(run: Run, queries: tuple[Tensor, Tensor, Tensor], targets: Tensor, notes: dict[str, Any]) -> Tensor:
    """Influence on every query; with less memory where the card has not enough."""
    unrolled = Unrolled(run, parameters="lora")
    for power in (36, 35, 33, 31):
        unrolled.memory = 2**power
        try:
            found = influence_on(unrolled, queries, targets).cpu()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            continue
        notes["memory"] = 2**power
        return found
    raise SystemExit("the card has not enough memory")


def groups(scores: Tensor, config: LoraConfig) -> dict[str, Tensor]:
    """Sets of examples to remove: those that the mean query would miss most, and least, and random ones.

    >>> found = groups(torch.arange(10.0), LoraConfig(removed=0.2, random_groups=1))
    >>> found["most helpful"].tolist(), found["most harmful"].tolist(), len(found["random 0"])
    ([8, 9], [0, 1], 2)
    """
    count, order = max(1, round(config.removed * len(scores))), scores.argsort()
    found = {"most helpful": order[-count:], "most harmful": order[:count]}
    for i in range(config.random_groups):
        generator = torch.Generator().manual_seed(config.seed + 100 + i)
        found[f"random {i}"] = torch.randperm(len(scores), generator=generator)[:count]
    return found


def study(data: Path | None, config: LoraConfig, save: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Fine-tune, compute the influence of all pairs on the queries, and remove groups of pairs."""
    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    preferences = synthetic_preferences(48, 8) if data is None else load_preferences(data / "preferences.safetensors")
    blocks = None if data is None else data / "blocks.safetensors"
    model = PairModel(partial(language_model, blocks), config).to(device)
    inputs = examples_of(preferences.train, model, device)
    tokens, mask, ratios = examples_of(preferences.evaluation, model, device)
    queries = (tokens[: config.queries], mask[: config.queries], ratios[: config.queries])
    steps = config.epochs * (len(inputs[0]) // config.batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PopRiskWarning)  # the first answer of every pair is the preferred one
        problem = Problem(model, "logistic", inputs, torch.ones(len(inputs[0]), 1, device=device))
    result: dict[str, Any] = {
        "config": asdict(config),
        "versions": _versions(device),
        "pairs": len(inputs[0]),
        "steps": steps,
        "loading_seconds": time.perf_counter() - began,
    }
    rule = partial(torch.optim.AdamW, lr=config.lr)
    training, run = timed(
        device, lambda: train(problem, rule, steps, batch_size=config.batch, seed=config.seed, progress=False)
    )
    result |= {"training_seconds": training, "weights": run.num_weights}
    result["losses"] = [round(float(x), 4) for x in run.losses]
    _say(result, "trained", training)
    targets = torch.ones(config.queries, 1, device=device)
    seconds, influence = timed(device, lambda: influence_of(run, queries, targets, result))
    result |= {"influence_seconds": seconds, "influence": [[float(f"{x:.4g}") for x in row] for row in influence]}
    if device.type == "cuda":
        result["peak_bytes"] = torch.cuda.max_memory_allocated()
    _say(result, "influence", seconds)
    save(result)
    for p, last in zip(
        (p for p in model.parameters() if p.requires_grad), run.layout.split(run.weights(run.num_steps)), strict=True
    ):
        p.data.copy_(last)
    before = query_losses(model, queries)
    result |= {"query_losses": before.tolist(), "removals": []}
    again = trained_without(run, model, torch.ones(len(inputs[0])), config)
    base = query_losses(again, queries)  # the same training by the loop below, which rounds like it
    result["replayed_difference"] = float((base - before).abs().max())
    for name, rows in groups(influence.mean(0), config).items():
        if time.perf_counter() - began > config.limit:
            break
        kept = torch.ones(len(inputs[0]))
        kept[rows] = 0
        seconds, without = timed(device, lambda kept=kept: trained_without(run, model, kept, config))
        measured = query_losses(without, queries) - base
        row = {"group": name, "removed": len(rows), "seconds": seconds}
        row |= {"predicted": influence[:, rows].sum(1).tolist(), "measured": measured.tolist()}
        result["removals"].append(row)
        _say(result, f"{name}: {influence[:, rows].sum(1).mean():+.4f} {measured.mean():+.4f}", seconds)
        save(result)
    result["seconds"] = time.perf_counter() - began
    save(result)
    return result


def _say(result: dict[str, Any], what: str, seconds: float) -> None:
    print(f"{what} ({seconds:.1f} s)", flush=True)


def _versions(device: torch.device) -> dict[str, str]:
    import peft
    import transformers

    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    libraries = {"torch": torch.__version__, "transformers": transformers.__version__, "peft": peft.__version__}
    return {**libraries, "python": platform.python_version(), "device": name}


def main() -> None:
    """Run the study and store it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--smoke", action="store_true", help="a tiny random model and synthetic pairs, no files")
    given = parser.parse_args()
    config = TINY if given.smoke else LoraConfig()
    study(None if given.smoke else given.data, config, partial(save_result, given.output, LORA, asdict(config)))


if __name__ == "__main__":
    main()
