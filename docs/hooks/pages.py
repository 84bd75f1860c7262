"""What mkdocs adds to the pages beside this folder: tables made of the package itself, and pages that lie outside.

A page says `<!-- models -->` where the table of the models belongs. README.md is the first page of the site, and
LOG.md, CHANGELOG.md and CONTRIBUTING.md are pages of it. live.html is written by `aaconv explore`.
"""

import logging
import re
from importlib import import_module
from pathlib import Path

from command_line import command_line_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from package_tables import models_table, recipes_table

import aaconv

ROOT = Path(__file__).parents[2]
OUTSIDE = {
    "index.md": "README.md",
    "log.md": "LOG.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
}
LIVE, EXPLORED = "live.html", ROOT / "runs/docs/demo-aa"
ON_THE_TRIANGLE = "#image=2&amp;layer=blocks.1.conv&amp;at=0.8,0.78"
FRAME = f"""\
<iframe class="live" src="../{LIVE}{ON_THE_TRIANGLE}" title="The explorer's page" loading="lazy"></iframe>

The page of the demo's network, live: point at the image. <a href="../{LIVE}">Alone in the window</a>.
"""
FILLED = {
    "models": models_table,
    "recipes": recipes_table,
    "command line": command_line_page,
    "live": lambda: FRAME,
}
LINK = re.compile(r"\[([^\]]*)\]\((?!https?://|#)([^)#]+)(#[^)]*)?\)")

# Below mkdocs: what is logged there as a warning ends a strict build.
log = logging.getLogger("mkdocs.hooks.aaconv")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for page, source in OUTSIDE.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_linked(text, ROOT)))
    files.append(File.generated(config, LIVE, content=_live_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri == "api.md":
        _check_public_names(markdown)
    if page.file.src_uri not in OUTSIDE:
        markdown = _linked(markdown, ROOT / "docs")
    return re.sub(r"^<!-- (.+) -->$", lambda found: FILLED[found[1]](), markdown, flags=re.MULTILINE)


def _linked(markdown: str, folder: Path) -> str:
    """Links from a folder of the repository as they are from docs; to files that are not on the site, words alone."""
    pages = {(ROOT / source).resolve(): page for page, source in OUTSIDE.items()}

    def link(found: re.Match[str]) -> str:
        words, target, anchor = found[1], (folder / found[2]).resolve(), found[3] or ""
        if target in pages:
            return f"[{words}]({pages[target]}{anchor})"
        if target.is_relative_to(ROOT / "docs"):
            return f"[{words}]({target.relative_to(ROOT / 'docs').as_posix()}{anchor})"
        return words if target.exists() else found[0]  # what leads nowhere is reported by mkdocs

    return LINK.sub(link, markdown)


def public_names() -> list[str]:
    """Every name that the package and its public rooms offer, rooms and the version aside."""
    names = [f"aaconv.{name}" for name in aaconv.__all__ if name not in (*aaconv._ROOMS, "__version__")]
    for room in aaconv._ROOMS:
        offered = getattr(import_module(f"aaconv.{room}"), "__all__", ())
        names += [f"aaconv.{room}.{name}" for name in offered if name not in aaconv.__all__]
    return names


def _check_public_names(markdown: str) -> None:
    documented = set(re.findall(r"^::: (\S+)$", markdown, flags=re.MULTILINE))
    for name in public_names():
        module, _, last = name.rpartition(".")
        found = getattr(import_module(module), last)
        if not documented & {name, f"{found.__module__}.{found.__qualname__}" if callable(found) else name}:
            log.warning("%s is public, and api.md does not name it", name)
        elif callable(found) and not found.__doc__:
            log.warning("%s is public, and has no docstring", name)


def _live_page() -> str:
    """The explorer's page of the demo's network, which is trained for it once: half a minute."""
    from aaconv import recipes
    from aaconv.demo import examples, one_thread
    from aaconv.explore.page import render
    from aaconv.explore.study import study
    from aaconv.runs.run_folder import is_finished, is_run
    from aaconv.training.trainer import resume, train

    if not (is_run(EXPLORED) and is_finished(EXPLORED)):
        log.info("training the network of the live explorer page into %s", EXPLORED)
        with one_thread():
            resume(EXPLORED) if is_run(EXPLORED) else train(recipes.get("demo-aa"), EXPLORED)
    images, names = examples(6)
    return render(study(EXPLORED, images, names=names))
