"""Print the output of ranks in the cell or terminal that started their work, with the rank before each line."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import groupby

from tqdm.auto import tqdm

from engines.output import OutputLine, RateLimiter

__all__ = ["OutputPrinter"]


_RANKS = 4  # rate limit: that of 4 ranks with much output


class OutputPrinter:
    """Prints lines of ranks while they work: no more in total than a page can take, and none if `on` is false."""

    def __init__(self, on: bool) -> None:
        self.on, self._meter = on, RateLimiter(_RANKS)

    def show(self, lines: Iterable[tuple[int, OutputLine]]) -> None:
        """Print lines with their ranks. If printing fails, the lines are dropped, and work continues."""
        passed = []
        for rank, line in lines if self.on else ():
            if self._meter.allow(line.text):
                note = self._meter.report_dropped()
                passed.append((line.stream, f"{note}{chr(10) * bool(note)}[rank {rank}] {line.text}\n"))
        # Neighbours of the same stream are written at once: each write costs a message to the page.
        for stream, texts in groupby(passed, key=lambda each: each[0]):
            with suppress(OSError, ValueError):
                # Not `print`, which would write into a progress bar.
                tqdm.write("".join(text for _, text in texts), file=getattr(sys, stream), end="")
