"""The command `published`: published results of the field compared to the simulator's. It needs no ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from engines.cli import options
from engines.errors import PlanError, TraceError
from engines.predict.published import PUBLISHED
from engines.predict.published_replay import PublishedReplay, ReplayOutcome

__all__ = ["format_outcomes", "run_published"]


def run_published(arguments: Sequence[str]) -> int:
    """Print one line of JSON per row, and a table. The exit code is 0, or 2 if a row cannot be simulated."""
    flags = options.FlagParser(
        "published", description="Simulate published results; machines and assumptions are data."
    )
    flags.add_argument("--only", nargs="*", default=[""], metavar="NAME", help="rows whose names begin so")
    found, replay = [], PublishedReplay()
    try:
        chosen = tuple(flags.parse_args(arguments).only)
        rows = [row for row in PUBLISHED if row.name.startswith(chosen)]
        if not rows:
            raise PlanError(
                f"No row begins with {' or '.join(chosen)}. There are {', '.join(r.name for r in PUBLISHED)}."
            )
        for row in rows:
            found.append(replay.simulate_result(row))
            print(json.dumps(found[-1].line), flush=True)
    except (PlanError, TraceError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(format_outcomes(found))
    return 0


def format_outcomes(outcomes: Sequence[ReplayOutcome]) -> str:
    """Format simulated and published values, and the range over each row's variants that fit the machine."""
    lines = [f"{'row':24}{'published':>12}{'simulated':>12}{'ratio':>8}  {'range':20}{'peak GiB':>9}  unit"]
    for each in outcomes:
        fitting = [value for _, value, fits in each.varied if fits]
        low, high = min([each.simulated, *fitting]), max([each.simulated, *fitting])
        span = f"{low:.4g} to {high:.4g}" if fitting else ""
        peak = f"{each.peak_bytes / 2**30:.1f}{'' if each.peak_bytes <= each.memory_bytes else '!'}"
        lines.append(
            f"{each.row.name:24}{each.row.published:12.5g}{each.simulated:12.5g}{each.ratio:8.2f}  {span:20}{peak:>9}"
            f"  {each.row.measure}"
        )
        if each.row.why or not each.agrees:
            lines.append(f"    {each.row.why or 'Why they disagree is not known.'}")
        if each.peak_bytes > each.memory_bytes:
            lines.append(f"    ! does not fit the {each.memory_bytes / 2**30:.0f} GiB of a rank")
    return "\n".join(lines)
