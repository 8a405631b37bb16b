"""Parses command lines as `sglang serve` does, without starting anything: what is refused, and how.

Standard input: a JSON list of [flags, environment]. Last line of standard output: a JSON list, an
error text for each, or null where the flags are accepted.
"""

import argparse
import contextlib
import io
import json
import os
import sys


def refusal(flags: list[str]) -> str | None:
    from sglang.multimodal_gen.runtime.entrypoints.cli.serve import (
        add_multimodal_gen_serve_args,
    )
    from sglang.multimodal_gen.runtime.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    add_multimodal_gen_serve_args(parser)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            args, unknown = parser.parse_known_args(flags)
            ServerArgs.from_cli_args(args, unknown, argv=flags)
    except (SystemExit, Exception) as error:
        return f"{errors.getvalue()}{error}"
    return None


def main() -> None:
    from sglang.multimodal_gen.runtime.platforms.plugins import apply_plugin_hooks

    apply_plugin_hooks()
    answers = []
    for flags, environment in json.load(sys.stdin):
        os.environ.update(environment)
        answers.append(refusal(flags))
        for name in environment:
            del os.environ[name]
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
