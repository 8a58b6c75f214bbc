r"""Which score finds flipped labels best: a run's own columns, the exact ones, and confident learning."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Generator, Tensor

from poprisk.risk import Unrolled, audit, exclusion, influence_on, k_fold
from poprisk.risk._classes import own_and_other
from poprisk.runs import Run, replace_labels
from poprisk_lab.data.idx import ImageSplit
from poprisk_lab.paper.mnist_influence.metrics import mislabel_auc, share_found
from poprisk_lab.paper.mnist_influence.task import MnistConfig, Setting, train_images

INSPECTED = 0.15
_FOLDS = 5
_CLASSES = 10


def mislabel_seed(config: MnistConfig, split: ImageSplit, seed: int) -> dict[str, Any]:
    """One training by SGD on labels of which a share is flipped: how well each column finds them.

    Confident learning's scores are those of cleanlab's ``get_label_quality_scores``: self-confidence is the probability
    of the given label, the normalized margin that less the largest other one. They are taken from the last network
    ("on the same run"), and from five networks that did not see the example ("5 folds", as cleanlab recommends; five
    more trainings). The exact columns are made in the first seed only, for some wrong and some right labels.
    """
    flipped = replace_labels(split.train_labels, config.flipped, _CLASSES, Generator().manual_seed(100 + seed))
    run = train_images(config, Setting("flipped labels", "sgd"), split, labels=flipped.labels, seed=seed)
    scores = _scores(run, flipped.labels)
    columns = {name: _measured(score, flipped.wrong) for name, score in scores.items()}
    found: dict[str, Any] = {"seed": seed, "wrong": int(flipped.wrong.sum()), "columns": columns}
    if seed == config.label_seeds[0]:
        found["sampled"] = _sampled(config, run, scores, flipped.wrong)
    return found


def summarize(seeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Means over seeds, the best column, and the sample with the exact columns."""
    names = list(seeds[0]["columns"])
    columns = {
        name: {
            key: sum(seed["columns"][name][key] for seed in seeds) / len(seeds) for key in ("auc", "found_in_first_15%")
        }
        for name in names
    }
    one_run = [name for name in names if "folds" not in name]
    return {
        "seeds": len(seeds),
        "columns": columns,
        "best": max(names, key=lambda name: columns[name]["auc"]),
        "best of the run alone": max(one_run, key=lambda name: columns[name]["auc"]),
        "sampled": seeds[0]["sampled"],
        "by_seed": list(seeds),
    }


def _scores(run: Run, labels: Int[Tensor, "n"]) -> dict[str, Float[Tensor, "n"]]:
    """Highest for the labels that look most wrong."""
    table = audit(run, tier="any", progress=False)
    folds = k_fold(run, _FOLDS, progress=False).outputs.softmax(1)
    last = run.problem.model().batch_outputs(run.weights(run.num_steps), run.problem.inputs).softmax(1)
    return {
        "suspicion (audit)": table["suspicion"],
        "last loss": table["loss"],
        "mean loss": table["mean_loss"],
        "AUM": -table["aum"],
        "self-confidence, last network": -_quality(last, labels)[0],
        "normalized margin, last network": -_quality(last, labels)[1],
        "label quality, averaged network": -table["label_quality"],
        "self-confidence, 5 folds": -_quality(folds, labels)[0],
        "normalized margin, 5 folds": -_quality(folds, labels)[1],
        "suspicion (audit), 5 folds": audit(run, tier="any", out_of_fold=folds, progress=False)["suspicion"],
    }


def _quality(p: Float[Tensor, "n classes"], labels: Int[Tensor, "n"]) -> tuple[Tensor, Tensor]:
    own, other, _ = own_and_other(p, labels)
    return own, own - other


def _measured(scores: Float[Tensor, "n"], wrong: Bool[Tensor, "n"]) -> dict[str, float]:
    auc, share = mislabel_auc(scores.double(), wrong), share_found(scores.double(), wrong, INSPECTED)
    return {
        "auc": float(auc.value),
        "auc_error": float(auc.standard_error),
        "found_in_first_15%": float(share.value),
    }


def _sampled(config: MnistConfig, run: Run, scores: Mapping[str, Tensor], wrong: Bool[Tensor, "n"]) -> dict[str, Any]:
    """The exact columns beside the others, for the same few examples; shares as if all had been there."""
    generator = Generator().manual_seed(7)
    chosen = []
    for kind, number in ((wrong, config.exact_wrong), (~wrong, config.exact_right)):
        every = kind.nonzero().squeeze(1)
        chosen.append(every[torch.randperm(len(every), generator=generator)[:number]])
    sample = torch.cat(chosen)
    pairs = zip(chosen, (wrong, ~wrong), strict=True)
    standing = torch.cat([torch.full((len(some),), int(kind.sum()) / len(some)) for some, kind in pairs])
    unrolled = Unrolled(run)
    x, y = unrolled.inputs, unrolled.targets
    assert isinstance(x, Tensor)
    influence = influence_on(unrolled, x[sample], y[sample])
    left_out = exclusion(unrolled, sample, mass_preserving=False)
    own, other, _ = own_and_other(left_out.excluded_outputs, y[sample])
    exact = {
        "self-influence": influence[torch.arange(len(sample)), sample],
        "linearized leave-one-out loss": left_out.losses,
        "linearized leave-one-out margin": other - own,
    }
    every = {**exact, **{name: score[sample] for name, score in scores.items()}}
    return {
        "wrong": len(chosen[0]),
        "right": len(chosen[1]),
        "doubtful": int(left_out.doubtful.sum()),
        "columns": {name: _stratified(score.double(), wrong[sample], standing) for name, score in every.items()},
    }


def _stratified(scores: Float[Tensor, "m"], wrong: Bool[Tensor, "m"], standing: Float[Tensor, "m"]) -> dict[str, float]:
    """An area does not depend on how many of each kind there are; the share found weighs each by what it stands for."""
    scores = scores.nan_to_num(nan=torch.inf)
    auc = mislabel_auc(scores, wrong)
    order = scores.argsort(descending=True, stable=True)
    before = standing[order].cumsum(0) - standing[order]
    share = ((INSPECTED * standing.sum() - before) / standing[order]).clamp(0, 1)
    found = (share * standing[order] * wrong[order]).sum() / (standing * wrong).sum()
    return {"auc": float(auc.value), "auc_error": float(auc.standard_error), "found_in_first_15%": float(found)}
