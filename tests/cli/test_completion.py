"""The scripts of `aaconv completion` complete in the shells they are for."""

import shutil
import subprocess

import pytest

from aaconv import cli
from aaconv.cli.completion import SHELLS, script
from support.command_line import error_of, run


def completed(shell, text, *words):
    """What the script offers behind these words, of which the last is begun."""
    ask = f"""
{text}
COMP_WORDS=({" ".join(f"'{word}'" for word in words)})
COMP_CWORD={len(words) - 1}
_aaconv
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
    done = subprocess.run([shell, "-c", ask], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["aaconv", "re"], ["recipes", "report", "record"]),
        (["aaconv", "train", "demo-"], ["demo-plain", "demo-se", "demo-aa"]),
        (
            ["aaconv", "train", "demo-aa", "--lr"],
            ["--lr", "--lr-attention", "--lr-backbone", "--lr-base", "--lr-base-size"],
        ),
        (["aaconv", "train", "demo-aa", "--schedule", "co"], ["cosine", "constant"]),
        (["aaconv", "bench", "t"], ["table2", "train"]),
        (["aaconv", "bench", "train", "--prec"], ["--precision"]),
        (["aaconv", "bench", "train", "--precision", "f"], ["float32", "fp16"]),
        (["aaconv", "data", "preview", "shapes", "--split", ""], ["train", "test"]),
        (["aaconv", "cost", "aa_wrn2"], ["aa_wrn28_2", "aa_wrn28_10"]),
        (["aaconv", "recipes", "sho"], ["show"]),
        (["aaconv", "completion", ""], list(SHELLS)),
        (["aaconv", "--ver"], ["--version"]),
        (["aaconv", "report", "runs"], []),  # files are the shell's
    ],
)
def test_bash_completes(words, offered):
    if not shutil.which("bash"):
        pytest.skip("needs bash")
    found = completed("bash", script(cli.command_line(), "bash"), *words)
    assert sorted(found) == sorted(offered)


def test_zsh_reads_the_script_of_bash(capsys):
    text = script(cli.command_line(), "zsh")
    assert text.endswith(script(cli.command_line(), "bash"))
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-fc", f"autoload -Uz compinit && compinit -u\n{text}"], check=True)


def test_fish_has_a_line_for_every_command_and_option():
    parser = cli.command_line()
    text = script(parser, "fish")
    for name, command in parser.commands.items():
        assert f" -a {name} -d " in text
        for option in command.option_strings():
            if option.startswith("--") and option not in ("--model.OPTION", "--augment.OPTION"):
                assert f" -l {option[2:]} " in text
    if shutil.which("fish"):
        subprocess.run(["fish", "--no-execute"], input=text, text=True, check=True)


def test_the_command_prints_it(capsys):
    assert run("completion", "bash") == 0
    assert capsys.readouterr().out == script(cli.command_line(), "bash")
    assert "unknown shell 'bsh', did you mean 'bash'?" in error_of(capsys, "completion", "bsh")
