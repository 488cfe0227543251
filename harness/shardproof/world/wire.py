"""Messages between parent, server, supervisors, ranks and workers over Unix sockets.

Control messages are JSON objects on SEQPACKET sockets, one packet a message, so that none is ever read half and
several ranks may share one socket. Calls to workers are length-prefixed on STREAM sockets, since payloads may be large.
"""

from __future__ import annotations

import array
import json
import socket
import struct
from typing import Any

PACKET_BYTES = 1 << 20
_LENGTHS = struct.Struct("<QQ")


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected SEQPACKET sockets."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send(channel: socket.socket, message: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
    """Send one JSON object, with open file descriptors attached."""
    data = json.dumps(message).encode()
    if fds:
        socket.send_fds(channel, [data], fds)
    else:
        channel.sendall(data)


def receive(channel: socket.socket, max_fds: int = 0) -> tuple[dict[str, Any] | None, list[int]]:
    """The next message and the descriptors that came with it; None when the other side is gone.

    A process that ends before it has read all that was sent to it resets the connection. The kernel says so once, ahead
    of the packets that the process had sent before: its last words, such as why a server gives up, are read after that.
    """
    for _ in ("a reset, perhaps", "what was sent before it"):
        try:
            if max_fds:
                data, fds, _, _ = socket.recv_fds(channel, PACKET_BYTES, max_fds)
            else:
                data, fds = channel.recv(PACKET_BYTES), []
        except ConnectionResetError:
            continue
        return (json.loads(data) if data else None), list(array.array("i", fds))
    return None, []


def send_blobs(channel: socket.socket, head: bytes, body: bytes) -> None:
    """Send two byte strings on a STREAM socket."""
    channel.sendall(_LENGTHS.pack(len(head), len(body)) + head + body)


def receive_blobs(channel: socket.socket) -> tuple[bytes, bytes] | None:
    """The two byte strings of `send_blobs`; None when the other side is gone."""
    lengths = _exactly(channel, _LENGTHS.size)
    if lengths is None:
        return None
    head_bytes, body_bytes = _LENGTHS.unpack(lengths)
    data = _exactly(channel, head_bytes + body_bytes)
    return None if data is None else (data[:head_bytes], data[head_bytes:])


def _exactly(channel: socket.socket, size: int) -> bytes | None:
    data = bytearray(size)
    view, position = memoryview(data), 0
    while position < size:
        try:
            count = channel.recv_into(view[position:])
        except (ConnectionResetError, BrokenPipeError):
            return None
        if not count:
            return None
        position += count
    return bytes(data)
