"""Options of the optimizer written as text, as trainers and command lines hand them over: ``alpha=0.5,fused=true``."""

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

import torch

from poprisk.errors import HyperparameterError
from poprisk.optim._defaults import DEFAULTS
from poprisk.optim._gate import join_gate, refuse_both
from poprisk.optim._validation import CHOICES, DTYPE_NAMES, check_group

_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False, "none": None}


def parse_options(options: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Options of :class:`poprisk.PopRiskAdamW` from text, with their types, names and ranges checked.

    Args:
        options: ``"name=value,name=value"`` as in Hugging Face's ``optim_args``, or a mapping whose values may be text.
            Commas inside brackets do not separate: ``betas=(0.9,0.95)``. Values that are not text are kept.

    Returns:
        Keyword arguments for the optimizer. Options that shape the gate (``gate``, ``strength``, ``alpha``, …, by their
        names in a parameter group) are joined into one :class:`poprisk.Gate`.

    Raises:
        HyperparameterError: an unknown name (the nearest one is suggested), a value that is not of the option's type
            or out of its range, an option given twice, or an entry without ``=``.

    Example:
        >>> parse_options("alpha=calibrated, betas=(0.9,0.95), fused=true")
        {'betas': (0.9, 0.95), 'fused': True, 'gate': Gate('snr', alpha='calibrated')}
    """
    parsed = read_options(options)
    refuse_both(parsed.get("gate"), parsed)
    group = {**DEFAULTS.as_dict(), **parsed, "params": []}
    check_group(group)
    given = {name: parsed[name] if name == "gate" else group[name] for name in parsed}
    return join_gate(given)


def read_options(options: str | Mapping[str, Any] | None) -> dict[str, Any]:
    """Names and types alone, for options that will be joined with others before their ranges are checked.

    >>> read_options("state=shared,rho=0.95")
    {'state': 'shared', 'rho': 0.95}
    """
    pairs = _split(options) if isinstance(options, str) else dict(options or {})
    return {name: _typed(name, value) for name, value in pairs.items()}


def _split(text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for entry in re.split(r",(?![^(\[{]*[)\]}])", text):
        if not entry.strip():
            continue
        name, equals, value = (part.strip() for part in entry.partition("="))
        if not equals or not name or not value:
            raise HyperparameterError(
                f"options must read name=value,name=value, got {entry.strip()!r} in {text!r}: write {name or 'name'}=…"
            )
        if name in pairs:
            raise HyperparameterError(f"{name} is given twice in {text!r}: keep one")
        pairs[name] = value
    return pairs


def _typed(name: str, value: Any) -> Any:
    known = DEFAULTS.as_dict()
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
        raise HyperparameterError(f"PopRiskAdamW has no option {name!r} that can be given as text: {hint}")
    return _read(name, value.strip()) if isinstance(value, str) else value


def _read(name: str, text: str) -> Any:
    """One value: a word from the list of the option (yes, no, none in any spelling), or what its reader makes of it."""
    if name in CHOICES:
        value = text if text in CHOICES[name] else _WORDS.get(text.lower(), text)
        if value in CHOICES[name]:
            return value
        expected = f"one of {', '.join(str(choice).lower() for choice in CHOICES[name])}"
    else:
        expected, reader = _READERS.get(name, ("a number", float))
        try:
            return reader(text)
        except (ValueError, KeyError):
            pass
    raise HyperparameterError(f"{name} must be {expected}, got {text!r}")


def _alpha(text: str) -> float | str:
    return "calibrated" if text.lower() == "calibrated" else float(text)


def _betas(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in re.split(r"[,;:\s]+", text.strip("()[] ")))


def _dtypes(text: str) -> torch.dtype | dict[str, torch.dtype] | None:
    if text.lower() == "none":
        return None
    if not text.startswith("{"):
        return DTYPE_NAMES[text.removeprefix("torch.")]
    entries = [entry.partition(":") for entry in text.strip("{} ").split(",")]
    return {key.strip(" '\""): DTYPE_NAMES[value.strip().removeprefix("torch.")] for key, _, value in entries}


_READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "alpha": ("a number or calibrated", _alpha),
    "betas": ("two numbers such as (0.9,0.95)", _betas),
    "state_dtype": (f"one of {', '.join(DTYPE_NAMES)}, or {{s:bfloat16}}", _dtypes),
    "warmup_steps": ("a whole number", int),
}
"""What is expected of an option's text, and what reads it; all others are numbers."""
