"""`shardproof trainer`: any training script under all arms."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from shardproof.cli import arguments, options
from shardproof.errors import UsageError
from shardproof.protocol.plugin_modules import load_plugins
from shardproof.world import preflight


@click.command()
@click.argument("file", metavar="FILE.py[:CLASS]")
@click.option("--set", "sets", multiple=True, metavar="AXIS=V[,V]", help="Values of one of the trainer's axes only.")
@click.option("--strength", type=options.Whole(min=1, max=20), metavar="N",
              help="Few cells that have every combination of N axes [all cells].")  # fmt: skip
@click.option("--version", "versions", multiple=True, metavar="VERSION",
              help="Another release of the first package that it requires; repeatable.")  # fmt: skip
@click.option("--program", default="arms", metavar="TEXT", show_default=True,
              help="Steps before and after the save, and which arms: 'arms 1 1 resumed'.")  # fmt: skip
@click.option("--fault", "faults", multiple=True, metavar="ID", help="Let a boundary fault strike; repeatable.")
@click.option("--seed", type=options.SEED, default=0, show_default=True, help="Of weights and covering arrays.")
@click.option("-j", "--jobs", type=options.JOBS, default=None, help="Cells at once [cores].")
@options.deadline
@click.option("--device", type=click.Choice(["cpu", "cuda"]), help="Where ranks compute [cpu].")
@options.max_world
@options.python
@options.executor
@click.option("--out", type=click.Path(path_type=Path), default=None, metavar="DIR",
              help="Folder of results [the command's own, under reports/].")  # fmt: skip
@options.json
@options.junit
@click.option("-q", "--quiet", is_flag=True, help="No progress.")
def trainer(
    file: str, sets: tuple[str, ...], strength: int | None, versions: tuple[str, ...], program: str,
    faults: tuple[str, ...], seed: int, jobs: int | None, deadline_s: float, device: str | None, python: str | None,
    executor: str, ray_address: str | None, out: Path | None, json_file: Path | None, junit_file: Path | None,
    quiet: bool,
) -> int:  # fmt: skip
    """Drive a trainer of your own along every arm, and compare its state bit for bit.

    FILE has a class that derives from shardproof.trainer.Trainer, with build, step, save and load; docs/trainer.md
    begins with a whole one.

    \b
    shardproof trainer my_trainer.py
    shardproof trainer my_trainer.py:Mine --set mesh=2x2 --set offload=true
    shardproof trainer my_trainer.py --strength 2 --json trainer.json
    shardproof trainer my_trainer.py --version 1.14.0 --version 1.15.0
    shardproof trainer my_trainer.py --program 'arms 1 1 resumed'
    """
    from shardproof.faults.requested import require_faults
    from shardproof.folders import folder_of, point_latest
    from shardproof.program import ARMS
    from shardproof.request import Request
    from shardproof.run import run as execute
    from shardproof.space.plan import Plan
    from shardproof.trainer.arms import program_of
    from shardproof.trainer.cells import cells, scenario_of, settings_of
    from shardproof.trainer.described import described, is_trainer
    from shardproof.trainer.text import render

    if not is_trainer(file):
        allowed = "a Python file, and behind a colon the class in it"
        raise UsageError.of("FILE", file, allowed, "shardproof trainer my_trainer.py")
    found = described(file)
    modules = load_plugins((found.plugin,))
    preflight.require_interpreter(python)
    program_of(found, program)
    if faults:
        require_faults(set(faults))
    ray = arguments.on_ray(executor, ray_address, jobs)
    chosen = cells(found, settings_of(found, sets), strength, seed)
    axes = {"program": program, "seed": str(seed), "faults": ",".join(faults), "device": device or "cpu"}
    planned = [
        scenario_of(found, cell, **{**axes, **({"version": version} if version else {})})
        for version in versions or ("",)
        for cell in chosen
    ]
    jobs = jobs or os.cpu_count() or 1
    if ray is None:
        preflight.require_device(device, python)
        preflight.require_machine(planned, python, jobs)
    others = {
        "set": sets, "strength": strength, "version": versions, "program": program if program != ARMS else "",
        "fault": faults, "seed": seed, "device": device, "python": python,
        "file": str(found.file) if found.file.parent != Path.cwd() else "",
    }  # fmt: skip
    folder = out or folder_of([f"trainer-{found.file.stem}-{found.name}"], (), None, others)
    arguments.require_output_files(folder, json=json_file, junit=junit_file)
    releases = preflight.require_releases(planned, python)
    arguments.writable_folder(folder)
    if out is None:
        point_latest(folder)
    request = Request(
        plan=Plan(tuple(planned)), out=folder, command=tuple(sys.argv[1:]), seed=seed, jobs=jobs, deadline_s=deadline_s,
        plugins=modules, python=python, releases=releases, json=json_file, junit=junit_file, quiet=quiet, ray=ray,
    )  # fmt: skip
    ended = execute(request)
    order = {scenario.id: place for place, scenario in enumerate(planned)}
    results = sorted(ended.report.results, key=lambda result: order.get(result.id, len(order)))
    print(render(found, results), end="")
    print(f"report: {ended.page}")
    if ended.interrupted:
        print("interrupted: the same command resumes the run", file=sys.stderr)
        return 130
    return ended.status
