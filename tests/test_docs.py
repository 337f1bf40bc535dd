"""The README's code runs, and what it says of errors is what they say."""

import re
from pathlib import Path

import pytest

import shardlib as sl

README = (Path(__file__).parent.parent / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return [code for said, code in re.findall(r"```(\w*)\n(.*?)```", README, re.DOTALL) if said == language]


def test_readme_code_runs() -> None:
    scope: dict[str, object] = {"__name__": "readme"}
    for code in blocks("python"):
        exec(compile(code, "README.md", "exec"), scope)
    metrics = scope["metrics"]
    assert isinstance(metrics, dict) and metrics["loss"] < 1.0, "100 steps fit 32 rows of noise better than zeros do"


def test_readme_error_is_what_it_says() -> None:
    code = blocks("python")[0].replace('    y = sl.psum("batch/dp model +tp -> batch/dp model", y)\n', "")
    with pytest.raises(sl.SpecError) as error:
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    said = next(b for b in blocks("") if b.startswith("SpecError"))
    assert said.strip() == f"SpecError: {error.value}"


def test_readme_shows_the_two_commands() -> None:
    assert "make demo" in README and "make test" in README
