"""The command line: `shardproof COMMAND`. It parses, calls, prints and maps errors to the contract's exit status."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardproof import __version__
from shardproof.cli import arguments, completion, options
from shardproof.cli.checkpoints import diff
from shardproof.cli.heads import claims, port
from shardproof.cli.init import init
from shardproof.cli.investigate import bisect, conformance, cures_, explore, export, optimizer, shrink, sweep
from shardproof.cli.night import night
from shardproof.cli.reports import history, known, merge, report
from shardproof.cli.resilience import resilience
from shardproof.cli.trainer import trainer
from shardproof.errors import MOST_GIVEN, UNWRITTEN, HarnessError, UsageError, printable
from shardproof.protocol.plugin_modules import load_plugins
from shardproof.verdict import ExitStatus
from shardproof.world import preflight

if TYPE_CHECKING:
    from shardproof.verdict import Verdict


NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR)
"""What the system says of a path that leads nowhere, whatever is asked of it."""

READER_GONE = 128 + signal.SIGPIPE
"""The status of a command whose output nobody reads to its end; what a shell calls any other command's."""


def entry(words: Sequence[str]) -> int:
    """Run a command line; the process's exit status.

    Every error that a user can cause is one message on stderr and status 2; a failure of our own is status 3.
    """
    try:
        options.require_words(tuple(words))
        status = cli.main(args=list(words), prog_name="shardproof", standalone_mode=False)
    except click.exceptions.Abort:
        return ExitStatus.INTERRUPTED
    except SystemExit as ended:  # click's: a completion has been told, or, with 1, the reader of a pipe has gone
        if completion.VARIABLE in os.environ or ended.code != 1:
            return int(ended.code or 0)
        return unwritten(OSError(errno.EPIPE, os.strerror(errno.EPIPE)))
    except click.ClickException as error:
        said = io.StringIO()
        error.show(said)
        print(printable(said.getvalue(), 2 * MOST_GIVEN), end="", file=sys.stderr)
        return ExitStatus.USAGE
    except UsageError as error:
        print(f"shardproof: {printable(str(error))}", file=sys.stderr)
        return ExitStatus.USAGE
    except HarnessError as error:
        print(f"shardproof: the harness failed: {printable(str(error))}", file=sys.stderr)
        return ExitStatus.HARNESS
    except OSError as error:
        if error.errno not in NO_PATH or error.filename is None:
            return unwritten(error) if error.errno in UNWRITTEN else _failed()
        wrong = UsageError.of("path", str(error.filename), f"one that can be followed ({error.strerror})", "bug.toml")
        print(f"shardproof: {printable(str(wrong))}", file=sys.stderr)
        return ExitStatus.USAGE
    except Exception:
        return _failed()
    return int(status or 0)


def unwritten(error: OSError) -> int:
    """The status where something could not be written, which is told unless the reader of a pipe has had enough, as
    `head` does; results that were stored are kept."""
    if error.errno == errno.EPIPE:
        return READER_GONE
    said = f"cannot write {error.filename or 'what there is to say'}: {error.strerror}"
    print(f"shardproof: the harness failed: {printable(said)}", file=sys.stderr)
    return ExitStatus.HARNESS


def _failed() -> int:
    """Print the traceback of an unforeseen exception, and return the exit status that means a failure of the
    harness."""
    traceback.print_exc()
    print("shardproof: the harness failed: an error of its own, above; please report it", file=sys.stderr)
    return ExitStatus.HARNESS


QUESTIONS = {
    "Whether a library keeps its state": ("run", "plan", "list", "explore", "sweep", "resilience"),
    "Whether yours does": ("init", "trainer", "optimizer", "diff", "inspect", "conformance"),
    "What went wrong, and who knows of it": (
        "explain", "replay", "shrink", "known", "export", "bisect", "cures",
    ),
    "What came last night": ("night", "port", "history", "report", "merge", "claims"),
    "Whether to believe it, and what is here": ("faults", "doctor", "completion"),
}  # fmt: skip
"""The commands by what a user asks, in the order in which a user meets them."""


class _Commands(click.Group):
    """The group of all commands, listed by the question that a command answers."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [name for names in QUESTIONS.values() for name in names]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The commands under their questions, each with the beginning of its help."""
        limit = formatter.width - 6 - max(map(len, self.commands))
        for question, names in QUESTIONS.items():
            with formatter.section(question):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(limit)) for name in names])


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="shardproof")
def cli() -> None:
    """Bitwise correctness testing and fault injection for sharded training state.

    \b
    shardproof run                                  the smoke scenarios, on the reference and on FSDP2 + DCP
    shardproof plan nightly                         what the nightly would run, and how long it takes
    shardproof run --system torch-fsdp2 --set dtype=bf16 --set mesh=1x4x1,2x2x1
    shardproof run regressions/torch-fsdp2-164929   a defect of PyTorch, kept
    shardproof run --system megatron-core@0.16.1    another release of a library, installed on the spot
    shardproof replay 1a2b3c4d5e6f                  one scenario again, in fresh processes

    Exit status: 0 all pass, 1 a correctness failure, 2 bad usage or input, 3 the harness failed, 4 nothing was run,
    130 Ctrl-C, 141 the reader of the output closed it.
    """


@cli.command()
@options.selection
@click.option("-j", "--jobs", type=options.JOBS, default=None, help="Scenarios, or Ray's slots, at once [cores + 1].")
@options.deadline
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where ranks compute [the scenario's: cpu].")
@options.python
@options.clone
@options.executor
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=None,
    metavar="DIR",
    help="Folder of results [the command's own, under reports/].",
)
@options.json
@options.junit
@click.option("--known", is_flag=True, help="Count known issues for scenario files and planted faults too.")
@click.option("-q", "--quiet", is_flag=True, help="No progress, and a report only if the run does not exit with 0.")
def run(
    names: tuple[str, ...], systems: tuple[str, ...], sets: tuple[str, ...], strength: str | None,
    sample: int | None, seed: int, faults: tuple[str, ...], shard: str | None, plugins: tuple[str, ...],
    jobs: int | None, deadline_s: float, device: str | None, python: str | None, clones: tuple[str, ...], executor: str,
    ray_address: str | None, out: Path | None, json_file: Path | None, junit_file: Path | None, known: bool,
    quiet: bool,
) -> int:  # fmt: skip
    """Run scenarios: a NAME of `scenarios/` (default: smoke) or scenario files.

    \b
    shardproof run
    shardproof run nightly --system reference --json nightly.json
    shardproof run --system torch-fsdp2 --set mesh=2x2x1 --set dtype=bf16,fp32/param=bf16
    shardproof run bug.toml --system megatron-core@0.14.0 --system megatron-core@path:../Megatron-LM
    shardproof run bug.toml --set optimizer=adamw/impl=forloop,adamw/impl=fused
    shardproof run bug.toml --device cuda
    shardproof run regressions/torch-fsdp2-164929 --fault boundary.memory-param --known
    shardproof run nightly --executor ray --ray-address 10.0.0.7:6379
    """
    from shardproof.folders import folder_of, point_latest
    from shardproof.report.text import render_text, wants_colour
    from shardproof.request import Request
    from shardproof.run import run as execute

    modules = load_plugins(plugins)
    preflight.require_interpreter(python)
    ray = arguments.on_ray(executor, ray_address, jobs)
    if ray is None:
        preflight.require_device(device, python)
    plan = arguments.planned(names, systems, arguments.on_device(sets, device), strength, sample, seed, faults, shard)
    plan.require_budget()
    jobs = jobs or (os.cpu_count() or 1) + 1
    if ray is None:  # of a cluster, each node is asked
        preflight.require_machine(plan.supported, python, jobs)
    preflight.use_clones(clones)
    others = {
        "set": sets, "strength": strength, "sample": sample, "seed": seed, "fault": faults, "plugin": plugins,
        "device": device, "python": python, "known": "on" if known else "",
    }  # fmt: skip
    folder = out or folder_of(names, systems, shard, others)
    arguments.require_output_files(folder, json=json_file, junit=junit_file)
    releases = preflight.require_releases(plan.scenarios, python, arguments.places_of_releases(names, systems))
    arguments.writable_folder(folder)
    if out is None:
        point_latest(folder)
    issues = arguments.shipped_issues()
    request = Request(
        plan=plan,
        out=folder,
        command=tuple(sys.argv[1:]),
        seed=seed,
        jobs=jobs,
        deadline_s=deadline_s,
        plugins=modules,
        python=python,
        releases=releases,
        known=arguments.that_count(issues, plan, faults, known),
        issues=issues,
        json=json_file,
        junit=junit_file,
        quiet=quiet,
        ray=ray,
    )
    outcome = execute(request)
    if not quiet or outcome.status or outcome.interrupted:
        print(render_text(outcome.report, outcome.page, wants_colour(sys.stdout, os.environ)), end="")
    if outcome.interrupted:
        print("interrupted: the same command resumes the run", file=sys.stderr)
        return ExitStatus.INTERRUPTED
    return outcome.status


@cli.command()
@options.selection
@options.python
@options.clone
def plan(
    names: tuple[str, ...], systems: tuple[str, ...], sets: tuple[str, ...], strength: str | None, sample: int | None,
    seed: int, faults: tuple[str, ...], shard: str | None, plugins: tuple[str, ...], python: str | None,
    clones: tuple[str, ...],
) -> int:  # fmt: skip
    """Print what `run` would run: counts, exclusions with reasons, coverage, time. Takes the same selection.

    A commit or a working tree is exported and installed for it, as for a run, and asked what it calls itself, since
    that decides what is refused.

    \b
    shardproof plan nightly
    shardproof plan nightly --system torch-fsdp2 --strength 2
    shardproof plan nightly --system megatron-core@git:main+cured --clone megatron-core=../Megatron-LM
    """
    from shardproof.space.plan_heads import at_heads
    from shardproof.space.plan_text import render_plan
    from shardproof.space.preparation import preparation

    load_plugins(plugins)
    preflight.require_interpreter(python)
    preflight.use_clones(clones)
    made, heads = at_heads(arguments.planned(names, systems, sets, strength, sample, seed, faults, shard), python)
    print(render_plan(made, heads, preparation(made.supported, python)), end="")
    return ExitStatus.OK if made.scenarios else ExitStatus.NOTHING_RUN


@cli.command(name="list")
@options.plugin
def list_(plugins: tuple[str, ...]) -> int:
    """Show the systems, models, axes, programs, spaces and faults there are.

    \b
    shardproof list
    """
    from shardproof.cli.listing import render_listing

    load_plugins(plugins)
    print(render_listing(), end="")
    return ExitStatus.OK


@cli.command()
@click.argument("scenario_id", metavar="ID", shell_complete=completion.results)
@options.database
@click.option("--times", type=options.TIMES, default=1, show_default=True, help="Run it this often.")
@options.deadline
@options.max_world
@options.python
@options.clone
@options.plugin
def replay(
    scenario_id: str, out: Path | None, times: int, deadline_s: float, python: str | None, clones: tuple[str, ...],
    plugins: tuple[str, ...],
) -> int:  # fmt: skip
    """Run one scenario of an earlier run again, in fresh processes, and print everything it shows.

    \b
    shardproof replay 1a2b3c4d5e6f
    shardproof replay 1a2b --out reports/nightly --times 20
    """
    from shardproof.laboratory.laboratory import Laboratory
    from shardproof.report.text import render_result, wants_colour
    from shardproof.verdict import exit_status

    modules = load_plugins(plugins)
    preflight.require_interpreter(python)
    preflight.use_clones(clones)
    scenario = arguments.stored(scenario_id, out).scenario
    preflight.require_machine([scenario], python)
    preflight.require_releases([scenario], python)
    counts: dict[Verdict, int] = {}
    colour = wants_colour(sys.stdout, os.environ)
    with Laboratory(jobs=1, deadline_s=deadline_s, plugins=modules, python=python) as laboratory:
        for attempt in range(times):
            result = laboratory.examine_one(scenario)
            counts[result.verdict] = counts.get(result.verdict, 0) + 1
            if attempt == 0:
                print(render_result(result, colour, emulated_only=arguments.shipped_issues().emulated_only(result)))
    if times > 1:
        print(", ".join(f"{verdict.value}: {n} of {times}" for verdict, n in counts.items()))
    return exit_status(counts)


@cli.command()
@click.argument("scenario_id", metavar="ID", shell_complete=completion.results)
@options.database
@click.option("--toml", is_flag=True, help="Print the scenario as TOML instead.")
@click.option("--page", is_flag=True, help="Write its page beside the run's report instead, and print where it is.")
@options.plugin
def explain(scenario_id: str, out: Path | None, toml: bool, page: bool, plugins: tuple[str, ...]) -> int:
    """Print what an earlier run found out about a scenario.

    \b
    shardproof explain 1a2b3c4d5e6f
    shardproof explain 1a2b3c4d5e6f --toml > bug.toml
    shardproof explain 1a2b3c4d5e6f --page
    """
    from shardproof.report.failure_text import render_explained
    from shardproof.report.model import again_of, in_folder, place_of
    from shardproof.report.text import wants_colour
    from shardproof.store import Store
    from shardproof.verdict import Verdict

    load_plugins(plugins)
    database, result = arguments.database_and_result(scenario_id, out)
    if page:
        from shardproof.report.files import write_page

        print(write_page(database, result, arguments.shipped_issues()))
        return ExitStatus.OK
    document = result.scenario.to_toml(every_axis=result.verdict is Verdict.UNSUPPORTED)
    colour = wants_colour(sys.stdout, os.environ)
    if toml:
        print(document)
        return ExitStatus.OK
    with Store(database) as store:
        command = store.runs()[-1].command
    place = in_folder(str(out)) if out else place_of(command)
    print(render_explained(result, arguments.shipped_issues(), colour, place=place, again=again_of(command)))
    return ExitStatus.OK


for shown in (report, history, merge):
    cli.add_command(shown)


@cli.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default=Path("reports/canaries"), metavar="DIR", help="Folder of results."
)
@options.json
@options.plugin
@click.option("--fault", "chosen", multiple=True, metavar="ID", help="Plant this fault only; repeatable.")
@click.option(
    "--strike", "struck", multiple=True, metavar="SYSTEM", shell_complete=completion.systems,
    help="Strike the ranks of this system only; repeatable.",
)  # fmt: skip
@click.option("--every", is_flag=True, help="Strike every collective and every read of a system, not only the first.")
@click.option("-j", "--jobs", type=options.JOBS, default=None, help="Scenarios at once (default: cores).")
def faults(
    out: Path, json_file: Path | None, plugins: tuple[str, ...], chosen: tuple[str, ...], struck: tuple[str, ...],
    every: bool, jobs: int | None,
) -> int:  # fmt: skip
    """Plant every fault of the catalogue and make every comparison that must differ; fail if one goes unnoticed.

    With --plugin, plant the faults that these modules add; with --fault, those. Of each it is said what explains it.
    With --strike, let memory, collectives, files, saves and ranks of a system fail, and say what notices it.

    \b
    shardproof faults --json faults.json
    shardproof faults --plugin my_package.my_faults
    shardproof faults --fault stale-masters
    shardproof faults --strike torch-fsdp2 --every
    """
    from shardproof.checks.boundary_faults import run_strikes
    from shardproof.checks.canaries import run_canaries
    from shardproof.faults.catalogue import CATALOGUE
    from shardproof.faults.requested import require_faults

    load_plugins(())
    ours = set(CATALOGUE)
    modules = load_plugins(plugins)
    require_faults(chosen, logical=not struck, boundary=bool(struck))
    added = [fault for fault in CATALOGUE if fault not in ours] if plugins else []
    if every and not struck:
        raise UsageError.of("--every", "alone", "beside --strike", "--strike torch-fsdp2 --every")
    if plugins and not (added or chosen):
        raise UsageError.of("--plugin", ", ".join(plugins), "a module that registers a fault", "--plugin my_faults")
    arguments.require_output_files(None, json=json_file)
    if struck:
        folder = arguments.writable_folder(out)
        return run_strikes(struck, folder, json_file, jobs or os.cpu_count() or 1, modules, every=every, only=chosen)
    only = (*added, *chosen) if plugins or chosen else None
    return run_canaries(arguments.writable_folder(out), json_file, jobs or os.cpu_count() or 1, modules, only)


@cli.command()
@click.option("--newer", is_flag=True, help="Ask the package index for newer releases.")
@options.python
@options.clone
@options.plugin
def doctor(newer: bool, python: str | None, clones: tuple[str, ...], plugins: tuple[str, ...]) -> int:
    """Show what is installed, and what each system and each of its releases can run here and why not.

    \b
    shardproof doctor
    shardproof doctor --newer    whether a library has a newer release than any that was tried here
    """
    from shardproof.cli.doctor import examine

    load_plugins(plugins)
    preflight.use_clones(clones)
    print(examine(python, newer=newer), end="")
    return ExitStatus.OK


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path), metavar="PATH")
def inspect(checkpoint: Path) -> int:
    """List the tensors and values of a checkpoint that any stack wrote. No code in its pickles is executed.

    \b
    shardproof inspect checkpoints/step-100
    """
    from shardproof.compare.listing import listed
    from shardproof.compare.text import foreign_names, unread_files
    from shardproof.protocol.registry import all_systems
    from shardproof.readers.description import beside, check_complete, describe, is_foreign, render_description
    from shardproof.readers.errors import CheckpointError, UnfamiliarError

    load_plugins(())
    foreign: tuple[str, ...] = ()
    try:
        rows = describe(checkpoint)
        unread = beside(checkpoint)
    except CheckpointError as error:
        if not is_foreign(checkpoint) and not isinstance(error, UnfamiliarError):
            raise
        layouts = [layout for system in all_systems() for layout in system.layouts]
        try:
            rows, foreign, unread = listed(checkpoint, layouts)
        except CheckpointError as refused:
            raise refused.with_example("shardproof inspect checkpoints/step-100") from None
    print(render_description(rows), end="")
    if foreign:
        print(foreign_names(foreign))
    if unread:
        print(unread_files(unread))
    check_complete(checkpoint, rows)
    return ExitStatus.OK


@cli.command(name="completion")
@click.argument("shell", type=click.Choice(list(completion.SHELLS)))
def completion_(shell: str) -> int:
    """Print the script that completes commands, scenarios, systems and axes in a shell.

    \b
    shardproof completion bash > ~/.shardproof-complete.sh
    shardproof completion fish
    """
    print(completion.script(shell, cli))
    return ExitStatus.OK


for command in (
    shrink, explore, export, sweep, bisect, known, cures_, conformance, optimizer, diff, resilience, port, claims,
    night, trainer, init,
):  # fmt: skip
    cli.add_command(command)
