"""The study of gate variants: gradients in halves, the verdict by hand, and the whole of it at a tiny size."""

import io
import math
from copy import deepcopy
from dataclasses import replace
from functools import cache

import pytest
import torch
from rich.console import Console

from poprisk._core.store.envelope import load_result
from poprisk.errors import DataError, HyperparameterError
from poprisk_lab import gates as gate_variants
from poprisk_lab.engine.arms import ARMS
from poprisk_lab.engine.parameter_layout import ParameterLayout
from poprisk_lab.engine.stack import Member, Stack
from poprisk_lab.gates import evidence, numbers
from poprisk_lab.gates.__main__ import main, with_data
from poprisk_lab.gates.arms import IDEAS
from poprisk_lab.gates.evidence_numbers import turning_rows, twin_counts
from poprisk_lab.gates.figure import draw
from poprisk_lab.gates.halves import HalvesTask
from poprisk_lab.gates.plan import KIND, SMOKE, GateVariantsConfig, studies
from poprisk_lab.gates.variants import VARIANTS
from poprisk_lab.gates.verdict import judge_clean, judge_noisy, outcomes, task_names
from poprisk_lab.pages.registry import chosen_pages
from poprisk_lab.pages.template import render
from poprisk_lab.paper.pinn.task import PinnTask

CPU = torch.device("cpu")


@pytest.mark.parametrize("bench", SMOKE.benches(), ids=lambda bench: bench.task.name)
def test_two_gradients_come_out_of_one_loss(bench):
    """The batch's beside half of its second half's, for every task, gaps and fillers included."""
    task, seeds = bench.task, [0, 1]
    halved = HalvesTask(task)
    layout = ParameterLayout.of(halved.initial(0))
    own = ParameterLayout.of(task.initial(0))
    matrix = torch.stack([layout.row(halved.initial(seed)) for seed in seeds]).requires_grad_()
    plain = torch.stack([own.row(task.initial(seed)) for seed in seeds]).requires_grad_()
    batch = {
        name: torch.stack([torch.randperm(count)[:size] for _ in seeds]) for name, (count, size) in task.streams.items()
    }
    losses = halved.cohort(seeds, CPU).losses(layout.views(matrix), batch)
    whole = task.cohort(seeds, CPU).losses(own.views(plain), batch)
    torch.testing.assert_close(losses, whole, rtol=1e-5, atol=1e-6)
    (both,) = torch.autograd.grad(losses.sum(), matrix)
    (mean,) = torch.autograd.grad(whole.sum(), plain)
    first, second = both.chunk(2, dim=1)
    torch.testing.assert_close(first[:, : own.size], mean[:, : own.size], rtol=1e-4, atol=1e-6)
    later = {name: index[:, index.shape[1] // 2 :] for name, index in batch.items()}
    half = gate_variants.halves.half_task(task).cohort(seeds, CPU)  # type: ignore[attr-defined]
    (beside,) = torch.autograd.grad(half.losses(own.views(plain), later).sum(), plain)
    torch.testing.assert_close(2 * second[:, : own.size], beside[:, : own.size], rtol=1e-4, atol=1e-6)


def test_the_two_parts_of_a_row_have_the_same_gaps():
    for width in (16, 33, 64):
        task = HalvesTask(PinnTask(noise=0.0, width=width, layers=2))
        start = task.initial(0)
        segments = ParameterLayout.of(start).segments
        named = [tensor for name, tensor in start.items() if not name.startswith("shadow.")]
        count = 2 * len(named)
        assert segments[:count] == segments[count : 2 * count]
        assert segments[-1] == 0


def test_shadows_never_move():
    task = HalvesTask(SMOKE.digits)
    arm = ARMS["halves_agreement"]
    members = [Member(arm, arm.hyper({"lr": 1e-2, "gate_warmup": 6.0}), seed) for seed in (0, 1)]
    curves = Stack(task, members, CPU).train()
    first, second = curves.weights.chunk(2, dim=1)
    assert not second.any()
    assert not torch.equal(first, torch.stack([curves.layout.row(task.initial(s)) for s in (0, 1)]).chunk(2, 1)[0])


def test_every_variant_is_an_arm_with_words_of_its_own():
    assert {idea.arm for idea in IDEAS} == set(VARIANTS) | {"strict_cosine"}
    assert len(IDEAS) >= 14
    assert len({idea.label for idea in IDEAS}) == len(IDEAS) == len({idea.arm for idea in IDEAS})
    assert len({idea.root for idea in IDEAS}) >= 5
    for idea in IDEAS:
        assert ARMS[idea.arm].definition()["rule"] in (*VARIANTS, "soft")


def study(task, metric, steps, rows, higher=True, goal=None):
    """A stored study: label -> lr -> [values per evaluation] per seed."""
    stored = [
        {"label": f"{label}, lr {lr:g}", "arm": "x", "hyper": {"lr": lr}, "chosen_for": [], "curves": {metric: curves}}
        for label, rates in rows.items()
        for lr, curves in rates.items()
    ]
    described = {"name": metric, "higher_is_better": higher, "target": goal, "spec": ".3f"}
    return {"task": {"config": task, "metrics": [described]}, "evaluation_steps": steps, "rows": stored}


def by_hand():
    noisy = {
        "AdamW": {0.001: [[0.9, 0.5], [0.9, 0.6]], 0.01: [[0.8, 0.3], [0.8, 0.3]]},
        "strict gate": {0.001: [[0.5, 0.6], [0.5, 0.6]], 0.01: [[0.7, 0.8], [0.7, 0.9]]},
        "hysteresis": {0.001: [[0.8, 0.86], [0.8, 0.82]], 0.01: [[0.7, None], [0.7, 0.9]]},
    }
    clean = {
        "AdamW": {0.001: [[0.0, 0.5, 1.0], [0.0, 1.0, 1.0]]},
        "strict gate": {0.001: [[0.0, 0.2, 0.4], [0.0, 0.5, 1.0]]},
        "hysteresis": {0.001: [[0.0, 0.4, 0.96], [0.0, 1.0, 0.9]]},
    }
    return {
        "noisy": study({"noise": 0.4}, "accuracy", [10, 20], {k: v for k, v in noisy.items() if k != "hysteresis"}),
        "noisy_halves": study({"noise": 0.4}, "accuracy", [10, 20], {"hysteresis": noisy["hysteresis"]}),
        "clean": study({"wrong_share": 0.0}, "accuracy", [10, 20, 30], clean),
    }


def test_the_noisy_side_by_hand():
    found = judge_noisy(by_hand(), "noisy", "hysteresis")
    assert found.rate == 0.001  # a diverged seed loses the other rate
    assert found.value == pytest.approx(0.84)
    assert found.lead == pytest.approx((0.06 - 0.08) / 2)
    assert found.error == pytest.approx(0.14 / 2)
    assert found.holds
    assert found.gain == pytest.approx(-0.01 / (0.85 - 0.55))
    unchanged = judge_noisy(by_hand(), "noisy", "strict gate", unchanged=True)
    assert unchanged.lead == pytest.approx(-0.25)
    assert not unchanged.holds
    itself = judge_noisy(by_hand(), "noisy", "strict gate")
    assert (itself.lead, itself.error, itself.holds) == (0.0, 0.0, True)
    assert not judge_noisy(by_hand(), "noisy", "AdamW").holds


def test_the_clean_side_by_hand():
    stored = by_hand()
    quick = judge_clean(stored, "clean", "hysteresis")
    first = (20 + 10 * 0.55 / 0.56) / (20 + 10 * 0.45 / 0.5)  # 95% of the way to 1
    assert quick.slowdown == pytest.approx(math.sqrt(first))
    assert quick.holds
    slow = judge_clean(stored, "clean", "strict gate")
    assert (slow.reached, slow.seeds) == (1, 2)
    assert not slow.holds
    assert slow.slowdown == pytest.approx(math.sqrt(30 / 29 * (20 + 10 * 0.45 / 0.5) / 19.5))
    stored["clean"]["task"]["metrics"][0]["target"] = 0.5  # the task's own, where AdamW reaches it
    assert judge_clean(stored, "clean", "strict gate").slowdown == pytest.approx(math.sqrt(30 / 20 * 20 / 15))


def test_outcomes_say_which_side_is_lost():
    assert task_names(by_hand()) == (["noisy"], ["clean"])
    found = {outcome.label: outcome for outcome in outcomes(by_hand())}
    assert list(found) == ["AdamW", "strict gate", "hysteresis"]
    assert found["hysteresis"].meets_both
    assert (found["AdamW"].lost_noisy, found["AdamW"].lost_clean) == (["noisy"], [])
    assert (found["strict gate"].lost_noisy, found["strict gate"].lost_clean) == ([], ["clean"])
    assert found["AdamW"].score == pytest.approx(0)
    assert found["strict gate"].score == pytest.approx(1)
    with pytest.raises(DataError, match="needs noisy and clean tasks"):
        outcomes({"noisy": by_hand()["noisy"]})


def test_bad_plans_are_refused():
    with pytest.raises(HyperparameterError, match="no variant is called 'magic'"):
        replace(SMOKE, variants=("magic",))
    with pytest.raises(HyperparameterError, match="no task is called 'cifar'"):
        replace(SMOKE, only=("cifar",))
    with pytest.raises(HyperparameterError, match="begin with 1"):
        replace(SMOKE, factors=(3.0,))
    with pytest.raises(HyperparameterError, match="clean tasks"):
        replace(SMOKE, pinn=replace(SMOKE.pinn, noise=1.0))
    with pytest.raises(HyperparameterError, match="need noise above 0"):
        replace(SMOKE, teacher=replace(SMOKE.teacher, noise=0.0))
    with pytest.raises(HyperparameterError, match="even size, got 5"):
        HalvesTask(replace(SMOKE.teacher, batch_size=5))


def test_the_full_plan_has_the_tasks_it_should_and_misses_no_file_silently(tmp_path, capsys):
    full = GateVariantsConfig()
    noisy = [bench for bench in full.benches() if bench.noisy]
    clean = {bench.task.name for bench in full.benches() if not bench.noisy}
    assert len(noisy) >= 5
    assert {"char_clean", "grokking", "pinn_clean"} < clean
    assert all(len(bench.seeds) >= 3 for bench in full.benches())
    with pytest.raises(DataError, match="put the four official idx files"):
        studies(gate_variants.plan.images_in(full, str(tmp_path)))  # type: ignore[attr-defined]
    assert with_data(full, str(tmp_path)).fashion is None
    assert "Without Fashion-MNIST" in capsys.readouterr().out


def test_parts_of_the_work_are_found_again(tmp_path, capsys):
    small = ["--smoke", "--ledger", str(tmp_path / "parts")]
    main([*small, "--only", "teacher_40"])
    files = sorted((tmp_path / "parts").glob("*.json"))
    assert len(files) == 2  # with whole batches, and with halves
    capsys.readouterr()
    main([*small, "--only", "teacher_40", "--output", str(tmp_path / "result.json")])
    assert "members" not in capsys.readouterr().out  # nothing was trained
    stored = load_result(tmp_path / "result.json", KIND)["result"]["studies"]
    assert list(stored) == ["teacher_40", "teacher_40_halves"]


def text_of(saved):
    console = Console(width=160, record=True, file=io.StringIO())
    for line in numbers.lines(saved):
        console.print(line)
    return " ".join(console.export_text().split())


def test_the_verdict_follows_the_numbers():
    stored = by_hand()
    yes = numbers.sentences(outcomes(stored))["verdict"]
    assert yes.startswith("Yes (1 variants, 1 noisy and 1 clean tasks): hysteresis")
    assert "At AdamW's own learning rate on both sides: hysteresis." in yes
    slow = stored["clean"]["rows"][2]["curves"]["accuracy"]
    slow[0] = [0.0, 0.3, 0.5]
    no = numbers.sentences(outcomes(stored))["verdict"]
    assert "0 lose on noise alone, 1 on speed alone, 0 on both" in no
    assert "The best trade-off is 'hysteresis': score 0.97, slowdown ≥ 1.02; it loses clean (speed)." in no
    stored["noisy_halves"]["rows"][0]["curves"]["accuracy"] = [[0.8, 0.5], [0.8, 0.51]]
    stored["noisy_halves"]["rows"][1]["curves"]["accuracy"] = [[0.8, 0.5], [0.8, 0.51]]
    found = outcomes(stored)
    assert numbers.lost_side(found[-1]) == "both"
    with pytest.raises(DataError, match="holds no variant"):
        numbers.best_trade_off(found[:2])


def test_tables_have_what_was_measured(watched):
    saved = {"result": {"studies": by_hand()}}
    for study in saved["result"]["studies"].values():
        for row in study["rows"]:
            row["seeds"] = [0, 1]
            row["hyper"] |= {"alpha": 1.0, "strength": 1.0}
    slots = numbers.slots(saved, watched)
    page = render("poprisk_lab.gates", **slots)
    noisy = [line for line in slots["noisy"].splitlines() if line.startswith("| hysteresis")]
    assert noisy == ["| hysteresis | 0.840 (0.840) |"]
    assert "| strict gate | 0.850 (*0.600*) |" in slots["noisy"]
    assert "| strict gate | *≥ 1.24 (1 of 2)* |" in slots["clean"]
    assert "| **hysteresis** (`hysteresis`) | agreement over time |" in slots["ideas"]
    assert "2 paired seeds. Learning rates on noisy tasks: 0.001, 0.01" in " ".join(page.split())
    assert "| noisy, last step | 0.550 | 0.850 | 0.840 | 0.840 | held: -0.010 ± 0.070 |" in slots["best"]
    assert all(slots[name] in page for name in ("noisy", "clean", "ideas", "best", "turning", "twins"))


def test_the_page_is_what_the_stored_results_say():
    [page] = chosen_pages(["gates.md"])
    assert not page.is_stale()


def test_the_turning_point_is_where_the_test_value_is_best(watched):
    found = watched["result"]["turning"]["digits-40"]
    found |= {"test accuracy": [[0.1, 0.9, 0.3], [0.2, 0.8, 0.4]], "agreement": [[0.5, 0.1, -0.3], [0.5, 0.3, -0.1]]}
    (_, rows) = turning_rows({"digits-40": found})
    step, passes, then, end, drop = rows[0][1:]
    assert (step, then, end) == ("4 steps", "0.2 ± 0.1", "-0.2 ± 0.1")
    assert passes == f"{4 / found['pass_steps']:.0f}"
    assert drop == "test accuracy 0.85 → 0.35"


@pytest.mark.parametrize("name", ["teacher_clean", "grokking"])
def test_what_is_watched_is_the_engines_adamw(name):
    bench = next(b for b in SMOKE.benches() if b.task.name == name)
    hyper, metric = ARMS["adamw"].hyper({**bench.shared, "lr": bench.rates[0]}), bench.task.metrics[-1].name
    stack = Stack(bench.task, [Member(ARMS["adamw"], hyper, seed) for seed in (0, 1)], CPU)
    curves = stack.train()
    seen = evidence.watch(bench, bench.task, (0, 1), bench.task.steps, 2)
    torch.testing.assert_close(torch.tensor(seen[metric])[:, -1].double(), curves.metrics[metric][:, -1])


def test_twins_differ_in_their_answers_only(watched):
    twins = watched["result"]["twins"]
    assert twins["right"]["steps"] == twins["wrong"]["steps"] == [2, 4, 6]
    assert twins["right"]["loss"] != twins["wrong"]["loss"]
    counts = twin_counts(twins)
    assert (counts["seeds"], counts["comparisons"]) == (2, 12)
    same = {"right": twins["right"], "wrong": twins["right"]}
    assert twin_counts(same) == counts | {"rows": 8, "apart": 0}
    with pytest.raises(HyperparameterError, match="no task is called 'elsewhere'"):
        replace(evidence.SMOKE, turning=(("elsewhere", 3),))
    with pytest.raises(HyperparameterError, match="at least two"):
        replace(evidence.SMOKE, seeds=(0,))


@cache
def watched_once():
    return {"result": evidence.run(evidence.SMOKE)}


@pytest.fixture
def watched():
    """A copy, which a test may change."""
    return deepcopy(watched_once())


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    path = tmp_path_factory.mktemp("gate_variants") / "result.json"
    small = replace(SMOKE, only=("digits-40", "teacher_40", "teacher_clean", "pinn_clean"))
    return load_result(gate_variants.run(small).save(path), KIND)


def test_the_smoke_study_runs_and_is_shown(smoke, watched):
    found = outcomes(smoke["result"]["studies"])
    assert [outcome.label for outcome in found][-len(IDEAS) :] == [idea.label for idea in IDEAS]
    assert found[0].label == "AdamW"
    assert found[0].slowdown == pytest.approx(1)
    assert "No variant meets both requirements" in text_of(smoke) or "Yes (" in text_of(smoke)
    figure = draw(smoke)
    figure.canvas.draw()
    trade, tasks = figure.axes
    assert len(trade.texts) == len(found)
    assert len(tasks.texts) == 4 * len(found)
    assert all(outcome.label in numbers.slots(smoke, watched)["noisy"] for outcome in found)
