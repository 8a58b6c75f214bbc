"""What this project adds to Sphinx: generated pages, names known under several addresses, a completeness check."""

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.domains.python import PythonDomain
from sphinx.errors import ExtensionError

from command_page import write_command_page
from offline import pages_that_fetch
from outside_pages import adapt_links, with_optional_pages, with_other_pages, write_outside_pages
from public_names import aliases, exists, known_as, missing, only_one, public_targets, rooms
from reference_pages import write_reference


def write_pages(app: Sphinx) -> None:
    """Everything that is made from the code or lies outside of this folder, before Sphinx looks for pages."""
    source = Path(app.srcdir)
    found = rooms()
    write_reference(source / "reference", found)
    write_command_page(source / "reference" / "command_line.md")
    write_outside_pages(source / "pages", source)
    app.config.poprisk_aliases = aliases(found)
    app.config.poprisk_targets = sorted(public_targets(found))


def read_page(app: Sphinx, page: str, content: list[str]) -> None:
    """Links of Markdown pages lead to pages of this site, also where they point out of this folder."""
    path = Path(app.env.doc2path(page))
    if path.suffix == ".md" and path.parent == Path(app.srcdir):
        text = with_optional_pages(with_other_pages(content[0], path.parent), path.parent)
        content[0] = adapt_links(text, path, path.parent)


def keep_whole(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Napoleon takes "Whose risk: …" for the type of an attribute, unless another line, here a comment, is first."""
    if what in {"attribute", "data", "property"}:
        lines[:0] = ["..", ""]


def readable_signature(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """A dataclass's ``<factory>`` is no Python, and Sphinx would take the signature apart at its commas."""
    return (signature.replace("<factory>", "...") if signature else signature), returns


def resolve_alias(app: Sphinx, env: Any, node: Any, contnode: nodes.Element) -> nodes.Element | None:
    """``poprisk.train`` and ``poprisk.runs._training.train`` are ``poprisk.runs.train``, and so are their members.

    What exists but is nobody's to import is shown without a link; what does not exist is left unresolved, an error.
    """
    if node.get("refdomain") != "py":
        return None
    domain, target, speaker = env.get_domain("py"), node.get("reftarget", ""), node.get("py:module") or ""
    names = [target, f"{speaker}.{target}"]
    if node["reftype"] == "mod" and exists(target):  # the room's page has a section for each module
        known = [".".join(target.split(".")[:2])]
    else:
        known = [place for name in names for place in known_as(app.config.poprisk_aliases, name)]
        known += only_one(target, domain.objects)
    for place in known:
        if place in domain.objects:
            return domain.resolve_xref(env, node["refdoc"], app.builder, node["reftype"], place, node, contnode)
    return contnode if any(exists(name) for name in names) else None


def check_complete(app: Sphinx, env: Any) -> list[str]:
    """Fails the build when a public name has no entry."""
    domain: PythonDomain = env.get_domain("py")
    if absent := missing(app.config.poprisk_targets, domain.objects):
        raise ExtensionError(f"public names that the reference does not explain: {', '.join(absent)}")
    return []


def check_offline(app: Sphinx, exception: Exception | None) -> None:
    """Fails the build when a page needs a network."""
    if exception is None and (pages := pages_that_fetch(Path(app.outdir))):
        raise ExtensionError(f"pages that need a network: {', '.join(pages)}")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("poprisk_aliases", {}, "")
    app.add_config_value("poprisk_targets", [], "")
    app.connect("builder-inited", write_pages, priority=100)
    app.connect("source-read", read_page)
    app.connect("autodoc-process-docstring", keep_whole, priority=400)  # before Napoleon's 500
    app.connect("autodoc-process-signature", readable_signature)
    app.connect("missing-reference", resolve_alias)
    app.connect("env-updated", check_complete)
    app.connect("build-finished", check_offline)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
