"""See: analyze a recorded run, and write the report that a person reads.

>>> import tempfile, torch
>>> from poprisk import Problem, analyze, train, write_report
>>> problem = Problem(torch.nn.Linear, "squared", torch.eye(4).repeat(4, 1), torch.ones(16, 1),
...                   arguments={"in_features": 4, "out_features": 1})
>>> run = train(problem, lambda p: torch.optim.SGD(p, lr=0.2), steps=9, progress=False)
>>> analysis = analyze(run, progress=False)
>>> with tempfile.TemporaryDirectory() as folder:
...     write_report(analysis, f"{folder}/report.html").name
'report.html'
"""

from poprisk._core.arguments import guard
from poprisk.report._analysis.analyze import Analysis, analyze
from poprisk.report._analysis.compare import Comparison, compare_runs
from poprisk.report._analysis.operators import CleanTargets
from poprisk.report._drawing.comparison import write_comparison
from poprisk.report._drawing.page import write_report
from poprisk.report._explore import explore

# isort: split
# For the rooms above: not public, and not in __all__.
from poprisk.report._analysis.analyze import WITHOUT_PROBLEM, can_rebuild
from poprisk.report._analysis.curves import put_weights, scores_on_test
from poprisk.report._analysis.kept import KeptAnalysis
from poprisk.report._drawing.commands import report_command, train_command
from poprisk.report._drawing.comparison import compared, comparison_json, comparison_lines
from poprisk.report._drawing.summary import analysis_json, finite, headline, summary_lines
from poprisk.report._drawing.templates import require_template
from poprisk.report._drawing.wording import as_command, size_of

__all__ = [
    "Analysis", "CleanTargets", "Comparison", "analyze", "compare_runs", "explore", "write_comparison",
    "write_report",
]  # fmt: skip
guard(globals(), ["analyze", "write_report"])
