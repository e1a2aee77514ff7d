"""What the documents say is so: their code runs, their links lead somewhere, their lists are complete."""

import doctest
import importlib.util
import inspect
import os
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest

import autopar
from autopar import errors
from autopar.cli import main
from autopar.cli.commands import app

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def _blocks(path: Path) -> list[tuple[str, str]]:
    """Return language and text of the code blocks of a document."""
    return _BLOCK.findall(path.read_text())


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


WITH_CODE = [path for path in DOCUMENTS if any(language == "python" for language, _ in _blocks(path))]


@pytest.mark.parametrize("path", WITH_CODE, ids=_name)
def test_code_runs_and_prints_what_it_says(
    path: Path, tmp_path: Path, cache_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Block after block, in an empty folder; a YAML block that begins with a file's name becomes that file.

    Rules that other documents needed are known, plans are not. README's shell blocks install things; `.ci/run` runs
    them.
    """
    rules, own = cache_dir / "docs", tmp_path / "cache"
    rules.mkdir(exist_ok=True)
    shutil.copytree(rules, own)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOPAR_CACHE_DIR", str(own))
    names: dict[str, Any] = {"__name__": "__main__"}
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(verbose=False)

    for language, text in _blocks(path):
        if language == "sh" and path.name != "README.md":
            for line in text.splitlines():
                program, *arguments = line.split("#")[0].split()
                assert program == "autopar"
                assert main(arguments) == 0, line
        elif language == "yaml" and (named := re.match(r"# (\S+\.yaml)\n", text)):
            Path(named[1]).write_text(text)
        elif language == "python" and ">>>" in text:
            test = parser.get_doctest(text, names, path.name, str(path), 0)
            runner.run(test, clear_globs=False)
            names = test.globs
        elif language == "python":
            exec(compile(text, path, "exec"), names)

    assert runner.summarize(verbose=False).failed == 0, capsys.readouterr().out
    for found in own.glob("rules-*.json"):
        shutil.copy(found, tmp_path / found.name)
        os.replace(tmp_path / found.name, rules / found.name)  # at once: another process may be reading


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_links_lead_to_files(path: Path) -> None:
    """Relative ones."""
    targets = [target for target in re.findall(r"\]\(([^)#]+)", path.read_text()) if "://" not in target]

    assert [target for target in targets if not (path.parent / target).exists()] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_commands_exist_with_their_options(path: Path) -> None:
    """In every shell block."""
    lines = [line for language, text in _blocks(path) if language == "sh" for line in text.splitlines()]

    for line in lines:
        words = line.split("#")[0].split()
        if words[:1] != ["autopar"]:
            continue
        command = app.commands[words[1]]
        known = {option for param in command.params if isinstance(param, click.Option) for option in param.opts}
        assert {word for word in words if word.startswith("-")} <= known, line


def test_errors_page_has_every_class() -> None:
    """In the order of the module, with the builtin each one is."""
    page = (ROOT / "docs" / "errors.md").read_text()
    classes = [item for item in vars(errors).values() if inspect.isclass(item)]

    sections = dict(re.findall(r"^## `(\w+)`\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))

    assert list(sections) == [item.__name__ for item in classes]
    for item in classes:
        assert f"(`{item.__bases__[-1].__name__}`)" in sections[item.__name__], item.__name__


def test_every_module_has_a_layer() -> None:
    """What import-linter does not know, it does not check."""
    (contract,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    everything = {path.stem for path in (ROOT / "autopar").glob("[!_]*") if path.suffix != ".typed"}

    layers = [name.removeprefix("autopar.") for layer in contract["layers"] for name in layer.split(" | ")]

    assert sorted(layers) == sorted(everything)


def test_layout_page_has_every_module() -> None:
    """Folders and modules of the package, and nothing that is not there."""
    page = (ROOT / "docs" / "layout.md").read_text()
    modules = {
        f"autopar/{path.name}/" if path.is_dir() else f"autopar/{path.name}"
        for path in (ROOT / "autopar").iterdir()
        if not path.name.startswith("_") and path.suffix in {"", ".py"} and not path.is_symlink()
    }

    named = set(re.findall(r"`(autopar/[\w./]+)`", page))

    assert named == modules


def test_references_are_what_the_program_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command with every option, every public name; the pages are made anew by `python docs/reference.py`."""
    monkeypatch.delenv("COLUMNS", raising=False)
    source = ROOT / "docs" / "reference.py"
    spec = importlib.util.spec_from_file_location("reference", source)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    pages = {name: make() for name, make in module.PAGES.items()}

    for name, text in pages.items():
        assert (ROOT / "docs" / name).read_text() == text, f"python {source} makes {name} anew"
    for name, command in app.commands.items():
        section = re.search(rf"^## `autopar {name}\b.*?(?=^## |\Z)", pages["commands.md"], re.MULTILINE | re.DOTALL)
        assert section is not None, name
        options = [option for own in command.params if isinstance(own, click.Option) for option in own.opts]
        assert [option for option in options if option not in section[0]] == []
    assert [
        name for name in autopar.__all__ if name != "__version__" and f"`autopar.{name}`" not in pages["python.md"]
    ] == []
