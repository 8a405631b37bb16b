"""The start scripts of examples/glm_image: minutes, up to seven processes at a time; on request.

one_process.sh is started in test_external_ar.py.
"""

import os

import numpy as np
import pytest

from harness.server import Server, pixels, pngs, source_image, start_script

pytestmark = pytest.mark.skipif(
    "START_SCRIPTS" not in os.environ, reason="runs with START_SCRIPTS=1"
)


@pytest.mark.parametrize("name", ["head_and_denoisers.sh", "router.sh"])
def test_it_serves(glm, name):
    with Server(glm, **start_script(name, glm)) as server:
        for answer in (server.generate(size="96x64"), server.edit([source_image(96, 64)])):
            assert pixels(pngs(answer)[0]).shape == (64, 96, 3)


def test_two_ranks_on_either_side(glm):
    """An AR server and a diffusion server of two ranks each give the pictures of one rank each."""

    def pictures(**settings: str) -> list[np.ndarray]:
        with Server(glm, **start_script("ar_server.sh", glm, **settings)) as server:
            answers = [
                server.generate(prompt=f"ranks {seed}", size=size, seed=seed)
                for seed, size in enumerate(("64x64", "96x64", "128x128"))
            ]
            answers.append(server.edit([source_image(96, 64)], seed=3))
        return [pixels(pngs(answer)[0]) for answer in answers]

    wanted = pictures()
    got = pictures(AR_TP="2", DIT_SP="2", SGLANG_CPU_OMP_THREADS_BIND="0|1")
    differences = [np.abs(one - other).max() for one, other in zip(got, wanted)]
    assert max(differences) <= 1, differences
