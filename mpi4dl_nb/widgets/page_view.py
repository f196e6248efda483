"""The part of a widget that a page draws. What a page sends is checked before anything is done with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import anywidget
import traitlets

from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.widgets.saved_view import SavedView

State = Mapping[str, Any]


@dataclass(frozen=True)
class Request:
    """What a page may ask of a view: `answer(value)` is called with a value that `accepts(value)`."""

    accepts: Callable[[Any], bool]
    answer: Callable[[Any], None]


@dataclass(frozen=True)
class PageRules:
    """What a page may set and ask for, by the names of traits and messages.

    `settable` tells of a value whether it is possible, together with the other values that the view then has. These
    are checked in the order of `settable`: a later one sees those before it.
    """

    settable: Mapping[str, Callable[[Any, State], bool]] = field(default_factory=dict)
    requests: Mapping[str, Request] = field(default_factory=dict)


class PageView(anywidget.AnyWidget):
    """A view that a page draws, and that takes from the page only what its `rules` allow.

    A page is not trusted: it contains the scripts of every notebook that is open in it, and a saved one may have been
    changed. What is refused changes nothing: the page gets the kernel's own value again, and for a request a message
    `{"refused": ...}`. A message with a number `asked` is answered by `{"answered": asked}` once all is done.
    """

    _rules = PageRules()

    def __init__(self, **traits: Any) -> None:
        super().__init__(**traits)
        self.on_msg(self._handle_event)

    @property
    def rules(self) -> PageRules:
        """What the page may set and ask for now."""
        return self._rules

    def save_view(self) -> SavedView:
        """Return what a page needs to show the view, as it is now, without a kernel."""
        others = {*anywidget.AnyWidget.class_trait_names(sync=True), "_esm", "_css", "_anywidget_id"}
        values = {name: getattr(self, name) for name in self.trait_names(sync=True) if name not in others}
        return SavedView(str(self._esm), str(self._css), values)

    def set_state(self, sync_data: dict[str, Any]) -> None:
        """Take over the state that a page sends; ipywidgets calls this."""
        accepted = {name: value for name, value in sync_data.items() if name == "_view_count"}
        # The view as it will be: a tile is one of the layer that comes with it.
        state = {name: getattr(self, name) for name in self.rules.settable}
        for name, accepts in self.rules.settable.items():
            if name in sync_data and self._has_type(name, sync_data[name]) and accepts(sync_data[name], state):
                accepted[name] = state[name] = sync_data[name]
        super().set_state(accepted)
        if refused := [name for name in sync_data if name not in accepted and self.has_trait(name)]:
            self.send_state(refused)

    def _has_type(self, name: str, value: Any) -> bool:
        try:
            self.traits()[name]._validate(self, value)
        except traitlets.TraitError:
            return False
        return True

    def _handle_event(self, _view: Any, content: Any, _buffers: Any) -> None:
        message = content if isinstance(content, Mapping) else {}
        try:
            for name, value in message.items():
                if name not in self.rules.requests:
                    continue
                request = self.rules.requests[name]
                if request.accepts(value):
                    request.answer(value)
                else:
                    self.send({"refused": f"The page has asked for {name} that this view does not have."})
        finally:  # the page waits for it, also after an interrupt, and where nothing has changed
            if isinstance(asked := message.get("asked"), int | float):
                self.send({"answered": asked})


MIN_HEIGHT_PX = 200


class BoundedView(PageView):
    """A view that is at most `max_height` px high, or as high as the window if that is None.

    What does not fit is drawn smaller, or scrolls inside the view. Raises PlanError for less than `MIN_HEIGHT_PX`.
    """

    max_height = traitlets.Int(None, allow_none=True).tag(sync=True)

    @traitlets.validate("max_height")
    def _check_height(self, proposal: Any) -> int | None:
        if proposal["value"] is not None and proposal["value"] < MIN_HEIGHT_PX:
            raise PlanError(
                f"max_height={proposal['value']} px is too low for a view. Give {MIN_HEIGHT_PX} or more, or None for "
                "the height of the window."
            )
        return proposal["value"]
