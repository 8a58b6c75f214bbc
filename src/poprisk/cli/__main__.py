"""``python -m poprisk.cli``."""

from poprisk.cli import main

if __name__ == "__main__":
    main()
