"""One section of a report."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Section:
    """A section of the page."""

    key: str
    title: str
    lead: str = ""
    """What the section shows, in a few sentences."""
    charts: tuple[str, ...] = ()
    """The charts, as HTML."""
    missing: str = ""
    """Why there is nothing to show, and how to get it."""
    notes: tuple[str, ...] = ()
    wide: bool = False
    """Whether the section takes the whole width of the page."""
    meaning: str = ""
    """What the picture means for the reader, in one sentence."""
