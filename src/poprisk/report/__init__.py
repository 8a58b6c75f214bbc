"""See: analyze a recorded run and write the report a person reads. Draws what the other rooms compute."""

from poprisk.report._analysis import Analysis, analyze

# isort: split
# For the rooms above: not public, and not in __all__.
from poprisk.report._analysis import PARTS
from poprisk.report._analysis_json import analysis_json, finite
from poprisk.report._audit import audit_json, audit_lines
from poprisk.report._explorable import builtin_kernel, kernel_from_file
from poprisk.report._explore import explore_page
from poprisk.report._kept_analysis import KeptAnalysis
from poprisk.report._page import report_command, require_template, run_report
from poprisk.report._sections import summary_lines
from poprisk.report._window import CleanTargets

__all__ = [
    "Analysis",
    "analyze",
]
