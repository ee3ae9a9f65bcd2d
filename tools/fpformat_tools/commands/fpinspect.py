"""fpinspect: what is in a checkpoint, without reading its tensors."""

import argparse
import shutil
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from fpformat.errors import FormatError
from fpformat.read.digest import StateDigest, state_digest
from fpformat.read.reader import Checkpoint, open_checkpoint
from fpformat.read.trees import StateTree
from fpformat.records.model import TensorKey, View
from fpformat.records.nodes import ArrayRef, Node, ParameterRef, Reference, TensorRef, children_of
from fpformat_tools.commands import fpinspect_gc
from fpformat_tools.commands.cli import (
    OK,
    Command,
    dump_json,
    name_argument,
    new_parser,
    shortened,
    show,
)
from fpformat_tools.errors import SourceError, UsageError
from fpformat_tools.formats.directories import with_hint
from fpformat_tools.show.inspection import (
    SegmentShare,
    Totals,
    count,
    created_text,
    entry_document,
    extents_of,
)
from fpformat_tools.show.tree import (
    UNFOLDED,
    Folding,
    TreeDrawing,
    element_label,
    key_label,
    leaf_text,
)
from fpformat_tools.streams.lookup import find, unknown_text
from fpformat_tools.streams.progress import bar
from fpformat_tools.text import count_text, nbytes_text, path_text, plain, shape_text, shown

COMMAND = "fpinspect"
_EPILOG = """\
examples:
  fpinspect step-0000001000
  fpinspect step-0000001000 --tree | less
  fpinspect step-0000001000 model/embed.weight optimizer/state/0/step
  fpinspect step-0000001000 --layout
  fpinspect step-0000001000 --digest
  fpinspect step-0000001000 --json | jq .tensors
  fpinspect gc runs --dry-run        what saves that died left in runs; see fpinspect gc --help

NAME is a tensor, a value or a part of the state: elements joined by /, as the tree shows them
(optimizer/state/~i0/exp_avg); a plain number also means an int key or a position.
Opening checks everything but the data; fpverify checks the data too.
--digest shows two values: "tensors" is the same for the same names, types, shapes and elements in
any file, "state" covers every other value as well; the specification defines both.

exit codes: 0 shown, 1 no sound checkpoint or an unknown NAME, 2 wrong usage
"""
_LABEL_WIDTH = 12
_BAR_WIDTH = 60
_LAYOUT_ROWS = 40
_TEXT_LIMIT = 10_000


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = new_parser(
        COMMAND, description="Show what is in a checkpoint of fpformat.", epilog=_EPILOG
    )
    parser.add_argument("path", metavar="DIR", help="directory of the checkpoint")
    parser.add_argument(
        "names",
        metavar="NAME",
        nargs="*",
        default=(),
        type=name_argument,
        help="show only these parts",
    )
    parser.add_argument("--tree", action="store_true", help="the whole state, nothing folded")
    parser.add_argument("--layout", action="store_true", help="where each extent lies")
    parser.add_argument(
        "--digest",
        action="store_true",
        help="read every tensor and show the digests of the state, whatever its files look like",
    )
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    return parser


def _row(label: str, text: str) -> str:
    return f"  {label:<{_LABEL_WIDTH}}{text}"


def summary(checkpoint: Checkpoint, totals: Totals) -> Iterator[str]:
    """Yield the lines of the summary."""
    manifest = checkpoint.manifest
    major, minor = manifest.version
    yield f"{checkpoint.path}: checkpoint of fpformat {major}.{minor}"
    yield _row("id", checkpoint.checkpoint_id)
    if manifest.step is not None:
        yield _row("step", str(manifest.step))
    yield _row("created", created_text(manifest.created_us))
    yield _row("world size", str(manifest.world_size))
    named = manifest.features
    features = (*named.incompat, *named.ro_compat, *named.compat)
    if features:
        yield _row("features", ", ".join(features))
    for extension in manifest.extensions:
        yield _row("extension", plain(extension.name))
    for key, text in sorted(manifest.user.items()):
        yield _row("user", f"{plain(key)} = {shown(text)}")
    ties = [
        count_text(number, noun, plural)
        for number, noun, plural in (
            (totals.alias_count, "alias", "aliases"),
            (totals.view_count, "view", "views"),
            (totals.hidden_count, "hidden base", "hidden bases"),
        )
        if number
    ]
    yield _row("tensors", ", ".join([f"{totals.tensor_count:,}", *ties]))
    for row in totals.dtypes:
        tensors = count_text(row.tensor_count, "tensor")
        yield _row("", f"{row.name:<12}{tensors:>16}  {nbytes_text(row.nbytes):>9}")
    total = sum(share.nbytes for share in totals.segments)
    yield _row("segments", f"{len(totals.segments):,}, {nbytes_text(total)}")
    for share in totals.segments[:_LAYOUT_ROWS]:
        yield _row("", _share_text(share))
    if len(totals.segments) > _LAYOUT_ROWS:
        yield _row("", f"and {len(totals.segments) - _LAYOUT_ROWS:,} more")


def _share_text(share: SegmentShare) -> str:
    extents = count_text(share.extent_count, "extent")
    index, padding = nbytes_text(share.index_nbytes), share.padding_nbytes / share.nbytes
    size = nbytes_text(share.nbytes)
    return f"{share.name:<16}{size:>9}  {extents}, index {index}, padding {padding:.2%}"


class _Lookup:
    """Finds the entries of one tree's references."""

    def __init__(self, checkpoint: Checkpoint, tree: StateTree, totals: Totals) -> None:
        self._checkpoint = checkpoint
        self._keys = tree.keys
        self._nbytes = totals.logical_nbytes
        self._has_tree = bool(checkpoint.tree_ranks())

    def drawing(self, folding: Folding) -> TreeDrawing:
        """Return what draws trees of these references."""
        encoding = (sys.stdout.encoding or "ascii").lower()
        return TreeDrawing(
            entry=lambda ref: self._checkpoint.entry(self._keys[ref.index]),
            nbytes=lambda ref: self._nbytes[self._keys[ref.index]],
            ascii=not encoding.startswith("utf"),
            folding=folding,
            label=element_label if self._has_tree else key_label,
        )

    def key(self, ref: Reference) -> TensorKey:
        """Return the key of a reference."""
        return self._keys[ref.index]


def _trees(checkpoint: Checkpoint) -> Iterator[tuple[str, StateTree]]:
    ranks = checkpoint.tree_ranks()
    for rank in ranks:
        tree = checkpoint.tree(rank)
        if tree is not None:
            yield ("state" if len(ranks) == 1 else f"state of rank {rank}"), tree
    if not ranks:
        keys = [key for key in checkpoint.keys() if not checkpoint.entry(key).hidden]  # noqa: SIM118
        node: Node = {
            name if scope is None else f"{name} (rank {scope})": TensorRef(position)
            for position, (name, scope) in enumerate(keys)
        }
        yield "tensors (no state tree)", StateTree(node=node, keys=keys)


def layout(checkpoint: Checkpoint, totals: Totals) -> Iterator[str]:
    """Yield the lines that show where the extents of each segment lie."""
    for segment, share in zip(checkpoint.segments, totals.segments, strict=True):
        yield ""
        yield _share_text(share)
        yield f"  {_bar(share, segment.header.geometry.align)}"
        yield f"  {'offset':>16}  {'size':>16}  {'padding':>9}  content"
        rest = share.extent_count - _LAYOUT_ROWS
        for position, place in enumerate(extents_of(segment)):
            if position >= _LAYOUT_ROWS and rest > 1:
                yield f"  and {rest:,} more; all of them with --json"
                break
            numbers = f"{place.offset:>16,}  {place.nbytes:>16,}  {place.padding_nbytes:>9,}"
            yield f"  {numbers}  {plain(place.title)}"


def _bar(share: SegmentShare, align: int) -> str:
    parts = (
        ("H", align),
        ("#", share.data_nbytes),
        (".", share.padding_nbytes),
        ("i", share.index_nbytes),
        ("F", align),
    )
    cells = [(mark, max(round(n / share.nbytes * _BAR_WIDTH), 1)) for mark, n in parts if n]
    text = "".join(mark * width for mark, width in cells)
    return f"[{text}]  H header, # data, . padding, i index, F footer"


def _find(checkpoint: Checkpoint, totals: Totals, names: Sequence[str]) -> Iterator[str]:
    """Yield the lines of tensors, parts and values of the state, each wherever it is found.

    Raises:
        SourceError: Names that are nowhere, all of them, after the lines of the others.
    """
    trees = list(_trees(checkpoint))
    unknown = []
    gap: list[str] = []
    for name in names:
        lines = list(_matches(checkpoint, totals, trees, name))
        if not lines:
            unknown.append(unknown_text([tree.node for _, tree in trees], name))
            continue
        yield from gap
        yield from lines
        gap = [""]
    if len(unknown) == 1:
        raise SourceError("invalid", checkpoint.path, unknown[0])
    if unknown:
        detail = f"{len(unknown):,} names are not in it"
        raise SourceError("invalid", checkpoint.path, detail, unknown)


def _matches(
    checkpoint: Checkpoint, totals: Totals, trees: Sequence[tuple[str, StateTree]], name: str
) -> Iterator[str]:
    """Yield the lines of everything that a name means, in the tables and in each tree."""
    keys = dict.fromkeys(key for key in totals.logical_nbytes if key[0] == name)
    others: dict[tuple[str, ...], list[str]] = {}
    for title, tree in trees:
        found = find(tree.node, name)
        if found is None:
            continue
        lookup = _Lookup(checkpoint, tree, totals)
        path, node = found
        if isinstance(node, TensorRef | ParameterRef | ArrayRef):
            keys[lookup.key(node)] = None
        else:
            lines: tuple[str, ...] = tuple(lookup.drawing(UNFOLDED).draw(node, path_text(path)))
            if children_of(node) is None:
                lines = (f"{path_text(path)}: {leaf_text(node, limit=_TEXT_LIMIT)}",)
            others.setdefault(lines, []).append(title)
    for key in keys:
        yield from _tensor(checkpoint, key, totals)
    for lines, titles in others.items():
        # What is the same on every rank is shown once, without saying so.
        if len(titles) < len(trees):
            yield f"in {', '.join(titles)}:"
        yield from lines


def _tensor(checkpoint: Checkpoint, key: TensorKey, totals: Totals) -> Iterator[str]:
    entry = checkpoint.entry(key)
    yield plain(entry.name) if entry.name else "'' (the state itself)"
    yield _row("dtype", f"{entry.dtype.name} ({count_text(entry.dtype.nbytes, 'byte')})")
    yield _row("shape", shape_text(entry.shape))
    nbytes = totals.logical_nbytes[key]
    yield _row("size", f"{nbytes_text(nbytes)} ({nbytes:,} bytes)")
    if entry.scope is not None:
        yield _row("rank", str(entry.scope))
    if isinstance(entry.alias, View):
        how = f"strides {shape_text(entry.alias.strides)}, offset {entry.alias.offset:,}"
        yield _row("view of", f"{plain(entry.alias.target[0])}, {how}")
    elif entry.alias is not None:
        yield _row("same as", plain(entry.alias[0]))
    owner = entry.target or entry.key
    for segment, share in zip(checkpoint.segments, totals.segments, strict=True):
        row = segment.find(owner)
        for extent in [] if row is None else segment.extents_of(row):
            record = segment.index.tables.extents[extent]
            start = int(record["offset"])
            stop = start + int(record["stored_nbytes"])
            yield _row("stored in", f"{share.name}, bytes {start:,} to {stop:,}")


def document(checkpoint: Checkpoint, totals: Totals) -> dict[str, Any]:
    """Return everything for programs to read."""
    manifest = checkpoint.manifest
    return {
        "path": checkpoint.path,
        "version": list(manifest.version),
        "checkpoint_id": checkpoint.checkpoint_id,
        "save_id": manifest.save_id.hex(),
        "step": manifest.step,
        "created_us": manifest.created_us,
        "world_size": manifest.world_size,
        "features": {
            "incompat": list(manifest.features.incompat),
            "ro_compat": list(manifest.features.ro_compat),
            "compat": list(manifest.features.compat),
        },
        "extensions": [extension.name for extension in manifest.extensions],
        "user": manifest.user,
        "segments": [
            {
                "name": share.name,
                "nbytes": share.nbytes,
                "data_nbytes": share.data_nbytes,
                "padding_nbytes": share.padding_nbytes,
                "index_nbytes": share.index_nbytes,
                "extents": [
                    {"offset": place.offset, "nbytes": place.nbytes, "content": place.title}
                    for place in extents_of(segment)
                ],
            }
            for segment, share in zip(checkpoint.segments, totals.segments, strict=True)
        ],
        "tensors": [
            entry_document(checkpoint.entry(key), nbytes)
            for key, nbytes in totals.logical_nbytes.items()
        ],
    }


def digest_of(checkpoint: Checkpoint, totals: Totals) -> StateDigest:
    """Return the digests of the state; every tensor is read."""
    shown = (key for key in totals.logical_nbytes if not checkpoint.entry(key).hidden)
    total_nbytes = sum(totals.logical_nbytes[key] for key in shown)
    with bar("reading", total_nbytes=total_nbytes) as progress:
        return state_digest(checkpoint, progress=progress)


def _lines(checkpoint: Checkpoint, arguments: argparse.Namespace) -> Iterator[str]:
    totals = count(checkpoint)
    if arguments.digest:
        found = digest_of(checkpoint, totals)
        yield _row("tensors", found.tensors)
        yield _row("state", found.state)
        return
    if arguments.names:
        yield from _find(checkpoint, totals, arguments.names)
        return
    yield from summary(checkpoint, totals)
    if arguments.layout:
        yield from layout(checkpoint, totals)
    if arguments.tree or not arguments.layout:
        for title, tree in _trees(checkpoint):
            yield ""
            lookup = _Lookup(checkpoint, tree, totals)
            yield from lookup.drawing(UNFOLDED if arguments.tree else Folding()).draw(
                tree.node, title
            )


def _document(checkpoint: Checkpoint, arguments: argparse.Namespace) -> dict[str, Any]:
    totals = count(checkpoint)
    everything = document(checkpoint, totals)
    if arguments.digest:
        found = digest_of(checkpoint, totals)
        everything["digest"] = {"tensors": found.tensors, "state": found.state}
    return everything


def _inspect(arguments: argparse.Namespace) -> int:
    if arguments.digest and (arguments.names or arguments.tree or arguments.layout):
        raise UsageError("--digest is of the whole checkpoint: neither NAME, --tree nor --layout")
    try:
        checkpoint = open_checkpoint(arguments.path)
    except FormatError as error:
        raise with_hint(error, arguments.path) from error
    with checkpoint:
        if arguments.json:
            dump_json(_document(checkpoint, arguments))
            return OK
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        lines = _lines(checkpoint, arguments)
        show(shortened(line, width=width) if width else line for line in lines)
    return OK


_SHOW = Command(name=COMMAND, parser=parser, body=_inspect)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, or the one that its first word names; see `Command.main`."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["gc"]:
        return fpinspect_gc.main(words[1:])
    return _SHOW.main(words)


if __name__ == "__main__":
    sys.exit(main())
