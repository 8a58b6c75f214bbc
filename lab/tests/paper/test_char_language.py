"""The character language model: stacked members against one module each, its noise, study, figure and claims."""

import copy
from dataclasses import replace

import pytest
import torch
from rich.text import Text
from torch.func import functional_call
from torch.nn import functional as F
from torch.testing import assert_close

from poprisk._core.store.files import write_figure
from poprisk.errors import DataError, HyperparameterError
from poprisk_lab.data.char_lm import all_windows, help_topics
from poprisk_lab.engine import reading
from poprisk_lab.paper.char_language.study import ADAMW_INHERITED, PAPER_INHERITED, SETTINGS, CharLanguageConfig
from poprisk_lab.paper.char_language.task import HELD_OUT, TRAIN, CharLanguageTask

pytest.importorskip("matplotlib")
from poprisk_lab.pages.gate_choice import searched_gates
from poprisk_lab.paper.char_language.figure import draw as draw_char_language
from poprisk_lab.paper.char_language.numbers import claims as claims_char_language
from poprisk_lab.paper.char_language.numbers import lines as char_language_lines

CPU = torch.device("cpu")
TASK = CharLanguageTask(
    noise=0.2, width=16, heads=2, layers=2, context=12, batch_size=3, steps=4, evaluations=2, measured_windows=7
)
SEEDS = (5, 0, 5)


def _stacked(task: CharLanguageTask = TASK, seeds=SEEDS) -> dict[str, torch.Tensor]:
    """Weights of each member moved a little from its start, so that members of one seed differ and no bias is 0."""
    generator = torch.Generator().manual_seed(1)
    members = [task.initial(seed) for seed in seeds]
    stacked = {name: torch.stack([member[name] for member in members]) for name in members[0]}
    return {name: x + 0.1 * torch.randn(x.shape, generator=generator) for name, x in stacked.items()}


def _batch() -> dict[str, torch.Tensor]:
    count, size = TASK.streams["windows"]
    return {"windows": torch.randint(count, (len(SEEDS), size), generator=torch.Generator().manual_seed(2))}


def _module_nats(weights, member: int, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    own = {name: x[member] for name, x in weights.items()}
    logits = functional_call(TASK.network(0), own, inputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def test_each_member_is_a_char_transformer() -> None:
    weights, batch = _stacked(), _batch()
    losses = TASK.cohort(SEEDS, CPU).losses(weights, batch)
    windows = all_windows(help_topics().train, TASK.context)
    for k, seed in enumerate(SEEDS):
        index = batch["windows"][k]
        expected = _module_nats(weights, k, windows[index, :-1], TASK.given_targets(seed)[index])
        assert_close(losses[k], expected, rtol=1e-5, atol=1e-5)


def test_gradients_are_each_members_own() -> None:
    weights = {name: x.requires_grad_() for name, x in _stacked().items()}
    TASK.cohort(SEEDS, CPU).losses(weights, _batch())[1].backward()
    windows, index = all_windows(help_topics().train, TASK.context), _batch()["windows"][1]
    own = {name: x.detach()[1].clone().requires_grad_() for name, x in weights.items()}
    logits = functional_call(TASK.network(0), own, windows[index, :-1])
    F.cross_entropy(logits.flatten(0, 1), TASK.given_targets(SEEDS[1])[index].flatten()).backward()
    for name, x in weights.items():
        assert x.grad is not None
        assert x.grad[[0, 2]].count_nonzero() == 0, name
        assert_close(x.grad[1], own[name].grad, rtol=1e-4, atol=1e-6)


def test_measures_are_over_clean_held_out_text_and_given_training_targets(monkeypatch) -> None:
    """In one piece or in several of unequal size: the mean over windows is the same."""
    weights, cohort = _stacked(), TASK.cohort(SEEDS, CPU)
    whole = cohort.measure(weights)
    held_out = all_windows(help_topics().held_out, TASK.context)
    held_out = held_out[torch.arange(7) * len(held_out) // 7]
    windows = all_windows(help_topics().train, TASK.context)
    places = torch.arange(7) * len(windows) // 7
    for k, seed in enumerate(SEEDS):
        clean = _module_nats(weights, k, held_out[:, :-1], held_out[:, 1:])
        given = _module_nats(weights, k, windows[places, :-1], TASK.given_targets(seed)[places])
        assert_close(whole[HELD_OUT][k], clean, rtol=1e-5, atol=1e-5)
        assert_close(whole[TRAIN][k], given, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr("poprisk_lab.paper.char_language.task._WINDOWS_AT_ONCE", 4 * len(SEEDS))
    for name, values in cohort.measure(weights).items():
        assert_close(values, whole[name], rtol=1e-5, atol=1e-5)


def test_noise_is_a_fixed_share_of_other_characters() -> None:
    true = all_windows(help_topics().train, TASK.context)[:, 1:]
    given = TASK.given_targets(0)
    assert ((given != true).double().mean() - TASK.noise).abs() < 1 / true.numel()
    assert torch.equal(given, TASK.given_targets(0))
    assert not torch.equal(given, TASK.given_targets(1))
    assert torch.equal(replace(TASK, noise=0.0).given_targets(0), true)
    assert given.min() >= 0
    assert given.max() < len(help_topics().vocabulary)


def test_a_seed_is_a_start() -> None:
    first, again, other = TASK.initial(3), TASK.initial(3), TASK.initial(4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["characters.weight"], other["characters.weight"])
    assert TASK.name == "char_noisy"
    assert replace(TASK, noise=0.0).name == "char_clean"


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"noise": 1.0}, HyperparameterError, "noise must lie in"),
        ({"width": 10, "heads": 4}, HyperparameterError, "multiple of heads, got 10 and 4"),
        ({"steps": 0}, HyperparameterError, "must be at least 1"),
        ({"text_sha256": "0" * 64}, DataError, "has sha256 000000000000.*leave text_sha256 out"),
    ],
)
def test_bad_sizes_are_refused(wrong, error, message) -> None:
    with pytest.raises(error, match=message):
        CharLanguageTask(**wrong)


@pytest.fixture(scope="module")
def saved(smoke_result):
    """The smoke run as it is stored."""
    return smoke_result("char_language")


def test_the_smoke_study_has_every_arm_and_setting(saved) -> None:
    studies = saved["result"]["studies"]
    assert list(studies) == ["char_clean", "char_noisy"]
    for study in studies.values():
        assert set(study["arms"]) == set(CharLanguageConfig().arms)
        assert {setting.label for setting in SETTINGS} <= {row["label"] for row in study["rows"]}
        assert study["task"]["config"]["text_sha256"] == help_topics().sha256


def test_claims_say_how_far_behind(saved) -> None:
    """The figures of the verdict are those of the stored rows."""
    clean = claims_char_language(saved)[0]
    study = saved["result"]["studies"]["char_clean"]
    ends = [reading.final(reading.row(study, label), HELD_OUT) for label in (PAPER_INHERITED, ADAMW_INHERITED)]
    behind = sum(ends[0]) / 2 - sum(ends[1]) / 2
    assert f"the paper's rule ends {abs(behind):.3f} nats {'behind' if behind >= 0 else 'ahead'}" in clean.verdict
    assert clean.paper_conditions.startswith(f"{ADAMW_INHERITED}: {sum(ends[1]) / 2:.3f}")
    assert clean.verdict in [line.plain for line in char_language_lines(saved) if isinstance(line, Text)]


def test_the_best_of_several_gates_is_said_to_be_that(saved) -> None:
    count = len(searched_gates(saved["result"]["studies"]["char_noisy"]))
    assert count > 1
    for claim in claims_char_language(saved):
        for words in (claim.verdict, claim.equal_tuning):
            assert f"best of {count} gates, {count} times the trials" in words
            assert "fixed in advance" in words


@pytest.mark.parametrize("kept", [("adamw",), ()])
def test_the_page_works_without_a_searched_gate(saved, kept) -> None:
    """The defaults are compared all the same, with the best given AdamW where none was searched."""
    changed = copy.deepcopy(saved)
    for study in changed["result"]["studies"].values():
        study["arms"] = {name: arm for name, arm in study["arms"].items() if name in kept}
        study["rows"] = [row for row in study["rows"] if not row["chosen_for"] or row["arm"] in kept]
    assert draw_char_language(changed)
    assert len(list(char_language_lines(changed))) == 5
    for claim in claims_char_language(changed):
        assert "PopRiskAdamW, defaults ends" in claim.verdict
        assert ("chosen in its favour" in claim.verdict) == (not kept)


def test_a_diverged_run_is_named(saved) -> None:
    changed = copy.deepcopy(saved)
    study = changed["result"]["studies"]["char_clean"]
    row = next(row for row in study["rows"] if row["label"] == PAPER_INHERITED)
    row["curves"][HELD_OUT][0][-1] = None
    assert "the paper's rule ends without a comparison (diverged (1 of 2))" in claims_char_language(changed)[0].verdict


def test_the_figure_has_two_panels_for_each_text(saved, tmp_path) -> None:
    figure = draw_char_language(saved)
    write_figure(tmp_path / "char_language.png", figure)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles == [
        "A  Held-out loss, clean text",
        "B  Held-out loss, 20% wrong targets",
        "C  Last step, clean text",
        "D  Last step, 20% wrong targets",
    ]


def test_a_configuration_that_cannot_be_compared_is_refused() -> None:
    with pytest.raises(HyperparameterError, match="must not meet, got 100"):
        CharLanguageConfig(report_seeds=(100,))
    with pytest.raises(HyperparameterError, match="0 and one other share"):
        CharLanguageConfig(noises=(0.1, 0.2))
    with pytest.raises(HyperparameterError, match="one entry each"):
        CharLanguageConfig(report_seeds=())
