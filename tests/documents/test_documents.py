"""README.md, LOG.md and docs/: examples run, commands parse, links lead somewhere. docs/operator.md: tests/layers."""

import re
import runpy
import shlex

import pytest
import torch

from aaconv.cli import _parse, command_line
from support.places import REPOSITORY

PAGES = {
    path.relative_to(REPOSITORY).as_posix(): path for path in (*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md"))
}
TEXTS = {name: path.read_text(encoding="utf-8") for name, path in PAGES.items()}
OWN_TEST = "docs/operator.md"
BLOCK = r"^```{language}\n(.*?)^```"
LINK = re.compile(r"\]\((?!https?://)([^)#]*)(#[^)]*)?\)")
GENERATED = {"docs/live.html", "docs/log.md", "docs/changelog.md", "docs/contributing.md"}
"""Pages that docs/hooks adds."""


def blocks(language, name):
    return re.findall(BLOCK.format(language=language), TEXTS[name], flags=re.DOTALL | re.MULTILINE)


def commands(name):
    """Every whole `aaconv ...` of the shell blocks and indented ones."""
    indented = re.findall(r"^    (aaconv .*(?:\n        .*)*)", TEXTS[name], flags=re.MULTILINE)
    text = "\n".join((*blocks("sh", name), *indented)).replace("\\\n", " ")
    for line in text.splitlines():
        found = re.match(r"(?:\w+=\S+ )?aaconv (.+?)(?: >>? .*)?$", re.split(r"\s+#", line.strip())[0])
        if found:
            yield found[1]


def mentions(name):
    """Words of `aaconv ...` in back quotes, which need not be whole."""
    prose = re.sub(r"^```.*?^```", "", TEXTS[name], flags=re.DOTALL | re.MULTILINE)
    for found in re.findall(r"`aaconv ([a-z][^`]*)`", prose):
        yield found.split()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PAGES if name != OWN_TEST and blocks("python", name)])
def test_the_examples_of_a_page_run_one_after_another(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    found = {"__name__": "example"}
    for number, example in enumerate(blocks("python", name), 1):
        exec(compile(example, f"{name}, example {number}", "exec"), found)
    # `y = ...  # [8, 256, 14, 20]` says the truth.
    for variable, shape in re.findall(r"^(\w+) = .*# (\[[\d, ]+\])", "\n".join(blocks("python", name)), re.MULTILINE):
        assert list(found[variable].shape) == eval(shape), variable


@pytest.mark.parametrize("name", [name for name in PAGES if any(commands(name))])
def test_the_commands_of_a_page_are_ones_that_aaconv_takes(name, capsys):
    for command in commands(name):
        try:
            _parse(shlex.split(command))
        except SystemExit:
            pytest.fail(f"aaconv {command}: {capsys.readouterr().err}")


@pytest.mark.parametrize("name", [name for name in PAGES if any(mentions(name))])
def test_the_commands_and_options_that_a_page_mentions_exist(name, capsys):
    parser = command_line()
    for words in mentions(name):
        try:
            command = parser.find(words[:1] if words[0] not in ("bench", "data") else words[:2])
        except SystemExit:
            pytest.fail(capsys.readouterr().err)
        for word in words:
            if word.startswith("--") and not word.startswith("--model."):
                assert word in command.option_strings(), " ".join(words)


@pytest.mark.parametrize("name", PAGES)
def test_the_links_of_a_page_lead_to_files(name):
    for target, _ in LINK.findall(TEXTS[name]):
        path = (PAGES[name].parent / target).resolve() if target else PAGES[name]
        place = path.relative_to(REPOSITORY).as_posix()
        assert path.exists() or place in GENERATED, f"{name} links to {target}"


def test_the_description_of_the_package_has_no_relative_links():
    made = runpy.run_path(str(REPOSITORY / "setup.py"))
    without, under = (
        made["description"](TEXTS["README.md"], None),
        made["description"](TEXTS["README.md"], "https://x/y"),
    )
    for text in (without, under):
        assert not LINK.findall(text.replace("(#", "(https://"))
    assert "![" not in without
    assert "(https://x/y/raw/main/docs/explorer-heads.png)" in under
    assert "(https://x/y/blob/main/LOG.md)" in under


def test_the_address_of_the_repository_comes_from_the_project():
    address = runpy.run_path(str(REPOSITORY / "setup.py"))["repository_address"]
    assert address('[project]\nname = "x"\n') is None
    assert address('[project.urls]\nHomepage = "https://a"\nRepository = "https://x/y/"\n\n[tool]\n') == "https://x/y"
