"""A DiffGenerator in a process of its own: requests as JSON lines in, results as .npz files out."""

import json
import sys


def main() -> None:
    import numpy as np

    from sglang.multimodal_gen import DiffGenerator

    answers = sys.stdout  # the engine logs there too, so every answer is marked
    generator = DiffGenerator.from_pretrained(**json.loads(sys.argv[1]))
    try:
        print("@ready", file=answers, flush=True)
        for line in sys.stdin:
            request = json.loads(line)
            path = request.pop("result_path")
            try:
                results = generator.generate(sampling_params_kwargs=request)
            except ValueError as error:
                print("@refused " + json.dumps(str(error)), file=answers, flush=True)
                continue
            if results is None:
                print("@failed", file=answers, flush=True)
                continue
            results = results if isinstance(results, list) else [results]
            images = np.stack([_pixels(result) for result in results])
            # of several outputs each carries the latents of all of them
            latents = results[0].trajectory_latents
            np.savez(
                path, images=images, latents=np.zeros(0) if latents is None else latents.float()
            )
            answer = {
                "metrics": results[0].metrics,
                "peak_memory_mb": results[0].peak_memory_mb,
            }
            print("@done " + json.dumps(answer), file=answers, flush=True)
    finally:
        generator.shutdown()


def _pixels(result):
    import numpy as np
    from PIL import Image

    return np.asarray(Image.open(result.output_file_path).convert("RGB"))


if __name__ == "__main__":
    main()
