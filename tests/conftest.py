"""Everything is in suite.py, which the lab shares."""

from suite import *  # noqa: F403
from suite import _isolated  # noqa: F401
