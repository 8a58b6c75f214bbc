"""Noisy DPO and noisy fine-tuning: stacked members against one at a time, facts of the data, smoke studies, pages."""

import copy
import io
import math

import pytest
import torch
from rich.console import Console
from torch.nn import functional as F
from torch.testing import assert_close

from poprisk.errors import DataError, HyperparameterError
from poprisk_lab.data.llama import StackedLlama
from poprisk_lab.data.llama_weights import _NAMES, random_llama
from poprisk_lab.engine import reading
from poprisk_lab.paper.dpo import numbers as report
from poprisk_lab.paper.dpo import study as dpo
from poprisk_lab.paper.dpo.figure import draw as draw_dpo
from poprisk_lab.paper.dpo.task import ACCURACY, DRIFT, LOSS, MARGIN, TINY, DpoTask, FineTuning, preference_metrics
from poprisk_lab.paper.sft import study as sft
from poprisk_lab.paper.sft.task import HELD_OUT, SftTask

CPU = torch.device("cpu")
MODEL = FineTuning(rank=2)
SEEDS = (0, 1, 0)
TASKS = (DpoTask(MODEL, batch=5), SftTask(MODEL, batch=5))


def drawn(task, seeds=SEEDS):
    """Adapters as after some steps."""
    generator = torch.Generator().manual_seed(7)
    starts = [task.initial(seed) for seed in seeds]
    noise = {name: 0.2 * torch.randn(len(seeds), *w.shape, generator=generator) for name, w in starts[0].items()}
    return {name: torch.stack([s[name] for s in starts]) + noise[name] for name in noise}


def batch(task, members=3):
    ((name, (count, size)),) = task.streams.items()
    return {name: torch.randint(count, (members, size), generator=torch.Generator().manual_seed(8))}


def merged(task, weights=None):
    """One member's network with its adapters added to its weights, in float64."""
    base = random_llama(TINY, seed=0).to(dtype=torch.float64)
    for index, layer in enumerate(base.layers):
        for target in task.model.lora.targets if weights else ():
            a, b = (weights[f"layer{index}.{target}.{half}"].double() for half in "AB")
            getattr(layer, target).add_(task.model.lora.scale * b @ a)
    return StackedLlama(base)


def logits_of(network, said):
    return network.hidden(None, said[None, None])[0, 0] @ network.llama.head.T


def answer_log_probabilities(network, pairs, i, side):
    """Of each token of one answer of one pair: no padding, all logits, a loop over tokens."""
    length, prompt = int(pairs.lengths[i, side]), int(pairs.prompts[i])
    said = pairs.tokens[i, side, :length]
    log_p = logits_of(network, said).log_softmax(-1)
    return [float(log_p[t - 1, said[t]]) for t in range(prompt, length)]


def reward(task, networks, pairs, i):
    """β (log π - log π_ref) of both answers."""
    policy, reference = ([sum(answer_log_probabilities(n, pairs, i, s)) for s in (0, 1)] for n in networks)
    return [task.beta * (p - r) for p, r in zip(policy, reference, strict=True)]


def member(weights, i):
    return {name: w[i] for name, w in weights.items()}


def test_dpo_losses_are_those_of_each_member_alone():
    task, weights, rows = TASKS[0], drawn(TASKS[0]), batch(TASKS[0])
    losses = task.cohort(SEEDS, CPU).losses(weights, rows)
    for m, seed in enumerate(SEEDS):
        swapped, total = task.swapped(seed), 0.0
        networks = merged(task, member(weights, m)), merged(task)
        for i in rows["pairs"][m].tolist():
            won, lost = reward(task, networks, task.model.preferences().train, i)
            margin = lost - won if swapped[i] else won - lost
            total += math.log1p(math.exp(-margin))
        assert_close(float(losses[m]), total / 5, rtol=1e-5, atol=1e-6)


def test_dpo_measures_are_those_of_each_member_alone():
    task, weights = TASKS[0], drawn(TASKS[0])
    with torch.no_grad():
        measured = task.cohort(SEEDS, CPU).measure(weights)
    networks = merged(task, member(weights, 1)), merged(task)
    found = [reward(task, networks, task.model.preferences().evaluation, i) for i in range(32)]
    margins = [won - lost for won, lost in found]
    assert_close(float(measured[ACCURACY][1]), sum(m > 0 for m in margins) / 32)
    assert_close(float(measured[MARGIN][1]), sum(margins) / 32, rtol=1e-5, atol=1e-6)
    assert_close(float(measured[DRIFT][1]), sum(abs(r) for pair in found for r in pair) / 64, rtol=1e-5, atol=1e-6)
    wanted = sum(math.log1p(math.exp(-m)) for m in margins) / 32
    assert_close(float(measured[LOSS][1]), wanted, rtol=1e-5, atol=1e-6)


def test_sft_losses_and_measures_are_those_of_each_member_alone():
    task, weights, rows = TASKS[1], drawn(TASKS[1]), batch(TASKS[1])
    losses = task.cohort(SEEDS, CPU).losses(weights, rows)
    for m, seed in enumerate(SEEDS):
        asked, total, count = task.targets(seed), 0.0, 0
        train, network = task.model.preferences().train, merged(task, member(weights, m))
        for i in rows["answers"][m].tolist():
            log_p = logits_of(network, train.tokens[i, 0, : int(train.lengths[i, 0])]).log_softmax(-1)
            for t in range(int(train.prompts[i]), int(train.lengths[i, 0])):
                total -= float(log_p[t - 1, asked[i, t]])
                count += 1
        assert_close(float(losses[m]), total / count, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        measured = task.cohort(SEEDS, CPU).measure(weights)[HELD_OUT]
    network, held_out = merged(task, member(weights, 2)), task.model.preferences().evaluation
    each = [x for i in range(32) for x in answer_log_probabilities(network, held_out, i, 0)]
    assert_close(float(measured[2]), -sum(each) / len(each), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("task", TASKS, ids=["dpo", "sft"])
def test_members_do_not_mix_and_equal_seeds_are_equal(task):
    weights = {name: w[[0, 1, 0]].requires_grad_() for name, w in drawn(task).items()}
    ((name, rows),) = batch(task).items()
    rows = rows[[0, 1, 0]]
    losses = task.cohort(SEEDS, CPU).losses(weights, {name: rows})
    assert_close(losses[0], losses[2], rtol=1e-6, atol=0)
    assert abs(losses[0] - losses[1]).item() > 1e-3
    gradients = torch.autograd.grad(losses[1], list(weights.values()))
    assert all(g[[0, 2]].abs().max() == 0 for g in gradients)
    assert all(g[1].abs().max() > 0 for g in gradients)


def test_training_starts_at_the_reference():
    task = TASKS[0]
    cohort = task.cohort(SEEDS, CPU)
    start = {name: torch.stack([task.initial(seed)[name] for seed in SEEDS]) for name in task.initial(0)}
    assert_close(cohort.losses(start, batch(task)), torch.full((3,), math.log(2)), rtol=0, atol=1e-6)
    with torch.no_grad():
        measured = cohort.measure(start)
    assert float(measured[DRIFT].max()) < 1e-6
    assert_close(measured[LOSS], torch.full((3,), math.log(2)), rtol=0, atol=1e-6)


def test_a_tie_counts_half():
    measured = preference_metrics(torch.tensor([[[1.0, 0.0], [0.0, 0.0], [0.0, 2.0], [3.0, 1.0]]]))
    assert float(measured[ACCURACY]) == 0.625
    assert float(measured[DRIFT]) == 7 / 8
    assert_close(measured[LOSS], -F.logsigmoid(torch.tensor([1.0, 0.0, -2.0, 2.0])).mean()[None])


def test_swaps_and_targets_are_of_the_seed():
    task = TASKS[0]
    assert int(task.swapped(3).sum()) == round(0.3 * 48)
    assert task.swapped(3).equal(task.swapped(3))
    assert not task.swapped(3).equal(task.swapped(4))
    tuned = TASKS[1]
    train = tuned.model.preferences().train
    changed = tuned.targets(3) != train.tokens[:, 0]
    assert not bool((changed & ~train.mask[:, 0]).any()), "prompts and padding stay"
    assert 0.1 < float(changed.sum() / train.mask[:, 0].sum()) < 0.3
    assert SftTask(MODEL, noise=0.0).targets(3).equal(train.tokens[:, 0])


def test_files_and_sizes_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(HyperparameterError, match="folder and data go together"):
        FineTuning(folder="somewhere")
    with pytest.raises(DataError, match=r"must be one \.safetensors file or \.jsonl files"):
        FineTuning(str(tmp_path), ("pairs.csv",)).preferences()
    with pytest.raises(DataError, match=r"pairs\.safetensors is missing"):
        FineTuning(str(tmp_path), (str(tmp_path / "pairs.safetensors"),)).preferences()
    with pytest.raises(DataError, match="folder nowhere is missing: fetch the model HuggingFaceTB/SmolLM2") as caught:
        dpo.studies(dpo.full_config("nowhere", ("pairs.jsonl",)))
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"config\.json is missing"):
        DpoTask(FineTuning(str(tmp_path), ("pairs.jsonl",))).initial(0)
    with pytest.raises(HyperparameterError, match="above 0"):
        dpo.DpoConfig(noises=(0.0,))
    with pytest.raises(HyperparameterError, match="adamw"):
        dpo.DpoConfig(arms=("snr",))
    with pytest.raises(HyperparameterError, match="adamw"):
        sft.SftConfig(arms=("snr",))
    with pytest.raises(HyperparameterError, match="replaced targets"):
        SftTask(noise=2.0)


def test_a_folder_and_a_token_file_are_used(tmp_path):
    """The tiny random model written as Hugging Face writes one gives what the one made by code gives."""
    import json

    from safetensors.torch import save_file

    from poprisk_lab.data.preferences import save_preferences

    made = random_llama(TINY, seed=0)
    tensors = {"model.embed_tokens.weight": made.embedding, "model.norm.weight": made.norm.clone()}
    for i, layer in enumerate(made.layers):
        tensors |= {f"model.layers.{i}.{words}.weight": getattr(layer, n).clone() for n, words in _NAMES.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = save_preferences(tmp_path / "pairs.safetensors", MODEL.preferences())
    task = DpoTask(FineTuning(str(tmp_path), (str(data),), rank=2), batch=5)
    weights, rows = drawn(TASKS[0]), batch(TASKS[0])
    wanted = TASKS[0].cohort(SEEDS, CPU).losses(weights, rows)
    assert_close(task.cohort(SEEDS, CPU).losses(weights, rows), wanted, rtol=1e-6, atol=1e-7)
    assert tmp_path.name in task.description
    small = FineTuning(str(tmp_path), (str(data),))
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 8}))
    from poprisk_lab.paper.dpo import task as dpo_task

    dpo_task._preferences.cache_clear()
    with pytest.raises(DataError, match="tokens up to 64"):
        small.preferences()
    dpo_task._preferences.cache_clear()


@pytest.fixture(scope="module")
def smoke(smoke_result):
    """Both experiments at their smallest, with a control each, saved and read back."""
    return {name: smoke_result(name) for name in ("dpo", "sft")}


def test_the_smoke_studies_run_and_learn(smoke):
    noisy, clean = smoke["dpo"]["result"]["studies"].values()
    assert (noisy["task"]["name"], clean["task"]["name"]) == ("dpo_30_swapped", "dpo_0_swapped")
    assert set(noisy["arms"]) == set(dpo.SMOKE.arms)
    assert noisy["arms"]["adamw"]["search"]["lr"] == [1e-4, 1e-1]
    assert noisy["task"]["streams"] == {"pairs": [48, 6]}
    assert [study["task"]["config"]["noise"] for study in (noisy, clean)] == [0.3, 0.0]
    for study in (noisy, clean):
        assert (study["task"]["steps"], study["evaluation_steps"]) == (12, [4, 8, 12])
        assert {row["failures"] for row in study["rows"]} == {0}
        ends = reading.final(reading.row(study, dpo.SHARED_ADAMW), ACCURACY)
        assert min(ends) > 0.8, "the marks are easy to prefer"
        assert len(study["portraits"][dpo.SHARED_ADAMW]["margins"]) == 32
    for study in smoke["sft"]["result"]["studies"].values():
        (values, _) = reading.curve(reading.row(study, sft.SHARED_ADAMW), HELD_OUT)
        assert values[-1] < values[0] - 0.3


def test_a_portrait_has_the_margins_of_the_last_step(smoke):
    study = next(iter(smoke["dpo"]["result"]["studies"].values()))
    for label in (dpo.SHARED_ADAMW, dpo.DEFAULTS):
        margins, row = study["portraits"][label]["margins"], reading.row(study, label)
        assert sum(m > 0 for m in margins) / 32 == pytest.approx(reading.final(row, ACCURACY)[0], abs=1e-6)
        assert sum(margins) / 32 == pytest.approx(reading.final(row, MARGIN)[0], rel=1e-3)


def test_sustained_accuracy_is_the_lowest_from_there_on():
    study = {"evaluation_steps": [10, 20, 30, 40]}
    row = {"label": "x", "curves": {ACCURACY: [[0.5, 0.6, 0.55, 0.7], [0.6, 0.6, 0.4, None], [0.5, 0.5, 0.5, 0.5]]}}
    assert report.steps_to_hold(study, row, 0.55) == [20, None, None]
    assert report.steps_to_hold(study, row, 0.56) == [40, None, None]
    assert report.steps_to_hold(study, row, 0.5) == [10, None, 10]
    with_nan = report.sustained([0.5, math.nan, 0.7])
    assert math.isnan(with_nan[0])
    assert with_nan[2] == 0.7


def stored(paper, adamw, drift=(0.1, 0.4)):
    """A made-up result in which the paper's rule and AdamW have these accuracies at every evaluation, three seeds."""

    def row(label, arm, level, far, chosen=()):
        wiggle = (0.0, 0.002, -0.002)
        curves = {ACCURACY: [[level + w] * 16 for w in wiggle], MARGIN: [[far] * 16] * 3, DRIFT: [[far] * 16] * 3}
        hyper = {"lr": 1e-4, "weight_decay": 0.01, "beta2": 0.999}
        return {"label": label, "arm": arm, "hyper": hyper, "seeds": [0, 1, 2], "curves": curves, "gate": None} | {
            "chosen_for": list(chosen),
            "failures": 0,
        }

    rows = [row(label, "soft", paper, drift[0]) for label in (dpo.PAPER_RULE, dpo.SUGGESTED, dpo.DEFAULTS)]
    rows += [row(dpo.SHARED_ADAMW, "adamw", adamw, drift[1]), row("AdamW", "adamw", adamw, drift[1], ["last"])]
    margins = {label: {"margins": [0.1] * 50 + [-0.1] * 50} for label in (dpo.PAPER_RULE, dpo.SHARED_ADAMW, "AdamW")}
    task = {
        "config": {"noise": 0.3},
        "description": "made up",
        "metrics": [{"name": ACCURACY, "higher_is_better": True}],
        "steps": 400,
    }
    study = {"task": task, "evaluation_steps": [25 * i for i in range(1, 17)], "arms": {}, "rows": rows}
    return {"result": {"studies": {"dpo_30_swapped": study | {"portraits": margins}}}}


def test_verdicts_follow_the_numbers():
    won = report.claims(stored(paper=0.61, adamw=0.57))
    assert len(won) == len(report.ROWS) + 1
    by_name = {claim.claim: claim for claim in won}
    final = by_name["Noisy DPO: final reward accuracy (table)"]
    assert final.paper == "AdamW 0.566, population risk 0.641 (1.13×)"
    assert "0.610" in final.paper_conditions
    assert final.verdict.startswith("Held with shared hyper-parameters")
    assert by_name["Noisy DPO: mean absolute reward drift (table)"].verdict.startswith("Held")
    held = by_name["Noisy DPO: steps to sustained accuracy ≥ 0.60 (table)"]
    assert held.paper == "AdamW not reached, population risk 175"
    assert held.verdict.startswith("Held with shared hyper-parameters")
    assert "25 (3 of 3 reached) against not reached (0 of 3 reached)" in held.verdict
    equal = by_name["Noisy DPO: steps to sustained accuracy ≥ 0.54 (table)"]
    assert equal.verdict.startswith("Undecided"), "both hold it at once"
    assert "gain 0 [−25, +25]" in equal.verdict, "known to an evaluation only"
    assert "no gate searched, against the tuned AdamW" in equal.verdict
    lost = {claim.claim: claim for claim in report.claims(stored(paper=0.52, adamw=0.60, drift=(0.4, 0.1)))}
    for name in ("final reward accuracy", "mean absolute reward drift", "steps to sustained accuracy ≥ 0.58"):
        assert lost[f"Noisy DPO: {name} (table)"].verdict.startswith("Not held"), name
    assert "100 evaluation pairs" in won[-1].verdict
    assert "5.0 points" in won[-1].verdict


def test_a_lead_of_one_evaluation_is_none_and_of_several_is_one():
    """Equal differences in all seeds have an interval without width, but a step is known to an evaluation only."""

    def verdict(ours, theirs):
        saved = stored(paper=0.61, adamw=0.61)
        for row in saved["result"]["studies"]["dpo_30_swapped"]["rows"]:
            at = ours if row["label"] == dpo.PAPER_RULE else theirs
            row["curves"][ACCURACY] = [[0.5] * at + [0.61] * (16 - at)] * 3
        claims = {claim.claim: claim.verdict for claim in report.claims(saved)}
        return claims["Noisy DPO: steps to sustained accuracy ≥ 0.60 (table)"]

    near = verdict(2, 3)
    assert near.startswith("Undecided")
    assert "gain +25 [0, +50]" in near
    far = verdict(2, 8)
    assert far.startswith("Held with shared")
    assert "gain +150 [+125, +175]" in far
    assert verdict(8, 2).startswith("Not held")


def test_the_level_to_sustain_is_each_seeds_own():
    """AdamW ends at .5, .6 and .7; the rule at .55, .65 and .65: the mean level would be reached by two of three."""
    study = {"evaluation_steps": [10, 20]}
    ends = {dpo.SHARED_ADAMW: (0.5, 0.6, 0.7), dpo.PAPER_RULE: (0.55, 0.65, 0.65)}
    study["rows"] = [
        {"label": label, "arm": "adamw", "chosen_for": [], "curves": {ACCURACY: [[0.4, end] for end in values]}}
        for label, values in ends.items()
    ]
    line = next(line for line in report.ROWS if line.name == "steps to sustain AdamW's final accuracy")
    assert line.measure(study, study["rows"][1]) == [20.0, 20.0, None]
    assert line.measure(study, study["rows"][0]) == [20.0, 20.0, 20.0]


def test_a_control_with_nothing_searched_is_compared_with_the_given_adamw(smoke):
    """``clean_arms`` is empty by default: no row of a tuned AdamW is there."""
    assert dpo.SMOKE.clean_arms == ()
    clean = report.clean_study(smoke["dpo"])
    assert clean is not None
    assert clean["arms"] == {}
    claim = report.claims(smoke["dpo"])[-1]
    assert claim.equal_tuning.startswith(f"nothing searched: {dpo.SHARED_ADAMW} ")
    assert f"against {dpo.SHARED_ADAMW} (best given AdamW, chosen in its favour)" in claim.verdict
    assert "tuned AdamW" not in claim.verdict


@pytest.mark.parametrize("kept", [("adamw",), ()])
def test_the_pages_work_without_a_searched_gate(smoke, kept):
    from poprisk_lab.paper.sft.figure import draw as draw_sft
    from poprisk_lab.paper.sft.numbers import claims as claims_sft
    from poprisk_lab.paper.sft.numbers import lines as sft_lines

    changed = copy.deepcopy(smoke)
    for kind in ("dpo", "sft"):
        for study in changed[kind]["result"]["studies"].values():
            study["arms"] = {name: arm for name, arm in study["arms"].items() if name in kept}
            study["rows"] = [row for row in study["rows"] if not row["chosen_for"] or row["arm"] in kept]
    assert draw_sft(changed["sft"])
    assert draw_dpo(changed["dpo"])
    assert len(list(report.lines(changed["dpo"]))) > 3
    assert len(list(sft_lines(changed["sft"]))) > 3
    assert "no gate searched" in report.claims(changed["dpo"])[0].verdict
    favour = "chosen in its favour"
    assert all((favour in claim.verdict) == (not kept) for claim in claims_sft(changed["sft"]))
    assert (favour in report.claims(changed["dpo"])[0].verdict) == (not kept)


def test_the_best_of_several_gates_is_said_to_be_that():
    saved = stored(paper=0.61, adamw=0.57)
    study = saved["result"]["studies"]["dpo_30_swapped"]
    study["task"]["metrics"] = [{"name": ACCURACY, "higher_is_better": True, "target": None, "spec": ".3f"}]
    given = next(row for row in study["rows"] if row["label"] == dpo.PAPER_RULE)
    for name in ("soft", "snr", "hard"):
        study["rows"].append(given | {"label": f"{name} gate", "arm": name, "chosen_for": ["last"]})
        curve = [[0.5] * 15 + [0.7 if name == "hard" else 0.6]]
        study["arms"][name] = {"trials": [{"hyper": {}, "curve": curve}], "chosen": {"last": 0}}
    sentence = report.claims(saved)[0].verdict
    assert "hard gate, best of 3 gates, 3 times the trials, against the tuned AdamW" in sentence
    assert "with the gate fixed in advance (" in sentence


def test_figures_and_lines_are_drawn_from_the_smoke_result(smoke):
    from poprisk_lab.paper.sft.figure import draw as draw_sft
    from poprisk_lab.paper.sft.numbers import claims as claims_sft
    from poprisk_lab.paper.sft.numbers import lines as sft_lines

    figure = draw_dpo(smoke["dpo"])
    assert [axes.get_title(loc="left")[0] for axes in figure.axes] == ["A", "B", "C"]
    assert len(figure.axes[0].lines) >= 6
    assert len(draw_sft(smoke["sft"]).axes) == 2
    console = Console(width=150, record=True, file=io.StringIO())
    for line in [*report.lines(smoke["dpo"]), *sft_lines(smoke["sft"])]:
        console.print(line)
    text = " ".join(console.export_text().split())
    assert "of the 9 rows of the paper's table, " in text
    assert "held-out loss" in text
    for claim in [*report.claims(smoke["dpo"]), *claims_sft(smoke["sft"])]:
        assert all((claim.claim, claim.paper, claim.paper_conditions, claim.equal_tuning, claim.verdict)), claim
    assert report.claims(smoke["dpo"])[-1].claim.startswith("DPO without swapped pairs")


def test_the_recipe_trains_on_the_loss_of_the_task_and_measures_what_it_kept():
    from poprisk_lab.paper.dpo import recipe
    from poprisk_lab.paper.dpo.task import dpo_losses

    cpu = torch.device("cpu")
    model = recipe.DpoModel(recipe.SMOKE.dpo, 0, cpu)
    pairs, swapped = torch.arange(6), torch.tensor([True, False, True, False, False, True])
    with torch.no_grad():
        for weight in model.weights:
            weight.add_(0.1 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1)))
        reward = model(pairs)
        theirs = dpo_losses(reward, swapped).mean()
    torch.testing.assert_close(torch.nn.functional.cross_entropy(reward, swapped.long()), theirs)
    cohort = recipe.SMOKE.dpo.cohort([0], cpu)
    assert model.measure() == pytest.approx({k: float(v[0]) for k, v in cohort.measure(model.stacked()).items()})
    made = recipe.run(recipe.SMOKE, cpu)
    assert [run["task"] for run in made["runs"]] == ["dpo_30_swapped", "sft_20_replaced"]
    for run in made["runs"]:
        assert run["held_back"] == 10
        assert run["last"] == run["curve"][-1]
        assert set(run["kept"]) == set(run["mean"]) == set(run["best"])
        assert 1 <= run["kept_step"] <= 12


def test_the_recipe_measures_fine_tuning_as_the_task_does():
    from poprisk_lab.paper.dpo import recipe

    cpu = torch.device("cpu")
    task = recipe.SMOKE.sft
    model, cohort = recipe.SftModel(task, 0, cpu), task.cohort([0], cpu)
    answers = torch.arange(5)
    counts = task.model.preferences().train.mask[:5, 0].sum(1).float()
    ours = recipe.token_loss(model(answers), counts)
    torch.testing.assert_close(ours, cohort.losses(model.stacked(), {"answers": answers[None]})[0])
    theirs = cohort.measure(model.stacked())
    assert model.measure() == pytest.approx({name: float(value[0]) for name, value in theirs.items()})


def test_the_table_of_the_recipe_has_every_metric_and_pairs_its_gains(tmp_path):
    from poprisk_lab.paper.dpo import recipe, recipe_numbers

    assert recipe_numbers.recipe_slots(tmp_path) is None
    metrics = [{"name": "accuracy", "higher_is_better": True, "target": None, "spec": ".2f"}]
    kinds = {"last": 0.5, "best": 0.7, "mean": 0.6, "kept": 0.6}
    runs = [
        {"task": "dpo", "measured": 3, **{kind: {"accuracy": value + 0.01 * seed} for kind, value in kinds.items()}}
        for seed in range(3)
    ]
    config = {"dpo_lr": 5e-5, "sft_lr": 2e-4, "share": 0.05, "tail": 0.2, "seeds": [0, 1, 2]}
    result = {"tasks": {"dpo": {"metrics": metrics}}, "runs": runs}
    found = recipe_numbers.slots({"kind": recipe.KIND, "config": config, "result": result})
    assert (
        "| dpo | accuracy | 0.51 ± 0.01 | 0.71 ± 0.01 | 0.61 ± 0.01 | 0.61 ± 0.01 | +0.10 [+0.10, +0.10] |"
        in (found["table"])
    )
    assert found["measured"] == [3]
