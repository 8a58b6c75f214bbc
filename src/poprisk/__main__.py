"""``python -m poprisk`` is the command ``poprisk``."""

from poprisk.cli import main

main()
