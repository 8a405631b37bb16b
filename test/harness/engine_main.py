"""A DiffGenerator in a process of its own: requests as JSON lines in, results as .npz files out."""

import json
import os
import sys


def main() -> None:
    # the engine's processes log to the standard output too, and in the middle of an answer
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def answer(kind: str, payload=None) -> None:
        print(json.dumps([kind, payload]), file=answers, flush=True)

    import numpy as np

    from sglang.multimodal_gen import DiffGenerator

    generator = DiffGenerator.from_pretrained(**json.loads(sys.argv[1]))
    try:
        answer("ready")
        for line in sys.stdin:
            request = json.loads(line)
            path = request.pop("result_path")
            try:
                results = generator.generate(sampling_params_kwargs=request)
            except ValueError as error:
                answer("refused", str(error))
                continue
            if results is None:
                answer("failed")
                continue
            results = results if isinstance(results, list) else [results]
            images = np.stack([_pixels(result) for result in results])
            # of several outputs each carries the latents of all of them
            latents = results[0].trajectory_latents
            np.savez(
                path, images=images, latents=np.zeros(0) if latents is None else latents.float()
            )
            metrics, peak = results[0].metrics, results[0].peak_memory_mb
            answer("done", {"metrics": metrics, "peak_memory_mb": peak})
    finally:
        generator.shutdown()


def _pixels(result):
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(result.output_file_path).convert("RGB"))


if __name__ == "__main__":
    main()
