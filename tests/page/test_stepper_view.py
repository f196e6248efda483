"""The stepper in a bare page: keys go to the ranks, what was recorded is shown again, numbers are the ranks'."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise

import pytest
import torch
from torch import nn

from mpi4dl_nb import Cluster, Plan, Stepper, Training
from tests.page.harness import PageHarness

PLAN = Plan(split_size=2, spatial_size=1, slice_method="2x2", balance=(2, 1))
LAYERS = [nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
SHAPE = 2, 3, 24, 40
SHOWN = "document.querySelector('.mpi4dl-badge').textContent"


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with Cluster(PLAN.ranks, backend="loopback") as cluster:
        yield cluster


@pytest.fixture
def stepper(cluster: Cluster) -> Iterator[Stepper]:
    torch.manual_seed(0)
    model = nn.Sequential(*LAYERS, nn.Conv2d(4, 2, 3, padding=1))
    training = Training(model, PLAN, cluster, SHAPE)
    found = Stepper(training, torch.randn(SHAPE), torch.randint(2, (2, 24, 40)))
    yield found
    found.close()


@pytest.fixture
def page(chromium: object, stepper: Stepper) -> Iterator[PageHarness]:
    found = PageHarness(chromium, stepper.view, reduced_motion="reduce")
    found.advance()
    yield found
    found.close()


def send_key(page: PageHarness, key: str) -> None:
    """Press a key in the picture and wait until the page has its answer."""
    page.page.locator(".mpi4dl-stage").focus()
    page.page.keyboard.press(key)
    page.page.wait_for_function(f"!{SHOWN}.includes('running')")
    page.advance(3)


def read_badge(page: PageHarness) -> str:
    """Return where the page says it is in the record, after what was done last is drawn."""
    page.advance(3)
    return page.page.evaluate(SHOWN)


def wait_for_record(page: PageHarness, stepper: Stepper) -> None:
    """Wait until the page has all frames of the record."""
    page.page.wait_for_function(
        "(most) => document.querySelector('[role=slider]').getAttribute('aria-valuemax') === most",
        arg=str(len(stepper.record.frames) - 1),
    )


def go_to(stepper: Stepper, kind: str, phase: str) -> None:
    stepper.kind.value, stepper.phase.value = kind, phase
    stepper._handle_key("b")
    assert stepper.trouble.text == ""


def test_keys_go_to_the_ranks_and_back_shows_what_was_recorded(stepper: Stepper, page: PageHarness):
    places = [stepper.stepping.event.places]
    for _ in range(3):
        send_key(page, "n")
        places.append(stepper.stepping.event.places)
    assert places[0] < places[1] < places[2] < places[3]
    assert read_badge(page) == "newest"
    badge = page.page.locator(".mpi4dl-badge")
    wide = badge.bounding_box()["width"]
    send_key(page, "ArrowLeft")
    assert read_badge(page) == "recorded: 3 of 4"
    assert badge.bounding_box()["width"] == wide, "the title beside it stays in place"
    send_key(page, "Home")
    assert read_badge(page) == "recorded: 1 of 4"
    assert "nothing is done" in page.page.locator(".mpi4dl-step-title").inner_text()
    assert stepper.stepping.event.places == places[3], "going back undoes nothing on the ranks"
    send_key(page, "ArrowRight")
    assert stepper.stepping.event.places == places[3], "a recorded instruction is not run again"
    send_key(page, "End")
    send_key(page, "ArrowRight")
    assert stepper.stepping.event.places > places[3]
    assert read_badge(page) == "newest"


@pytest.mark.nightly
def test_keys_in_the_table_of_ranks_scroll_it(page: PageHarness):
    for key in ("n", "n", "ArrowLeft"):
        send_key(page, key)
    table = page.page.get_by_role("region", name="All ranks")
    assert table.get_attribute("data-lm-suppress-shortcuts") == "true"
    table.focus()
    for key in ("Home", "End", "PageUp", "ArrowDown"):
        page.page.keyboard.press(key)
        assert read_badge(page) == "recorded: 2 of 3"


def test_the_focus_stays_where_it_is_used(stepper: Stepper, page: PageHarness):
    go_to(stepper, "halo", "forward")
    page.advance(3)
    page.page.get_by_role("button", name="Next message").focus()
    page.page.keyboard.press("Enter")
    page.advance()
    assert "message 2 of 12" in page.page.locator(".mpi4dl-strips").inner_text()
    assert page.page.evaluate("() => document.activeElement.title") == "Next message (])"
    page.page.keyboard.press("n")  # the next frame may have no message
    page.page.wait_for_function(f"!{SHOWN}.includes('running')")
    page.advance(3)
    assert page.page.evaluate("() => Boolean(document.activeElement.closest('.mpi4dl-strips'))")
    wait_for_record(page, stepper)
    back = page.page.get_by_role("button", name="Back")
    back.focus()
    page.page.keyboard.press("Home")
    first = read_badge(page)
    assert first.startswith("recorded: 1 of")
    assert back.is_disabled()
    page.page.keyboard.press("Enter")
    assert page.page.evaluate("() => document.activeElement.textContent") == "◀ Back"
    assert read_badge(page) == first


@pytest.mark.nightly
def test_the_picture_follows_the_theme(page: PageHarness):
    pixels = "() => document.querySelector('.mpi4dl-stage canvas').toDataURL()"
    light = page.page.evaluate(pixels)
    page.switch_to_dark()
    assert page.page.evaluate(pixels) != light


@pytest.mark.nightly
def test_a_walk_is_recorded_by_instruction(stepper: Stepper, page: PageHarness):
    send_key(page, "p")
    wait_for_record(page, stepper)
    counts = [frame.meta["total"] for frame in stepper.record.frames]
    assert len(counts) > 4
    assert all(0 < later - earlier <= PLAN.ranks for earlier, later in pairwise(counts))


@pytest.mark.nightly
def test_gradients_that_come_home_are_added_in_numbers(stepper: Stepper, page: PageHarness):
    go_to(stepper, "halo", "backward")
    page.advance(3)
    table = """(at) => [...document.querySelectorAll('.mpi4dl-strips table')].map(
        (each) => Number(each.querySelector('tr').children[at].textContent.replaceAll('−', '-')))"""
    for at in range(1, 6):
        before, arrived, after = page.page.evaluate(table, at)
        assert after == pytest.approx(before + arrived, rel=0.1, abs=2e-6)
    assert "message 1 of 12" in page.page.locator(".mpi4dl-strips").inner_text()


@pytest.mark.nightly
def test_a_message_is_chosen_on_the_page_and_in_the_menu(stepper: Stepper, page: PageHarness):
    go_to(stepper, "halo", "forward")
    send_key(page, "]")
    assert stepper.message.value == 1
    stepper.message.value = 4
    page.advance(3)
    assert "message 5 of 12" in page.page.locator(".mpi4dl-strips").inner_text()
    assert "message 5 of 12" in stepper.figure.alt


def test_a_pixel_is_read_by_pointer_and_by_keyboard(stepper: Stepper, page: PageHarness):
    whole = stepper.stepping.tensor("images")[0, 0]
    send_key(page, "Shift+ArrowRight")
    told = page.page.locator("[role=status]").inner_text()
    rank, row, column = (int(part.split()[-1]) for part in told.split(", ")[:3])
    assert rank == 0
    number = float(told.split("value ")[1].split(",")[0].replace("−", "-"))
    assert number == pytest.approx(float(whole[row, column]), rel=1e-2)
    box = page.page.locator(".mpi4dl-stage").bounding_box()
    page.page.mouse.move(box["x"] + 0.12 * box["width"], box["y"] + 0.3 * box["height"])
    page.advance(2)
    assert page.page.locator(".mpi4dl-tooltip").inner_text().startswith("rank 0, row ")


@pytest.mark.nightly
def test_the_schedule_has_the_textures_of_the_timeline(page: PageHarness):
    backgrounds = """(name) => [...document.querySelectorAll(`.mpi4dl-step-table ${name}`)].map(
        (each) => getComputedStyle(each).backgroundImage).filter((each) => each.startsWith('url("data:image/png'))"""
    slots, legend = (page.page.evaluate(backgrounds, name) for name in (".mpi4dl-slot", ".mpi4dl-swatch"))
    assert len(slots) > len(set(slots)) == len(legend) == 2  # forward and backward
    assert set(slots) == set(legend)


@pytest.mark.nightly
def test_the_scrubber_goes_to_any_frame(stepper: Stepper, page: PageHarness):
    send_key(page, "l")
    wait_for_record(page, stepper)
    frames = len(stepper.record.frames)
    box = page.page.locator(".mpi4dl-scrubber").bounding_box()
    page.page.mouse.move(box["x"] + 30, box["y"] + 10)
    page.page.mouse.down()
    assert read_badge(page) == f"recorded: 2 of {frames}"
    page.page.mouse.move(box["x"] + 2, box["y"] + 10)
    page.page.mouse.up()
    assert read_badge(page) == f"recorded: 1 of {frames}"


@pytest.mark.nightly
def test_play_runs_the_step_to_its_end(stepper: Stepper, page: PageHarness):
    send_key(page, "p")
    page.page.get_by_label("Speed").select_option("4")
    page.page.get_by_role("button", name="Play").click()
    page.page.wait_for_function("document.querySelector('.mpi4dl-step-title').textContent.includes('is done')")
    page.advance(3)
    assert stepper.stepping.done
    assert page.page.get_by_role("button", name="Play").is_disabled()


def test_what_the_ranks_refuse_is_reported_and_stops_the_player(stepper: Stepper, page: PageHarness):
    stepper.stepping.close()
    send_key(page, "n")
    page.page.wait_for_function("document.querySelector('[role=alert]').textContent.includes('restart()')")
    assert not page.page.locator(".mpi4dl-step-title").is_visible()
    send_key(page, "r")
    assert read_badge(page) == "newest"
    assert stepper.trouble.text == ""


def test_a_button_is_answered_at_once_however_long_the_ranks_take(page: PageHarness):
    page.is_busy = True
    button = page.page.get_by_role("group", name="Run on the ranks").get_by_role("button", name="Phase")
    button.click()
    assert read_badge(page) == "the ranks are running"
    assert button.is_disabled()


def test_buttons_that_run_differ_from_those_that_look(stepper: Stepper, page: PageHarness):
    groups = {name: page.page.get_by_role("group", name=name) for name in ("Run on the ranks", "Look at the record")}
    assert [each.inner_text() for each in groups["Run on the ranks"].get_by_role("button").all()] == [
        "Instruction", "Layer", "Micro-batch", "Phase", "To breakpoint", "Finish", "Restart",
    ]  # fmt: skip
    places = stepper.stepping.event.places
    groups["Run on the ranks"].get_by_role("button", name="Instruction").click()
    page.page.wait_for_function(f"{SHOWN} === 'newest'")
    wait_until(page, lambda: stepper.stepping.event.places > places)
    wait_for_record(page, stepper)
    places = stepper.stepping.event.places
    forward, back = (groups["Look at the record"].get_by_role("button", name=name) for name in ("Forward", "Back"))
    assert forward.is_disabled()
    back.click()
    assert read_badge(page) == "recorded: 1 of 2"
    forward.click()
    assert read_badge(page) == "newest"
    assert stepper.stepping.event.places == places
    colours = "(each) => getComputedStyle(each).backgroundColor"
    run = groups["Run on the ranks"].get_by_role("button", name="Layer")
    assert run.evaluate(colours) != back.evaluate(colours)


def test_a_sum_shows_what_each_rank_had_before_and_the_sum_after(stepper: Stepper, page: PageHarness):
    go_to(stepper, "all-reduce", "forward")
    page.advance(3)
    table = page.page.locator(".mpi4dl-sum")
    assert table.locator("thead").inner_text().strip("\n").split("\t") == [
        "",
        "before: the rank's own",
        "after: the sum",
    ]
    rows = [[float(text.replace("−", "-")) for text in row.locator("td").all_inner_texts()]
            for row in table.locator("tbody tr").all()]  # fmt: skip
    assert len(rows) == 4
    for at in range(2):
        total = sum(row[at] for row in rows)
        assert all(row[at + 2] == pytest.approx(total, rel=0.02, abs=0.02) for row in rows)


@pytest.mark.nightly
def test_a_key_that_changes_nothing_is_answered_too(stepper: Stepper, page: PageHarness):
    for _ in range(2):
        send_key(page, "f")
        assert read_badge(page) == "newest"
    send_key(page, "r")
    assert stepper.stepping.event.places == (0,) * PLAN.ranks


@pytest.mark.nightly
def test_a_page_that_is_opened_later_has_the_record(chromium: object, stepper: Stepper):
    go_to(stepper, "halo", "backward")
    later = PageHarness(chromium, stepper.view, reduced_motion="reduce")
    wait_for_record(later, stepper)
    assert read_badge(later) == "newest"
    later.close()


@pytest.mark.nightly
def test_the_picture_of_the_saved_page_is_drawn_when_the_page_rests(stepper: Stepper, page: PageHarness):
    updates: list[str] = []
    stepper._still = type("Still", (), {"update": lambda _self, html: updates.append(html.data)})()
    send_key(page, "n")
    wait_until(page, lambda: bool(updates))
    assert stepper.figure.alt == stepper.view.alt
    assert "<iframe" not in updates[-1], "the step is not finished"
    assert '<div class="mpi4dl-still">' in updates[-1]
    stepper.close()
    assert '<div class="mpi4dl-still">' not in updates[-1], "a closed stepper keeps its last picture where it is shown"


def wait_until(page: PageHarness, test: Callable[[], bool]) -> None:
    for _ in range(50):
        if test():
            return
        page.page.wait_for_timeout(100)
    raise AssertionError("it did not happen in 5 s")


@pytest.mark.nightly
def test_motion_moves_and_ends(chromium: object, stepper: Stepper):
    moving = PageHarness(chromium, stepper.view)
    moving.advance()
    moving.page.get_by_label("Speed").select_option("0.25")
    go_to(stepper, "halo", "forward")
    canvas = moving.page.locator(".mpi4dl-stage canvas")
    first = canvas.screenshot()
    wait_until(moving, lambda: canvas.screenshot() != first)
    moving.page.wait_for_function("document.querySelector('[role=status]').textContent.includes('pixels have moved')")
    moving.advance()
    assert canvas.screenshot() == canvas.screenshot()
    moving.close()


@pytest.mark.nightly
def test_who_wants_less_motion_sees_the_end_at_once(stepper: Stepper, page: PageHarness):
    go_to(stepper, "halo", "forward")
    page.advance()
    assert "pixels have moved" in page.page.locator("[role=status]").inner_text()
