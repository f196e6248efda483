"""The slicer in a page without a notebook: the page answers what is pointed at, and asks the kernel for tissue only."""

from __future__ import annotations

import re

import numpy as np
import pytest
from playwright.sync_api import expect
from torch import nn

from mpi4dl_nb import Slicer
from mpi4dl_nb.engines.errors import ImageError
from mpi4dl_nb.engines.images.sample_data import immunohistochemistry
from mpi4dl_nb.engines.inference.class_map import make_colours
from mpi4dl_nb.engines.models import resnet20_v1
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.widgets import slicer_view as module
from mpi4dl_nb.widgets.page_modules import read_style
from tests.page.harness import PageHarness

TISSUE = immunohistochemistry()
PLAN = Plan(split_size=2, slice_method="2x2")


@pytest.fixture(scope="module")
def slicer() -> Slicer:
    return Slicer(TISSUE, PLAN, resnet20_v1(num_classes=2))


@pytest.fixture
def page(chromium, slicer):
    slicer.view.layer = slicer.view.tile = 0
    slicer.view.reading, slicer.view.fields, slicer.view.place = "layer", False, []
    harness = PageHarness(chromium, slicer.view)
    harness.advance()
    yield harness.page
    harness.close()


def send_keys(page, *keys: str) -> None:
    page.locator("canvas").focus()
    for key in keys:
        page.keyboard.press(key)


def move_pointer(page, row: float, col: float) -> str:
    """Point at a place of the whole picture, in fractions of its sides; what is said of it."""
    box = page.locator("canvas").bounding_box()
    side = min(box["width"], box["height"]) - 16
    left, top = box["x"] + (box["width"] - side) / 2, box["y"] + (box["height"] - side) / 2
    page.mouse.move(left + col * side, top + row * side)
    return page.locator(".mpi4dl-tooltip").inner_text()


def test_a_pixel_is_explained_without_the_kernel(page, slicer):
    page.evaluate("() => { window.pageSent = (content) => { window.asked = content; } }")
    told = move_pointer(page, 0.25, 0.5 - 1 / 1024)
    assert "picture: row 128, column 255" in told
    assert "owner: tile 0, rank 0" in told
    assert "borrowed by rank 1: 12 bytes" in told
    assert "the output here depends on 3 × 3 px" in told
    assert "no tile borrows it" in move_pointer(page, 0.25, 0.25)
    assert "owner: tile 3, rank 3" in move_pointer(page, 0.75, 0.75)
    assert page.evaluate("() => window.asked ?? null") is None


@pytest.mark.nightly
def test_the_sheets_of_other_widgets_change_nothing(page):
    send_keys(page, "t")
    stage, offset = page.locator(".mpi4dl-stage"), "getComputedStyle(document.activeElement).outlineOffset"
    before = stage.bounding_box()
    page.add_style_tag(content=read_style("stepper/stepper.css", "timeline/timeline.css"))
    assert stage.bounding_box() == before
    assert page.evaluate(offset) == "-3px"


@pytest.mark.nightly
def test_beside_the_picture_no_pixel_is_framed(page):
    canvas = page.locator("canvas")
    box = canvas.bounding_box()
    page.mouse.move(box["x"] + 40, box["y"] + box["height"] / 2)
    page.wait_for_timeout(500)  # until all tissue has come
    beside = canvas.screenshot()
    page.mouse.move(0, 0)
    page.wait_for_timeout(100)
    assert canvas.screenshot() == beside


def test_the_status_line_follows_the_layer_and_says_what_receptive_fields_wait_for(page):
    status, title = page.locator(".mpi4dl-status"), page.locator(".mpi4dl-title")

    def expect_resting() -> str:
        (layer,) = re.findall(r"layer \S+", title.inner_text())
        expect(status).to_have_text(f"Pixels of {layer}: point at one, or go to one with the arrow keys.")
        return layer

    move_pointer(page, 0.25, 0.25)
    expect(status).to_contain_text("owner: tile 0, rank 0")
    page.mouse.move(0, 0)
    layer = expect_resting()
    page.get_by_role("slider", name="layer").focus()
    page.keyboard.press("PageUp")
    assert expect_resting() != layer
    page.get_by_role("button", name="receptive fields").click()
    expect(status).to_contain_text("Receptive fields wait for a pixel: point at one, or go to one with the arrow keys.")
    send_keys(page, "ArrowLeft")
    expect(status).not_to_contain_text("wait for a pixel")
    expect(status).to_contain_text("the output here depends on")


def test_every_box_of_the_strip_has_a_name_under_the_pointer(page, slicer):
    named = """() => [...document.querySelectorAll('.mpi4dl-strip rect.slot')].map((slot) => {
        const { left, top, width, height } = slot.getBoundingClientRect();
        const under = (share) => document.elementFromPoint(left + width / 2, top + height * share);
        return [0.2, 0.85].map((share) => under(share).closest('g')?.querySelector('title').textContent ?? '');
    })"""
    names = page.evaluate(named)
    assert len(names) == len(slicer.view.facts["net"]) > 5
    for shown, layer in zip(names, slicer.view.facts["net"], strict=True):
        assert layer["name"]
        assert all(text.startswith(f"{layer['name']}: {layer['channels']} channels") for text in shown)


def test_keys_are_behind_one_button(page):
    button, keys = page.get_by_role("button", name="Keys"), page.get_by_role("region", name="Keys")
    assert not keys.is_visible()
    button.focus()
    page.keyboard.press("Enter")
    assert keys.is_visible()
    assert "receptive fields" in keys.inner_text()
    assert button.get_attribute("aria-expanded") == "true"
    page.keyboard.press("Escape")
    assert not keys.is_visible()
    assert page.evaluate("() => document.activeElement.textContent") == "?"


def test_the_strip_scrubs_through_the_net(page, slicer):
    strip = page.get_by_role("slider", name="layer")
    strip.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert "blocks.1.branch.0" in strip.get_attribute("aria-valuetext")
    expect(page.locator(".mpi4dl-title")).to_contain_text("blocks.1.branch.0 (conv2d) reads 16 channels")
    page.wait_for_timeout(150)
    assert slicer.layer.value == 3
    box = strip.bounding_box()
    page.mouse.move(box["x"] + 2, box["y"] + 30)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 30, steps=8)
    page.mouse.up()
    page.wait_for_timeout(150)
    assert slicer.layer.value > 6
    assert "16 channels" not in page.locator(".mpi4dl-title").inner_text()
    page.keyboard.press("Home")
    page.wait_for_timeout(150)
    assert slicer.layer.value == 0


@pytest.mark.nightly
def test_a_click_chooses_a_tile_and_keys_do(page, slicer):
    move_pointer(page, 0.25, 0.75)
    page.mouse.down()
    page.mouse.up()
    expect(page.locator(".mpi4dl-words")).to_contain_text("Tile 1 (rank 1) owns 256 × 256 px")
    send_keys(page, "t", "t", "T", "t")
    page.wait_for_timeout(150)
    assert slicer.tile.value == 3
    move_pointer(page, 0.25, 0.75)
    page.mouse.down(button="right")
    page.mouse.up(button="right")
    page.wait_for_timeout(150)
    assert slicer.tile.value == 3, "the right button opens a menu, and chooses nothing"
    assert "from rank 2: 256 × 1 px, 3.0 KB" in page.locator(".mpi4dl-legend").inner_text()


@pytest.mark.nightly
def test_zooming_keeps_what_is_under_the_pointer(page, slicer):
    move_pointer(page, 0.3, 0.4)
    for _ in range(12):
        page.mouse.wheel(0, -300)
    page.wait_for_timeout(600)
    row, col, side = slicer.view.place
    assert side < 20
    assert abs(row - 0.3 * 512) < side
    assert abs(col - 0.4 * 512) < side
    assert "Shown: rows" in slicer.figure.alt
    send_keys(page, "0")
    page.wait_for_timeout(600)
    assert slicer.view.place == []


def test_keys_reach_every_pixel(page, slicer):
    send_keys(page, "h", *["+"] * 8)
    page.wait_for_timeout(300)
    first = page.locator(".mpi4dl-tooltip").inner_text() or move_pointer(page, 0.5, 0.5)
    send_keys(page, "ArrowRight", "ArrowRight")
    words = [page.locator(".mpi4dl-tooltip").inner_text()]
    send_keys(page, "ArrowRight")
    words.append(page.locator(".mpi4dl-tooltip").inner_text())
    columns = [int(re.search(r"column (\d+)", text)[1]) for text in words]
    assert columns[1] == columns[0] + 1
    values = re.search(r"red, green, blue: (\d+), (\d+), (\d+)", words[1])
    row = int(re.search(r"row (\d+)", words[1])[1])
    assert first
    assert [int(value) for value in values.groups()] == TISSUE[row, columns[1]].tolist()
    page.wait_for_timeout(300)
    assert f"column {columns[1]}" in page.get_by_role("status").inner_text()


def test_both_readings_and_receptive_fields(page, slicer):
    send_keys(page, "]", "]", "]", "]", "c", "f")
    page.wait_for_timeout(150)
    assert (slicer.view.reading, slicer.view.fields, slicer.view.layer) == ("picture", True, 4)
    assert page.get_by_role("button", name="receptive fields").get_attribute("aria-pressed") == "true"
    expect(page.locator(".mpi4dl-words")).to_contain_text("all pixels of the picture that its outputs read")
    seen = re.search(r"depends on (\d+) × (\d+) px", move_pointer(page, 0.25, 0.25))
    assert int(seen[1]) > 3
    (_, seen_by_tile) = re.findall(r"0 above, (\d+) below", page.locator(".mpi4dl-words").inner_text())
    assert int(seen_by_tile) == int(seen[1]) // 2


@pytest.mark.nightly
def test_remarks_are_those_of_the_stage_that_the_layer_is_in(chromium):
    plan = Plan(split_size=2, spatial_size=2, num_spatial_parts=(4, 2), slice_method=("square", "vertical"))
    layers = [nn.Conv2d(3, 3, 3, padding=1) for _ in range(4)]
    net = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    slicer = Slicer(TISSUE[:96, :120], plan, net)
    slicer.fused_halos.value = True
    harness = PageHarness(chromium, slicer.view)
    shown = slicer.view.facts["layers"]
    for slicer.layer.value, layer in enumerate(shown):
        harness.advance()
        (remark,) = slicer.view.facts["remarks"][str(layer["stage"])][slicer.tile.value]
        expect(harness.page.locator(".mpi4dl-words")).to_contain_text(remark)
    harness.close()


@pytest.mark.nightly
def test_what_cannot_be_read_is_reported_and_read_again_on_request(chromium, slicer, monkeypatch):
    encode, broken = module.encode_tile, [True]

    def encode_some(picture, level, row, col):
        if broken[0] and (row, col) == (0, 0):
            raise ImageError("the disk is gone")
        return encode(picture, level, row, col)

    monkeypatch.setattr(module, "encode_tile", encode_some)
    slicer.view.place = []
    harness = PageHarness(chromium, slicer.view)
    harness.advance(4)
    send_keys(harness.page, "h", *["+"] * 2)
    alert = harness.page.get_by_role("alert")
    expect(alert).to_contain_text("Parts of the picture stay coarse: the disk is gone")
    refilled = harness.page.evaluate(
        """async () => {
            const alert = document.querySelector("[role=alert]"), seen = [];
            new MutationObserver((records) => seen.push(...records)).observe(alert, { childList: true });
            for (const trouble of ["the disk is gone", "it is back", "it is back"])
                window.kernelSent({ tiles: [[0, 0, 0]], trouble }, [""]);
            await new Promise((done) => requestAnimationFrame(done));
            return seen.length;
        }"""
    )
    assert refilled == 1, "a screen reader is told each reason once"
    broken[0] = False
    alert.get_by_role("button", name="read again").click()
    expect(alert).to_be_empty()
    harness.advance(4)
    move_pointer(harness.page, 0.5, 0.5)
    expect(harness.page.locator(".mpi4dl-tooltip")).to_contain_text("red, green, blue")
    harness.close()


@pytest.mark.nightly
def test_the_picture_follows_the_theme(chromium, slicer):
    harness = PageHarness(chromium, slicer.view)
    harness.advance(4)
    corner = "() => [...document.querySelector('canvas').getContext('2d').getImageData(1, 1, 1, 1).data]"
    harness.page.wait_for_timeout(500)  # until all tissue has come, and nothing else paints
    harness.switch_to_dark()
    assert harness.page.evaluate(corner) == [0x2B, 0x2D, 0x31, 255]
    harness.close()


@pytest.mark.nightly
def test_less_motion_and_a_narrow_page(chromium, slicer):
    harness = PageHarness(chromium, slicer.view, (480, 800), reduced_motion="reduce", color_scheme="dark")
    harness.advance()
    assert harness.page.evaluate("() => document.documentElement.scrollWidth") <= 480
    assert (
        harness.page.locator("canvas").bounding_box()["height"] >= 300
    )  # below it are words of up to six lines, whole
    harness.close()


def read_middle(page, row: float, col: float) -> list[int]:
    """The colour on the canvas at a place of the whole picture, in fractions of its sides."""
    return page.evaluate(
        """([row, col]) => {
            const canvas = document.querySelector("canvas"), { width, height } = canvas;
            const ratio = width / canvas.clientWidth, side = Math.min(width, height) - 16 * ratio;
            const [left, top] = [(width - side) / 2, (height - side) / 2];
            const pixel = canvas.getContext("2d").getImageData(left + col * side, top + row * side, 1, 1);
            return [...pixel.data].slice(0, 3);
        }""",
        [row, col],
    )


@pytest.mark.parametrize("save_picture", [True, False])
def test_a_predicted_map_lies_over_the_picture(chromium, save_picture: bool, tmp_path):
    """Without saving, the page asks for picture and map, and shows the same."""
    white = np.full((64, 64, 3), 255, np.uint8)
    classes = np.zeros((16, 16), np.uint8)
    classes[4:8, 8:12] = 1
    named = {"class_names": ["tissue", "<tumour>"], "save_picture": save_picture}
    slicer = Slicer(white, Plan(split_size=1, slice_method="1x1"), prediction=classes, **named)
    harness = PageHarness(chromium, slicer.view)
    page = harness.page
    expect(page.get_by_text("1 <tumour> 6%")).to_be_visible()
    harness.advance(4)
    over = [round((255 + part) / 2) for part in make_colours(2)[1].tolist()]
    beside = [round((255 + part) / 2) for part in make_colours(2)[0].tolist()]
    inside = [(4.2, 8.2), (7.8, 11.8), (6, 10)]  # close to the corners of its rectangle, and in its middle
    outside = [(3.8, 8.2), (8.2, 11.8), (6, 7.8), (6, 12.2)]
    for places, colour in ((inside, over), (outside, beside)):
        for row, col in places:
            assert np.allclose(read_middle(page, row / 16, col / 16), colour, atol=2), (row, col)
    page.screenshot(path=str(tmp_path / "page.png"))
    send_keys(page, "o")
    harness.advance(4)
    expect(page.get_by_role("button", name="predicted map")).to_have_attribute("aria-pressed", "false")
    assert np.allclose(read_middle(page, 6 / 16, 10 / 16), 255, atol=2)
    expect(page.get_by_text("1 <tumour> 6%")).to_have_count(0)
    harness.close()
    slicer.close()


@pytest.mark.nightly
def test_without_a_map_there_is_no_button_for_it(page):
    expect(page.get_by_text("predicted map", exact=True)).to_be_hidden()
