"""What is kept, over many tasks whose probabilities are calibrated: labels are drawn from these."""

import numpy as np
import pytest

from fewshot.evaluation.selection import kept_at


@pytest.mark.parametrize("wanted", [0.8, 0.95])
def test_tasks_that_leave_answers_out_reach_the_accuracy_and_the_others_exceed_it(wanted):
    rng = np.random.default_rng(0)
    p = np.concatenate([rng.dirichlet(np.full(5, spread), (800, 50)) for spread in (0.02, 0.1, 0.3)])
    labels = (rng.random((*p.shape[:2], 1)) > np.cumsum(p, axis=-1)).sum(-1)
    right, kept = p.argmax(-1) == labels, np.stack([kept_at(task, wanted) for task in p])
    whole = kept.all(1)
    assert 200 < whole.sum() < len(p) - 200
    assert right[~whole][kept[~whole]].mean() == pytest.approx(wanted, abs=0.008)
    assert right[whole].mean() > wanted + 0.01
    # The expected accuracy that a call is told is right for either kind.
    for tasks in (whole, ~whole):
        expected = p.max(-1)[tasks][kept[tasks]].mean()
        assert right[tasks][kept[tasks]].mean() == pytest.approx(expected, abs=0.006)
