"""The predicted part of the page on scaling: 1 B and 70 B weights, a million examples, runs, and what is assumed."""

from collections.abc import Sequence
from typing import Any

from poprisk_lab.costs.page.predictions import (
    BILLION,
    DISK,
    EXAMPLES,
    FOLDS,
    GPUS_IN_A_MACHINE,
    LARGE,
    LAYOUTS,
    MANY,
    NETWORK,
    NVLINK,
    PATIENCE,
    PRODUCTS,
    QUERIES,
    RESNET,
    RESNET_TEN,
    SMALL,
    STATES_SHARE,
    SUBSAMPLE,
    TOKENS,
    WORK_SHARE,
    Predictor,
    Products,
    Stand,
    Through,
    WholeKernel,
    kernel_by_jobs,
    kernel_products,
    members_through,
    messages,
    optimizer_at_scale,
    queries_through,
    whole_kernel,
)
from poprisk_lab.costs.page.words import byte_count, count_words, duration, two_digits
from poprisk_lab.costs.trajectories import adjoint, recording, retraining
from poprisk_lab.pages.wording import table

MODELS = {"1 B": 1e9, "70 B": 70e9}
RUNS = ((SMALL, 10_000, 128), (BILLION, 1_000, 8), (LARGE, 1_000, 8))
"""Networks with the steps and the batch of the run that is analysed."""
STEPS, SPARSE = 10_000, 1_000
"""Steps of a recorded run, and steps between the checkpoints of a sparse recording."""


def optimizer_table(predictor: Predictor) -> str:
    """The optimizer's step at scale."""
    head = ["model", "weights and states", "least GPUs", f"held on each of {MANY}", "optimizer step", "training step"]
    head += ["share", "change against AdamW", "beyond measured"]
    rows = []
    for name, weights in MODELS.items():
        usual = None
        for layout, states in LAYOUTS.items():
            found = optimizer_at_scale(predictor, weights, states, MANY)
            usual = usual or found.step
            whole = found.step + found.training
            change = (found.step - usual) / (usual + found.training)
            cells = [str(found.least), byte_count(found.held), duration(found.step), duration(found.training)]
            sign = "" if found.step == usual else "+" if change > 0 else "−"
            shares = [percent(found.step / whole), f"{sign}{percent(abs(change))}" if sign else "–"]
            rows.append([name, layout, *cells, *shares, _beyond(found.beyond)])
    return table(head, rows)


def messages_table(predictor: Predictor) -> str:
    """What the variance from ranks sends, at assumed rates."""
    head = ["model", "GPUs", "rate, assumed", "FSDP2 sends", "takes", "variance sends", "takes", "squares take"]
    head += ["extra time, if nothing overlaps"]
    rows = []
    for name, weights in MODELS.items():
        training = optimizer_at_scale(predictor, weights, LAYOUTS["PopRiskAdamW, float32"], MANY).training
        for ranks in (GPUS_IN_A_MACHINE, MANY):
            sent = messages(predictor, weights, ranks)
            own, extra = sent.own / sent.rate, sent.extra / sent.rate
            cells = [byte_count(sent.own), duration(own), byte_count(sent.extra), duration(extra)]
            more = percent((extra + sent.squares) / (training + own))
            rows.append([name, str(ranks), f"{byte_count(sent.rate)}/s", *cells, duration(sent.squares), f"+{more}"])
    return table(head, rows)


def kernels_table(predictor: Predictor) -> str:
    """A million examples: the whole kernel, products with it, a part of it."""
    head = ["network", "kernel on disk", "float16, 1 GPU", f"float16, {MANY} GPUs", f"float32 jobs, {MANY} GPUs"]
    head += [f"{PRODUCTS} products, 1 GPU", f"sketch of {PRODUCTS} columns, {MANY} GPUs"]
    head += [f"float16, {SUBSAMPLE:,} examples, 1 GPU", "beyond measured"]
    rows = []
    for stand in (RESNET, RESNET_TEN, BILLION, LARGE):
        network = stand.network
        whole, part = (whole_kernel(predictor, network, n) for n in (EXAMPLES, SUBSAMPLE))
        parts = whole_kernel(predictor, network, EXAMPLES, symmetric=False)
        jobs = kernel_by_jobs(predictor, network, EXAMPLES)
        products = kernel_products(predictor, network, EXAMPLES)
        beyond = [each.beyond for each in (whole, jobs, products) if each is not None]
        times = [_seconds(whole), _seconds(parts, MANY), _seconds(jobs, MANY), _seconds(products)]
        times += [_seconds(products, MANY), _seconds(part)]
        disk = byte_count(2.0 * (EXAMPLES * network.outputs) ** 2)
        rows.append([stand.name, disk, *times, _beyond(max(beyond)) if beyond else "–"])
    return table(head, rows)


def runs_table(predictor: Predictor) -> str:
    """Influence and K-fold through runs."""
    head = ["network", "steps × batch", f"{QUERIES:,} queries, 1 GPU", f"{MANY} GPUs", "held", "turns"]
    head += [f"{FOLDS}-fold, 1 GPU", f"{FOLDS} GPUs", "beyond measured"]
    rows = []
    for stand, steps, batch in RUNS:
        queries = queries_through(predictor, stand.network, steps, batch)
        members = members_through(predictor, stand.network, steps, batch)
        cells = [_through(queries), _through(queries, MANY), byte_count(queries.held)]
        cells += [f"{queries.turns:,}" if queries.fits else "–", _through(members), _through(members, FOLDS)]
        beyond = [each.beyond for each in (queries, members) if each.fits]
        rows.append([stand.name, f"{steps:,} × {batch}", *cells, _beyond(max(beyond)) if beyond else "–"])
    return table(head, rows)


def recording_table() -> str:
    """What recordings of Adam take on disk."""
    kept = {True: "every step", False: f"every {SPARSE:,}th step"}
    head = ["model", *(f"{words}, for each step" for words in kept.values())]
    head += [f"{words}, {STEPS:,} steps" for words in kept.values()]
    rows = []
    for name, weights in {"1 M": 1e6, **MODELS}.items():
        taken = [recording(weights, steps=STEPS, segment_steps=SPARSE, dense=dense) for dense in kept]
        rows.append([name, *(byte_count(each / STEPS) for each in taken), *map(byte_count, taken)])
    return table(head, rows)


def query_trainings() -> float:
    """What the influence of all examples on one query costs, in trainings."""
    sizes = {"steps": 1.0, "batch": 1.0}
    query = adjoint(BILLION.network, **sizes, queries=1).flops - adjoint(BILLION.network, **sizes, queries=0).flops
    return query / retraining(BILLION.network, **sizes, members=1).flops


def assumed(predictor: Predictor) -> dict[str, Any]:
    """The values of what is assumed."""
    stands: Sequence[Stand] = (RESNET, BILLION, LARGE)
    layers = ((stand.name, stand.network.layers) for stand in stands)
    return {
        "widths": "; ".join(f"{name}: {len(each)} layers of width {each[0].inputs:,}" for name, each in layers),
        "memory": byte_count(predictor.memory),
        "states_share": STATES_SHARE,
        "work_share": WORK_SHARE,
        "tokens": TOKENS,
        "nvlink": byte_count(NVLINK),
        "nvlink_both": byte_count(2 * NVLINK),
        "gpus_in_a_machine": GPUS_IN_A_MACHINE,
        "network": byte_count(NETWORK),
        "network_gigabits": 8 * NETWORK / 1e9,
        "disk": byte_count(DISK),
        "patience": duration(PATIENCE),
    }


def percent(share: float) -> str:
    """Two digits.

    >>> percent(0.0123)
    '1.2%'
    """
    return f"{two_digits(100 * share)}%"


def _beyond(factor: float) -> str:
    return "inside" if factor <= 1 else f"{count_words(factor)}×"


def _seconds(found: WholeKernel | Products | None, machines: int = 1) -> str:
    return "does not fit" if found is None else duration(found.seconds / machines)


def _through(found: Through, machines: int = 1) -> str:
    return duration(found.seconds / machines) if found.fits else "does not fit"
