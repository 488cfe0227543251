"""`shardproof known`: what is known of a defect, by its upstream number or by words."""

from __future__ import annotations

import click

from shardproof.cli import options
from shardproof.errors import UsageError
from shardproof.protocol.plugin_modules import load_plugins
from shardproof.verdict import ExitStatus


@click.command()
@click.argument("words", nargs=-1, metavar="[WORD]...")
@options.plugin
def known(words: tuple[str, ...], plugins: tuple[str, ...]) -> int:
    """Say what is known of a defect: by its upstream number or address, or by words.

    Every entry that has all of them is told with the commands that show it, and that run it cured; without words, one
    line for each entry.

    \b
    shardproof known 3949
    shardproof known https://github.com/NVIDIA/Megatron-LM/issues/2777
    shardproof known deepspeed offload
    """
    from shardproof.issues.lookup import described, lookup, planted
    from shardproof.protocol.registry import all_systems
    from shardproof.trainer.system import shipped

    load_plugins(plugins)
    trainers = {name: str(file) for name, file in shipped().items()}
    findings, faults = lookup(words, all_systems())
    if not findings and not faults:
        each = {word: lookup([word], all_systems()) for word in words}
        numbers = {word: len(of) + len(also) for word, (of, also) in each.items()}
        alone = ", ".join(f"{word!r} is in {number or 'no'} entr{'y' if number == 1 else 'ies'}" for word, number in
                          numbers.items())  # fmt: skip
        allowed = f"a number, an address or words that one entry has together; `shardproof known` lists them; {alone}"
        raise UsageError.of("WORD", " ".join(words), allowed, "shardproof known 2777")
    if not words:
        print("\n".join(f"{finding.id:<42} {finding.novelty.harm}" for finding in findings))
        return ExitStatus.OK
    told = (described(each, trainers.get(each.system, "")) for each in findings)
    blocks = [*told, *map(planted, faults)]
    print("\n\n".join("\n".join(block) for block in blocks))
    return ExitStatus.OK
