"""`shardproof resilience`: tests what crashes, failing disks and damaged files do to a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardproof.cli import arguments, completion, options
from shardproof.errors import UsageError
from shardproof.protocol.plugin_modules import load_plugins
from shardproof.verdict import ExitStatus

if TYPE_CHECKING:
    from shardproof.resilience.run import ResilienceOutcome

TRIALS = 400
OF_BOTH = ("trials", "seed", "trial", "deadline_s", "out", "json_file")


@click.command()
@click.argument("names", nargs=-1, metavar="[STACK]...", shell_complete=completion.stacks)
@options.script
@click.option("--trials", type=options.SAMPLE, metavar="N", help="Trials of each at most [400, of a command 40].")
@click.option("--seed", type=options.SEED, default=0, show_default=True, help="Seed of damages and samples.")
@click.option("--trial", metavar="ID", help="Make this one trial of one stack again, and print the record of its save.")
@click.option("--set", "sets", multiple=True, metavar="AXIS=V[,V]", help="Values of a trainer's axis [the first].")
@click.option("--layout", type=click.Choice(["over", "steps"]), default="over", show_default=True,
              help="Whether a trainer saves over its last checkpoint, or into a folder for each step.")  # fmt: skip
@click.option("-j", "--jobs", type=options.JOBS, default=2, show_default=True, help="Trials side by side.")
@options.either_deadline
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the trials, the scorecard and its page; a run that was cut off goes on there.",
)
@options.json
@options.plugin
@click.pass_context
def resilience(
    context: click.Context, /, names: tuple[str, ...], command: str | None, steps: str, world: str, resume: str,
    trials: int | None, seed: int, trial: str | None, sets: tuple[str, ...], layout: str, jobs: int,
    deadline_s: float | None, out: Path | None, json_file: Path | None, plugins: tuple[str, ...],
) -> int:  # fmt: skip
    """Try what crashes, failing disks and damage make of a checkpoint: STACK is a way to keep one (see `list`), or the
    file of a trainer of your own, FILE.py[:CLASS].

    Every change that a save makes to its folder is recorded, by strace. Each folder that a crash may leave by that
    record, and damaged ones, are loaded in processes of their own, and what comes out is compared bit by bit. Saves and
    loads are also struck by errors of the disk, and asked what they say.

    With --command a training script is run as it is. It resumes in each folder that a kill may leave while it writes,
    and its last checkpoint is compared with that of a run that nothing killed.

    \b
    shardproof resilience
    shardproof resilience torch-save dcp --trials 2000 --out reports/resilience
    shardproof resilience dcp --trial flip-payload-0
    shardproof resilience my_trainer.py --set optimizer=sgd
    shardproof resilience --command 'python train.py --out {folder} --max-steps {until}'

    Exit status: 0 every load gave a whole state or an error, 1 one gave something else, hung or crashed, a save lied,
    or a command began anew or ended with an error, 2 bad input, 130 interrupted.
    """
    from shardproof.resilience import scorecard
    from shardproof.resilience.progress import Progress
    from shardproof.resilience.run import ResilienceRequest, replay, try_stacks
    from shardproof.resilience.trace import require_strace
    from shardproof.resilience.trainer_stacks import all_named

    options.require_one_of_both(context, "STACK", names, OF_BOTH)
    require_strace()
    if command is not None:
        asked = (command, steps, world, resume)
        return _tried_command(asked, (trials, seed, trial), deadline_s or options.COMMAND_S, out, json_file)
    trials, deadline_s = trials or TRIALS, deadline_s or options.SESSION_S
    load_plugins(plugins)
    arguments.require_output_files(None, json=json_file)
    stacks = all_named(names, sets, layout)
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
    return _reported(outcome, trials, seed, folder, json_file)


def _reported(
    outcome: ResilienceOutcome, trials: int, seed: int, folder: Path | None, json_file: Path | None
) -> int:  # fmt: skip
    """Print and write what the trials showed; the exit status."""
    from shardproof.report.publish import write_json
    from shardproof.resilience import page, scorecard

    document = scorecard.document_of(outcome.found, trials, seed)
    print(scorecard.render(document), end="")
    if folder is not None:
        print(f"report: {page.write_files(document, folder)}")
    write_json(json_file, document)
    if outcome.interrupted:
        again = "the same command goes on from here" if folder else "with --out DIR, the same command would go on"
        print(f"interrupted: {again}", file=sys.stderr)
        return ExitStatus.INTERRUPTED
    return scorecard.exit_status(document)


def _tried_command(
    asked: tuple[str, str, str, str], by: tuple[int | None, int, str | None], deadline_s: float, out: Path | None,
    json_file: Path | None,
) -> int:  # fmt: skip
    """Try a command; the exit status. `by` is the number of trials, the seed, and the one trial to be made again."""
    from shardproof.folders import folder_of
    from shardproof.resilience import commands, scorecard
    from shardproof.resilience.progress import Progress
    from shardproof.resilience.run import ResilienceRequest
    from shardproof.trainer.command.asked import asked_command
    from shardproof.trainer.command.runs import Runs, on_stderr

    command, (trials, seed, trial) = asked_command(*asked), by
    others = {"command": command.key, "trial": trial, "seed": seed}
    folder = out or folder_of([f"resilience-command-{command.name}"], (), None, others)
    arguments.require_output_files(folder, json=json_file)
    arguments.writable_folder(folder)
    runs = Runs(command, folder, deadline_s, on_stderr(quiet=False))
    if trial is not None:
        tried, trace = commands.replay_command(trial, runs)
        print(scorecard.render_trial(tried, trace), end="")
        print(f"the folder that the command found: {folder / 'state'}; what it left: {folder / 'kept' / 'trial'}")
        return ExitStatus.FAILURE if tried.outcome in scorecard.WRONG_OF_COMMANDS else ExitStatus.OK
    trials = trials or commands.TRIALS
    with Progress(sys.stderr) as progress:
        request = ResilienceRequest((), trials, seed, deadline_s, out=folder, watch=progress)
        outcome = commands.try_command(command, request, runs)
    return _reported(outcome, trials, seed, folder, json_file)
