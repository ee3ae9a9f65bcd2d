"""Keep the text of the specification, its lock, the code and the tests together.

``fpspec lint`` checks the clauses of ``spec/fpformat-1.0.rst``; ``fpspec lock`` rewrites
``spec/clauses.lock`` from them; ``fpspec matrix`` prints where each clause is enforced and tested;
``fpspec example`` prints the worked examples, or puts them into the text with ``--write``.

The text is read line by line: a clause is the indented block under its directive, a table is the
block under ``csv-table``. Nothing here needs a parser of reStructuredText.
"""

import argparse
import csv
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, get_args

from fpformat.clauses import ErrorClass

ROOT: Final = Path(__file__).resolve().parents[2]
SPEC: Final = Path("spec/fpformat-1.0.rst")
LOCK: Final = Path("spec/clauses.lock")
ROLES: Final = ("Reader", "Writer", "Editor", "Validator")
DIGEST_DIGITS: Final = 16

_KEYWORD: Final = re.compile(r"\b(?:MUST|SHOULD|SHALL)(?:\s+NOT)?\b|\bMAY\b|\bREQUIRED\b")
_REFERENCE: Final = re.compile(r":clause:`([^`]+)`")
_FIELD: Final = re.compile(r":(\w+): +(.*)")
_ID: Final = re.compile(r"\b([A-Z]{3}-[1-9][0-9]*)\b")
_QUOTED_ID: Final = re.compile(r"""["']([A-Z]{3}-[1-9][0-9]*)["']""")
_CODE_NOTE: Final = re.compile(r"spec: ((?:[A-Z]{3}-[0-9]+(?:, )?)+)")
_MARK: Final = re.compile(r"mark\.clause\(([^)]*)\)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Clause:
    """One requirement of the specification.

    Attributes:
        id: Such as ``SEG-4``.
        line: Line of the directive, from 1.
        text: The words, white space normalised, without the fields.
        error_class: What a reader reports, or None when it cannot find the clause broken.
        roles: Who has to obey.
    """

    id: str
    line: int
    text: str
    error_class: str | None
    roles: tuple[str, ...]

    @property
    def area(self) -> str:
        """The letters of the id."""
        return self.id.partition("-")[0]

    @property
    def digest(self) -> str:
        """Prefix of the SHA-256 of the normalised words."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:DIGEST_DIGITS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Where a clause is enforced in code, and which tests are marked with it."""

    code: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)


def _block(lines: Sequence[str], start: int) -> list[str]:
    """Return the lines from `start` that are empty or indented."""
    stop = start
    while stop < len(lines) and (not lines[stop].strip() or lines[stop].startswith("   ")):
        stop += 1
    return list(lines[start:stop])


def parse_clauses(text: str) -> list[Clause]:
    """Return the clauses of the specification in the order of the text."""
    lines = text.splitlines()
    return [
        _clause(line.removeprefix(".. clause:: ").strip(), number, _block(lines, number))
        for number, line in enumerate(lines, start=1)
        if line.startswith(".. clause:: ")
    ]


def _clause(clause_id: str, line: int, block: Sequence[str]) -> Clause:
    words: list[str] = []
    fields: dict[str, str] = {}
    name = None
    for raw in block:
        match = _FIELD.fullmatch(raw.strip())
        if match:
            name = match[1]
            fields[name] = match[2]
        elif name is None:
            words += raw.split()
        else:
            fields[name] = f"{fields[name]} {raw.strip()}".strip()
    roles = tuple(role.strip() for role in fields.get("roles", "").split(",") if role.strip())
    return Clause(
        id=clause_id,
        line=line,
        text=" ".join(words),
        error_class=fields.get("class"),
        roles=roles,
    )


def parse_tables(text: str) -> dict[str, list[dict[str, str]]]:
    """Return the rows of every named csv-table, each as a mapping from its header."""
    lines = text.splitlines()
    tables = {}
    for number, line in enumerate(lines, start=1):
        if not line.startswith(".. csv-table::"):
            continue
        block = [raw.strip() for raw in _block(lines, number)]
        fields = [match for raw in block if (match := _FIELD.fullmatch(raw))]
        options = {match[1]: match[2] for match in fields}
        rows = [raw for raw in block if raw and not _FIELD.fullmatch(raw)]
        header, *body = csv.reader([options["header"], *rows], skipinitialspace=True)
        tables[options["name"]] = [dict(zip(header, row, strict=True)) for row in body]
    return tables


def lint(text: str) -> list[str]:
    """Return what is wrong with the clauses of a specification, one line each."""
    clauses = parse_clauses(text)
    return [*_lint_ids(clauses), *_lint_words(clauses), *_lint_rest(text, clauses)]


def _lint_ids(clauses: Sequence[Clause]) -> Iterator[str]:
    numbers: dict[str, list[int]] = {}
    for clause in clauses:
        if not _ID.fullmatch(clause.id):
            yield f"line {clause.line}: {clause.id!r} is not a clause id"
            continue
        numbers.setdefault(clause.area, []).append(int(clause.id.partition("-")[2]))
    for area, found in numbers.items():
        if found != list(range(1, len(found) + 1)):
            yield f"{area}: the numbers are {found}, expected each once, from 1, in order"


def _lint_words(clauses: Iterable[Clause]) -> Iterator[str]:
    classes = get_args(ErrorClass)
    for clause in clauses:
        keywords = _KEYWORD.findall(clause.text)
        if len(keywords) != 1:
            yield f"line {clause.line}: {clause.id} has {len(keywords)} of MUST, SHOULD, MAY, not 1"
        if clause.error_class is not None and clause.error_class not in classes:
            yield f"line {clause.line}: {clause.id} has the unknown class {clause.error_class!r}"
        if not clause.roles or not set(clause.roles) <= set(ROLES):
            yield f"line {clause.line}: {clause.id} has the roles {clause.roles}"
        if not clause.text.endswith((".", ":")):
            yield f"line {clause.line}: {clause.id} does not end with a full stop"


def _lint_rest(text: str, clauses: Sequence[Clause]) -> Iterator[str]:
    """Find requirements outside clauses and references to clauses that do not exist."""
    known = {clause.id for clause in clauses}
    inside = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith(".. clause::"):
            inside = True
        elif line and not line.startswith("   "):
            inside = False
        if not inside and _KEYWORD.search(line) and "RFC 2119" not in line:
            yield f"line {number}: a requirement outside a clause"
        for reference in _REFERENCE.findall(line):
            if reference not in known:
                yield f"line {number}: there is no clause {reference}"


def parse_lock(lock: str) -> dict[str, list[str]]:
    """Return digest, class and status of each clause of a lock file."""
    rows = (line.split(None, 3) for line in lock.splitlines() if line and line[0] != "#")
    return {row[0]: row[1:] for row in rows}


def dump_lock(clauses: Iterable[Clause], old: str = "") -> str:
    """Return the lock file of `clauses`; statuses are taken over from `old`."""
    before = parse_lock(old)
    lines = [
        "# Written by `fpspec lock`. A changed line means that a requirement was reworded.",
        f"# id, first {DIGEST_DIGITS} digits of the SHA-256 of the words, error class, status",
        "# (-, implied, todo: #number, or exception: reason)",
    ]
    for clause in clauses:
        status = before.get(clause.id, ["", "", "-"])[2]
        lines.append(f"{clause.id:<7} {clause.digest} {clause.error_class or '-':<12} {status}")
    return "\n".join(lines) + "\n"


def python_files(root: Path, *folders: str) -> Iterator[Path]:
    """Yield the Python files below some folders of the repository, sorted."""
    for folder in folders:
        yield from sorted((root / folder).rglob("*.py"))


def cited_ids(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and id of every place in a file's code that enforces or notes a clause."""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        for clause_id in _QUOTED_ID.findall(line):
            yield number, clause_id
        for note in _CODE_NOTE.findall(line):
            for clause_id in _ID.findall(note):
                yield number, clause_id


def marked_ids(source: str) -> set[str]:
    """Return the ids that the tests in `source` are marked with.

    A mark whose argument is computed, as in a table of cases, counts for every quoted id of the
    file.
    """
    found: set[str] = set()
    for arguments in _MARK.findall(source):
        literal = _QUOTED_ID.findall(arguments)
        found.update(literal or _QUOTED_ID.findall(source))
    return found


def collect_evidence(root: Path, clauses: Iterable[Clause]) -> dict[str, Evidence]:
    """Return code places and tests of every clause, by id."""
    evidence = {clause.id: Evidence() for clause in clauses}
    for path in python_files(root, "fpformat", "fpformat_io", "tools"):
        if path.name in ("clauses.py", "trace.py"):
            continue
        for number, clause_id in cited_ids(path):
            if clause_id in evidence:
                evidence[clause_id].code.append(f"{path.relative_to(root)}:{number}")
    for path in python_files(root, "tests"):
        for clause_id in sorted(marked_ids(path.read_text(encoding="utf-8"))):
            if clause_id in evidence:
                evidence[clause_id].tests.append(str(path.relative_to(root)))
    for path in sorted((root / "tests").rglob("expect.json")):
        clause_id = json.loads(path.read_text(encoding="utf-8")).get("clause")
        if clause_id in evidence:
            evidence[clause_id].tests.append(str(path.relative_to(root)))
    return evidence


def unknown_ids(root: Path, clauses: Sequence[Clause]) -> list[str]:
    """Return every mention of a clause that does not exist, in code, tests and documents."""
    known = {clause.id for clause in clauses}
    areas = {clause.area for clause in clauses}
    files = [*python_files(root, "fpformat", "fpformat_io", "tools", "tests")]
    for folder in ("docs", "spec", "changes"):
        files += sorted(path for path in (root / folder).rglob("*.[rm][sd]*") if path.is_file())
    found = []
    for path in files:
        if root / "docs/reference/spec" in path.parents:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            for clause_id in _ID.findall(line):
                if clause_id not in known and clause_id[:3] in areas:
                    found.append(f"{path.relative_to(root)}:{number}: {clause_id}")
    return found


def matrix_lines(clauses: Iterable[Clause], evidence: dict[str, Evidence]) -> Iterator[str]:
    """Yield one line per clause: class, code places, tests."""
    for clause in clauses:
        entry = evidence[clause.id]
        code = " ".join(entry.code) or "-"
        tests = " ".join(entry.tests) or "-"
        yield f"{clause.id:<7} {clause.error_class or '-':<12} code: {code}  tests: {tests}"


def _example_marks(name: str) -> tuple[str, str]:
    return f".. example {name} begin\n", f".. example {name} end\n"


def example_of(text: str, name: str) -> str:
    """Return a worked example as it stands in the specification."""
    begin, end = _example_marks(name)
    return text.partition(begin)[2].partition(end)[0]


def replace_example(text: str, name: str, example: str) -> str:
    """Return the specification with another text for a worked example."""
    begin, end = _example_marks(name)
    head, _, rest = text.partition(begin)
    _, _, tail = rest.partition(end)
    return f"{head}{begin}{example}{end}{tail}"


def _run_lint(root: Path) -> int:
    faults = lint((root / SPEC).read_text(encoding="utf-8"))
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


def _run_lock(root: Path) -> int:
    path = root / LOCK
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    clauses = parse_clauses((root / SPEC).read_text(encoding="utf-8"))
    path.write_text(dump_lock(clauses, old), encoding="utf-8")
    return 0


def _run_matrix(root: Path) -> int:
    clauses = parse_clauses((root / SPEC).read_text(encoding="utf-8"))
    evidence = collect_evidence(root, clauses)
    print(*matrix_lines(clauses, evidence), sep="\n")
    classed = [clause for clause in clauses if clause.error_class]
    code = [clause.id for clause in classed if not evidence[clause.id].code]
    tests = [clause.id for clause in classed if not evidence[clause.id].tests]
    print(f"{len(clauses)} clauses, {len(classed)} with a class")
    print(f"without code: {' '.join(code) or 'none'}")
    print(f"without test: {' '.join(tests) or 'none'}")
    return 0


def _run_example(root: Path, *, write: bool) -> int:
    from fpspec.example import EXAMPLES, render_example

    path = root / SPEC
    text = path.read_text(encoding="utf-8")
    for name in EXAMPLES:
        example = render_example(name)
        if write:
            text = replace_example(text, name, example)
        else:
            sys.stdout.write(example)
    if write:
        path.write_text(text, encoding="utf-8")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="fpspec",
        description="Check the specification and keep its lock, code and tests together.",
        epilog="exit codes: 0 fine, 1 lint found something, 2 wrong usage",
    )
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="the repository (default: where this tool lies)"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("lint", help="check ids, words, classes and references of all clauses")
    commands.add_parser("lock", help="rewrite spec/clauses.lock from the text")
    commands.add_parser("matrix", help="print clause -> code places and tests")
    example = commands.add_parser("example", help="print the worked examples of the text")
    example.add_argument("--write", action="store_true", help="put them into the text")
    arguments = parser.parse_args(argv)
    if not (arguments.root / SPEC).is_file():
        parser.error(f"{arguments.root / SPEC} does not exist; name the repository with --root")
    if arguments.command == "example":
        return _run_example(arguments.root, write=arguments.write)
    runs = {"lint": _run_lint, "lock": _run_lock, "matrix": _run_matrix}
    return runs[arguments.command](arguments.root)
