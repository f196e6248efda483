"""Numbers of a running training as HTML, cheap enough for an update every second."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from engines.checkpoint.interrupts import StoppedError
from engines.training_events import EpochResult
from mpi4dl_nb.draw.figure import format_bytes
from mpi4dl_nb.draw.monitor import compute_uses, format_rank_names, get_memory_bytes
from mpi4dl_nb.fit_run import History
from mpi4dl_nb.progress import Progress

__all__ = ["describe_outcome", "format_duration", "format_progress_html"]

EPOCHS = 6  # the last ones; the History has all of them
SIDE_BY_SIDE = "display:flex;flex-wrap:wrap;align-items:flex-start;gap:0 2em"
RANKS = 16  # more than that are in the figure only
SCORES = {"loss": ".5g", "accuracy": ".3f", "dice": ".3f"}
EPOCH_COLUMNS = (
    {"epoch": "d"}
    | SCORES
    | {f"held_out_{name}": form for name, form in SCORES.items()}
    | {"images_per_s": ".2f", "data_wait": ".0%"}
)
"""Columns of the table of epochs, with the formats of their numbers."""


def format_progress_html(progress: Progress) -> str:
    """Return a line of numbers, a progress bar of the steps, and tables of the last epochs and of the ranks."""
    line = " · ".join(escape(part) for part in _format_step(progress))
    bar = ""
    if progress.total:
        style = "width:100%;max-width:40em;height:1.1em;margin:0.2em 0"
        done = f'value="{len(progress.losses)}" max="{progress.total}"'
        bar = f'<progress aria-label="steps done" {done} style="{style}"></progress>'
    return (
        f'<div style="line-height:1.5"><p style="margin:0"><b>{escape(progress.state)}</b> · {line}</p>'
        f'{bar}<div style="{SIDE_BY_SIDE}">{_format_ranks(progress)}{_format_epochs(progress.epochs)}</div></div>'
    )


def format_duration(seconds: float) -> str:
    """
    >>> format_duration(59.6), format_duration(3725)
    ('1:00', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def describe_outcome(outcome: History | BaseException) -> str:
    """Describe how a `fit` has ended."""
    match outcome:
        case History(stopped=True, saved=None):
            return f"stopped after {len(outcome.losses)} steps; the ranks keep what they have learned"
        case History(stopped=True):
            return f"stopped after {len(outcome.losses)} steps; saved as {outcome.saved}"
        case History():
            return f"done; saved as {outcome.saved}" if outcome.saved else "done"
        case StoppedError():
            return str(outcome)
        case KeyboardInterrupt():
            return "stopped by an interrupt; the ranks keep what they have learned"
    return f"ended by an error: {outcome}"


def _format_step(progress: Progress) -> list[str]:
    done = len(progress.losses)
    of = f" of {progress.total}" if progress.total is not None else ""
    if progress.last is None:
        return [f"step {done}{of}"]
    last = progress.last
    wait = last.wait_s / (last.seconds + last.wait_s)
    told = [f"epoch {last.epoch}, step {done}{of}", f"loss {last.loss:.5g}", f"{progress.speeds[-1]:.2f} images/s"]
    told += [f"accuracy {last.accuracy:.3f}"] if last.accuracy is not None else []
    told += [f"waiting for images {wait:.0%}", f"{format_duration(progress.seconds)} so far"]
    told += [f"about {format_duration(progress.left_s)} left"] if progress.left_s is not None else []
    return told + ([f"{progress.left_out} bad images left out"] if progress.left_out else [])


def _format_ranks(progress: Progress) -> str:
    used, held = compute_uses(progress), get_memory_bytes(progress)
    # Ranks that are threads of one process have one memory, which is told in a row of its own.
    together = next(iter(held.values()), 0) if progress.one_process else None
    names = format_rank_names(progress.plan)
    rows: list[tuple[str, ...]] = []
    for rank, use in used.items():
        shares = (f"{share:.0%}" for share in (use.work, use.communication, use.waiting, use.other))
        rows.append((names[rank], *shares, "" if together is not None else format_bytes(held[f"rank {rank}"])))
    rows += [("all ranks: one process", "", "", "", "", format_bytes(together))] if together else []
    rows = rows if len(rows) <= RANKS else []
    return _format_table("Ranks in the last step", ("rank", "works", "communicates", "waits", "other", "memory"), rows)


def _format_epochs(epochs: Sequence[EpochResult]) -> str:
    """Return the table of the last epochs, newest first, without the columns that are empty."""
    records = [epoch.record for epoch in reversed(epochs[-EPOCHS:])]
    kept = {name: form for name, form in EPOCH_COLUMNS.items() if any(record[name] is not None for record in records)}
    rows = [["" if record[name] is None else format(record[name], kept[name]) for name in kept] for record in records]
    names = {"images_per_s": "images/s"}
    return _format_table("Last epochs", [names.get(name, name.replace("_", " ")) for name in kept], rows)


def _format_table(caption: str, heads: Iterable[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    cell = 'style="text-align:right;padding:0 0.6em"'
    first = 'style="text-align:left;padding:0 0.6em 0 0;font-weight:normal"'
    head = "".join(
        f'<th scope="col" {cell if place else first}>{escape(name)}</th>' for place, name in enumerate(heads)
    )
    body = "".join(
        f'<tr><th scope="row" {first}>{escape(name)}</th>'
        + "".join(f"<td {cell}>{escape(v)}</td>" for v in values)
        + "</tr>"
        for name, *values in rows
    )
    words = f'<caption style="text-align:left;font-weight:bold">{caption}</caption>'
    return f"<table>{words}<tr>{head}</tr>{body}</table>"
