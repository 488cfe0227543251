"""`shardproof init`: files to begin with."""

from __future__ import annotations

from pathlib import Path

import click

from shardproof.errors import UsageError
from shardproof.verdict import ExitStatus

SKELETON = Path(__file__).with_name("trainer_skeleton.py.txt")


@click.command()
@click.argument("what", type=click.Choice(["trainer"]))
@click.argument("file", type=click.Path(path_type=Path), metavar="[FILE.py]", default=Path("my_trainer.py"))
def init(what: str, file: Path) -> int:
    """Write a commented skeleton that runs: of a trainer, for `shardproof trainer`.

    \b
    shardproof init trainer
    shardproof init trainer checks/accelerate_fsdp.py
    """
    if file.suffix != ".py" or not file.parent.is_dir():
        raise UsageError.of(
            "FILE", str(file), "a Python file in a folder that is there", f"shardproof init {what} x.py"
        )
    try:
        with file.open("x", encoding="utf-8") as opened:
            opened.write(SKELETON.read_text("utf-8"))
    except FileExistsError:
        allowed = "a file that is not there yet: nothing is written over"
        raise UsageError.of("FILE", str(file), allowed, f"shardproof init {what} another.py") from None
    from shlex import quote

    print(f"{file} is there. Now: shardproof trainer {quote(str(file))}")
    return ExitStatus.OK
