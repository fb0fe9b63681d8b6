"""`optstream convert SRC DST --to {streamed,resident}`: a checkpoint's optimizer state in the other kind."""

from __future__ import annotations

import argparse


def add_parser(subparsers: argparse._SubParsersAction) -> argparse.ArgumentParser:
    parser = subparsers.add_parser(
        "convert",
        help="turn the optimizer state of one kind of checkpoint into the other",
        description="Turns the optimizer state in a streamed checkpoint into Megatron's torch_dist kind "
        "(fully reshardable), or the other way round, with the same bits, in bounded memory.",
        allow_abbrev=False,
    )
    parser.add_argument("source", metavar="SRC", help="directory of the checkpoint")
    parser.add_argument("target", metavar="DST", help="directory of the new one")
    parser.add_argument("--to", choices=("streamed", "resident"), required=True, help="the kind of DST")
    parser.set_defaults(run=run)
    return parser


def run(args: argparse.Namespace) -> int:
    from optstream.core.convert import convert_to_resident, convert_to_streamed

    convert = convert_to_streamed if args.to == "streamed" else convert_to_resident
    manifest = convert(args.source, args.target)
    print(
        f"{args.target}: step {manifest.iteration}, {manifest.entries} parameters, "
        f"{manifest.data_bytes:,} bytes of state"
    )
    return 0
