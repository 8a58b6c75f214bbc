"""Templates of the pages: one HTML file with its style and scripts inside, and a policy that allows nothing else."""

import base64
import hashlib
import json
from importlib.resources import files
from typing import Any

from poprisk.errors import MissingExtraError


def require_template() -> None:
    """Check, before anything slow, that a page can be written.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    _environment()


def render(name: str, scripts: tuple[str, ...] = (), *, data: Any = None, **values: Any) -> str:
    """A page as HTML text.

    Args:
        name: File of the template.
        scripts: Files of scripts, which become one.
        data: JSON value that the scripts read from the element ``data``.
        values: Variables of the template.

    Raises:
        MissingExtraError: jinja2 is not installed.
    """
    environment = _environment()
    style, script = _text("page.css"), "\n".join(map(_text, scripts))
    # No text may close the script element that contains it.
    packed = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")
    return environment.get_template(name).render(
        policy=policy_of(style, script), style=style, script=script, data=packed, **values
    )


def policy_of(style: str, script: str) -> str:
    """The content security policy of a page: its own style and script, pictures inside it, and nothing else.

    >>> policy_of("p {}", "").startswith("default-src 'none'; style-src 'sha256-")
    True
    """
    return "; ".join(
        [
            "default-src 'none'",
            f"style-src '{_hash(style)}'",
            f"script-src '{_hash(script)}'" if script else "script-src 'none'",
            *("img-src data:", "base-uri 'none'", "form-action 'none'"),
        ]
    )


def _environment() -> Any:
    try:
        import jinja2
    except ImportError:
        raise MissingExtraError("jinja2", "report", "the report of a run") from None
    options = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True, "undefined": jinja2.StrictUndefined}
    return jinja2.Environment(loader=jinja2.FunctionLoader(_text), **options)


def _text(name: str) -> str:
    return files("poprisk.report").joinpath("templates", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """What a content security policy calls a piece of code that it allows."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
