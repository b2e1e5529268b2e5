"""check_learner: learners with one error each, and the name of the promise that each breaks."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from fewshot import check_learner
from fewshot.inference.inner.base import Code, Mask
from fewshot.learners import MAML, FeatureTransfer, NearestMean, NearestNeighbour, Prototypical, TrainsOn
from fewshot.learners.base import categorical
from fewshot.models import MLP, RBF, Conv4, Identity
from fewshot.models.conformance import ConformanceError

SHAPE = (4, 4, 1)


class Whole(Prototypical):
    """A learner without errors, and with the helpers of those below."""

    def __init__(self, way=3):
        super().__init__(MLP(SHAPE, rngs=nnx.Rngs(0), width=8), way=way)


class OfTooFew(Whole):
    def predict(self, key, state, query):
        return categorical(super().predict(key, state, query).probabilities[:, :2])


class OfTooMuch(Whole):
    def predict(self, key, state, query):
        return categorical(1.1 * super().predict(key, state, query).probabilities)


class Negative(Whole):
    def predict(self, key, state, query):
        return categorical(super().predict(key, state, query).probabilities * 2 - 1 / 3)


class Failing(Whole):
    def fit(self, key, support, y, classes, mask=None):
        return super().fit(key, support, y, classes, mask)[0], jnp.asarray(Code.NON_FINITE)


class Undecided(Whole):
    """Divides by one less than the number of labelled images of a class."""

    def fit(self, key, support, y, classes, mask=None):
        state, code = super().fit(key, support, y, classes, mask)
        counts = jnp.zeros(classes).at[y].add(1.0)[:, None]
        return state._replace(means=state.means * counts / (counts - 1)), code


class Blind(Whole):
    def logits(self, state, query):
        return super().logits(state, jnp.ones_like(query))


class Stateless(Whole):
    def fit(self, key, support, y, classes, mask=None):
        return super().fit(key, support, y, classes, mask)[0]


class Bare(Whole):
    def predict(self, key, state, query):
        return super().predict(key, state, query).probabilities


class Deaf(Whole):
    def fit(self, key, support, y, classes, mask=None):
        return super().fit(key, support, jnp.arange(len(y)) % 3, classes, mask)


class Unmasked(Whole):
    def fit(self, key, support, y, classes, mask=None):
        state, code = super().fit(key, support, y, classes)
        return state._replace(present=state.present if mask is None else mask.classes), code


class Haunted(Whole):
    """Gives absent classes a share."""

    def fit(self, key, support, y, classes, mask=None):
        return super().fit(key, support, y, classes, mask and Mask(mask.points, jnp.ones(classes, bool)))


class Centred(Whole):
    def embed(self, images):
        found = super().embed(images)
        return found - found.mean(0)


class Together(Whole):
    def logits(self, state, query):
        return super().logits(state, query - query.mean(0))


class Biased(Whole):
    def logits(self, state, query):
        found = super().logits(state, query)
        return found + 0.1 * jnp.arange(found.shape[1])


class Weak(Whole):
    def __init__(self):
        super().__init__()
        self.scale = nnx.Param(jnp.asarray(2.0))


class Unnamed(Whole):
    def loss(self, keys, tasks, for_each):
        return super().loss(keys, tasks, for_each)._replace(diagnostics={"accuracy": jnp.zeros(())})


class Steep(Whole):
    def loss(self, keys, tasks, for_each):
        found = super().loss(keys, tasks, for_each)
        return found._replace(objective=found.objective - jnp.sqrt(0.0 * found.objective))


class Flat(Whole):
    def loss(self, keys, tasks, for_each):
        found = super().loss(keys, tasks, for_each)
        return found._replace(objective=jax.lax.stop_gradient(found.objective))


class Dead(Whole):
    def __init__(self):
        super().__init__()
        self.unused = nnx.Param(jnp.ones(3, jnp.float32))


class Backwards(Whole):
    def loss(self, keys, tasks, for_each):
        found = super().loss(keys, tasks, for_each)
        return found._replace(objective=-found.objective)


class OfOtherLabels(Whole):
    def loss(self, keys, tasks, for_each):
        return super().loss(keys, tasks._replace(y_query=(tasks.y_query + 1) % 3), for_each)


BROKEN = {
    OfTooFew: r"probabilities: expected the shape \(4, 3\), got \(4, 2\)",
    OfTooMuch: "the sum of a query's probabilities: expected a difference of at most 1e-05",
    Negative: "probabilities: expected none below 0, got -0",
    Failing: "result code: expected OK, got NON_FINITE",
    Undecided: "result code: expected OK, got NON_FINITE",
    Blind: "probabilities of queries of two classes: expected other numbers, got a difference of 0",
    Stateless: "answers: expected an answer, got ",
    Bare: "answers: expected an answer, got AttributeError",
    Deaf: "after every label was moved to the next class: expected other numbers",
    Unmasked: "probabilities of a padded task",
    Haunted: "probabilities of classes that are absent",
    Centred: "the embedding of an image among other images",
    Together: "probabilities of a query beside other queries",
    Biased: "probabilities of permuted labels, put back",
    Weak: "parameters: expected arrays of a dtype, got a Python number at .*scale",
    Unnamed: r"diagnostics: expected those of the class \(none\), got accuracy",
    Steep: "the loss and its gradient: expected finite numbers",
    Flat: "the gradient of the loss: expected one, got zeros alone",
    Dead: "the gradient in .*unused.*: expected one, got zeros alone",
    Backwards: "labels after 15 steps down the loss: expected more than -0.[0-9]+, as before, got -",
    OfOtherLabels: "labels after 15 steps down the loss: expected more than",
}


@pytest.mark.long
@pytest.mark.parametrize("broken, reason", BROKEN.items(), ids=[one.__name__ for one in BROKEN])
def test_an_error_is_named(broken, reason):
    with pytest.raises(ConformanceError, match=reason) as error:
        check_learner(broken())
    assert "\n" not in str(error.value)


@pytest.mark.long
def test_a_learner_without_errors_passes_every_check():
    assert check_learner(Whole()) == [
        "answers",
        "answers unlike numbers of images",
        "tells queries apart",
        "is fitted to the labels",
        "has parameters of a dtype",
        "embeds each image alone",
        "ignores padding",
        "answers each query alone",
        "ignores absent classes",
        "knows no order of classes",
        "has a loss",
        "learns every parameter",
        "learns to answer",
    ]


@pytest.mark.long
def test_checks_are_those_of_the_traits():
    learner = MAML(MLP(SHAPE, rngs=nnx.Rngs(0), width=8), way=5, rngs=nnx.Rngs(1))
    found = check_learner(learner)
    assert "knows no order of classes" in found and not {"ignores padding", "ignores absent classes"} & {*found}
    assert NearestMean.traits.trains_on is TrainsOn.NOTHING
    assert "has a loss" not in check_learner(NearestMean(MLP(SHAPE, rngs=nnx.Rngs(0), width=8)))
    assert "knows no order of classes" not in check_learner(Biased(), symmetric=False)


class Saturated(Prototypical):
    """Right answers have no loss that single precision holds, and no gradient."""

    def __init__(self):
        super().__init__(Identity(SHAPE), way=3)
        self.scale = nnx.Param(jnp.full((), 1e3, jnp.float32))

    def features(self, images, train):
        return self.scale * images.reshape(*images.shape[:2], -1) / 255


@pytest.mark.long
def test_learners_without_errors_raise_no_alarm():
    """Trained on two classes, with answers of 0 and 1 alone, certain of all that they see, or with batch norms."""
    of_two = FeatureTransfer(MLP(SHAPE, rngs=nnx.Rngs(0), width=8), classes=2, rngs=nnx.Rngs(1))
    of_statistics = Prototypical(Conv4((16, 16, 1), rngs=nnx.Rngs(0), width=4), way=3)
    for learner in (Whole(way=2), of_two, NearestNeighbour(Identity((1, 1, 16))), Saturated(), of_statistics):
        assert "answers" in check_learner(learner)


def test_what_is_no_learner_of_classes_is_refused():
    with pytest.raises(TypeError, match="expected a Learner of labels that are classes, got RBF"):
        check_learner(RBF())
