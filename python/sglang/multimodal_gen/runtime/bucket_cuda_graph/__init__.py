# SPDX-License-Identifier: Apache-2.0
"""Bucket CUDA graphs: a plan's forward, captured for so many rows of one shape."""

from sglang.multimodal_gen.runtime.bucket_cuda_graph.inputs import GraphSample
from sglang.multimodal_gen.runtime.bucket_cuda_graph.manager import BucketGraphs, Prediction
from sglang.multimodal_gen.runtime.bucket_cuda_graph.report import publish_graphs

__all__ = ["BucketGraphs", "GraphSample", "Prediction", "publish_graphs"]
