"""The page of the command line, made from the commands themselves."""

import inspect
import re
from pathlib import Path
from typing import Any

import typer

from reference_pages import write_if_changed


def write_command_page(path: Path) -> None:
    """Writes the page of ``poprisk`` and all its commands."""
    from poprisk.cli import app

    write_if_changed(path, command_page(typer.main.get_command(app), "poprisk"))


def command_page(root: Any, name: str) -> str:
    """Markdown for a command and the commands below it, whatever they are."""
    context = root.context_class(root, info_name=name)
    lines = ["# Command line", "", *_help(root)]
    commands = [(child, root.commands[child]) for child in root.commands if not root.commands[child].hidden]
    lines += ["| command | |", "|---|---|"]
    lines += [f"| [`{name} {child}`](#{name}-{child}) | {_first_sentence(each)} |" for child, each in commands]
    lines += ["", *_parameters(root, context)]
    for child, each in commands:
        lines += _section(each, child, context, 2)
    return "\n".join(lines).rstrip() + "\n"


def _section(command: Any, name: str, parent: Any, level: int) -> list[str]:
    context = command.context_class(command, info_name=name, parent=parent)
    usage = command.get_usage(context).partition(":")[2].split()
    lines = [f"{'#' * level} {context.command_path}", "", "```console", f"$ {' '.join(usage)}", "```", ""]
    lines += [*_help(command), *_parameters(command, context), *_paragraphs(command.epilog or "")]
    for child, each in getattr(command, "commands", {}).items():
        if not each.hidden:
            lines += _section(each, child, context, level + 1)
    return lines


def _help(command: Any) -> list[str]:
    return _paragraphs(inspect.cleandoc(command.help or ""))


def _first_sentence(command: Any) -> str:
    text = command.short_help or (command.help or "").split("\n\n")[0]
    return escaped(" ".join(text.split())).replace("|", "\\|")


def _paragraphs(text: str) -> list[str]:
    r"""Text as it stands; a paragraph after ``\b`` is not filled, and neither is one of command lines or indented."""
    lines = []
    for paragraph in re.split(r"\n\s*\n", text.split("\f", maxsplit=1)[0]):
        kept = paragraph.replace("\b\n", "").replace("\b", "")
        if not kept.strip():
            continue
        if kept != paragraph or re.match(r"\s*\$ | {2,}", kept):
            lines += ["```console", *inspect.cleandoc("\n" + kept).splitlines(), "```", ""]
        else:
            lines += [escaped(kept), ""]
    return lines


def _parameters(command: Any, context: Any) -> list[str]:
    records = [p.get_help_record(context) for p in command.params if not getattr(p, "hidden", False)]
    lines = []
    for names, explanation in filter(None, records):
        lines += [f"`{names}`", f": {escaped(' '.join(explanation.split())) or '—'}", ""]
    return lines


def escaped(text: str) -> str:
    r"""Plain text for Markdown; what stands between backticks is code already.

    >>> print(escaped("a*b, `c*d`"))
    a\*b, `c*d`
    """
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_\[\]<>])", r"\\\1", part) for part in parts)
