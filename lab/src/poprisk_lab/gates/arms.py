"""The variants as arms of the engine: what each is called, which idea it comes from, why it was expected to work."""

from dataclasses import dataclass

from poprisk_lab.engine.arms import ARMS, Arm
from poprisk_lab.engine.peers import PEERS
from poprisk_lab.gates.variants import NEED_HALVES, VARIANTS


@dataclass(frozen=True)
class Variant:
    """One idea.

    Attributes:
        arm: Its key.
        label: Its words in tables and figures.
        root: The idea it comes from.
        expected: Why it should be noise-proof and quick, in a sentence.
    """

    arm: str
    label: str
    root: str
    expected: str

    @property
    def needs_halves(self) -> bool:
        """Whether it compares the two halves of a batch."""
        return self.arm in NEED_HALVES


REPLAY, VARIANCE, POOLING = "replay", "another variance", "pooled significance"
TIME, APART, ACTION = "agreement over time", "held-apart examples", "what the gate acts on"

IDEAS: tuple[Variant, ...] = (
    Variant(
        "replayed_alpha",
        "α rising with passes",
        REPLAY,
        "fresh examples need only break-even; each replay adds as much to what leave-one-out must take away",
    ),
    Variant(
        "replayed_alpha_falling",
        "α = 1, then b/n",
        REPLAY,
        "the paper's two regimes in turn: 1 for fresh batches, b/n for a finite data set",
    ),
    Variant(
        "open_first_pass",
        "open for the first pass",
        REPLAY,
        "nothing can be memorized that is seen once, so the first pass needs no gate",
    ),
    Variant(
        "closing_with_replay",
        "closing with replay",
        REPLAY,
        "the share of replayed gradients is the share for which independence fails",
    ),
    Variant(
        "replayed_strength",
        "SNR, strength = passes",
        REPLAY,
        "the noise that can have been learnt from an example grows with its uses",
    ),
    Variant(
        "successive_differences",
        "noise by differences",
        VARIANCE,
        "a difference of neighbouring gradients does not take drift for noise",
    ),
    Variant(
        "halves_variance",
        "noise by halves",
        VARIANCE,
        "the halves of one batch give the noise of its mean exactly, without time",
    ),
    Variant(
        "slow_evidence",
        "slow evidence",
        TIME,
        "the strict test's level on ten times the memory passes signals of a third of the strength",
    ),
    Variant(
        "sign_agreement",
        "sign of a slow mean",
        TIME,
        "signal keeps its sign for long, noise does not",
    ),
    Variant(
        "pass_agreement",
        "agreement with last pass",
        TIME,
        "over a whole pass sampling noise cancels; signal comes back the same",
    ),
    Variant(
        "hysteresis",
        "hysteresis",
        TIME,
        "a signal that was proven once at α = 1 need only stay above break-even",
    ),
    Variant(
        "pooled_blocks",
        "blocks open, elements shape",
        POOLING,
        "64 weights together tell signal from noise at a far smaller ratio than one",
    ),
    Variant(
        "shrunk_blocks",
        "empirical Bayes in blocks",
        POOLING,
        "the signal's variance is estimated in blocks, each element shrunk by its own noise",
    ),
    Variant(
        "pooled_whole",
        "whole network opens",
        POOLING,
        "the share of a step that leave-one-out leaves is 0 in memorization, near 1 in learning",
    ),
    Variant(
        "lagged_agreement",
        "next batch agrees",
        APART,
        "while new batches gain from the step decided before them, an ungated step pays",
    ),
    Variant(
        "lagged_agreement_blocks",
        "next batch agrees, by block",
        APART,
        "what memorizes and what learns may be different units",
    ),
    Variant(
        "lagged_agreement_elements",
        "next batch agrees, by weight",
        APART,
        "asks of each weight whether its steps paid on the batches after them, not whether its mean is large",
    ),
    Variant(
        "agreement_over_blocks",
        "next batch agrees, else blocks",
        APART,
        "once the whole step no longer pays, blocks find the parts that do",
    ),
    Variant(
        "agreement_after_first_pass",
        "fresh, then next batch agrees",
        APART,
        "fresh gradients need no proof, replayed ones earn it block by block",
    ),
    Variant(
        "fading_agreement",
        "fresh, then fading agreement",
        APART,
        "examples that have shaped the weights are worse and worse witnesses",
    ),
    Variant(
        "latched_agreement",
        "fresh, then until disagreed",
        APART,
        "a gate that may open again lets noise in little by little",
    ),
    Variant(
        "tolerant_agreement",
        "next batch nearly agrees",
        APART,
        "clean training goes on improving for a while after the leave-one-out rate has turned, noisy training does not",
    ),
    Variant(
        "agreement_or_calm",
        "next batch agrees, or calm",
        APART,
        "memorizing right labels calms the gradients, memorizing wrong ones makes them grow",
    ),
    Variant(
        "halves_agreement",
        "halves agree",
        APART,
        "the mean product of the halves' gradients is the leave-one-out rate of an AdamW step",
    ),
    Variant(
        "halves_agreement_blocks",
        "halves agree, by block",
        APART,
        "what memorizes and what learns may be different units",
    ),
    Variant(
        "held_apart",
        "each half gates the other",
        APART,
        "a gate chosen on other examples is not optimistic and can do with break-even",
    ),
    Variant(
        "gated_momentum",
        "gated momentum",
        ACTION,
        "what was let in once acts on through the momentum while the gate is closed again",
    ),
    Variant(
        "kept_norm",
        "AdamW's step length",
        ACTION,
        "the slowness is the length of the step: the gate chooses the direction only",
    ),
    Variant(
        "root_gate",
        "fourth root of SNR 30",
        ACTION,
        "the order of coordinates protects, the root gives the length back",
    ),
    Variant(
        "strict_cosine",
        "strict gate, cosine decay",
        ACTION,
        "decay stops late memorization, so that a higher rate can be used before",
    ),
)
"""Every variant, in the order of a table."""


def _arms() -> dict[str, Arm]:
    arms = {idea.arm: Arm(idea.arm, idea.label, idea.arm) for idea in IDEAS if idea.arm in VARIANTS}
    return arms | {"strict_cosine": Arm("strict_cosine", "strict gate, cosine decay", "soft", cosine=True)}


def register() -> None:
    """Add the variants to the engine's arms and rules; what is there already is left as it is."""
    for name, peer in VARIANTS.items():
        PEERS.setdefault(name, peer)
    for name, arm in _arms().items():
        ARMS.setdefault(name, arm)


register()
