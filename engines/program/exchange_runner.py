"""Runs an exchange between ranks, forward and backward: a linear map and its adjoint.

What depends on the instruction alone is computed once: the position of each message's pixels, its buffer, its requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mpi4dl_nb.engines.comm.device import choose_memory_format
from mpi4dl_nb.engines.comm.streams import DeviceEvent, copy_to_device, record_event, use_send_stream
from mpi4dl_nb.engines.comm.world import Pending, World
from mpi4dl_nb.engines.geometry.tiles import Move
from mpi4dl_nb.engines.program.exchange import Exchange
from mpi4dl_nb.engines.program.message_buffers import (
    MessageBuffer,
    MessageSet,
    SendQueue,
    choose_message_device,
    find_outside,
    make_index,
    make_message_allocator,
    make_persistent_messages,
    make_temporary_messages,
)


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """Record of one received message: pixels of a window, or gradients added at the owner.

    `before` is the content of the destination before gradients were added; None if the pixels were copied. `arrived`
    and `after` are None if the pixels were not kept.
    """

    move: Move
    before: Tensor | None
    arrived: Tensor | None
    after: Tensor | None


@dataclass(frozen=True, slots=True)
class StartedExchange:
    """An exchange in flight: its messages, and the buffers that are `expected` to be filled.

    `parts` are the window or strips to fill; in the backward pass, `grads` are their gradients, to be added at the end.
    `adds` is false if the arriving gradients are all that the source gets.
    """

    pending: Pending
    expected: Sequence[MessageBuffer]
    parts: Sequence[Tensor] = ()
    grads: Sequence[Tensor | None] = ()
    adds: bool = True


class ExchangeRunner:
    """One exchange on one rank, prepared to run repeatedly.

    `arena` (or None) holds the messages in transit. Exchanges share it, as only one of them runs at a time. Without an
    arena, messages go directly from tensor to tensor where a region's pixels are contiguous in memory. No message
    starts before the GPU has computed its pixels and has read the previous content of its buffer. Windows and gradients
    are always separate tensors, to which autograd may keep references. `allocate` (as `torch.empty`) makes what other
    ranks' pixels arrive in.

                  forward                            backward
      source --pack--> sent     = = = >     source.grad <--add-- sent     < = = =
      window <-unpack- received < = = =     window.grad --pack-> received = = = >
    """

    def __init__(
        self,
        exchange: Exchange,
        world: World,
        device: torch.device,
        send_queue: SendQueue,
        arena: Tensor | None = None,
        allocate: Callable[..., Tensor] = torch.empty,
    ) -> None:
        self.exchange, self.world, self.device, self.send_queue = exchange, world, device, send_queue
        self._forward_bytes = exchange.compute_bytes(exchange.sends)
        self._backward_bytes = exchange.compute_bytes(exchange.receives)
        self._tiles = [tile for _, tile in exchange.parts]
        self._allocate = allocate
        self._layout = choose_memory_format(len(exchange.shape)) if exchange.is_image else torch.contiguous_format
        # The whole window: the pixels that stay on this rank are in its tile of the source, and in its window.
        #
        #   source, own columns 4 to 7         [4 5 6 7]
        #   window, columns 3 to 8           3 [4 5 6 7] 8      3 and 8 arrive from the neighbours
        #
        # Strips: with a kernel of 3 x 3, only the outputs of the border read the halo, and of the own pixels only the
        # outer two rows and columns. The top strip therefore is three rows high:
        #
        #   h h h h h h h h      h  received (halo)
        #   h o o o o o o h      o  own pixels, copied into the strip
        #   h o o o o o o h
        #   h o o . . o o h      .  read by interior outputs only, from the source itself
        #   ...
        #
        # `_kept` places own pixels (part, index in the source, index in the part), `_arrivals` received ones (message,
        # part, index in the message, index in the part). Strips may overlap, so one message can fill parts of several.
        self._outside = [find_outside(exchange, tile) for tile in self._tiles]
        owned, moves = exchange.own, exchange.receives
        self._kept = [
            (part, make_index(exchange, owned & tile, owned), make_index(exchange, owned & tile, tile))
            for part, tile in enumerate(self._tiles)
            if owned and owned & tile
        ]
        self._arrivals = [
            (message, part, make_index(exchange, here, move.tile), make_index(exchange, here, tile))
            for message, move in enumerate(moves)
            for part, tile in enumerate(self._tiles)
            if (here := move.tile & tile)
        ]
        self._keeps_all, self._sends_all_once = exchange.keeps_all, exchange.sends_all_once
        self.received: list[ReceivedMessage] | None = None  # set to a list to record what arrives
        # The window of which `allocate_source` handed out the middle, and how to recognise that middle later.
        self._next_window: Tensor | None = None
        self._next_source: tuple[int, tuple[int, ...]] | None = None
        self._memory, self._where = make_message_allocator(device, world), choose_message_device(device, world)
        self._messages = None if arena is None else make_persistent_messages(exchange, world, arena)

    def allocate_source(self) -> Tensor:
        """Return memory for the source's values that is the middle of a newly allocated window.

        If `start_forward` then gets this tensor as the source, the window is already complete except for the halo, and
        the rank's own pixels are not copied.
        """
        self._next_window = self._make_part(0)
        # Not a view in autograd's sense (`set_` shares the storage only): writing the halo into the window must not
        # count as a change of the source, and the source's data may be moved elsewhere.
        view = self._next_window[self._kept[0][2]]
        middle = view.new_empty(0).set_(view.untyped_storage(), view.storage_offset(), view.size(), view.stride())
        self._next_source = middle.data_ptr(), middle.stride()
        return middle

    def start_forward(self, source: Tensor | None) -> tuple[StartedExchange, int]:
        """Post the messages and copy this rank's own pixels; return also the bytes that this rank sends."""
        # Of all values here, the source alone may belong to an autograd graph, so that only this method leaves it.
        with torch.no_grad():
            window, self._next_window = self._next_window, None
            # The source must still be exactly the tensor handed out: a kernel may have ignored it, or offloading may
            # have moved it.
            held = None if source is None else (source.data_ptr(), source.stride())
            if held != self._next_source:
                window = None
            parts = [self._make_part(part) for part in range(len(self._tiles))] if window is None else [window]
            messages = self._get_message_set(source, parts)
            contents = [] if source is None else [source[message.index] for message in messages.sent]
            pending = self.send_queue.start_after(self._fill(messages.sent, contents), messages.start_forward)
            # Copy the rank's own pixels while the messages are in transit.
            if source is not None and window is None:
                for part, here, there in self._kept:
                    parts[part][there].copy_(source[here])
        return StartedExchange(pending, messages.received, parts), self._forward_bytes

    def wait_forward(self, started: StartedExchange) -> Sequence[Tensor]:
        """Wait for the messages and return the completed window or strips."""
        self._finish(started)
        arrived = copy_to_device([message.pixels for message in started.expected], self.device, self._where)
        if self.exchange.strips:
            for message, part, here, there in self._arrivals:
                started.parts[part][there].copy_(arrived[message][here])
        else:
            for expected, pixels in zip(started.expected, arrived, strict=True):
                started.parts[0][expected.index].copy_(pixels)
        if self.received is not None:
            for move, expected in zip(self.exchange.receives, started.expected, strict=True):
                self.received.append(ReceivedMessage(move, None, expected.pixels.clone(), expected.pixels.clone()))
        return started.parts

    def start_backward(self, grads: Sequence[Tensor | None], source: Tensor | None) -> tuple[StartedExchange, int]:
        """Send the gradients of received pixels to their owners; return also the bytes that this rank sends.

        `grads` are those of the window or strips.
        """
        # If every pixel was sent to exactly one rank and none stays, the arriving gradients cover the source exactly
        # once: they can be received straight into uninitialised memory instead of being added to zeros.
        first: Tensor | None = None
        if source is not None and source.grad is None and self._sends_all_once:
            first = source.grad = self._make_like(source)
        messages = self._get_message_set(first, grads)
        window_grad = None if self.exchange.strips else next(iter(grads), None)
        if window_grad is not None:
            contents = [window_grad[message.index] for message in messages.received]
        else:
            # A pixel may be in several strips, so the gradients are summed per message first: on the device, where the
            # gradients are, then copied into the message once.
            contents = [torch.zeros_like(message.pixels, device=self.device) for message in messages.received]
            for message, part, here, there in self._arrivals:
                if (grad := grads[part]) is not None:
                    contents[message][here].add_(grad[there])
        pending = self.send_queue.start_after(self._fill(messages.received, contents), messages.start_backward)
        return StartedExchange(pending, messages.sent, grads=grads, adds=first is None), self._backward_bytes

    def wait_backward(self, started: StartedExchange, source: Tensor | None, alone: bool) -> None:
        """Wait, and add all gradients to that of `source` (unless it is None): the rank's own and received ones.

        `alone`: nothing else is added to the gradient of `source`, so that it may remain a view of the window's
        gradient.
        """
        if source is not None and started.adds:  # the gradients of the pixels that stayed on this rank
            if self._keeps_all and source.grad is None and (window_grad := started.grads[0]) is not None:
                kept = window_grad[self._kept[0][2]]
                # Other readers add to it in place.
                source.grad = kept if alone else torch.empty_like(source).copy_(kept)
            else:
                total = _get_gradient(source)
                for part, here, there in self._kept:
                    if (grad := started.grads[part]) is not None:
                        total[here].add_(grad[there])
        self._finish(started)
        if source is None:
            return
        total = _get_gradient(source)
        arrived = copy_to_device([message.pixels for message in started.expected], self.device, self._where)
        for move, message, pixels in zip(self.exchange.sends, started.expected, arrived, strict=True):
            region = total[message.index]
            before = region.clone() if started.adds and self.received is not None else None
            region.add_(pixels) if started.adds else region.copy_(pixels)
            if self.received is not None:
                self.received.append(ReceivedMessage(move, before, message.pixels.clone(), region.clone()))

    def _get_message_set(self, source: Tensor | None, parts: Sequence[Tensor | None]) -> MessageSet:
        if self._messages:
            return self._messages
        # Strips are no parts of one tensor, and their messages are still being sent while the rank continues: these
        # need memory of their own.
        direct = (None, None) if self.exchange.strips else (source, next(iter(parts), None))
        return make_temporary_messages(self.exchange, self.world, self._memory, *direct)

    def _fill(self, buffers: Sequence[MessageBuffer], contents: Sequence[Tensor]) -> DeviceEvent:
        with use_send_stream(self.device, self._where, contents):
            for buffer, pixels in zip(buffers, contents, strict=True):
                if self._where != self.device:  # only a copy of contiguous memory is asynchronous
                    pixels = pixels.contiguous(memory_format=self._layout)
                buffer.pixels.copy_(pixels, non_blocking=True)
            return record_event(self.device, self._where)

    def _finish(self, started: StartedExchange) -> None:
        """Wait if messages are expected, else queue the sends: waiting for them would block the pipeline."""
        if started.expected:
            started.pending.wait()
        else:
            self.send_queue.add(started.pending)

    def _make_part(self, number: int) -> Tensor:
        """Allocate the window or a strip and write the fill where it extends beyond the image."""
        shape, dtype = self.exchange.compute_shape(self._tiles[number]), getattr(torch, self.exchange.dtype)
        part = self._allocate(shape, dtype=dtype, device=self.device, memory_format=self._layout)
        for index in self._outside[number]:
            part[index].fill_(self.exchange.fill)
        return part

    def _make_like(self, tensor: Tensor) -> Tensor:
        """Allocate what `torch.empty_like` would: autograd wants gradients in the strides of their tensors."""
        strides = torch.empty_like(tensor, device="meta").stride()
        memory = self._allocate(tensor.numel(), dtype=tensor.dtype, device=tensor.device)
        return memory.set_(memory.untyped_storage(), 0, tensor.size(), strides)


def _get_gradient(tensor: Tensor) -> Tensor:
    """Return the gradient of a tensor, to be added to: zero at first."""
    if tensor.grad is None:
        tensor.grad = torch.zeros_like(tensor)
    return tensor.grad


def make_exchange_runners(
    exchanges: Iterable[Exchange],
    world: World,
    device: torch.device,
    send_queue: SendQueue,
    allocate: Callable[..., Tensor] = torch.empty,
) -> dict[str, ExchangeRunner]:
    """Make a runner for each exchange of a program, by key; persistent exchanges share one message arena."""
    by_key = {item.key: item for item in exchanges}
    largest = max((exchange.staging_bytes for exchange in by_key.values() if exchange.is_persistent), default=0)
    arena = make_message_allocator(device, world, allocate)(largest)
    return {
        key: ExchangeRunner(exchange, world, device, send_queue, arena if exchange.is_persistent else None, allocate)
        for key, exchange in by_key.items()
    }
