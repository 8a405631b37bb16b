# SPDX-License-Identifier: Apache-2.0
"""How guidance buckets are wired into an installed SGLang: `wiring` holds the table of hooks.

In an SGLang checkout this package goes away: docs/upstreaming.md says what each hook becomes.
"""
