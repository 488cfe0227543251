"""The commands that test a head of a library: a commit, a source tree or a release that has no recorded results yet."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from shardproof.cli import arguments, completion, options
from shardproof.errors import UsageError, printable
from shardproof.protocol.plugin_modules import load_plugins
from shardproof.verdict import ExitStatus
from shardproof.versions import split_cures
from shardproof.world import preflight


@click.command()
@click.argument("name", metavar="SYSTEM@VERSION", shell_complete=completion.systems)
@click.option("--since", metavar="RELEASE", help="The release to compare with [the newest one that is declared].")
@click.option("--quick", is_flag=True, help="Leave out the kit's slow checks, and all but one regression of an entry.")
@click.option("-j", "--jobs", type=options.JOBS, default=2, show_default=True, help="Scenarios at once.")
@options.deadline
@options.max_world
@options.python
@options.clone
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="DIR", help="Folder of results and page [reports/port-SYSTEM]."
)
@options.json
@options.plugin
def port(
    name: str, since: str | None, quick: bool, jobs: int, deadline_s: float, python: str | None,
    clones: tuple[str, ...], out: Path | None, json_file: Path | None, plugins: tuple[str, ...],
) -> int:  # fmt: skip
    """Say what of ours no longer fits a head of a library, what is repaired there and what is new, in that order.

    VERSION is a commit of a clone (git:REV), a working tree (path:DIR) or a release. The conformance kit runs there,
    one scenario of each checkpoint format, option and optimizer, and every regression.

    \b
    shardproof port megatron-core@git:main --clone megatron-core=../Megatron-LM
    shardproof port deepspeed@path:../DeepSpeed --quick
    shardproof port megatron-core@git:core_v0.17.1 --since 0.16.1 --json port.json

    Exit status: 0 nothing fails that was not known, 1 something new fails, 2 bad input, 3 something of ours does not
    fit, 130 interrupted.
    """
    from shardproof.folders import REPORTS, at_work_in
    from shardproof.heads.log import name_clone_of
    from shardproof.heads.port import Asked
    from shardproof.heads.port import port as look
    from shardproof.heads.port_page import write_page
    from shardproof.heads.port_text import document, render
    from shardproof.laboratory.laboratory import Laboratory
    from shardproof.protocol.registry import all_systems, system_named
    from shardproof.protocol.releases import package_of
    from shardproof.report.model import Report
    from shardproof.report.publish import write_json
    from shardproof.space.files import split_system
    from shardproof.store import DATABASE, Store

    modules = load_plugins(plugins)
    preflight.require_interpreter(python)
    preflight.use_clones(clones)
    named, version = split_system(arguments.placed(name))
    system = system_named(named)
    if not system.package:
        installed = [each.name for each in all_systems() if each.package]
        raise UsageError.of("SYSTEM", named, installed, "shardproof port megatron-core@git:main")
    if not version or split_cures(version)[1] is not None:
        allowed = "a version without cures: git:REV, path:DIR or a release"
        raise UsageError.of("SYSTEM@VERSION", name, allowed, "shardproof port megatron-core@git:main")
    package = package_of(system)
    name_clone_of(package, version)
    base = package.release(since or "").version
    folder = out or REPORTS / f"port-{named}"
    arguments.require_output_files(folder, json=json_file)
    issues = arguments.shipped_issues()
    asked = Asked(system, version, base, quick)
    with (
        at_work_in(arguments.writable_folder(folder)),
        Store(folder / DATABASE) as store,
        Laboratory(jobs=jobs, deadline_s=deadline_s, plugins=modules, python=python, systems={named}) as laboratory,
    ):
        run = store.begin_run(tuple(sys.argv[1:]), 0, {package.name: version})
        found = look(
            asked, laboratory, issues, python, lambda result: store.finished(run, result),
            lambda line: print(printable(line), file=sys.stderr, flush=True),
        )  # fmt: skip
        store.end_run(run)
        report = Report.from_store(store, run, issues)
        page = write_page(found, report, folder)
    print(render(found, report.place + report.again), end="")
    print(f"report: {printable(str(page))}", file=sys.stderr)
    write_json(json_file, document(found))
    return found.status


@click.command()
@click.argument("names", nargs=-1, metavar="[SYSTEM]...", shell_complete=completion.systems)
@options.clone
@click.option("--rev", default="HEAD", show_default=True, metavar="REV", help="The commit of the clone that is asked.")
@click.option("--since", default="", metavar="DATE|REV", help="Where the search begins [the newest declared release].")
@click.option("--run", "runs", is_flag=True, help="Run the regressions of what has landed, and say what they show.")
@click.option("--all", "every", is_flag=True, help="With --run: also those of every entry that says it is repaired.")
@click.option("-j", "--jobs", type=options.JOBS, default=2, show_default=True, help="Scenarios at once.")
@options.deadline
@options.max_world
@options.python
@options.json
@options.plugin
def claims(
    names: tuple[str, ...], clones: tuple[str, ...], rev: str, since: str, runs: bool, every: bool, jobs: int,
    deadline_s: float, python: str | None, json_file: Path | None, plugins: tuple[str, ...],
) -> int:  # fmt: skip
    """Say which entries of issues.toml are out of date: upstream has landed what they name.

    The log of each system's clone is searched for the numbers of issues and pull requests that its entries name. SYSTEM
    is one or several [all whose clone is named].

    \b
    shardproof claims --clone megatron-core=../Megatron-LM
    shardproof claims megatron-core --clone megatron-core=../Megatron-LM --rev main --since 2026-08-01 --run
    shardproof claims --clone deepspeed=../DeepSpeed --clone megatron-core=../Megatron-LM --run --all --json claims.json

    Exit status: 0 no entry is known to be out of date, 1 one is, 2 bad input, 3 a regression says nothing, 4 there was
    nothing to search, 130 interrupted.
    """
    from shardproof.heads import claims as found
    from shardproof.laboratory.laboratory import Laboratory
    from shardproof.protocol.registry import all_systems, system_named
    from shardproof.protocol.releases import package_of
    from shardproof.report.publish import write_json
    from shardproof.world.overlay import clone_variable

    modules = load_plugins(plugins)
    preflight.require_interpreter(python)
    preflight.use_clones(clones)
    arguments.require_output_files(None, json=json_file)
    if every and not runs:
        raise UsageError.of("--all", "alone", "beside --run", "--run --all")
    cloned = [s for s in all_systems() if s.package and clone_variable(package_of(s).name) in os.environ]
    systems = [system_named(name) for name in names] or cloned
    for system in systems:
        if not system.package:
            installed = [each.name for each in all_systems() if each.package]
            raise UsageError.of("SYSTEM", system.name, installed, "shardproof claims megatron-core")
    if not systems:
        allowed = "a clone of a library whose entries are asked about"
        raise UsageError.of("--clone", "none", allowed, "--clone megatron-core=../Megatron-LM")
    searched = [found.searched(system, rev, since, every=every) for system in systems]
    answers: list[found.Answered] = []
    interrupted = False
    if runs:
        wanted = {each.system.name for each in searched}
        issues = arguments.shipped_issues()
        with Laboratory(jobs=jobs, deadline_s=deadline_s, plugins=modules, python=python, systems=wanted) as laboratory:
            try:
                for each in searched:
                    found.answered(each, laboratory, issues, answers)
            except KeyboardInterrupt:
                interrupted = True
    by_entry = {answer.claim.finding.id: answer for answer in answers}
    for each in searched:
        for line in found.lines(each, by_entry):
            print(printable(line))
    write_json(json_file, {"systems": [found.document(each, by_entry) for each in searched]})
    return 130 if interrupted else found.status(answers) if runs else ExitStatus.OK
