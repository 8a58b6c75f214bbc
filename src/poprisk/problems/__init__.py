"""What is trained: problems, shipped data, and ways to spoil it on purpose."""

from poprisk.problems.corruption import ReplacedLabels as ReplacedLabels
from poprisk.problems.corruption import replace_labels as replace_labels
from poprisk.problems.digits import Split as Split
from poprisk.problems.digits import digits_split as digits_split
from poprisk.problems.problem import Problem as Problem
