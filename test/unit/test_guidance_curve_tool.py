"""`python -m sglang.multimodal_gen.tools.guidance_curve`: what it says, without torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from sglang.multimodal_gen.configs import guidance_curves
from sglang.multimodal_gen.configs.guidance import GuidanceOptions
from sglang.multimodal_gen.configs.guidance_curves import BUCKET_MODES
from sglang.multimodal_gen.tools.guidance_curve import describe, main, step_scales

SCRIPT = Path(guidance_curves.__file__).parents[1] / "tools" / "guidance_curve.py"
# neither may be imported; sglang is where the script lies, not a package that it uses
WITHOUT = "import runpy, sys; sys.modules.update(torch=None, sglang=None); "


def run_by_path(*arguments: str) -> subprocess.CompletedProcess:
    code = f"{WITHOUT}sys.argv = {[str(SCRIPT), *arguments]!r}; runpy.run_path(sys.argv[0], "
    code += "run_name='__main__')"
    # a file run by its path finds its neighbours
    code = f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); {code}"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)


def test_by_path_it_needs_no_torch(tmp_path):
    picture = tmp_path / "curve.png"
    done = run_by_path("front:2:1@0.4", "--steps", "30", "-o", str(picture))
    assert done.returncode == 0, done.stderr
    assert "42 forwards: 30 cond + 12 uncond" in done.stdout
    assert "     3  12-14   1                 cond" in done.stdout
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "guidance_curve: got 'nonsense', wanted one of"),
        (["[1, 2]"], "wanted 30 (one for each of num_inference_steps)"),
        (["linear", "--steps", "0"], "--steps: got 0"),
        (["linear", "--buckets", "65"], "--buckets: got 65"),
        (["linear", "--scale", "nan"], "--scale: got nan"),
        (["--all"], "--all: nothing to print"),
    ],
)
def test_wrong_input(arguments, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["guidance_curve", *arguments])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_step_scales_are_the_schedules():
    for mode in BUCKET_MODES:
        options = GuidanceOptions(
            curve="peak:1:3@0.5", buckets=4, bucket_mode=mode, scale=2
        )
        answer = describe("peak:1:3@0.5", steps=18, buckets=4, mode=mode, scale=2)
        assert step_scales(answer) == pytest.approx(options.schedule(18).scales)


def test_all_shapes_in_one_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["guidance_curve", "--all", "-o", str(tmp_path / "all.png")])
    main()
    assert capsys.readouterr().out.strip() == str(tmp_path / "all.png")
    assert (tmp_path / "all.png").stat().st_size > 10_000
