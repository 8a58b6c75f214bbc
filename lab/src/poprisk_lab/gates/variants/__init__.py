r"""Variants of the gate: attempts at one that resists noise like the strict gate and is as fast as AdamW without noise.

Every rule has the form of :mod:`poprisk_lab.engine.peers`: ``direction(g, state, h, t) -> (u, new state)``. The hyper-
parameters ``h`` may be columns, with one row for each training. The *strict gate* is that of Algorithm 1, :math:`q =
\delta/(\delta + \lambda \hat s)` with :math:`\delta = (\hat m^2 - \alpha \hat s)_+` and α = λ = 1; *AdamW* is q = 1.
Each docstring defines the rule, says why it was expected to work, and names the limits in which it becomes one of them.
``docs/gates.md`` shows the results. Each family of rules is a module of this package.

Symbols: m, v, s as in Algorithm 1; hats are debiased. :math:`\kappa_t` is the variance of m̂ under white noise of unit
variance; :math:`a_t` is the threshold at which pure noise breaks even, :math:`\hat m^2 = a_t \hat s` on average. T is
the number of steps in a pass over the data, given by ``gate_warmup``; :math:`E = \lfloor (t-1)/T \rfloor` counts how
often the examples of this step have been used before. A state with one number for each training is repeated along its
row, because the callers keep arrays of one shape.

Rules that compare two halves of a batch take a gradient of twice the width: the mean gradient, followed by the second
half's share in it, :math:`g_B/2`. They do not change the second part.
"""

from poprisk_lab.engine.peers import Peer
from poprisk_lab.gates.variants.action import gated_momentum, kept_norm, root_gate
from poprisk_lab.gates.variants.halves import halves_agreement, halves_agreement_blocks, held_apart
from poprisk_lab.gates.variants.next_batch import (
    CALM,
    LONG,
    PASSES_OF_WORTH,
    agreement_after_first_pass,
    agreement_or_calm,
    agreement_over_blocks,
    fading_agreement,
    lagged_agreement,
    lagged_agreement_blocks,
    lagged_agreement_elements,
    latched_agreement,
    tolerant_agreement,
)
from poprisk_lab.gates.variants.over_time import SLOW, hysteresis, pass_agreement, sign_agreement, slow_evidence
from poprisk_lab.gates.variants.pooled import SAFE, pooled_blocks, pooled_whole, shrunk_blocks
from poprisk_lab.gates.variants.replay import (
    closing_with_replay,
    open_first_pass,
    replayed_alpha,
    replayed_alpha_falling,
    replayed_strength,
)
from poprisk_lab.gates.variants.shared import BLOCK, STEPS_OF_EVIDENCE, SURE, Direction, break_even, passes
from poprisk_lab.gates.variants.variance import halves_variance, successive_differences

_GATE = ("m", "v", "s")
_KNOBS = ("beta1", "beta2", "eps", "rho", "alpha", "strength")
_PASS = (*_KNOBS, "gate_warmup")
_GAIN = ("gain", "gain_square")

VARIANTS: dict[str, Peer] = {
    "replayed_alpha": Peer(_GATE, replayed_alpha, _PASS),
    "replayed_alpha_falling": Peer(_GATE, replayed_alpha_falling, _PASS),
    "open_first_pass": Peer(_GATE, open_first_pass, _PASS),
    "closing_with_replay": Peer(_GATE, closing_with_replay, _PASS),
    "replayed_strength": Peer(_GATE, replayed_strength, _PASS),
    "successive_differences": Peer((*_GATE, "last"), successive_differences, _KNOBS),
    "halves_variance": Peer(_GATE, halves_variance, _KNOBS),
    "slow_evidence": Peer((*_GATE, "slow"), slow_evidence, _KNOBS),
    "sign_agreement": Peer((*_GATE, "slow"), sign_agreement, _KNOBS),
    "pass_agreement": Peer((*_GATE, "total", "pass"), pass_agreement, _PASS),
    "pooled_blocks": Peer(_GATE, pooled_blocks, _KNOBS),
    "pooled_whole": Peer(_GATE, pooled_whole, _PASS),
    "shrunk_blocks": Peer(_GATE, shrunk_blocks, _KNOBS),
    "lagged_agreement": Peer((*_GATE, *_GAIN, "u"), lagged_agreement, _KNOBS),
    "lagged_agreement_blocks": Peer((*_GATE, *_GAIN, "u"), lagged_agreement_blocks, _KNOBS),
    "lagged_agreement_elements": Peer((*_GATE, *_GAIN, "u"), lagged_agreement_elements, _KNOBS),
    "agreement_over_blocks": Peer((*_GATE, *_GAIN, "u"), agreement_over_blocks, _KNOBS),
    "agreement_after_first_pass": Peer((*_GATE, *_GAIN, "u"), agreement_after_first_pass, _PASS),
    "fading_agreement": Peer((*_GATE, *_GAIN, "u"), fading_agreement, _PASS),
    "latched_agreement": Peer((*_GATE, *_GAIN, "u", "shut"), latched_agreement, _PASS),
    "tolerant_agreement": Peer((*_GATE, "gain", "own", "u"), tolerant_agreement, _KNOBS),
    "agreement_or_calm": Peer((*_GATE, "gain", "own", "u", "long"), agreement_or_calm, _KNOBS),
    "halves_agreement": Peer((*_GATE, *_GAIN), halves_agreement, _KNOBS),
    "halves_agreement_blocks": Peer((*_GATE, *_GAIN), halves_agreement_blocks, _KNOBS),
    "held_apart": Peer(("v", "m_a", "s_a", "m_b", "s_b"), held_apart, _KNOBS),
    "hysteresis": Peer((*_GATE, "open"), hysteresis, _KNOBS),
    "gated_momentum": Peer((*_GATE, "entered"), gated_momentum, _KNOBS),
    "kept_norm": Peer(_GATE, kept_norm, _KNOBS),
    "root_gate": Peer(_GATE, root_gate, _KNOBS),
}
"""Every rule of this module by its name."""

NEED_HALVES = ("halves_variance", "halves_agreement", "halves_agreement_blocks", "held_apart")
"""Those that take the gradient of a batch and of its second half."""

__all__ = [
    "BLOCK",
    "CALM",
    "Direction",
    "LONG",
    "NEED_HALVES",
    "PASSES_OF_WORTH",
    "SAFE",
    "SLOW",
    "STEPS_OF_EVIDENCE",
    "SURE",
    "VARIANTS",
    "agreement_after_first_pass",
    "agreement_or_calm",
    "agreement_over_blocks",
    "break_even",
    "closing_with_replay",
    "fading_agreement",
    "gated_momentum",
    "halves_agreement",
    "halves_agreement_blocks",
    "halves_variance",
    "held_apart",
    "hysteresis",
    "kept_norm",
    "lagged_agreement",
    "lagged_agreement_blocks",
    "lagged_agreement_elements",
    "latched_agreement",
    "open_first_pass",
    "pass_agreement",
    "passes",
    "pooled_blocks",
    "pooled_whole",
    "replayed_alpha",
    "replayed_alpha_falling",
    "replayed_strength",
    "root_gate",
    "shrunk_blocks",
    "sign_agreement",
    "slow_evidence",
    "successive_differences",
    "tolerant_agreement",
]
