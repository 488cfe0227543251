"""`shardproof trainer`: any training script under all arms."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardproof.cli import arguments, options
from shardproof.errors import CANNOT_IMPORT, UsageError
from shardproof.protocol.plugin_modules import load_plugins
from shardproof.verdict import ExitStatus
from shardproof.versions import CURED
from shardproof.world import preflight

if TYPE_CHECKING:
    from shardproof.result import Result
    from shardproof.scenario import Scenario
    from shardproof.trainer.described import Described


@click.command()
@click.argument("files", metavar="[FILE.py[:CLASS]]...", nargs=-1)
@options.script
@click.option("--set", "sets", multiple=True, metavar="AXIS=V[,V]", help="Values of one of the trainer's axes only.")
@click.option("--strength", type=options.Whole(min=1, max=20), metavar="N",
              help="Few cells that have every combination of N axes [all cells].")  # fmt: skip
@click.option("--sample", type=options.SAMPLE, metavar="N", help="N of these cells, drawn by --seed.")
@click.option("--version", "versions", multiple=True, metavar="VERSION",
              help="Another release of the first package that it requires; repeatable.")  # fmt: skip
@click.option("--cured", is_flag=True, help="With the cures that lie beside the file: what still fails is new.")
@click.option("--program", default="arms", metavar="TEXT", show_default=True,
              help="Steps before and after the save, and which arms: 'arms 1 1 resumed'.")  # fmt: skip
@click.option("--fault", "faults", multiple=True, metavar="ID", help="Let a boundary fault strike; repeatable.")
@click.option("--seed", type=options.SEED, default=0, show_default=True, help="Of weights, covering arrays, samples.")
@click.option("-j", "--jobs", type=options.JOBS, default=None, help="Cells at once [cores].")
@options.either_deadline
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where ranks compute [cpu].")
@options.max_world
@options.python
@options.executor
@click.option("--out", type=click.Path(path_type=Path), default=None, metavar="DIR",
              help="Folder of results [the command's own, under reports/].")  # fmt: skip
@options.json
@options.junit
@options.quiet
@click.pass_context
def trainer(
    context: click.Context, /, files: tuple[str, ...], command: str | None, steps: str, world: str, resume: str,
    deadline_s: float | None, **given: Any,
) -> int:  # fmt: skip
    """Drive a trainer of your own along every arm, and compare its state bit for bit.

    FILE has a class that derives from shardproof.trainer.Trainer, with build, step, save and load; docs/trainer.md
    begins with a whole one. Several files run one after another, each in a folder of its own. With --command a training
    script is run as it is, and the checkpoints that it leaves are compared.

    \b
    shardproof trainer my_trainer.py
    shardproof trainer my_trainer.py:Mine --set mesh=2x2 --set offload=true
    shardproof trainer my_trainer.py --strength 2 --json trainer.json
    shardproof trainer my_trainer.py --sample 20
    shardproof trainer my_trainer.py --version 1.14.0 --version 1.15.0
    shardproof trainer my_trainer.py --program 'arms 1 1 resumed'
    shardproof trainer --command 'python train.py --out {folder} --max-steps {until}'
    """
    from shardproof.protocol import registry
    from shardproof.trainer.described import described, is_trainer

    options.require_one_of_both(context, "FILE", files, OF_BOTH)
    if command is None and not files:
        form = "shardproof trainer my_trainer.py"
        raise UsageError.of("FILE, --command", "neither", "one or more files, or one --command", form)
    if command is not None:
        given = {name: given[name] for name in ("out", "json_file", "quiet")}
        return _examined_command((command, steps, world, resume), deadline_s=deadline_s or options.COMMAND_S, **given)
    asked = Asked(deadline_s=deadline_s or options.SESSION_S, **given)
    for file in files:
        if not is_trainer(file):
            allowed = "a Python file, and behind a colon the class in it"
            raise UsageError.of("FILE", file, allowed, "shardproof trainer my_trainer.py")
    names = [f"{found.file.stem}-{found.name}" for found in map(described, files)]
    if len(files) == 1:
        return _examined(files[0], asked)
    if asked.json_file or asked.junit_file:
        allowed = "one FILE; each of several has a folder of its own"
        raise UsageError.of("--json, --junit", " ".join(files), allowed, f"shardproof trainer {files[0]} --json f.json")
    if asked.out and len({*names}) < len(names):
        raise UsageError.of("FILE", " ".join(files), "files and classes of different names", "one command for each")
    statuses = []
    for file, name in zip(files, names, strict=True):
        print(f"== {file}", flush=True)
        statuses.append(_examined(file, replace(asked, out=asked.out / name if asked.out else None)))
        registry.forget(described(file).system)  # the next may require another release of the same package
        if statuses[-1] == ExitStatus.INTERRUPTED:
            break
        print()
    return _worst(statuses)


@dataclass(frozen=True)
class Asked:
    """The options of the command, each under its own name."""

    sets: tuple[str, ...]
    strength: int | None
    sample: int | None
    versions: tuple[str, ...]
    cured: bool
    program: str
    faults: tuple[str, ...]
    seed: int
    jobs: int | None
    deadline_s: float
    device: str | None
    python: str | None
    executor: str
    ray_address: str | None
    out: Path | None
    json_file: Path | None
    junit_file: Path | None
    quiet: bool


OF_BOTH = ("deadline_s", "out", "json_file", "quiet")


def _examined_command(
    asked: tuple[str, str, str, str], *, deadline_s: float, out: Path | None, json_file: Path | None, quiet: bool
) -> int:
    """Run the arms of a command; the exit status."""
    from shardproof.folders import folder_of
    from shardproof.trainer.command.asked import asked_command
    from shardproof.trainer.command.main import examine

    command = asked_command(*asked)
    folder = out or folder_of([f"trainer-command-{command.name}"], (), None, {"command": command.key})
    arguments.require_output_files(folder, json=json_file)
    arguments.writable_folder(folder)
    return examine(command, folder, deadline_s, json_file, quiet=quiet)


def _worst(statuses: Sequence[int]) -> int:
    """The exit status of several runs: a failure before what the harness could not do, and nothing run only where that
    is true of all."""
    order = (ExitStatus.INTERRUPTED, ExitStatus.FAILURE, ExitStatus.HARNESS, ExitStatus.OK)
    return next((status for status in order if status in statuses), max(statuses))


def _planned(found: Described, cured: bool, asked: Asked) -> list[Scenario]:
    """The cells that were asked for, on each release."""
    from shardproof.trainer.cells import cells, scenario_of, settings_of

    chosen = cells(found, settings_of(found, asked.sets), asked.strength, asked.seed, asked.sample)
    axes = {"program": asked.program, "seed": str(asked.seed), "faults": ",".join(asked.faults)}
    axes["device"] = asked.device or "cpu"
    versions = [f"{version}{CURED if cured and CURED not in version else ''}" for version in asked.versions or ("",)]
    return [
        scenario_of(found, cell, **{**axes, **({"version": version} if version else {})})
        for version in versions
        for cell in chosen
    ]


def _examined(file: str, asked: Asked) -> int:
    """Run the cells of one file; the exit status."""
    from shardproof.faults.requested import require_faults
    from shardproof.folders import point_latest
    from shardproof.issues.cures import cures_of
    from shardproof.issues.known_issues import KnownIssues
    from shardproof.program import ARMS
    from shardproof.protocol.registry import system_named
    from shardproof.request import Request
    from shardproof.run import run as execute
    from shardproof.space.plan import Plan
    from shardproof.trainer.arms import program_of
    from shardproof.trainer.described import described
    from shardproof.trainer.judge.longer import cut_short, longer, told_of
    from shardproof.trainer.report.text import cell_text, lead_to_alike, render

    found = described(file)
    modules = load_plugins((found.plugin,))
    preflight.require_interpreter(asked.python)
    program_of(found, asked.program)
    if asked.faults:
        require_faults(set(asked.faults))
    ray = arguments.on_ray(asked.executor, asked.ray_address, asked.jobs)
    planned = _planned(found, asked.cured and bool(cures_of(system_named(found.system))), asked)
    jobs = asked.jobs or os.cpu_count() or 1
    if ray is None:
        preflight.require_device(asked.device, asked.python)
        preflight.require_machine(planned, asked.python, jobs)
    folder = asked.out or _folder(found, asked)
    arguments.require_output_files(folder, json=asked.json_file, junit=asked.junit_file)
    releases = preflight.require_releases(planned, asked.python)
    arguments.writable_folder(folder)
    if asked.out is None:
        point_latest(folder)
    issues = arguments.issues_of([system_named(found.system)])
    request = Request(
        plan=Plan(tuple(planned)), out=folder, command=tuple(sys.argv[1:]), seed=asked.seed, jobs=jobs,
        deadline_s=asked.deadline_s, known=KnownIssues() if asked.faults else issues, issues=issues, plugins=modules,
        python=asked.python, releases=releases, json=asked.json_file, junit=asked.junit_file, quiet=asked.quiet,
        ray=ray,
    )  # fmt: skip
    ended = execute(request)
    cut: dict[Scenario, str] = {}
    if not ended.interrupted and asked.program == ARMS and not asked.faults:
        more = longer(found, ended.report.results)
        if later := [*_in_a_later_epoch(ended.report.results), *more]:
            planned += later
            ended = execute(replace(request, plan=Plan(tuple(planned)), goes_on=ended.report.run.id))
            cut = {one.scenario: why for one in ended.report.results
                   if one.scenario in later and (why := cut_short(one, data=one.scenario not in more))}  # fmt: skip
        if cut and not ended.interrupted:
            planned = [scenario for scenario in planned if scenario not in cut]
            ended = execute(replace(request, plan=Plan(tuple(planned)), goes_on=ended.report.run.id))
    order = {scenario.id: place for place, scenario in enumerate(planned)}
    results = sorted(ended.report.results, key=lambda result: order.get(result.id, len(order)))
    _require_importable(found, results)
    tried = {scenario.program for scenario in cut}
    print(render(found, results, ended.report.place, ended.report.again, tried), end="")
    for scenario, why in cut.items():
        print(told_of(cell_text(scenario), why))
    print(f"report: {ended.page}")
    if ended.interrupted:
        print("interrupted: the same command resumes the run", file=sys.stderr)
        return ExitStatus.INTERRUPTED
    if not asked.quiet and (hint := lead_to_alike(found, results)):
        print(hint)
    return ended.status


MOST_LATER = 2
"""How many cells are run once more, with a save in a later epoch."""


def _in_a_later_epoch(results: Sequence[Result]) -> list[Scenario]:
    """The first cells whose resume is right with a save in the first epoch of their data, with as many steps as it
    takes to save in a later one, where another order or another place may be lost."""
    from shardproof.trainer.arms import TRAINS
    from shardproof.trainer.data.epochs import later_program

    programs = ((result, later_program(note for arm in result.arms if arm.name != TRAINS for note in arm.notes))
                for result in results)  # fmt: skip
    later = [replace(result.scenario, program=program) for result, program in programs if program]
    return sorted(later, key=lambda scenario: scenario.options)[:MOST_LATER]


def _require_importable(found: Described, results: Sequence[Result]) -> None:
    """Check that the trainer's file could be imported for some cell; a release may lack what another one has.

    Raises:
        UsageError: it could not, with the place in the user's own modules.
    """
    from shardproof.trainer.described import FORM

    said = f"{found.file.name} {CANNOT_IMPORT}: "
    if results and all(result.reason.startswith(said) for result in results):
        why, _, traceback = results[0].reason.removeprefix(said).partition("\n")
        refused = UsageError.of("FILE", found.file.name, f"a file that can be imported ({why})", FORM)
        raise UsageError(f"{refused}\n{traceback}".rstrip())


def _folder(found: Described, asked: Asked) -> Path:
    """The command's own folder, under reports/."""
    from shardproof.folders import folder_of
    from shardproof.program import ARMS

    others = {
        "set": asked.sets, "strength": asked.strength, "sample": asked.sample, "version": asked.versions,
        "cured": asked.cured,
        "program": asked.program if asked.program != ARMS else "", "fault": asked.faults, "seed": asked.seed,
        "device": asked.device, "python": asked.python,
        "file": str(found.file) if found.file.parent != Path.cwd() else "",
    }  # fmt: skip
    return folder_of([f"trainer-{found.file.stem}-{found.name}"], (), None, others)
