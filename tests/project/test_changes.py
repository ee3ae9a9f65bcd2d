"""The changelog is made of fragments, and the fragments keep to their rules."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "changes"
CLAUSE = re.compile(r"\b[A-Z]{3}-[0-9]+\b")


def _load_collect():
    spec = importlib.util.spec_from_file_location("collect", FOLDER / "collect.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


collect = _load_collect()


def _locked_clauses() -> set[str]:
    return set(CLAUSE.findall((ROOT / "spec" / "clauses.lock").read_text(encoding="utf-8")))


@pytest.mark.parametrize("fragment", collect.fragments(FOLDER), ids=lambda path: path.name)
def test_a_fragment_keeps_to_the_rules(fragment):
    kind = collect.kind_of(fragment)
    texts = collect.paragraphs(fragment)
    assert texts
    assert all(text.endswith((".", ")")) for text in texts)
    if kind == "format":
        cited = {clause for text in texts for clause in CLAUSE.findall(text)}
        assert cited, "a change of the format cites the clauses that changed"
        assert cited <= _locked_clauses()


def test_every_file_of_the_folder_is_known():
    known = {*collect.fragments(FOLDER), FOLDER / "README.md", FOLDER / "collect.py"}
    present = {path for path in FOLDER.iterdir() if path.name != "__pycache__"}
    assert present == known


def test_a_version_of_the_package_is_in_the_changelog_or_has_fragments():
    version = re.search(
        r'^__version__ = "(.+)"$',
        (ROOT / "fpformat" / "__init__.py").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    released = re.findall(r"^## (\S+) \(", _changelog(), re.MULTILINE)
    assert version is not None
    assert version[1] in released or collect.fragments(FOLDER)


def test_headings_of_each_release_are_in_order():
    for release in _changelog().split("\n## ")[1:]:
        headings = re.findall(r"^### (.+)$", release, re.MULTILINE)
        places = [list(collect.HEADINGS.values()).index(each) for each in headings]
        assert places == sorted(set(places))


def test_collecting_moves_fragments_below_the_mark(tmp_path):
    changelog = tmp_path / "CHANGELOG.md"
    changelog.write_text(f"# Changelog\n\n{collect.MARK}\n## 0.1.0 (2000-01-01)\n")
    folder = tmp_path / "changes"
    folder.mkdir()
    (folder / "README.md").write_text("rules\n")
    (folder / "7.fix.md").write_text("One thing\nwas wrong.\n\nAnother too.\n")
    (folder / "7.format.md").write_text("A bit moved (SEG-3).\n")
    collect.collect(folder, changelog, version="0.2.0", date="2000-02-02")
    assert changelog.read_text() == (
        f"# Changelog\n\n{collect.MARK}\n"
        "## 0.2.0 (2000-02-02)\n\n### Format\n\n- A bit moved (SEG-3).\n\n"
        "### Fixed\n\n- One thing was wrong.\n- Another too.\n\n"
        "## 0.1.0 (2000-01-01)\n"
    )
    assert [path.name for path in folder.iterdir()] == ["README.md"]


@pytest.mark.parametrize("name", ["7.md", "7.bug.md", "a.b.fix.md"])
def test_a_fragment_with_a_strange_name_is_refused(name):
    with pytest.raises(ValueError, match="called <id>"):
        collect.kind_of(Path(name))


def _changelog() -> str:
    return (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
