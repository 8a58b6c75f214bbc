"""Names of recipes, arms and tasks in tables and figures, and how gains are written."""

import math

from poprisk._core.statistics import Difference
from poprisk_lab.engine.arms import ARMS
from poprisk_lab.recipes.judging import Recipe
from poprisk_lab.recipes.stored_tasks import ANY, StoredTask

_ARM_WORDS = {
    "literal": "SNR gate, literal defaults",
    "half_open": "SNR gate relative to its mean",
    "relative": "SNR gate relative to its mean, an earlier form",
    "relative_3": "SNR gate relative to its mean, up to 3, an earlier form",
    "soft": "soft gate",
    "hard": "hard gate",
    "snr": "SNR gate, strength 1",
    "gate_schedule": "mean opening of the gate",
    "shuffled_gate": "shuffled openings of the gate",
    "random_mask": "random mask of equal density",
}
_MOMENT_WORDS = {
    "last": "last step",
    "error": "least error on the block",
    "loss": "least loss on the block",
    "kept": "KeepBest's choice",
    "half error": "least error on half of the block",
    "half loss": "least loss on half of the block",
}


def arm_words(arm: str) -> str:
    """The name of an arm.

    >>> arm_words("adamw_cosine"), arm_words("literal")
    ('AdamW, cosine decay', 'SNR gate, literal defaults')
    """
    return _ARM_WORDS.get(arm) or (ARMS[arm].label if arm in ARMS else arm)


def average_words(average: str) -> str:
    """The name of a mean of the weights.

    >>> average_words("tail 0.2"), average_words("ema 0.999")
    ('mean of the last 20%', 'exponential mean 0.999')
    """
    kind, _, number = average.partition(" ")
    if average == ANY:
        return "the mean that the block chooses"
    if kind == "tail":
        return f"mean of the last {100 * float(number):g}%"
    return f"exponential mean {number}" if kind == "ema" else "weights"


def recipe_words(recipe: Recipe) -> str:
    """A recipe in one line.

    >>> recipe_words(Recipe("adamw", "tail 0.2", "error"))
    'AdamW, mean of the last 20%, least error on the block'
    """
    return f"{arm_words(recipe.arm)}, {average_words(recipe.average)}, {_MOMENT_WORDS[recipe.moment]}"


def task_words(task: StoredTask | str) -> str:
    """The name of a task.

    >>> task_words("digits-40"), task_words("lorenz_noise0.1"), task_words("char_25_passes")
    ('digits, 40% wrong', 'Lorenz, noise 0.1', 'characters, 25 passes')
    """
    name = task if isinstance(task, str) else task.name
    first, _, rest = name.partition("-" if "-" in name else "_")
    noise = {"0": "clean", "clean": "clean"}.get(rest, f"{rest}% wrong")
    picture = rest.replace("_", ", ") if rest.endswith("clean") else f"{rest}, noisy"
    words = {
        "digits": f"digits, {noise}",
        "fashion": f"Fashion-MNIST, {noise}",
        "teacher": f"teacher, {noise}",
        "lorenz": f"Lorenz, {'clean' if rest == 'noise0' else rest.replace('noise', 'noise ')}",
        "inr": f"image, {picture}",
        "char": f"characters, {rest.replace('_', ' ')}",
        "cifar10": f"CIFAR-10N plain, {'worst' if rest == 'worse' else rest.replace('random', 'random ')}",
    }
    return words.get(first, name)


def gain_words(gain: Difference, digits: int = 1) -> str:
    """A gain with its interval.

    >>> gain_words(Difference(1.25, 0.5, 2.0, 0.95, 3)), gain_words(Difference(-3.0, None, None, 0.95, 1))
    ('+1.2 [+0.5, +2.0]', '−3.0')
    """
    value = _signed(gain.value, digits)
    if gain.low is None or gain.high is None:
        return value
    return f"{value} [{_signed(gain.low, digits)}, {_signed(gain.high, digits)}]"


def value_words(task: StoredTask, value: float) -> str:
    """A test metric: accuracies in percent, decibels, and errors with three digits.

    >>> value_words(StoredTask("t", "test accuracy", True, False, (), {}, {}), 0.7654)
    '76.5%'
    """
    if math.isnan(value):
        return "diverged"
    if task.unit == "points":
        return f"{100 * value:.1f}%"
    return f"{value:.2f} dB" if task.unit == "decibels" else f"{value:.3g}"


def _signed(value: float, digits: int) -> str:
    return f"{value:+.{digits}f}".replace("-", "−")
