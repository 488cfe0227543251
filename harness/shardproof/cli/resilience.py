"""`shardproof resilience`: tests what crashes, failing disks and damaged files do to a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from shardproof.cli import arguments, completion, options
from shardproof.errors import UsageError
from shardproof.protocol.plugin_modules import load_plugins
from shardproof.verdict import ExitStatus


@click.command()
@click.argument("names", nargs=-1, metavar="[STACK]...", shell_complete=completion.stacks)
@click.option(
    "--trials", type=options.SAMPLE, default=400, show_default=True, metavar="N", help="Trials of each stack at most."
)
@click.option("--seed", type=options.SEED, default=0, show_default=True, help="Seed of damages and samples.")
@click.option("--trial", metavar="ID", help="Make this one trial of one stack again, and print the record of its save.")
@click.option("--set", "sets", multiple=True, metavar="AXIS=V[,V]", help="Values of a trainer's axis [the first].")
@click.option("--layout", type=click.Choice(["over", "steps"]), default="over", show_default=True,
              help="Whether a trainer saves over its last checkpoint, or into a folder for each step.")  # fmt: skip
@click.option("-j", "--jobs", type=options.JOBS, default=2, show_default=True, help="Trials side by side.")
@options.deadline
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the trials, the scorecard and its page; a run that was cut off goes on there.",
)
@options.json
@options.plugin
def resilience(
    names: tuple[str, ...], trials: int, seed: int, trial: str | None, sets: tuple[str, ...], layout: str, jobs: int,
    deadline_s: float, out: Path | None, json_file: Path | None, plugins: tuple[str, ...],
) -> int:  # fmt: skip
    """Try what crashes, failing disks and damage make of a checkpoint: STACK is a way to keep one (see `list`), or the
    file of a trainer of your own, FILE.py[:CLASS].

    Every change that a save makes to its folder is recorded, by strace. Each folder that a crash may leave by that
    record, and damaged ones, are loaded in processes of their own, and what comes out is compared bit by bit. Saves and
    loads are also struck by errors of the disk, and asked what they say.

    \b
    shardproof resilience
    shardproof resilience torch-save dcp --trials 2000 --out reports/resilience
    shardproof resilience dcp --trial flip-payload-0
    shardproof resilience my_trainer.py --set optimizer=sgd

    Exit status: 0 every load gave a whole state or an error, 1 one gave something else, hung or crashed, or a save
    lied, 2 bad input, 130 interrupted.
    """
    from shardproof.report.publish import write_json
    from shardproof.resilience import page, scorecard
    from shardproof.resilience.progress import Progress
    from shardproof.resilience.run import ResilienceRequest, replay, try_stacks
    from shardproof.resilience.trace import require_strace
    from shardproof.resilience.trainer_stacks import all_named

    load_plugins(plugins)
    arguments.require_output_files(None, json=json_file)
    stacks = all_named(names, sets, layout)
    require_strace()
    if trial is not None:
        if len(stacks) != 1:
            form = "shardproof resilience dcp --trial killed@3"
            raise UsageError.of("--trial", trial, "with the name of the one stack that it is of", form)
        tried, trace = replay(stacks[0], trial, seed, deadline_s)
        print(scorecard.render_trial(tried, trace), end="")
        return ExitStatus.FAILURE if tried.outcome in scorecard.WRONG else ExitStatus.OK
    folder = arguments.writable_folder(out) if out else None
    with Progress(sys.stderr) as progress:
        request = ResilienceRequest(stacks, trials, seed, deadline_s, jobs, folder, progress)
        outcome = try_stacks(request)
    document = scorecard.document_of(outcome.found, trials, seed)
    print(scorecard.render(document), end="")
    if folder is not None:
        print(f"report: {page.write_files(document, folder)}")
    write_json(json_file, document)
    if outcome.interrupted:
        again = "the same command goes on from here" if folder else "with --out DIR, the same command would go on"
        print(f"interrupted: {again}", file=sys.stderr)
        return 130
    return scorecard.exit_status(document)
