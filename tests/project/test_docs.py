"""Every Python and console block of the documentation runs, page by page, from top to bottom.

All blocks of a page share one namespace and one empty folder. A block with prompts is checked by
doctest; a block without is executed; in a console block each line that starts with ``$`` is run
by bash and must succeed, and output that is shown must be the output that comes ("..." stands for
anything). A block that cannot run has a comment right before it: ``.. not run: why``, in Markdown
``<!-- not run: why -->``.
"""

import doctest
import importlib
import os
import re
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOOSE = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
RST_OPENS = re.compile(r"^( *)\.\. (?:code-block|code|sourcecode):: *(\w*) *$")
RST_REASON = re.compile(r"^ *\.\. not run: *(.*)$")
MARKDOWN_REASON = re.compile(r"^<!-- not run: *(.*) -->$")
RUN = {"python", "console"}


@dataclass(frozen=True)
class Block:
    """One block of code: its language, first line, text, and why it is not run."""

    language: str
    line: int
    text: str
    reason: str | None


def pages() -> list[Path]:
    """Return all pages, without what the build of the documentation copies together."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("spec/*.rst"), *ROOT.glob("docs/**/*.rst")]
    copied = ROOT / "docs" / "reference" / "spec"
    return sorted(path for path in found if copied not in path.parents)


def blocks_of(text: str, *, markdown: bool) -> list[Block]:
    """Return the blocks of a page that are written in a language that can be run."""
    lines = text.splitlines()
    found = []
    for number, line in enumerate(lines):
        opened = _markdown_open(line) if markdown else _rst_open(line)
        if opened is None or opened[1] not in RUN:
            continue
        body = (_markdown_body if markdown else _rst_body)(lines, number, indent=opened[0])
        found.append(Block(opened[1], number + 1, body, _reason(lines[:number], markdown)))
    return found


def _markdown_open(line: str) -> tuple[int, str] | None:
    return (0, line.removeprefix("```").strip()) if line.startswith("```") else None


def _rst_open(line: str) -> tuple[int, str] | None:
    match = RST_OPENS.match(line)
    return (len(match[1]), match[2]) if match else None


def _markdown_body(lines: list[str], number: int, *, indent: int) -> str:
    del indent
    stop = lines.index("```", number + 1)
    return "\n".join(lines[number + 1 : stop]) + "\n"


def _rst_body(lines: list[str], number: int, *, indent: int) -> str:
    body = []
    for line in lines[number + 1 :]:
        if line.strip() and len(line) - len(line.lstrip()) <= indent:
            break
        if not (not body and line.strip().startswith(":")):
            body.append(line)
    return textwrap.dedent("\n".join(body)).strip("\n") + "\n"


def _reason(before: list[str], markdown: bool) -> str | None:
    last = next((line for line in reversed(before) if line.strip()), "")
    match = (MARKDOWN_REASON if markdown else RST_REASON).match(last)
    return match[1] if match else None


def run_python(block: Block, namespace: dict, page: Path) -> None:
    """Run a Python block: as a doctest when it shows prompts, else as it stands."""
    where = f"{page.relative_to(ROOT)}:{block.line}"
    if ">>>" not in block.text:
        exec(compile(block.text, where, "exec"), namespace)  # noqa: S102
        return
    test = doctest.DocTestParser().get_doctest(block.text, namespace, where, where, block.line)
    test.globs = namespace
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=LOOSE)
    runner.run(test, out=report.append, clear_globs=False)
    assert not runner.failures, "".join(report)


def run_console(block: Block, folder: Path) -> None:
    """Run each command of a console block and compare what it prints, where that is shown."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": tools, "COLUMNS": "100"}
    if not (folder / "tools").exists():
        (folder / "tools").symlink_to(ROOT / "tools")  # what contributors run is not installed
    for command, expected in commands_of(block.text):
        done = subprocess.run(
            ["bash", "-c", command],
            check=False,
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}"
        if expected:
            same = doctest.OutputChecker().check_output(expected, done.stdout, LOOSE)
            assert same, f"{command}\nexpected:\n{expected}\ngot:\n{done.stdout}"


def commands_of(text: str) -> list[tuple[str, str]]:
    """Split a console block into commands and what is shown below each."""
    found: list[tuple[str, str]] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            found.append((line.removeprefix("$ "), ""))
        elif line.strip():
            assert found, f"output before any command: {line}"
            found[-1] = (found[-1][0], f"{found[-1][1]}{line}\n")
    return found


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "__docs__"}
    for block in blocks_of(page.read_text(encoding="utf-8"), markdown=page.suffix == ".md"):
        if block.reason is not None:
            assert block.reason.strip(), f"{page}:{block.line}: say why it is not run"
        elif block.language == "python":
            run_python(block, namespace, page)
        else:
            run_console(block, tmp_path)


def test_blocks_are_found_in_both_kinds_of_pages():
    rst = ".. not run: because\n\n.. code-block:: python\n   :name: a\n\n   x = 1\n\n   y\n\nEnd"
    markdown = "Text\n\n```console\n$ ls\nfoo\n```\n\n```text\nno\n```\n"
    assert blocks_of(rst, markdown=False) == [Block("python", 3, "x = 1\n\ny\n", "because")]
    assert blocks_of(markdown, markdown=True) == [Block("console", 3, "$ ls\nfoo\n", None)]
    assert commands_of("$ ls\nfoo\n$ pwd\n") == [("ls", "foo\n"), ("pwd", "")]


def test_a_block_whose_output_differs_is_noticed(tmp_path):
    page = ROOT / "README.md"
    with pytest.raises(AssertionError):
        run_python(Block("python", 1, ">>> 1 + 1\n3\n", None), {}, page)
    with pytest.raises(AssertionError):
        run_console(Block("console", 1, "$ echo a\nb\n", None), tmp_path)
    with pytest.raises(AssertionError):
        run_console(Block("console", 1, "$ false\n", None), tmp_path)


@pytest.mark.parametrize(
    ("module", "page"), [("fpformat", "api_fpformat"), ("fpformat_io.torch", "api_torch")]
)
def test_every_public_name_is_in_the_reference(module, page):
    text = (ROOT / "docs" / "reference" / f"{page}.rst").read_text(encoding="utf-8")
    shown = re.findall(
        rf"^\.\. auto(?!module)\w+:: {re.escape(module)}\.(\w+)$", text, re.MULTILINE
    )
    assert sorted(shown) == sorted(importlib.import_module(module).__all__)
