"""One end of the line between the consumer's process and the worker's."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from multiprocessing.connection import wait
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

__all__ = ["Channel"]

_WITH = b"\0"
"""A descriptor comes with a byte at least."""


class Channel:
    """Messages, some of them with a descriptor; and the other process's end, noticed at once.

    That end is seen in two ways. The connection ends, unless a process that was forked from the other one has a copy of
    it. And the other's pidfd becomes readable, which nothing can delay; it is Linux's. PR_SET_PDEATHSIG would do
    neither: it kills a child when the thread ends that started it.

    Two threads may send and receive, one each.

    Args:
        connection: Becomes the channel's.
        peer: Id of the other process, a child or the parent of this one.
    """

    def __init__(self, connection: Connection, peer: int) -> None:
        self._connection = connection
        # The connection's own socket once more: only a socket sends descriptors. One made for each descriptor, as
        # multiprocessing does, would be left open by an interrupt that comes while it is being made.
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))
        self._peer: int | None = None
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):  # a kernel or a sandbox without it, or nobody of that id any more
                self._peer = os.pidfd_open(peer)

    def send(self, message: object, descriptor: int | None = None) -> None:
        """Say something. Does nothing where nobody is left to hear it: who receives will notice."""
        try:
            self._connection.send((message, descriptor is not None))
            if descriptor is not None:
                socket.send_fds(self._socket, [_WITH], [descriptor])
        except (BrokenPipeError, ConnectionResetError):  # the other process has ended
            pass
        except OSError:
            if not self.is_closed:
                raise

    def receive(self) -> tuple[Any, int | None]:
        """Wait for the next message, and the descriptor that came with it, which becomes the caller's.

        Interrupted while it waits it loses nothing; in the middle of a message it closes the channel.

        Raises:
            EOFError: The other process has ended, after all it said, or this channel is closed.
        """
        if self.is_closed or self._connection not in wait(self._ends()):
            raise EOFError
        try:
            message, has_descriptor = self._connection.recv()
            return message, self._receive_descriptor() if has_descriptor else None
        except OSError as error:  # ended in the middle of a word
            raise EOFError from error
        except EOFError:
            raise
        except BaseException:
            self.close()
            raise

    def _receive_descriptor(self) -> int:
        _, descriptors, _, _ = socket.recv_fds(self._socket, len(_WITH), 1)
        if not descriptors:
            raise EOFError
        return descriptors[0]

    @property
    def is_closed(self) -> bool:
        """At this end."""
        return self._connection.closed

    def close(self) -> None:
        """Idempotent."""
        self._connection.close()
        self._socket.close()
        if self._peer is not None:
            os.close(self._peer)
            self._peer = None

    def _ends(self) -> list[Any]:
        return [self._connection] if self._peer is None else [self._connection, self._peer]
