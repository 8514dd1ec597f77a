"""Stop strings in text that arrives in pieces, wherever the pieces are cut."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string to become complete; of several that end together, the longest.

    What has come out is final. So text is held back exactly as long as it may still be the start of a stop string.
    The result depends on the text alone, not on how it was cut into pieces.

    Args:
        stops: the stop strings; none is empty.
        include: whether the stop string is part of the text that comes out.
    """

    def __init__(self, stops: Sequence[str], include: bool) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self._longest = max(map(len, stops))
        self._last = {stop[-1] for stop in stops}
        self._by_first: dict[str, list[str]] = {}
        for stop in stops:
            self._by_first.setdefault(stop[0], []).append(stop)

    def feed(self, piece: str, armed: bool = True) -> tuple[str, str | None]:
        """Takes the next piece; returns (text that is now decided, the stop string found or None).

        Args:
            piece: the text.
            armed: False lets a stop string that this piece completes pass as text.
        """
        if not piece:
            return "", None
        text = self._held + piece
        if armed and not self._last.isdisjoint(piece):
            found = self._first_match(text, len(self._held))
            if found:
                begin, stop = found
                self._held = ""
                return text[: begin + len(stop) if self._include else begin], stop
        cut = self._undecided(text)
        self._held = text[cut:]
        return text[:cut], None

    def flush(self) -> str:
        """The text held back, once nothing follows it."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, old: int) -> tuple[int, str] | None:
        """(start, stop string) of the first match that ends after the first `old` characters."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            begin = text.find(stop, max(0, old - len(stop) + 1))
            if begin >= 0 and (best is None or (begin + len(stop), begin) < best[:2]):
                best = (begin + len(stop), begin, stop)
        return None if best is None else best[1:]

    def _undecided(self, text: str) -> int:
        """Where the longest end of the text begins that a stop string, longer than it, begins with."""
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            stops = self._by_first.get(text[start])
            if stops:
                tail = text[start:]
                if any(len(stop) > len(tail) and stop.startswith(tail) for stop in stops):
                    return start
        return len(text)
