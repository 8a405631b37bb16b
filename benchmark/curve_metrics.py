# SPDX-License-Identifier: Apache-2.0
"""Numbers about many pictures, and how sure they are."""

import math

import numpy as np
import torch
import torch.nn.functional as F

FILTERS, FILTER_SIDE = 24, 5
PYRAMID = (1, 2, 4, 8)  # picture sides are divided by these
CELLS = 3  # a side, that responses are averaged over
COMPONENTS = 64
RESAMPLES = 100
SURE = 0.95


class FeatureSpace:
    """A fixed space to compare pictures in: what random filters see, in principal components.

    `FILTERS` zero-mean filters of `FILTER_SIDE` pixels over three channels, drawn once from a seed,
    at four sizes of the picture; absolute responses averaged over `CELLS` x `CELLS` cells, and the
    cells' mean colours beside them. Of these the first `COMPONENTS` principal components of the
    reference pictures, each scaled to variance 1 there.
    """

    def __init__(self, reference_batches, device: torch.device):
        weight = torch.randn(
            FILTERS, 3, FILTER_SIDE, FILTER_SIDE, generator=torch.Generator().manual_seed(0)
        )
        weight = weight - weight.mean(dim=(1, 2, 3), keepdim=True)
        self._weight = F.normalize(weight.flatten(1), dim=1).view_as(weight).to(device)
        raw = torch.cat([self._raw(picture) for picture in reference_batches]).double()
        self._mean = raw.mean(0)
        _, size, axes = torch.linalg.svd(raw - self._mean, full_matrices=False)
        deviation = size[:COMPONENTS] / math.sqrt(len(raw) - 1)
        self._axes = (axes[:COMPONENTS] / deviation[:, None]).T
        self.reference = self._project(raw).cpu().numpy()

    def __call__(self, picture_NCHW: torch.Tensor) -> np.ndarray:
        """[N, COMPONENTS]."""
        return self._project(self._raw(picture_NCHW).double()).cpu().numpy()

    def _raw(self, picture_NCHW: torch.Tensor) -> torch.Tensor:
        parts = [F.adaptive_avg_pool2d(picture_NCHW, CELLS).flatten(1)]
        for factor in PYRAMID:
            small = F.avg_pool2d(picture_NCHW, factor) if factor > 1 else picture_NCHW
            response = F.conv2d(small, self._weight, padding=FILTER_SIDE // 2).abs()
            parts.append(F.adaptive_avg_pool2d(response, CELLS).flatten(1))
        return torch.cat(parts, dim=1)

    def _project(self, raw: torch.Tensor) -> torch.Tensor:
        return (raw - self._mean) @ self._axes


class FrechetDistance:
    """Heusel et al., arXiv:1706.08500, in a `FeatureSpace` instead of Inception's.

    |m1 - m2|^2 + tr(C1 + C2 - 2 (C1 C2)^(1/2)). The reference's part is computed once.
    """

    def __init__(self, reference: np.ndarray):
        self._mean = reference.mean(0)
        covariance = np.cov(reference, rowvar=False)
        values, vectors = np.linalg.eigh(covariance)
        self._root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
        self._trace = np.trace(covariance)

    def __call__(self, features: np.ndarray) -> float:
        covariance = np.cov(features, rowvar=False)
        shared = np.linalg.eigvalsh(self._root @ covariance @ self._root).clip(0)
        gap = features.mean(0) - self._mean
        return float(gap @ gap + self._trace + np.trace(covariance) - 2 * np.sqrt(shared).sum())

    def interval(self, features: np.ndarray) -> tuple[float, float]:
        """Bootstrap over pictures, moved to the distance's own value.

        Resampled pictures repeat, so each resample lies further away than the sample does; the
        spread is what is taken.
        """
        random = np.random.default_rng(0)
        picks = random.integers(len(features), size=(RESAMPLES, len(features)))
        values = np.array([self(features[pick]) for pick in picks])
        return _around(self(features), values - values.mean())


def share_interval(hits: int, count: int) -> tuple[float, float]:
    """Wilson's interval of a share."""
    z = 1.959964
    middle = (hits + z * z / 2) / (count + z * z)
    half = z / (count + z * z) * math.sqrt(hits * (count - hits) / count + z * z / 4)
    return middle - half, middle + half


def mean_interval(values: np.ndarray) -> tuple[float, float]:
    """Bootstrap of a mean."""
    random = np.random.default_rng(0)
    picks = random.integers(len(values), size=(RESAMPLES, len(values)))
    means = values[picks].mean(1)
    return _around(values.mean(), means - values.mean())


def _around(value: float, deviations: np.ndarray) -> tuple[float, float]:
    low, high = np.quantile(deviations, [(1 - SURE) / 2, (1 + SURE) / 2])
    return float(value + low), float(value + high)


def chroma(picture_NCHW: torch.Tensor) -> torch.Tensor:
    """[N]: the mean over pixels of the highest channel minus the lowest."""
    return (picture_NCHW.amax(1) - picture_NCHW.amin(1)).mean((1, 2))


def clipped(raw_NCHW: torch.Tensor) -> torch.Tensor:
    """[N]: the share of channel values that lie more than a grey level outside 0..1."""
    return ((raw_NCHW < -1 / 255) | (raw_NCHW > 1 + 1 / 255)).float().mean((1, 2, 3))
