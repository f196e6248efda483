"""Shows what ranks have printed, in the cell or the terminal that they work for, with the rank before each line."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import groupby

from tqdm.auto import tqdm

from engines.output import OutputLine, RateLimiter

__all__ = ["OutputPrinter"]


_RANKS = 4  # as many as print much at once are shown, and something of all


class OutputPrinter:
    """Prints lines of ranks while they work; of all together no more than a page can take, and none where it is off."""

    def __init__(self, on: bool) -> None:
        self.on, self._meter = on, RateLimiter(_RANKS)

    def show(self, lines: Iterable[tuple[int, OutputLine]]) -> None:
        """Lines and their ranks. Where nothing can be printed they are lost: work goes on."""
        passed = [(line.stream, self._format_line(rank, line)) for rank, line in lines if self.on]
        for stream, texts in groupby(passed, key=lambda each: each[0]):
            if text := "".join(text for _, text in texts):
                with suppress(OSError, ValueError):
                    # Not `print`, which would write into the middle of a progress bar.
                    tqdm.write(text, file=getattr(sys, stream), end="")

    def _format_line(self, rank: int, line: OutputLine) -> str:
        if not self._meter.allow(line.text):
            return ""
        note = self._meter.report_dropped()
        return f"{note}{chr(10) * bool(note)}[rank {rank}] {line.text}\n"
