"""The inner loop: inference for one task, one algorithm a file."""

from inference.inner.base import Code, InferenceKernel, Info, Mask, fit, fit_to_tolerance, run, settle
from inference.inner.cavi import cavi
from inference.inner.cvi import cvi
from inference.inner.exact import exact
from inference.inner.gibbs import gibbs
from inference.inner.gradient import gradient
from inference.inner.laplace import laplace

__all__ = [
    "Code",
    "InferenceKernel",
    "Info",
    "Mask",
    "cavi",
    "cvi",
    "exact",
    "fit",
    "fit_to_tolerance",
    "gibbs",
    "gradient",
    "laplace",
    "run",
    "settle",
]
