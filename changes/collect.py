"""Move the fragments of this folder into CHANGELOG.md, under a heading of their own release."""

import argparse
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
CHANGELOG = FOLDER.parent / "CHANGELOG.md"
MARK = "<!-- releases -->\n"

# In the order of their headings; what changed on disk comes first.
HEADINGS = {
    "format": "Format",
    "feature": "Added",
    "fix": "Fixed",
    "perf": "Performance",
    "removal": "Removed",
    "doc": "Documentation",
}


def fragments(folder: Path) -> list[Path]:
    """Return the fragments, by id."""
    return sorted(path for path in folder.glob("*.md") if path.name != "README.md")


def kind_of(fragment: Path) -> str:
    """Return the kind that stands in a fragment's name.

    Raises:
        ValueError: The name is not ``<id>.<kind>.md`` with a known kind.
    """
    parts = fragment.name.split(".")
    if len(parts) != 3 or parts[1] not in HEADINGS:
        raise ValueError(f"{fragment.name}: a fragment is called <id>.<kind>.md")
    return parts[1]


def paragraphs(fragment: Path) -> list[str]:
    """Return the paragraphs of a fragment, each on one line."""
    blocks = fragment.read_text(encoding="utf-8").split("\n\n")
    return [" ".join(block.split()) for block in blocks if block.strip()]


def section(folder: Path, *, version: str, date: str) -> str:
    """Return the part of the changelog that the fragments make."""
    lines = [f"## {version} ({date})", ""]
    for kind, heading in HEADINGS.items():
        entries = [
            text
            for fragment in fragments(folder)
            if kind_of(fragment) == kind
            for text in paragraphs(fragment)
        ]
        if entries:
            lines += [f"### {heading}", "", *(f"- {text}" for text in entries), ""]
    return "\n".join(lines) + "\n"


def collect(folder: Path, changelog: Path, *, version: str, date: str) -> None:
    """Write the new section and remove the fragments."""
    text = changelog.read_text(encoding="utf-8")
    head, mark, releases = text.partition(MARK)
    if not mark:
        raise ValueError(f"{changelog.name} lacks the line {MARK.strip()}")
    new = section(folder, version=version, date=date)
    changelog.write_text(f"{head}{mark}\n{new}{releases.lstrip()}", encoding="utf-8")
    for fragment in fragments(folder):
        fragment.unlink()


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("version")
    parser.add_argument("date", help="YYYY-MM-DD")
    arguments = parser.parse_args()
    collect(FOLDER, CHANGELOG, version=arguments.version, date=arguments.date)
    return 0


if __name__ == "__main__":
    sys.exit(main())
