"""The code of the README and of docs/ runs, and what the README says of errors is what they say."""

import inspect
import re
import runpy
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import shardlib as sl
from shardlib import mesh

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Pages make a mesh the current one until changed, and take SIGTERM over."""
    monkeypatch.setattr(mesh, "_current", [])
    held = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, held)


def blocks(page: Path, language: str) -> list[str]:
    found = re.findall(r"```(\w*)\n(.*?)```", page.read_text(), re.DOTALL)
    return [code for said, code in found if said == language]


def run(page: Path) -> dict[str, Any]:
    """All python blocks of a page in one scope, at the lines where they stand."""
    scope: dict[str, Any] = {"__name__": page.stem}
    for code in blocks(page, "python"):
        before = page.read_text().split(code)[0].count("\n")
        exec(compile("\n" * before + code, str(page), "exec"), scope)
    return scope


def test_readme_code_runs() -> None:
    assert run(README)["metrics"]["loss"] < 1.0, "100 steps fit 32 rows of noise better than zeros do"


@pytest.mark.parametrize("page", [p for p in PAGES if p.stem != "errors"], ids=lambda page: page.stem)
def test_code_of_pages_runs(page: Path) -> None:
    """The tests that a page defines run, too: once for each parameter."""
    for name, f in run(page).items():
        if name.startswith("test_"):
            marks = [m for m in getattr(f, "pytestmark", []) if m.name == "parametrize"]
            for options in [{m.args[0]: value} for m in marks for value in m.args[1]] or [{}]:
                f(**options)


def test_errors_say_what_the_page_says() -> None:
    """Each message in docs/errors.md, in order, is what the code before it raises."""
    page = ROOT / "docs" / "errors.md"
    said = [block.rstrip("\n") for block in blocks(page, "")]
    assert run(page)["messages"] == said and len(said) >= 25


def test_readme_error_is_what_it_says() -> None:
    code = blocks(README, "python")[0].replace('    y = sl.psum("batch/dp model +tp -> batch/dp model", y)\n', "")
    with pytest.raises(sl.SpecError) as error:
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    said = next(b for b in blocks(README, "") if b.startswith("SpecError"))
    assert said.strip() == f"SpecError: {error.value}"


def test_readme_shows_the_two_commands() -> None:
    assert "make demo" in README.read_text() and "make test" in README.read_text()


def test_the_step_is_printed_as_it_is() -> None:
    assert inspect.getsource(sl.step) in (ROOT / "docs" / "step.md").read_text()


def test_every_page_is_linked_from_the_readme() -> None:
    linked = set(re.findall(r"\]\((docs/\w+\.md)\)", README.read_text()))
    assert linked == {f"docs/{page.name}" for page in PAGES}


def test_the_page_of_all_names_is_of_today() -> None:
    """`python docs/make_api.py` writes it."""
    written = runpy.run_path(str(ROOT / "docs" / "make_api.py"))["page"]()
    assert (ROOT / "docs" / "api.md").read_text() == written


def public(module: Any) -> set[str]:
    """The functions and classes of the library that a package exports."""
    named = vars(module).items()
    return {n for n, x in named if n[0] != "_" and getattr(x, "__module__", "").startswith("shardlib")}


def test_every_public_name_is_in_the_docs() -> None:
    """In the text or the code of a page or the README, as `sl.name`, `sl.optim.name`, or in backquotes."""
    text = "\n".join(page.read_text() for page in (README, *PAGES))
    names = public(sl) | public(sl.optim) | public(sl.testing) | public(sl.random)
    assert {"psum", "jit", "adamw", "check_loss", "Mean"} <= names
    missing = [n for n in sorted(names) if not re.search(rf"(`|sl\.|optim\.|testing\.|random\.){n}\b", text)]
    assert not missing, f"no page says what these are: {missing}"


def test_the_package_says_what_it_has() -> None:
    """`help(shardlib)` names every public function and class."""
    modules = {p.stem for p in (ROOT / "shardlib").iterdir()}
    public = {n for n in vars(sl) if not n.startswith("_") and n not in modules} | {"jit", "show", "step"}
    said = set(re.findall(r"\w+", sl.__doc__ or ""))
    errors = {n for n in public if n.endswith("Error")}
    assert public - errors <= said, f"not in the docstring: {public - errors - said}"
