"""Options of the optimizer written as text, as trainers and command lines hand them over: ``alpha=0.5,fused=true``."""

import re
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

import torch

from poprisk.errors import HyperparameterError
from poprisk.optim._defaults import DEFAULTS
from poprisk.optim._gate import join_gate
from poprisk.optim._validation import CHOICES, STATE_DTYPES, check_group

_WORDS = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False, "none": None}
_DTYPES = {str(d).removeprefix("torch."): d for d in STATE_DTYPES}


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
    return _reader(name)(name, value.strip()) if isinstance(value, str) else value


def _reader(name: str) -> Callable[[str, str], Any]:
    if name == "betas":
        return _pair
    if name == "state_dtype":
        return _dtypes
    if name == "warmup_steps":
        return _whole
    if name in CHOICES:
        return _choice
    return _number


def _number(name: str, text: str) -> float | str:
    if name == "alpha" and text.lower() == "calibrated":
        return "calibrated"
    try:
        return float(text)
    except ValueError:
        raise HyperparameterError(
            f"{name} must be a number{' or calibrated' * (name == 'alpha')}, got {text!r}"
        ) from None


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise HyperparameterError(f"{name} must be a whole number, got {text!r}") from None


def _pair(name: str, text: str) -> tuple[float, ...]:
    parts = re.split(r"[,;:\s]+", text.strip("()[] "))
    try:
        return tuple(float(part) for part in parts)
    except ValueError:
        raise HyperparameterError(f"{name} must be two numbers such as (0.9,0.95), got {text!r}") from None


def _choice(name: str, text: str) -> Any:
    """A word of the option's own, or yes, no and none in the ways people write them."""
    value = text if text in CHOICES[name] else _WORDS.get(text.lower(), text)
    if value not in CHOICES[name]:
        expected = ", ".join(str(choice).lower() for choice in CHOICES[name])
        raise HyperparameterError(f"{name} must be one of {expected}, got {text!r}")
    return value


def _dtypes(name: str, text: str) -> torch.dtype | dict[str, torch.dtype] | None:
    if text.lower() == "none":
        return None
    if text.startswith("{"):
        entries = [entry.partition(":") for entry in text.strip("{} ").split(",")]
        return {key.strip(" '\""): _dtype(name, value.strip(), text) for key, _, value in entries}
    return _dtype(name, text, text)


def _dtype(name: str, word: str, text: str) -> torch.dtype:
    dtype = _DTYPES.get(word.removeprefix("torch."))
    if dtype is None:
        raise HyperparameterError(f"{name} must be one of {', '.join(_DTYPES)}, or {{s:bfloat16}}, got {text!r}")
    return dtype
