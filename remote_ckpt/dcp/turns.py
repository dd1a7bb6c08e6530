"""Whose turn it is at a writer: saves of two threads must not share its state.

``dcp.async_save`` saves in a thread of its own. A second save with the same writer, begun before the
first has ended, would send the first one's commit to the second one's place.
"""

from __future__ import annotations

import threading
from weakref import WeakSet


class Turns:
    """Gives a writer to one save at a time. A save is known by its thread: torch runs each in one.

    Until data is written a later save takes the turn away, and the earlier one is told: one that failed in
    planning ends without a word, and must not keep the writer. So may one of which another rank failed, which
    torch never finishes: between its data and its commit the turn can be taken away too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: threading.Thread | None = None
        self._is_writing = False
        self._refused: WeakSet[threading.Thread] = WeakSet()

    def __reduce__(self) -> tuple[type[Turns], tuple[()]]:
        return Turns, ()  # in another process nobody is saving

    def ask(self) -> bool:
        """Take the turn; False while another thread's save is being written, and :meth:`take` then too."""
        me = threading.current_thread()
        with self._lock:
            if self._is_busy(me):
                self._refused.add(me)
                return False
            self._holder, self._is_writing = me, False
            return True

    def take(self) -> bool:
        """Take the turn that was asked for."""
        me = threading.current_thread()
        with self._lock:
            was_refused = me in self._refused
            self._refused.discard(me)
        return not was_refused and self.ask()

    def begin_writing(self) -> bool:
        """Keep the turn until :meth:`end`; False where another save has taken it. For data and to commit."""
        with self._lock:
            is_mine = self._is_mine()
            self._is_writing = self._is_writing or is_mine
            return is_mine

    def end(self) -> None:
        """Let others take the turn from here on, if it is this thread's."""
        with self._lock:
            if self._is_mine():
                self._is_writing = False

    def _is_mine(self) -> bool:
        return self._holder in (None, threading.current_thread())

    def _is_busy(self, me: threading.Thread) -> bool:
        is_others = self._holder is not None and self._holder is not me and self._holder.is_alive()
        return self._is_writing and is_others
