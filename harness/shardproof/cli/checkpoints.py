"""The command that compares two checkpoints on disk."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from shardproof.cli import arguments, options
from shardproof.errors import A_TRAINER
from shardproof.protocol.plugin_modules import load_plugins
from shardproof.verdict import ExitStatus


@click.command()
@click.argument("a", type=click.Path(path_type=Path), metavar="A")
@click.argument("b", type=click.Path(path_type=Path), metavar="B")
@click.option(
    "--rename", "renames", multiple=True, metavar="REGEX=REPL", help="Change names on both sides, first; repeatable."
)
@click.option("--only", multiple=True, metavar="REGEX", help="Compare only names in which it is found; repeatable.")
@click.option("--all", "everything", is_flag=True, help="Print every difference, however many.")
@click.option("--no-checksums", is_flag=True, help="Do not verify the checksums in files of torch.")
@options.json
@click.option("--html", "html_file", type=click.Path(path_type=Path), metavar="FILE", help="Also write a page.")
@options.plugin
def diff(
    a: Path, b: Path, renames: tuple[str, ...], only: tuple[str, ...], everything: bool, no_checksums: bool,
    json_file: Path | None, html_file: Path | None, plugins: tuple[str, ...],
) -> int:  # fmt: skip
    """Compare two checkpoints bit for bit, whatever wrote them and however they are sharded.

    A and B are folders of torch's distributed checkpoint, Megatron-Core or DeepSpeed, safetensors, or files of
    torch.save; they need not be of one kind. Nothing in them is executed, and memory stays small at any size. Exit
    status: 0 equal, 1 different, 2 bad input.

    \b
    shardproof diff checkpoints/step-100 checkpoints/step-200
    shardproof diff checkpoints/step-100 model.safetensors --rename '^model[.]=' --only '[.]weight$'
    shardproof diff before.pt after.pt --all --json differences.json --html differences.html
    """
    from shardproof.compare.page import write_page
    from shardproof.compare.progress import progress_on
    from shardproof.compare.renames import parse_pattern, parse_rename
    from shardproof.compare.run import CompareRequest, compare
    from shardproof.compare.text import render
    from shardproof.protocol.registry import all_systems
    from shardproof.readers.errors import UnfamiliarError
    from shardproof.report.publish import write_json

    load_plugins(plugins)
    arguments.require_output_files(None, json=json_file, html=html_file)
    request = CompareRequest(
        a,
        b,
        [layout for system in all_systems() for layout in system.layouts],
        [parse_rename(text) for text in renames],
        [parse_pattern("--only", text) for text in only],
        checksums=not no_checksums,
    )
    with progress_on(sys.stderr) as progress:
        try:
            found = compare(request, progress)
        except UnfamiliarError as error:
            raise error.led_to(A_TRAINER) from None
    print(render(found, everything=everything), end="")
    write_json(json_file, found.to_json())
    if html_file is not None:
        write_page(found, html_file)
    if written := [str(file) for file in (json_file, html_file) if file is not None]:
        print(f"written: {', '.join(written)}", file=sys.stderr)
    return ExitStatus.OK if found.equal else ExitStatus.FAILURE
