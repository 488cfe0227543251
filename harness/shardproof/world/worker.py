"""A worker: a long-lived process forked from the warm server that answers calls, one at a time.

It is for work that needs torch, warm and single-threaded, but no ranks: the twin, the lockstep reference, the
checkpoint reader. Calls take and return bytes; an exception goes back as its traceback.
"""

from __future__ import annotations

import gc
import socket
import traceback

from shardproof.entry import resolve
from shardproof.world import wire

_COLLECTING = (50_000, 20, 50)
"""What Python's collector waits for: its own 700 new objects are the records of one scenario, and it would go over all
that a worker remembers, a tenth of the time, to find none of it garbage."""


def serve(channel: socket.socket) -> None:
    """Answer calls until the other side closes. A call is (`module:function`, payload), an answer (b"ok", result) or
    (b"error", traceback)."""
    gc.set_threshold(*_COLLECTING)
    channel.setblocking(True)
    while (call := wire.receive_blobs(channel)) is not None:
        target, payload = call
        try:
            answer = (b"ok", bytes(resolve(target.decode())(payload)))
        except Exception:
            answer = (b"error", traceback.format_exc().encode())
        wire.send_blobs(channel, *answer)
