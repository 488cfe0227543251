"""The commands that look into one failure, library or system: from shrink and export to conformance and optimizer."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardproof.cli import arguments, completion, options
from shardproof.errors import UsageError
from shardproof.faults.requested import require_faults
from shardproof.protocol.plugin_modules import load_plugins
from shardproof.verdict import ExitStatus
from shardproof.versions import with_cures
from shardproof.world import preflight

if TYPE_CHECKING:
    from shardproof.result import Result
    from shardproof.scenario import Scenario


@click.command()
@click.argument("name", metavar="SCENARIO", shell_complete=completion.scenarios)
@click.option("--limit-s", type=options.LIMIT_S, default=300.0, show_default=True, help="Seconds to search.")
@click.option("--toml", type=click.Path(path_type=Path), metavar="FILE", help="Write the simplest scenario there.")
@options.deadline
@options.max_world
@options.python
@options.clone
@options.database
@options.json
@options.quiet
@options.plugin
def shrink(
    name: str, limit_s: float, toml: Path | None, deadline_s: float, python: str | None, clones: tuple[str, ...],
    out: Path | None, json_file: Path | None, quiet: bool, plugins: tuple[str, ...],
) -> int:  # fmt: skip
    """Find the simplest scenario that fails in the same way: fewer ranks, operations, parameters and settings.

    SCENARIO is the id of a result, a file, or a regression.

    \b
    shardproof shrink 1a2b3c4d5e6f --toml bug.toml
    shardproof shrink regressions/torch-fsdp2-164929 --limit-s 60
    """
    from shardproof.investigate.shrink import shrink as search
    from shardproof.laboratory.laboratory import Laboratory
    from shardproof.report.progress import NowAndThen
    from shardproof.report.publish import publish, write_json
    from shardproof.report.text import render_result, scenario_file, wants_colour

    modules = load_plugins(plugins)
    preflight.require_interpreter(python)
    preflight.use_clones(clones)
    arguments.require_output_files(None, json=json_file, toml=toml)
    scenario = arguments.one_scenario(name, None, out, keep_version=True)
    preflight.require_machine([scenario], python)
    preflight.require_releases([scenario], python)

    told = NowAndThen(None if quiet else sys.stderr)
    with Laboratory(jobs=1, deadline_s=deadline_s, plugins=modules, python=python) as laboratory:
        confirmed = told.before("running", laboratory.examine_one, always=True)
        tried = told.before("trying", lambda simpler: laboratory.examine_one(simpler, confirm=False))
        found = search(confirmed(scenario), tried, confirmed, limit_s, lambda one: told.say(f"fails too: {one}"))
    print(render_result(found.result, wants_colour(sys.stdout, os.environ)), end="")
    ended = "nothing simpler was found to try" if found.complete else f"stopped after {limit_s:.0f} s"
    print(f"shrunk from: {scenario}\n{found.tried} scenarios tried; {ended}")
    write_json(json_file, {**found.result.to_json(), "tried": found.tried, "complete": found.complete})
    if toml is not None:
        publish(toml, scenario_file(found.result, "Written by shardproof shrink"))
    return ExitStatus.FAILURE


@click.command()
@click.argument("system", metavar="SYSTEM[@VERSION]", shell_complete=completion.systems)
@click.option(
    "--budget-s", type=options.LIMIT_S, default=60.0, show_default=True, help="Seconds to draw and to shrink."
)
@click.option("--examples", type=options.SAMPLE, default=None, metavar="N", help="Stop after so many scenarios.")
@click.option("--seed", type=options.SEED, default=0, show_default=True, help="Of everything that is drawn.")
@click.option("--fault", "faults", multiple=True, metavar="ID", help="Plant this fault in each; repeatable.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("reports/explore"),
    metavar="DIR",
    show_default=True,
    help="Where to write the scenarios that fail.",
)
@options.deadline
@options.max_world
@options.python
@options.clone
@options.json
@options.plugin
def explore(
    system: str, budget_s: float, examples: int | None, seed: int, faults: tuple[str, ...], out: Path,
    deadline_s: float, python: str | None, clones: tuple[str, ...], json_file: Path | None, plugins: tuple[str, ...],
) -> int:  # fmt: skip
    """Let Hypothesis make up programs and axes that nobody has written down, and shrink what fails.

    A real library runs cured of its known defects. What fails is written as a scenario file, the simplest that was
    found, with the command that runs it again. Needs the extra `explore`.

    \b
    shardproof explore reference --examples 20000 --budget-s 3600
    shardproof explore torch-fsdp2 --budget-s 600 --seed 7

    Exit status: 0 nothing fails, 1 something does, 2 bad input, 3 something is unknown, 4 nothing could be run;
    130 interrupted, with what was found so far.
    """
    from shardproof.investigate.explore import (
        Explorer,
        progress_of,
        report_of,
        require_hypothesis,
        simplest,
        status_of,
        to_json,
    )
    from shardproof.laboratory.laboratory import Laboratory
    from shardproof.report.progress import NowAndThen
    from shardproof.report.publish import publish, write_json
    from shardproof.report.text import render_brief, scenario_file, wants_colour

    modules = load_plugins(plugins)
    require_hypothesis()
    preflight.require_interpreter(python)
    preflight.use_clones(clones)
    require_faults(set(faults))
    arguments.require_output_files(None, json=json_file)
    issues, told = arguments.shipped_issues(), NowAndThen(sys.stderr)
    with Laboratory(jobs=1, deadline_s=deadline_s, plugins=modules, python=python) as laboratory:
        explorer = Explorer(
            system, lambda scenario: laboratory.examine_one(scenario, confirm=False),
            seed=seed, budget_s=budget_s, examples=examples, faults=faults,
            known=lambda result: bool(issues.match(result)),
            on_failure=told.say, on_scenario=lambda found, left_s: told.now_and_then(progress_of(found, left_s)),
        )  # fmt: skip
        found = explorer.run()
        left_s = 0.0 if found.interrupted else explorer.left_s
        results = [simplest(result, laboratory, left_s) for result in found.failures.values()]
    for result in results:
        file = arguments.writable_folder(out) / f"explored-{result.id}.toml"
        publish(file, scenario_file(result, f"Found by shardproof explore {system} --seed {seed}"))
        print(render_brief(result, wants_colour(sys.stdout, os.environ)))
        print(f"  replay: {arguments.run_again(str(file))}\n")
    print(report_of(system, found, seed))
    write_json(json_file, to_json(found, results))
    return ExitStatus.INTERRUPTED if found.interrupted else status_of(found, results)


@click.command()
@click.argument("name", metavar="SCENARIO", required=False, shell_complete=completion.scenarios)
@click.option("--folder", type=click.Path(path_type=Path), metavar="DIR", help="Where to write  [default: exports/ID].")
@click.option(
    "--ready", is_flag=True, help="Export every finding that is ready to send, with a page of what was checked."
)
@click.option("--cured", is_flag=True, help="Also run the script with the defect cured; it must pass then.")
@click.option("--newest", is_flag=True, help="Also run it on the newest release, or with --clone on its newest commit.")
@options.deadline
@options.max_world
@options.python
@options.clone
@options.database
@options.quiet
@options.plugin
def export(
    name: str | None, folder: Path | None, ready: bool, cured: bool, newest: bool, deadline_s: float,
    python: str | None, clones: tuple[str, ...], out: Path | None, quiet: bool, plugins: tuple[str, ...],
) -> int:  # fmt: skip
    """Write a failure as a script of the library's own calls, and as the text of an issue.

    The script imports torch and the library alone, and is run once before it is handed out. SCENARIO is the id of a
    result, a file, or a regression.

    \b
    shardproof export 1a2b3c4d5e6f
    shardproof export regressions/torch-fsdp2-164929 --cured
    shardproof export --ready --clone deepspeed=../DeepSpeed    # into exports/upstream
    """
    from shardproof.cli.ready import export_ready, is_cloned
    from shardproof.export.case import NoExportError
    from shardproof.export.description import require_in_front
    from shardproof.export.job import export as write
    from shardproof.export.job import require_own
    from shardproof.export.newest import on_newest
    from shardproof.laboratory.laboratory import Laboratory
    from shardproof.report.progress import NowAndThen

    modules = load_plugins(plugins)
    preflight.require_interpreter(python)
    if folder is not None:
        require_own(folder)
    preflight.use_clones(clones)
    told = NowAndThen(None if quiet else sys.stderr)

    def examined(scenario: Scenario) -> Result:
        require_in_front(scenario)
        preflight.require_machine([scenario], python)
        preflight.require_releases([scenario], python)
        with Laboratory(jobs=1, deadline_s=deadline_s, plugins=modules, python=python) as laboratory:
            return told.before("running", laboratory.examine_one, always=True)(scenario)

    if ready and name is None:
        return export_ready(folder or Path(out or "", "exports", "upstream"), examined, python, clones, told.say)
    if ready or name is None:
        raise UsageError.of("SCENARIO", name or "", "a scenario, or --ready without one", "shardproof export --ready")
    result = arguments.result_of(name, out, examined)
    known = result.known_issue or arguments.shipped_issues().match(result)
    cloned = is_cloned(result.system, clones)
    asked = on_newest(result, examined, cloned=cloned) if newest or cloned else None
    where = folder or Path(out or "", "exports", result.id)
    try:
        found = write(result, known, where, python, cured=cured, newest=asked, say=told.say)
    except NoExportError as error:
        raise arguments.with_pasted(error, result, name) from None
    print(found.text(), end="")
    return ExitStatus.FAILURE if found.wrong else ExitStatus.OK


@click.command()
@click.argument("names", metavar="SCENARIO...", nargs=-1, required=True, shell_complete=completion.scenarios)
@options.system
@click.option(
    "--versions", "texts", multiple=True, metavar="A..B | V", help="Releases; or git:REV, path:DIR; repeatable [all]."
)
@click.option("-j", "--jobs", type=options.JOBS, default=2, show_default=True, help="Releases at once.")
@options.deadline
@options.max_world
@options.python
@options.clone
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder in which sweeps join into one page [reports/sweep-SYSTEM]; also one whose database knows ID.",
)
@options.json
@options.plugin
def sweep(
    names: tuple[str, ...], system: str | None, texts: tuple[str, ...], jobs: int, deadline_s: float,
    python: str | None, clones: tuple[str, ...], out: Path | None, json_file: Path | None, plugins: tuple[str, ...],
) -> int:  # fmt: skip
    """Run a scenario on several releases, side by side; of several scenarios, the table of their verdicts.

    SCENARIO is a file, a regression, or the id of a result. The page of all sweeps of a folder has releases as columns
    and scenarios as rows, and says when each failure came and went.

    \b
    shardproof sweep bug.toml --system megatron-core --versions 0.13.0..0.16.1
    shardproof sweep 1a2b3c4d5e6f --versions 0.16.1 --versions git:main --clone megatron-core=../Megatron-LM
    """
    from shardproof.errors import printable
    from shardproof.investigate.sweep import beyond, status, sweeps, versions
    from shardproof.investigate.sweep_folder import Keeper, folder_of
    from shardproof.laboratory.laboratory import Laboratory
    from shardproof.report.progress import Progress, verdict_of
    from shardproof.report.publish import write_json
    from shardproof.report.releases_page import write_releases
    from shardproof.report.releases_text import render_sweeps
    from shardproof.report.text import wants_colour

    modules = load_plugins(plugins)
    preflight.require_interpreter(python)
    preflight.use_clones(clones)
    looked = out if out and arguments.databases(out) else None
    scenarios = [arguments.one_scenario(name, system, looked) for name in names]
    preflight.require_machine(scenarios, python)
    package = arguments.one_package(scenarios)
    asked = versions(package, tuple(map(arguments.placed, texts)))
    preflight.require_undeclared(package, scenarios[0], asked, python, "--versions")
    for told in beyond(package, texts):
        print(told, file=sys.stderr)
    folder = out or folder_of(scenarios[0].system)
    arguments.require_output_files(folder, json=json_file)
    issues = arguments.shipped_issues()
    keeper = Keeper(arguments.writable_folder(folder), dict(zip(scenarios, names, strict=True)), asked)
    with keeper, Laboratory(jobs=jobs, deadline_s=deadline_s, plugins=modules, python=python) as laboratory:
        found = sweeps(scenarios, asked, laboratory, keeper, lambda cells: Progress(cells, sys.stderr, word=verdict_of))
        print(render_sweeps(names, found, arguments.columns(), wants_colour(sys.stdout, os.environ)), end="")
        if not any(one.rows for one in found) and not keeper.store.runs():
            return status(found)  # interrupted before there was anything to show
        page, against = write_releases(keeper.store, folder, issues, keeper.fresh)
    for line in against:
        print(f"contradicts issues.toml: {printable(line)}")
    print(f"report: {printable(str(page))}")
    documents = [one.to_json() for one in found]
    document = documents[0] if len(names) == 1 else {"sweeps": documents}
    write_json(json_file, {**document, "contradictions": against})
    return status(found)


@click.command()
@click.argument("name", metavar="SCENARIO", shell_complete=completion.scenarios)
@options.system
@click.option("--good", required=True, metavar="VERSION", help="Where it passes: a release, or git:REV.")
@click.option("--bad", required=True, metavar="VERSION", help="Where it fails; older than --good to find the fix.")
@click.option("--any-failure", is_flag=True, help="Count every failure as the same, whatever its signature.")
@click.option("--budget-s", type=options.LIMIT_S, help="Seconds to search; it says what is left open then [no limit].")
@options.deadline
@options.max_world
@options.python
@options.clone
@options.database
@options.json
@options.plugin
def bisect(
    name: str, system: str | None, good: str, bad: str, any_failure: bool, budget_s: float | None, deadline_s: float,
    python: str | None, clones: tuple[str, ...], out: Path | None, json_file: Path | None, plugins: tuple[str, ...],
) -> int:  # fmt: skip
    """Find the release or commit at which a failure came, or went.

    It ends with the last good and the first bad one, or with the last bad and the first fixed. SCENARIO is a file, a
    regression, or the id of a result.

    \b
    shardproof bisect bug.toml --good 0.13.0 --bad 0.16.1
    shardproof bisect bug.toml --good 0.13.0+cured:2777 --bad 0.16.1+cured:2777
    shardproof bisect bug.toml --good git:core_v0.15.0 --bad git:main --clone megatron-core=../Megatron-LM
    """
    from shardproof.investigate import bisect as search
    from shardproof.laboratory.laboratory import Laboratory
    from shardproof.report.publish import write_json
    from shardproof.report.releases_text import render_finding, tried_line
    from shardproof.report.text import wants_colour

    modules = load_plugins(plugins)
    preflight.require_interpreter(python)
    preflight.use_clones(clones)
    arguments.require_output_files(None, json=json_file)
    scenario = arguments.one_scenario(name, system, out)
    preflight.require_machine([scenario], python)
    package = arguments.package_of(scenario)
    good, bad, wanted = search.ends(good, bad)
    preflight.require_undeclared(package, scenario, (good, bad), python, "--good, --bad")
    with Laboratory(jobs=1, deadline_s=deadline_s, plugins=modules, python=python) as laboratory:
        searching = search.Bisection(
            lambda version: laboratory.examine_one(replace(scenario, version=with_cures(version, wanted))),
            lambda *tried: print(tried_line(*tried), file=sys.stderr, flush=True),
            any_failure=any_failure,
            budget_s=budget_s,
        )
        found = searching.run(package, good, bad)
    subjects = {version: search.subject(package, version) for version in (found.before, found.after)}
    print(render_finding(found, subjects, arguments.columns(), wants_colour(sys.stdout, os.environ)), end="")
    write_json(json_file, found.to_json())
    return ExitStatus.INTERRUPTED if found.interrupted else ExitStatus.OK


@click.command("cures")
@click.argument("names", nargs=-1, metavar="[SYSTEM]...")
@click.option("--run", "runs", is_flag=True, help="Run each defect plain, cured, and with all cured but that one.")
@click.option("--install", is_flag=True, help="Install every declared release first, to say what applies to it.")
@click.option("-j", "--jobs", type=options.JOBS, default=2, show_default=True, help="Scenarios at once.")
@options.deadline
@options.max_world
@options.python
@options.clone
@options.plugin
def cures_(
    names: tuple[str, ...], runs: bool, install: bool, jobs: int, deadline_s: float, python: str | None,
    clones: tuple[str, ...], plugins: tuple[str, ...],
) -> int:  # fmt: skip
    """List the cures of known defects, and the releases to which each applies.

    A cure is a patch of a few lines that takes one defect of a library away, in memory. NAME@VERSION+cured is a release
    with all of them.

    \b
    shardproof cures megatron-fsdp
    shardproof cures megatron-fsdp --run
    shardproof run --system megatron-core@0.16.1+cured:2777,5077
    """
    from shardproof.investigate import cure_table
    from shardproof.issues.cures import cures_of
    from shardproof.laboratory.laboratory import Laboratory
    from shardproof.protocol.registry import all_systems, system_named

    modules = load_plugins(plugins)
    preflight.use_clones(clones)
    systems = [system_named(name) for name in names] or [system for system in all_systems() if cures_of(system)]
    wrong = 0
    for system in systems:
        versions = cure_table.releases(system, python, install=install)
        found = cure_table.applicability(system, versions, python)
        print(cure_table.render(system, versions, found), end="", flush=True)
    if not runs:
        return ExitStatus.OK
    with Laboratory(jobs=jobs, deadline_s=deadline_s, plugins=modules, python=python) as laboratory:
        for system in systems:
            for cure in cures_of(system):
                for shown in cure_table.three_ways(system, cure, laboratory):
                    wrong += bool(shown.wrong)
                    print(f"{'FAIL' if shown.wrong else 'ok':<4}  {system.name} {shown.cure}: {shown.line}", flush=True)
    return ExitStatus.FAILURE if wrong else ExitStatus.OK


@click.command()
@click.argument("names", nargs=-1, required=True, metavar="NAME[@VERSION]...")
@options.python
@options.clone
@options.plugin
@options.deadline
@options.max_world
def conformance(
    names: tuple[str, ...], python: str | None, clones: tuple[str, ...], plugins: tuple[str, ...], deadline_s: float
) -> int:
    """Check that a system, also one of a plugin, is driven and observed so that its verdicts can be believed.

    \b
    shardproof conformance torch-fsdp2
    shardproof conformance my-system --plugin my_plugin
    shardproof conformance megatron-core@0.14.0
    """
    from shardproof.checks.conformance import check_system
    from shardproof.laboratory.laboratory import Laboratory
    from shardproof.protocol.registry import system_named
    from shardproof.space.files import split_system

    modules = load_plugins(plugins)
    preflight.use_clones(clones)
    chosen = [split_system(arguments.placed(name)) for name in names]
    wrong = 0
    with Laboratory(jobs=1, deadline_s=deadline_s, plugins=modules, python=python) as laboratory:
        for name, version in chosen:
            print(f"{name}{'@' if version else ''}{version}")
            for check in check_system(system_named(name), laboratory, version):
                print(f"  {check.line}", flush=True)
                wrong += bool(check.wrong)
    return ExitStatus.FAILURE if wrong else ExitStatus.OK


@click.command()
@click.argument("path", metavar="IMPORT.PATH")
@click.option("--arg", "texts", multiple=True, metavar="NAME=VALUE", help="An argument of the constructor; repeatable.")
@click.option("--mesh", default="1x2x1", show_default=True, help="The ranks that shard: dp_replicate x dp_shard x 1.")
@click.option("-j", "--jobs", type=options.JOBS, default=1, show_default=True, help="Runs at once.")
@options.deadline
@options.python
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Folder for the logs of ranks that failed.")
@options.json
def optimizer(
    path: str, texts: tuple[str, ...], mesh: str, jobs: int, deadline_s: float, python: str | None, out: Path | None,
    json_file: Path | None,
) -> int:  # fmt: skip
    """Try any torch.optim.Optimizer under FSDP2 and distributed checkpoints, and say what holds.

    IMPORT.PATH is the module and the name of a class. It steps whole tensors in one process, and sharded ones on real
    ranks, with the same gradients; nothing is assumed of its formula.

    \b
    shardproof optimizer torch.optim.AdamW
    shardproof optimizer torch.optim.SGD --arg momentum=0.9 --mesh 2x2x1
    shardproof optimizer torch.optim.AdamW --json adamw.json

    Exit status: 0 every answer that there is to give is yes, 1 some no, 2 bad input, 3 an answer is unknown, 4 nothing
    could be asked.
    """
    from shardproof.optimizers import answers, text
    from shardproof.optimizers.examine import Examination, opened
    from shardproof.optimizers.request import asked
    from shardproof.report.publish import write_json

    wanted = asked(path, texts, mesh)
    preflight.require_interpreter(python)
    arguments.require_output_files(None, json=json_file)
    found: list[answers.AnsweredQuestion] = []
    keep = arguments.writable_folder(out) if out else None
    with opened(jobs, deadline_s, python, keep) as laboratory:
        examination = Examination(laboratory, wanted)
        for one in examination.answers():
            if not found:
                print(text.head(examination), flush=True)
            print(text.line(one), flush=True)
            found.append(one)
        print(text.notes(examination), end="")
        write_json(json_file, text.document(examination, found))
    return answers.exit_status(found)
