from __future__ import annotations

import numpy as np

from shiftmend.inputs.digits import enlarged_digits, load_digits


def test_the_digits_are_scikit_learns() -> None:
    from sklearn import datasets

    raw = datasets.load_digits()
    images, labels = load_digits()
    np.testing.assert_array_equal(images[:, 0].double().numpy(), raw.images / 16)
    assert labels.tolist() == raw.target.tolist()


def test_enlarged_digits_are_upright_and_in_their_place() -> None:
    images, labels = load_digits()
    ink = images[:, 0].double().numpy()
    small = enlarged_digits(8)  # at its own size an image has only its faint grey taken away
    np.testing.assert_array_equal(small.images[:, 0].numpy(), (np.where(ink > 0.3, ink, 0) * 255).astype(np.uint8))
    assert small.labels is not None
    assert small.labels.tolist() == labels.tolist()
    large = enlarged_digits()
    assert large.images.shape == (1797, 1, 28, 28)
    assert large.images[large.images > 0].min() == 76  # 0.3 of 255 is 76.5
    blocks = large.images[:, 0, :, :].double().reshape(1797, 4, 7, 4, 7).mean((2, 4)) / 255
    means = ink.reshape(1797, 4, 2, 4, 2).mean((2, 4))
    assert np.corrcoef(blocks.numpy().ravel(), means.ravel())[0, 1] > 0.98  # upright, and in its place
