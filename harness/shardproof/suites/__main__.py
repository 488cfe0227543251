"""`python -m shardproof.suites SYSTEM/SUITE --clone NAME=DIR`: run a suite of upstream's, compare with the kept
verdicts.

Exit status: 0 where every test ended as the list says, 1 where one did not, 2 for bad input.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import click

from shardproof.cli import options
from shardproof.errors import UsageError
from shardproof.suites import ranks as runner
from shardproof.suites.declared import upstream_of
from shardproof.suites.verdicts import FAILED, PASSED, SKIPPED, CommittedVerdicts, differences, text_of
from shardproof.world import preflight


@click.command()
@click.argument("name", metavar="SYSTEM/SUITE")
@options.clone
@click.option("--ranks", type=click.IntRange(1, 8), default=1, show_default=True, help="Processes, one a rank.")
@click.option("--limit-s", type=float, default=300.0, show_default=True, help="How long a test may take.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for what the ranks write; kept.")
@click.option("--accept", is_flag=True, help="Write the list of verdicts instead of comparing with it.")
def main(name: str, clones: tuple[str, ...], ranks: int, limit_s: float, out: Path | None, accept: bool) -> None:
    """Run one of upstream's suites, unmodified, over the emulation, at the commit that the system declares.

    \b
    python -m shardproof.suites megatron-core/optimizer --clone megatron-core=../Megatron-LM --ranks 2
    """
    system, _, wanted = name.partition("/")
    try:
        upstream = upstream_of(system)
        suite = upstream.suite(wanted)
        preflight.use_clones(clones)
        with tempfile.TemporaryDirectory(prefix="shardproof-suite-") as temporary:
            scratch = (out or Path(temporary)).resolve()
            scratch.mkdir(parents=True, exist_ok=True)
            where = runner.place(upstream, scratch)
            seen = runner.verdicts(upstream, suite, ranks, where, limit_s)
    except UsageError as error:
        raise click.UsageError(str(error)) from None
    counts = {outcome: sum(one.outcome == outcome for one in seen.values()) for outcome in (PASSED, FAILED, SKIPPED)}
    click.echo(f"{name} at {ranks} ranks: {', '.join(f'{number} {outcome}' for outcome, number in counts.items())}")
    file = Path(str(upstream.verdicts_file(suite, ranks)))
    if accept:
        file.parent.mkdir(exist_ok=True)
        file.write_text(text_of(seen, f"Verdicts of {name} at {ranks} ranks, {upstream.tag}. Written by --accept."))
        return
    if not file.is_file():
        raise click.UsageError(f"no list of verdicts at {ranks} ranks: {file}; make one with --accept")
    lines = differences(CommittedVerdicts.read(file.read_text("utf-8"), str(file)), seen)
    click.echo("\n".join(lines) or "every test as expected")
    raise SystemExit(1 if lines else 0)


if __name__ == "__main__":
    main()
