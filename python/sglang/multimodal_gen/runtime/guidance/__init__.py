# SPDX-License-Identifier: Apache-2.0
"""Guidance buckets at run time: plan, agreement, rows, combine, report.

The modules are imported by name: a plan must be readable where torch is not wanted.
"""
