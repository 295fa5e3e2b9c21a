"""Shell completion scripts for bash and zsh, and their result in a real bash."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[4]
COMMANDS = {
    "up",
    "demo",
    "router",
    "prefill",
    "decode",
    "chat",
    "top",
    "bench",
    "eval",
    "simulate",
    "plan",
    "doctor",
    "version",
}


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH on which `tandem` is this checkout's."""
    script = tmp_path / "bin" / "tandem"
    script.parent.mkdir()
    lines = (f"#!{sys.executable}", "import sys", f"sys.path.insert(0, {str(ROOT)!r})", "import cluster.cli.main")
    script.write_text("\n".join((*lines, "cluster.cli.main.main()\n")))
    script.chmod(0o755)
    return os.pathsep.join((str(script.parent), os.environ["PATH"]))


def bash(script: str, path: str, home: Path) -> str:
    found = shutil.which("bash")
    assert found, "bash is needed: make uses it too"
    # Typer detects the shell from the parent process; there is none here, so the test names it.
    env = {"PATH": path, "HOME": str(home), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = subprocess.run(
        [found, "--norc", "-c", script], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_completion_offers_commands_and_options_in_bash(path: str, tmp_path: Path) -> None:
    """In a real bash, with the script that `--show-completion` prints."""
    lines = ["tandem ", "tandem top --o", "tandem up --p"]
    named = "complete=$(complete -p tandem | sed -E 's/.*-F ([^ ]+).*/\\1/')"
    script = ['eval "$(tandem --show-completion bash)"', named]
    for given in (line.split(" ") for line in lines):
        quoted = " ".join(f"'{word}'" for word in given)
        script += [f"COMP_WORDS=({quoted}); COMP_CWORD={len(given) - 1}; $complete tandem", 'echo "${COMPREPLY[@]}"']
    commands, once, pools = (set(line.split()) for line in bash("\n".join(script), path, tmp_path).splitlines())
    assert commands >= COMMANDS
    assert once == {"--once"}
    assert pools >= {"--prefill", "--port"}
    assert not any("--" in word for word in commands)


def test_completion_installs_for_next_shell(path: str, tmp_path: Path) -> None:
    (tmp_path / ".bashrc").touch()
    output = bash("tandem --install-completion bash", path, tmp_path)
    assert "bash completion installed" in output
    assert "bash_completions/tandem.sh" in (tmp_path / ".bashrc").read_text()
    assert "_TANDEM_COMPLETE" in (tmp_path / ".bash_completions" / "tandem.sh").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_script_exists_for_other_shells(shell: str, path: str, tmp_path: Path) -> None:
    assert "_TANDEM_COMPLETE" in bash(f"tandem --show-completion {shell}", path, tmp_path)
