r"""Which training labels are wrong: an audit of a recorded run, in one table.

>>> import torch
>>> from functools import partial
>>> from poprisk.audit import audit
>>> from poprisk.problems import Problem
>>> from poprisk.runs import train
>>> inputs, labels = torch.eye(3).repeat(12, 1), torch.arange(3).repeat(12)
>>> labels[4] = 2  # really a 1
>>> problem = Problem(torch.nn.Linear, "cross_entropy", inputs, labels,
...                   arguments={"in_features": 3, "out_features": 3})
>>> run = train(problem, partial(torch.optim.SGD, lr=1.0), 40, progress=False)
>>> table = audit(run, progress=False)
>>> int(table.order()[0]), int(table["suggested_label"][4]), table.cleaned_targets([4])[4]
(4, 1, tensor(1))
"""

from poprisk.audit.run_audit import audit as audit
from poprisk.audit.table import DESCRIPTIONS as DESCRIPTIONS
from poprisk.audit.table import AuditTable as AuditTable
