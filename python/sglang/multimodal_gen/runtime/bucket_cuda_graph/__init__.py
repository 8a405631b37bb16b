# SPDX-License-Identifier: Apache-2.0
"""Bucket CUDA graphs: a plan's forward, captured for so many rows of one shape."""
