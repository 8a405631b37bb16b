# SPDX-License-Identifier: Apache-2.0
"""Lets ``sglang generate`` know the --guidance-* flags. It registers no pipeline.

``sglang serve`` applies plugin hooks before it builds its parser, ``sglang generate`` only after
it has parsed. Between the two it asks the config registry about the model, and the registry calls
every module here. In an SGLang checkout one line in ``cli/generate.py`` takes this file's place.
"""

import sys


def register() -> None:
    if "sglang.cli.generate" in sys.modules:
        from sglang.multimodal_gen.runtime.platforms.plugins import apply_plugin_hooks

        apply_plugin_hooks()
