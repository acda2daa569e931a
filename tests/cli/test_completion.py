"""The shells complete commands, actions, options and settings, by scripts that are made from the parser."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from edgemoe.cli import main
from edgemoe.cli.completion import scripts

LINES = (  # the line so far, and the words offered
    ("edgemoe mod", {"models"}),
    ("edgemoe models ", {"list", "verify", "remove"}),
    ("edgemoe models remove --y", {"--yes"}),
    ("edgemoe serve --jo", {"--join"}),
    ("edgemoe serve --set engine.th", {"engine.threads="}),
    ("edgemoe completion f", {"fish"}),
)
BASH = """source {script}; COMP_WORDS=({line}); [[ "{line}" == *" " ]] && COMP_WORDS+=("")
COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _edgemoe 2>/dev/null; printf '%s\\n' "${{COMPREPLY[@]}}" """
ASKED = {"bash": BASH, "fish": "source {script}; complete -C '{line}'", "zsh": ""}


@pytest.mark.parametrize("shell", ASKED)
def test_a_shell_completes_from_the_parser(shell: str, tmp_path: Path) -> None:
    script = tmp_path / f"edgemoe.{shell}"
    script.write_text(scripts()[shell])
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not here")
    if shell == "zsh":  # its completion needs a terminal
        subprocess.run([shell, "-n", script], check=True, timeout=60)
        return
    for line, words in LINES:
        command = [shell, "-c", ASKED[shell].format(script=script, line=line)]
        env = os.environ | {"HOME": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, check=True)
        offered = {found.partition("\t")[0] for found in done.stdout.splitlines()}
        assert words <= offered, (line, done.stdout)
        assert len(offered) == len(words) or line.endswith(" ")


def test_the_script_of_a_shell_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == scripts()["bash"]
