"""README as the description of a release: relative links become those of the released version in the repository."""

import re
from pathlib import Path

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURES = (".png", ".svg", ".gif")


class CustomMetadataHook(MetadataHookInterface):
    """Fills in ``readme`` when an archive or a wheel is built."""

    def update(self, metadata):
        """An index shows the description alone, where relative links would be dead."""
        source = self.config["source"]
        version = metadata["version"]

        def absolute(match):
            opening, link = match.groups()
            kind = "raw" if link.endswith(_PICTURES) else "blob"
            return f"{opening}{source}/{kind}/v{version}/{link}"

        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        links = re.sub(r"(]\()(?![a-z]+:|#)([^)\s]+)", absolute, text)
        links = re.sub(r'((?:src|href)=")(?![a-z]+:|#)([^"]+)', absolute, links)
        metadata["readme"] = {"content-type": "text/markdown", "text": links}
