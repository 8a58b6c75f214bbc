"""The training behind the stored recipes, at a size of seconds, on images made by code."""

import numpy as np
import torch

from poprisk_lab.recipes.cifar_run import TAILS, CifarRun, augmented, run


def test_a_small_training_has_a_column_for_the_weights_and_every_mean(tmp_path):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 48)
    np.savez(
        tmp_path / "cifar10.npz",
        train_images=rng.integers(0, 255, (48, 32, 32, 3), dtype=np.uint8),
        train_labels=labels,
        test_images=rng.integers(0, 255, (8, 32, 32, 3), dtype=np.uint8),
        test_labels=rng.integers(0, 10, 8),
    )
    names = ("clean_label", "aggre_label", "random_label1", "random_label2", "random_label3", "worse_label")
    np.savez(tmp_path / "cifar10n_labels.npz", **dict.fromkeys(names, labels))
    config = CifarRun(size=48, batch=16, epochs=1, evaluations=1, share=0.25, schedule="cosine")
    found = run(config, str(tmp_path), "cpu")
    assert found["steps"] == [2]
    assert found["held"] == 12
    for name in ("held_loss", "held_accuracy", "half_held_loss", "half_held_accuracy", "test_loss", "test_accuracy"):
        assert np.isfinite(found[name]).all()
        assert np.shape(found[name]) == (1, 1 + len(TAILS))
    assert 0 <= np.min(found["test_accuracy"]) <= np.max(found["test_accuracy"]) <= 1


def test_augmented_images_are_shifted_or_mirrored_ones():
    images = torch.arange(1, 2 * 3 * 32 * 32 + 1, dtype=torch.float32).reshape(2, 3, 32, 32)
    seen = augmented(images, torch.Generator().manual_seed(0))
    assert seen.shape == images.shape
    for before, after in zip(images, seen, strict=True):
        padded = torch.nn.functional.pad(torch.stack([before, before.flip(2)]), (4, 4, 4, 4))
        places = [(dy, dx) for dy in range(9) for dx in range(9)]
        assert any(torch.equal(after, each[:, dy : dy + 32, dx : dx + 32]) for each in padded for dy, dx in places)
