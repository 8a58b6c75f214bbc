"""Options as text: types, brackets, and one-line refusals."""

import pytest
import torch

from poprisk.errors import HyperparameterError
from poprisk.optim import Gate, join_gate
from poprisk.optim._adamw import PopRiskAdamW
from poprisk.optim._defaults import DEFAULTS
from poprisk.optim._parsing import parse_options


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, {}),
        ("", {}),
        ("alpha=0.5", {"alpha": 0.5}),
        (" alpha = calibrated , strength=2e0,", {"alpha": "calibrated", "strength": 2.0}),
        ("betas=(0.9,0.95),rho=.95", {"betas": (0.9, 0.95), "rho": 0.95}),
        ("betas=[0.9, 0.95]", {"betas": (0.9, 0.95)}),
        ("betas=0.9;0.95", {"betas": (0.9, 0.95)}),
        ("fused=True,foreach=none,gated_decay=1", {"fused": True, "foreach": None, "gated_decay": True}),
        ("gate=None", {"gate": None}),
        (
            "gate=snr,centering=corrected,granularity=row",
            {"gate": "snr", "centering": "corrected", "granularity": "row"},
        ),
        ("warmup_steps=10", {"warmup_steps": 10}),
        ("state_dtype=bfloat16", {"state_dtype": {"v": torch.bfloat16, "s": torch.bfloat16}}),
        ("state_dtype={s:torch.bfloat16},lr=1e-2", {"state_dtype": {"s": torch.bfloat16}, "lr": 1e-2}),
        ({"alpha": "0.25", "fused": True, "betas": (0.8, 0.9)}, {"alpha": 0.25, "fused": True, "betas": (0.8, 0.9)}),
    ],
)
def test_text_becomes_typed_options(text, expected):
    parsed, expected = parse_options(text), join_gate(expected)
    assert parsed == expected
    assert {name: type(value) for name, value in parsed.items()} == {n: type(v) for n, v in expected.items()}
    PopRiskAdamW([torch.zeros(2, requires_grad=True)], **parsed)


def test_every_option_can_be_written_as_text():
    written = {name: str(value) for name, value in DEFAULTS.as_dict().items()}
    assert parse_options(written) == join_gate(DEFAULTS.as_dict())
    assert parse_options(written)["gate"] == Gate()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("alhpa=1", "no option 'alhpa' that can be given as text: did you mean 'alpha'"),
        ("variance=x", "no option 'variance'"),
        ("alpha", "name=value"),
        ("alpha=", "name=value"),
        ("=3", "name=value"),
        ("alpha=1,alpha=2", "alpha is given twice"),
        ("alpha=big", "alpha must be a number or calibrated, got 'big'"),
        ("alpha=-1", "alpha must be a finite number ≥ 0"),
        ("rho=1", r"rho must be a number in \[0, 1\)"),
        ("betas=0.9", "betas must be two numbers"),
        ("betas=(a,b)", "betas must be two numbers"),
        ("fused=maybe", "fused must be one of true, false, none, got 'maybe'"),
        ("gate=hrad", "gate must be one of soft, hard, snr, none"),
        ("warmup_steps=1.5", "warmup_steps must be a whole number"),
        ("state_dtype=int8", "state_dtype must be one of float32"),
        ("lr=inf", "lr must be a finite number"),
        ("fused=true,foreach=true", "`fused` and `foreach`"),
    ],
)
def test_bad_text_is_refused_in_one_line(text, message):
    with pytest.raises(HyperparameterError, match=message) as caught:
        parse_options(text)
    assert "\n" not in str(caught.value)
