"""benchmarks/image_completion.py: its commands are ones of today, its pictures show pixels where they are."""

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import load_benchmark

from fewshot.evaluation.plain_labels import NearestLabel
from fewshot.runners import meta_train
from fewshot.tasks.curves import Pixels
from fewshot.training.configuration import resolve


@pytest.fixture(scope="module")
def study():
    return load_benchmark("image_completion")


def test_every_command_is_accepted(study):
    for words in study.ROWS.values():
        config = resolve(meta_train.parse(["--dataset", study.DATA, *words.split()]))
        assert config.dataset == "glyph-completion" and config.seed == 0
    assert {*study.DRAWN} <= {*study.ROWS}


def test_a_picture_of_all_pixels_is_the_image(study):
    image = np.arange(20).reshape(1, 4, 5) * 12
    curves = Pixels(jnp.asarray(image, jnp.uint8), noise=0.0)
    task = study.seen(curves, 20)
    np.testing.assert_allclose(study.image(task.x_query, task.y_query, (4, 5)), image[0] / 255, atol=1e-6)
    np.testing.assert_allclose(study.picture(NearestLabel(2), task, (4, 5)).mean, image[0] / 255, atol=1e-6)
    few = study.seen(curves, 3)
    known = study.image(few.x_support, few.y_support, (4, 5))
    assert np.isfinite(known).sum() == 3
    np.testing.assert_allclose(known[np.isfinite(known)], image[0][np.isfinite(known)] / 255, atol=1e-6)
