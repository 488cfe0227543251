"""Messages between processes: what was sent before the other side ended is read, whatever it left unread itself."""

from __future__ import annotations

import os
import socket
import struct

import pytest
from shardproof.world import wire


@pytest.mark.parametrize("unread", [0, 1, 3])
@pytest.mark.parametrize("max_fds", [0, 1])
def test_last_words_arrive_before_the_end(unread: int, max_fds: int) -> None:
    ours, theirs = wire.packet_pair()
    with ours:
        for number in range(unread):
            wire.send(ours, {"job": number})
        wire.send(theirs, {"kind": "ready"})
        wire.send(theirs, {"kind": "failed"})
        theirs.close()
        assert [wire.receive(ours, max_fds)[0] for _ in range(4)] == [{"kind": "ready"}, {"kind": "failed"}, None, None]


def test_descriptors_travel_with_a_message() -> None:
    ours, theirs = wire.packet_pair()
    read, write = os.pipe()
    with ours, theirs:
        wire.send(theirs, {"kind": "worker"}, (write,))
        message, (fd,) = wire.receive(ours, max_fds=1)
        assert message == {"kind": "worker"}
        os.write(fd, b"x")
        assert os.read(read, 1) == b"x"
        for each in (read, write, fd):
            os.close(each)


def test_blobs_arrive_whole_and_a_half_one_is_an_end() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire.send_blobs(theirs, b"head", b"body" * 1000)
        assert wire.receive_blobs(ours) == (b"head", b"body" * 1000)
        theirs.sendall(struct.pack("<QQ", 4, 4) + b"hea")
        theirs.close()
        assert wire.receive_blobs(ours) is None
