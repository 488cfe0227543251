"""`python -m shardproof.world.supervised PARENT WORD…`: runs a command that ends with the process `PARENT`.

The kernel kills a child with its parent, but not what that child has started. This process adopts all that the command
starts, and ends it when the command ends, or when `PARENT` does, also by SIGKILL. It ends as the command ended.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys

from shardproof.world.process import adopt_orphans, die_with_parent, kill_children

NOT_STARTED = 127
"""The exit status where the command cannot be started, as a shell has it."""


def main() -> int:
    """Run the command; its exit status. A signal that ended it ends this process, too."""
    parent, *words = sys.argv[1:]
    adopt_orphans()
    die_with_parent(int(parent), clean_up=kill_children)
    try:
        status = subprocess.Popen(words, stdin=subprocess.DEVNULL).wait()
    except OSError as error:
        print(f"{words[0]}: {error.strerror}", file=sys.stderr)
        return NOT_STARTED
    kill_children()
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(-status, signal.SIG_DFL) if -status not in (signal.SIGKILL, signal.SIGSTOP) else None
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main())
