"""The table of every inference against NUTS: no KL is negative, Gibbs agrees, block sites are at least as close."""

import pytest
from conftest import load_benchmark

from fewshot.inference.inner import Code


@pytest.fixture(scope="module")
def posteriors():
    return load_benchmark("posteriors")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["softmax", "logistic-softmax", "one-vs-each"])
def test_no_inference_is_closer_than_exact(posteriors, name):
    effort = posteriors.QUICK._replace(annealing=(256, 600), nodes=2**14)
    rows, remarks = posteriors.compare(0, name, posteriors.random_task(0, 3, 4), effort)
    print(posteriors.markdown(rows), *remarks, sep="\n")
    fits = {row["method"]: row for row in rows if "bound" in row}
    for row in fits.values():
        assert row["code"] == Code.OK
        assert row["kl"] > -4 * row["kl_error"]
    error = 4 * (fits["cvi"]["bound_error"] + fits["cvi, block"]["bound_error"])
    assert fits["cvi, block"]["bound"] > fits["cvi"]["bound"] - error
    assert not any("ABOVE" in remark for remark in remarks)
