"""A worker: a long-lived process forked from the warm server that answers calls, one at a time.

It is for work that needs torch, warm and single-threaded, but no ranks: the twin, the lockstep reference, the
checkpoint reader. Calls take and return bytes; an exception goes back as its traceback.
"""

from __future__ import annotations

import socket
import traceback

from harness.entry import resolve
from harness.world import wire


def serve(channel: socket.socket) -> None:
    """Answer calls until the other side closes. A call is (`module:function`, payload), an answer (b"ok", result) or
    (b"error", traceback)."""
    channel.setblocking(True)
    while (call := wire.receive_blobs(channel)) is not None:
        target, payload = call
        try:
            answer = (b"ok", bytes(resolve(target.decode())(payload)))
        except Exception:
            answer = (b"error", traceback.format_exc().encode())
        wire.send_blobs(channel, *answer)
