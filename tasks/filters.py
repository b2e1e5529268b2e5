"""Blurs and changes of size as kernels and matrices of constants, made with NumPy from the image's size alone.

A separable filter of an image X [H, W] is R X S^T with a matrix [H, H] for the rows and one [W, W] for the columns.
Letters: n pixels of one side before, m after, Z zoom factors.
"""

import math

import numpy as np
from jaxtyping import Float

Matrix = Float[np.ndarray, "m n"]


def disc_kernel(radius: float, blur: float) -> Float[np.ndarray, "k k"]:
    """Uniform disc of whole pixels (x^2 + y^2 <= radius^2), its edge softened by a small Gaussian of s.d. `blur`.

    The grid has 17 pixels a side (2 radius + 1 from radius 9 on), the Gaussian 3 taps (5). The disc is mirrored at the
    rim of its grid, as the published one is, so a disc that touches the rim weighs a little more than 1.
    """
    reach, taps = (8, 1) if radius <= 8 else (math.ceil(radius), 2)
    at = np.arange(-reach, reach + 1)
    disc = (at**2 + at[:, None] ** 2 <= radius**2).astype(np.float64)
    softened = np.pad(disc / disc.sum(), taps, mode="reflect")
    weights = np.exp(-0.5 * (np.arange(-taps, taps + 1) / blur) ** 2)
    for axis in (0, 1):
        softened = np.apply_along_axis(np.convolve, axis, softened, weights / weights.sum(), "valid")
    return softened.astype(np.float32)


def gaussian_matrix(n: int, sigma: float) -> Float[np.ndarray, "n n"]:
    """Gaussian blur of one side, cut off at 4 sigma, with the border repeated."""
    reach = int(4 * sigma + 0.5)
    offsets = np.arange(-reach, reach + 1)
    weights = np.exp(-0.5 * (offsets / sigma) ** 2)
    matrix = np.zeros((n, n))
    pixels = np.arange(n)
    for offset, weight in zip(offsets, weights / weights.sum(), strict=True):
        np.add.at(matrix, (pixels, np.clip(pixels + offset, 0, n - 1)), weight)
    return matrix.astype(np.float32)


def zoom_matrix(n: int, factor: float) -> Float[np.ndarray, "n n"]:
    """The middle ceil(n / factor) pixels enlarged by `factor`, linear between them, of which the middle n are kept."""
    window = math.ceil(n / factor)
    enlarged = round(window * factor)
    at = (np.arange(n) + (enlarged - n) // 2) * (window - 1) / max(enlarged - 1, 1)
    first = np.minimum(at.astype(int), max(window - 2, 0))
    matrix = np.zeros((n, n))
    rows, left = np.arange(n), (n - window) // 2 + first
    matrix[rows, left] = 1 - (at - first)
    matrix[rows, np.minimum(left + 1, n - 1)] += at - first
    return matrix.astype(np.float32)


def box_matrix(n: int, m: int) -> Matrix:
    """From n pixels to m: the mean of the old pixels whose centres lie in the new one, or the nearest if none does."""
    ratio = n / m
    distance = np.arange(n) + 0.5 - (np.arange(m)[:, None] + 0.5) * ratio
    reach = 0.5 * max(ratio, 1.0)
    inside = (distance > -reach) & (distance <= reach)
    return (inside / inside.sum(axis=1, keepdims=True)).astype(np.float32)
