"""fpconvert: any checkpoint in, any checkpoint out."""

import argparse
import re
import sys
import textwrap
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from fpformat_tools.commands.cli import (
    OK,
    SHOWN_LINES,
    Command,
    dump_json,
    name_argument,
    new_parser,
    say,
    show,
)
from fpformat_tools.convert.conversion import Numpy, Report, Request, Unsupported, convert
from fpformat_tools.formats import registry
from fpformat_tools.formats.interface import SaveId
from fpformat_tools.streams.progress import Progress, bar, silent
from fpformat_tools.text import count_text, nbytes_text, shown

COMMAND = "fpconvert"
_EPILOG = """\
inputs, told apart by content:
{inputs}

outputs, by --to or the ending of DST:
{outputs}

examples:
  fpconvert model.safetensors model.fpformat
  fpconvert llama/ step-0 --to fpformat
  fpconvert trainer.ckpt weights.safetensors --key state_dict
  fpconvert step-0000001000 hub/ --to safetensors --max-shard-size 2GB
  fpconvert step-0000001000 layer.pt --key model/layers/0
  fpconvert old.pt new --skip-unsupported

K of --key is a name in the notation of the format: elements joined by /, as fpinspect shows them
(optimizer/state/~i0/exp_avg); a plain number also means an int key or a position.

rules:
  DST appears whole or not at all, and nothing is ever overwritten.
  safetensors holds tensors only: nested names are joined with dots, tied tensors are written
  at every name and recorded in __metadata__ (fpformat.aliases), so that they come back tied.
  __metadata__ gets "format": "pt" unless it has a format, since transformers refuses it without;
  what comes from a torch file always has one, a file without any metadata stays without.
  __metadata__: null is taken for none; values that are no strings are errors.

same source, same bytes:
  The time in a checkpoint of fpformat is SOURCE_DATE_EPOCH, in seconds, where that is set.
  --reproducible takes the save id from the content, for which the source is read twice, and the
  time 1970 where SOURCE_DATE_EPOCH is not set: the checkpoint id is then the same each time.
  The other formats hold neither.

exit codes: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted
"""
_HELP_WIDTH = 80
_LEFT_OUT_LIMIT = 5
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_nbytes(text: str) -> int:
    """Return the bytes that text such as ``5GB``, ``500MB`` or ``2GiB`` means."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip(), re.I)
    if not found or len(text) > 100:
        raise argparse.ArgumentTypeError(f"{shown(text)} is no size such as 5GB")
    unit = (found.group(2) or "").lower()
    nbytes = int(float(found.group(1)) * {**_UNITS, **_BINARY}[unit])
    if nbytes < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is less than a byte")
    return nbytes


def _epilog() -> str:
    inputs = "; ".join(each.help for each in registry.FORMATS if each.kinds)
    outputs = (f"  {name:<11}  {output.help}" for name, output in registry.outputs().items())
    return _EPILOG.format(
        inputs=textwrap.fill(
            inputs, _HELP_WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False
        ),
        outputs="\n".join(outputs),
    )


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    *others, last = names = list(registry.outputs())
    parser = new_parser(
        COMMAND,
        description=f"Convert a checkpoint between {', '.join(others)} and {last} files.",
        epilog=_epilog(),
    )
    parser.add_argument("source", metavar="SRC", type=Path, help="file or directory to read")
    parser.add_argument("target", metavar="DST", type=Path, help="what to create")
    parser.add_argument("--to", choices=names, help="format of DST")
    parser.add_argument(
        "--key", metavar="K", type=name_argument, help="convert only this part, such as model"
    )
    parser.add_argument(
        "--max-shard-size",
        metavar="SIZE",
        type=parse_nbytes,
        help="limit of a file in a safetensors directory (5GB)",
    )
    parser.add_argument(
        "--skip-unsupported", action="store_true", help="leave out, and list, what has no form"
    )
    parser.add_argument(
        "--numpy-to-tensor",
        action="store_true",
        help="make tensors of numpy arrays, and plain numbers of numpy scalars",
    )
    parser.add_argument(
        "--reproducible", action="store_true", help="the same bytes and id each time, see below"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress and no summary")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    return parser


def summary(report: Report, request: Request) -> str:
    """Return the line that tells what was done."""
    rate = nbytes_text(int(report.data_nbytes / max(report.seconds, 1e-9)))
    speed = f" ({rate}/s)" if report.data_nbytes else ""
    tensors = f"{count_text(report.tensor_count, 'tensor')}, {nbytes_text(report.data_nbytes)}"
    place = (
        f"{request.target}: {tensors} from {registry.kind_named(report.kind).title} to {report.to}"
    )
    name = f", id {report.written.checkpoint_id}" if report.written.checkpoint_id else ""
    return f"{place} in {report.seconds:.2f} s{speed}{name}"


def document(report: Report, request: Request) -> dict[str, object]:
    """Return the report for programs to read."""
    return {
        "source": str(request.source),
        "source_format": report.kind,
        "target": str(request.target),
        "target_format": report.to,
        "tensors": report.tensor_count,
        "tensor_nbytes": report.data_nbytes,
        "nbytes": report.written.nbytes,
        "checkpoint_id": report.written.checkpoint_id,
        "seconds": round(report.seconds, 6),
        "warnings": list(report.warnings),
        "skipped": list(report.skipped),
        "left_out": list(report.left_out),
    }


def _tell(report: Report) -> None:
    for warning in report.warnings:
        say(COMMAND, f"warning: {warning}")
    for line in report.skipped[:SHOWN_LINES]:
        say(COMMAND, f"skipped: {line}")
    if len(report.skipped) > SHOWN_LINES:
        say(COMMAND, f"skipped: and {len(report.skipped) - SHOWN_LINES:,} more")
    if report.left_out:
        names = report.left_out[:_LEFT_OUT_LIMIT]
        rest = len(report.left_out) - len(names)
        more = f" and {rest:,} more" if rest else ""
        say(COMMAND, f"left out by --key: {', '.join(names)}{more}")


def _convert(arguments: argparse.Namespace) -> int:
    request = Request(
        source=arguments.source,
        target=arguments.target,
        to=arguments.to,
        key=arguments.key,
        max_shard_nbytes=arguments.max_shard_size,
        unsupported=Unsupported.SKIP if arguments.skip_unsupported else Unsupported.REFUSE,
        save_id=SaveId.CONTENT if arguments.reproducible else SaveId.RANDOM,
        numpy=Numpy.CONVERT if arguments.numpy_to_tensor else Numpy.KEEP,
    )

    def show_progress(nbytes: int) -> AbstractContextManager[Progress]:
        if arguments.quiet:
            return nullcontext(silent)
        return bar(str(request.target.name), total_nbytes=nbytes)

    report = convert(request, show_progress=show_progress)
    if arguments.json:
        dump_json(document(report, request))
    else:
        _tell(report)
        if not arguments.quiet:
            show([summary(report, request)])
    return OK


main = Command(name=COMMAND, parser=parser, body=_convert).main


if __name__ == "__main__":
    sys.exit(main())
