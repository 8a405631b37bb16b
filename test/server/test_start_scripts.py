"""The start scripts of examples/glm_image that no other test starts: a minute each, on request.

one_process.sh and ar_server.sh are started in test_external_ar.py.
"""

import os

import pytest

from harness.server import Server, pixels, pngs, source_image, start_script


@pytest.mark.skipif("START_SCRIPTS" not in os.environ, reason="runs with START_SCRIPTS=1")
@pytest.mark.parametrize("name", ["head_and_denoisers.sh", "router.sh"])
def test_it_serves(glm, name):
    with Server(glm, **start_script(name, glm)) as server:
        for answer in (server.generate(size="96x64"), server.edit([source_image(96, 64)])):
            assert pixels(pngs(answer)[0]).shape == (64, 96, 3)
