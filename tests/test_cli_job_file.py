"""Job files, `autopar doctor` and completion."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autopar import models, solvers
from autopar.cli import main
from tests.test_cli import Api, api  # noqa: F401 (a fixture)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _asked(api: Api, *arguments: str) -> dict[str, object]:  # noqa: F811
    assert main(["solve", *arguments]) == 0
    asked: dict[str, object] = api.calls[-1]
    return asked


def test_a_job_file_says_what_would_be_typed(api: Api, folder: Path) -> None:  # noqa: F811
    (folder / "autopar.toml").write_text(
        'model = "zoo:gpt2"\ngpus = 16\nmemory-limit = 40\nset = {seq = 128}\n'
        "[solve]\ntop-k = 5\n[simulate]\nflat = true\n"
    )

    asked = _asked(api)

    assert (asked["model"], asked["gpus"], asked["top_k"]) == ("zoo:gpt2", 16, 5)
    assert (asked["memory_limit"], asked["dims"]) == (40e9, {"seq": 128})


def test_what_is_typed_goes_before_the_file(api: Api, folder: Path) -> None:  # noqa: F811
    (folder / "autopar.toml").write_text('model = "zoo:gpt2"\ngpus = 16\n')

    assert _asked(api, "zoo:gpt2-xl", "--gpus", "8")["gpus"] == 8
    assert api.calls[-1]["model"] == "zoo:gpt2-xl"


def test_another_job_file_is_named(api: Api, folder: Path) -> None:  # noqa: F811
    (folder / "autopar.toml").write_text("gpus = 16\n")
    (folder / "other.toml").write_text('[solve]\ngpus = 4\ncluster = "a100"\n')

    assert main(["--job", "other.toml", "solve", "zoo:gpt2"]) == 0

    assert (api.calls[-1]["gpus"], api.calls[-1]["cluster"]) == (4, "a100")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpsu = 3\n", "has 'gpsu', which no command takes\nhint: did you mean 'gpus'?"),
        ("[solve]\nranks = 3\n", "has 'ranks' in [solve], which no command takes"),
        ("gpus = \n", "is no TOML"),
        ("[gpus]\nmany = 3\n", "gpus is a table"),
        ('json = "yes"\n', "json is true or false"),
        ('gpus = "many"\n', "Invalid value for '--gpus': 'many' is not a valid integer"),
    ],
)
def test_a_wrong_job_file_is_one_clear_error(
    folder: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    (folder / "job.toml").write_text(text)

    assert main(["--job", "job.toml", "solve", "zoo:gpt2"]) == 2

    error = capsys.readouterr().err
    assert message in error
    assert error.count("error:") == 1


def test_a_job_file_that_is_not_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--job", "none.toml", "solve", "zoo:gpt2", "--gpus", "8"]) == 2

    assert "cannot read job file 'none.toml': No such file" in capsys.readouterr().err


def test_doctor_tries_every_solver(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rules-v1-onnx1.json").write_text("{}")

    assert main(["doctor", "--json", "--cache-dir", str(tmp_path)]) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["solvers"] == dict.fromkeys(solvers.available(), "works")
    assert found["cache"] == {"folder": str(tmp_path), "files": 1, "bytes": 2}
    assert found["packages"]["onnx"]


def test_doctor_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(solvers, "NEEDS", {**solvers.NEEDS, "cp-sat": "no_such_package"})

    assert main(["doctor", "--no-cache"]) == 2

    assert "solver cp-sat: needs the package no_such_package" in capsys.readouterr().out


def test_clearing_the_cache_leaves_what_is_not_ours(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rules-v1-onnx1.json").write_text("{}")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "answer.json").write_text("{}")
    (tmp_path / "thesis.tex").write_text("mine")

    assert main(["doctor", "--clear-cache", "--cache-dir", str(tmp_path)]) == 0

    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["thesis.tex"]
    assert "0 files" in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0

    assert f"_AUTOPAR_COMPLETE={shell}_complete" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [("autopar solve --clus", "--cluster"), ("autopar solve --cluster a10", "a100"), ("autopar doc", "doctor")],
)
def test_the_shell_is_told_what_fits(words: str, expected: str) -> None:
    names = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1), "_AUTOPAR_COMPLETE": "bash_complete"}

    done = subprocess.run(
        [sys.executable, "-m", "autopar"], env=os.environ | names, capture_output=True, text=True, check=False
    )

    assert expected in [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_models_of_the_zoo_are_offered() -> None:
    names = {"COMP_WORDS": "autopar solve zoo:gpt2", "COMP_CWORD": "2", "_AUTOPAR_COMPLETE": "zsh_complete"}

    done = subprocess.run(
        [sys.executable, "-m", "autopar"], env=os.environ | names, capture_output=True, text=True, check=False
    )

    offered = {line for line in done.stdout.splitlines() if line.startswith("zoo:")}
    assert {line.replace("\\", "") for line in offered} == {
        f"zoo:{name}" for name in models.names() if name.startswith("gpt2")
    }


def test_the_job_file_of_the_documents_is_one(api: Api, folder: Path) -> None:  # noqa: F811
    document = (Path(__file__).parent.parent / "docs" / "using.md").read_text()
    (folder / "autopar.toml").write_text(document.partition("```toml\n")[2].partition("```")[0])

    asked = _asked(api)

    assert (asked["model"], asked["gpus"], asked["dims"]) == ("zoo:llama3-8b", 64, {"seq": 4096})
    assert (folder / "plan" / "plan.json").exists()
