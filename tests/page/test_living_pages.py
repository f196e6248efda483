"""Living pages, saved and opened from a file with the network off: no kernel, and no word of who made them."""

from __future__ import annotations

import getpass
import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from playwright.sync_api import Page, expect
from torch import nn

from mpi4dl_nb import (
    Cluster,
    Configurator,
    Slicer,
    Stepper,
    TimelineView,
    Training,
    Tuner,
    Workbench,
    forecast,
    save_page,
    show_slicing,
)
from mpi4dl_nb.__main__ import main
from mpi4dl_nb.engines.errors import PlanError
from mpi4dl_nb.engines.images.sample_data import immunohistochemistry
from mpi4dl_nb.engines.plan import Plan
from mpi4dl_nb.engines.predict.machines import MACHINES
from tests.page.cells import AROUND_PX
from tests.unpacking import unpack_part

TISSUE = immunohistochemistry()[:192, :256]
NAME = "tissue_7.png"
PLAN = Plan(split_size=2, slice_method="2x2")
PACKED = re.compile(r'(<script type="application/gzip">)([^<]*)(</script>)')


class SavedPage:
    """A saved page in a browser. `errors` are those of its console, and `requests` what it asked of a network."""

    def __init__(self, browser: object, path: Path, width: int = 1280, **options: object) -> None:
        viewport = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=viewport, offline=True, **options)
        self.page: Page = self.context.new_page()
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda said: said.type in ("error", "warning") and self.errors.append(said.text))
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())
        if options.get("java_script_enabled", True):
            self.page.wait_for_selector("body[data-shown]")

    def check(self) -> None:
        """Check that nothing went wrong, and that nothing was asked of a network."""
        assert self.errors == []
        assert [url for url in self.requests[1:] if not url.startswith(("blob:", "data:"))] == []


@pytest.fixture
def open_page(chromium) -> Iterator[object]:
    opened: list[SavedPage] = []

    def open_file(path: Path, **options: object) -> SavedPage:
        opened.append(SavedPage(chromium, path, **options))
        return opened[-1]

    yield open_file
    for each in opened:
        each.context.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    made = tmp_path_factory.mktemp("secret_folder")
    Image.fromarray(TISSUE).save(made / NAME)
    return made


def make_model() -> nn.Module:
    layers = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


@pytest.fixture(scope="module")
def slicer(folder: Path) -> Slicer:
    return Slicer(folder / NAME, PLAN, make_model())


@pytest.fixture(scope="module")
def pages(folder: Path, slicer: Slicer) -> dict[str, Path]:
    """A page of each widget, saved as a user would."""
    saved = {"Slicer": slicer.save_page(folder / "slicer.html", title="Halos <of> tissue", text="One.\n\nTwo.")}
    timeline = TimelineView(forecast(make_model(), PLAN, (2, 3, 64, 64), "Summit").timeline, PLAN)
    saved["TimelineView"] = timeline.save_page(folder / "timeline.html")
    configurator = Configurator(make_model(), (4, 3, 64, 64), plan=PLAN, machine="Summit")
    saved["Configurator"] = configurator.save_page(folder / "configurator.html")
    crop = TISSUE[:64, :64]
    images = torch.from_numpy(crop.copy()).permute(2, 0, 1)[None] / 255
    with Cluster(5, backend="loopback") as cluster:
        training = Training(make_model(), PLAN, cluster, (1, 3, 64, 64))
        stepper = Stepper(training, images, torch.tensor([3]))
        stepper.record_step()
        saved["Stepper"] = stepper.save_page(folder / "stepper.html")
        stepper.close()
        training.step(images, torch.tensor([3]))
        saved["Workbench"] = Workbench(training, crop).save_page(folder / "workbench.html")
    with Cluster(2, backend="loopback") as cluster, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cluster, "calibrate", lambda *_, **__: MACHINES["Summit"])  # a measurement takes longer
        tuner = Tuner(make_model(), (2, 3, 64, 64), cluster, progress=False)
        saved["Tuner"] = tuner.save_page(folder / "tuner.html")
    return saved


WIDGETS = ("Slicer", "TimelineView", "Configurator", "Stepper", "Workbench", "Tuner")


def unpack_parts(path: Path) -> list[object]:
    text = path.read_text(encoding="utf-8")
    return [unpack_part(packed) for _, packed, _ in PACKED.findall(text)]


@pytest.mark.parametrize("name", WIDGETS)
def test_a_page_tells_nobody_who_made_it(pages, folder, name: str):
    """Neither paths nor names of users and hosts; the code, which is the same for all, is not searched."""
    text = repr(unpack_parts(pages[name]))
    outside = re.sub(r"<(script|style)[ >].*?</\1>", "", pages[name].read_text(encoding="utf-8"), flags=re.DOTALL)
    outside = re.sub(r'src="data:[^"]*"', "", outside)
    for hidden in (
        str(folder),
        folder.name,
        str(Path.home()),
        str(Path.cwd()),
        socket.gethostname(),
        getpass.getuser(),
    ):
        assert not re.search(rf"(?<![\w/]){re.escape(hidden)}(?!\w)", text + outside), hidden
    assert not re.search(r'"(/\w+){2,}', re.sub(r'"[\w+/=]{40,}"', '""', text))  # without images


@pytest.mark.sampled(4)
@pytest.mark.parametrize("width", [1400, 700])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", WIDGETS)
def test_a_page_asks_for_nothing(pages, open_page, name: str, scheme: str, width: int):
    opened = open_page(pages[name], width=width, color_scheme=scheme)
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= width
    colour = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", colour))) < 200) == (scheme == "dark")
    opened.check()


def test_a_slicer_without_a_kernel(pages, open_page):
    opened = open_page(pages["Slicer"])
    page = opened.page
    assert page.locator("h1").inner_text() == "Halos <of> tissue"
    assert page.locator("header p").all_inner_texts() == ["One.", "Two."]
    page.locator(".mpi4dl-stage canvas").focus()
    for key in "h]":  # the tiles of the finest level are here: pixels have their values
        page.keyboard.press(key)
    title = page.locator(".mpi4dl-title").inner_text()
    assert "layer 2 (conv2d)" in title
    page.keyboard.press("h")
    page.wait_for_timeout(300)
    stage = page.locator(".mpi4dl-stage canvas").bounding_box()
    page.mouse.move(stage["x"] + stage["width"] / 2 - 25, stage["y"] + stage["height"] / 2 - 25)
    expect(page.locator(".mpi4dl-tooltip")).to_contain_text("owner: tile 0, rank 0")
    row, col = map(int, re.search(r"row (\d+), column (\d+)", page.locator(".mpi4dl-tooltip").inner_text()).groups())
    expect(page.locator(".mpi4dl-tooltip")).to_contain_text(", ".join(map(str, TISSUE[row, col])))
    opened.check()


@pytest.mark.nightly
def test_a_page_says_where_its_picture_ends(folder, open_page):
    large = np.tile(TISSUE, (5, 5, 1))
    slicer = Slicer(large, PLAN, make_model())
    path = slicer.save_page(folder / "small.html", picture_bytes=500_000)
    (part,) = unpack_parts(path)
    picture = part["views"][0]["values"]["facts"]["picture"]
    levels = {json.loads(key)[0] for key in part["views"][0]["answers"]["tiles"]}
    assert levels == set(range(picture["finest"], picture["levels"]))
    assert picture["finest"] > 0
    opened = open_page(path)
    side = 2 ** picture["finest"]
    expect(opened.page.locator(".mpi4dl-saved-remark").last).to_contain_text(f"one pixel for {side} × {side}")
    opened.page.locator(".mpi4dl-stage canvas").focus()
    opened.page.keyboard.press("h")
    opened.page.wait_for_timeout(300)
    assert opened.page.locator(".mpi4dl-trouble").inner_text() == ""
    opened.check()
    with pytest.raises(PlanError, match=r"does not fit into picture_bytes=1,000: .* Give picture_bytes=400,000"):
        slicer.save_page(folder / "none.html", picture_bytes=1000)
    assert not (folder / "none.html").exists()


def test_a_recorded_step_is_played(pages, open_page):
    opened = open_page(pages["Stepper"])
    page = opened.page
    badge = page.locator(".mpi4dl-badge")
    count = int(re.search(r"recorded: 1 of (\d+)", badge.inner_text())[1])
    assert count > 8
    page.get_by_role("button", name="Forward").click()
    expect(badge).to_contain_text(f"recorded: 2 of {count}")
    page.locator(".mpi4dl-stage").focus()
    page.keyboard.press("End")
    expect(badge).to_have_text("newest")
    expect(page.get_by_role("button", name="Forward")).to_have_attribute("aria-disabled", "true")
    page.keyboard.press("n")  # nothing runs behind the page
    page.keyboard.press("Home")
    page.keyboard.press(" ")
    expect(badge).to_contain_text(f"recorded: 3 of {count}", timeout=20_000)
    opened.check()


@pytest.mark.nightly
def test_a_recorded_step_shows_messages_with_their_values(pages, open_page):
    opened = open_page(pages["Stepper"])
    page = opened.page
    page.locator(".mpi4dl-stage").focus()
    region = page.get_by_role("region", name="Message in numbers")
    message = region.get_by_role("heading")
    for _ in range(20):
        page.keyboard.press("ArrowRight")
        if message.inner_text() != "No message":
            break
    expect(message).to_have_text(re.compile(r"message 1 of \d+"))
    expect(region).to_contain_text(re.compile(r"rank \d"))
    opened.check()


def test_a_plan_is_chosen_without_a_kernel(pages, open_page):
    opened = open_page(pages["Configurator"])
    page = opened.page
    facts = page.locator(".mpi4dl-plan-facts")
    expect(facts).to_contain_text("5 ranks")
    stages = page.get_by_label("Stages, exact", exact=True)
    stages.fill("3")
    stages.press("Enter")
    expect(facts).to_contain_text("6 ranks")
    stages.fill("9")
    stages.press("Enter")
    expect(page.locator(".mpi4dl-plan-doing")).to_contain_text(
        "This page has split_size 2, 1, 3 with the rest of this plan"
    )
    expect(stages).to_have_value("3")
    rows = page.get_by_label("Image, rows of px", exact=True)
    expect(rows).to_be_disabled()
    assert "no ranks run behind it" in rows.locator("xpath=ancestor::*[@title]").first.get_attribute("title")
    expect(page.get_by_role("button", name="Start")).to_have_attribute("aria-disabled", "true")
    opened.check()


@pytest.mark.nightly
def test_a_tuner_shows_every_plan_and_measures_none(pages, open_page):
    opened = open_page(pages["Tuner"])
    page = opened.page
    name = page.locator(".mpi4dl-tuning-side h3")
    first = name.inner_text()
    page.locator("svg.mpi4dl-tuning-chart").focus()
    page.keyboard.press("ArrowLeft")
    expect(name).not_to_have_text(first)
    chosen = page.locator("input[type=radio]:checked")
    assert chosen.count() == 1
    expect(page.get_by_role("button", name="Measure this plan")).to_have_attribute("aria-disabled", "true")
    page.keyboard.press("m")
    expect(page.locator(".mpi4dl-tuning [role=status]")).to_contain_text("no ranks run behind it")
    opened.check()


def test_a_workbench_has_one_selection(pages, open_page):
    opened = open_page(pages["Workbench"])
    page = opened.page
    memory = page.locator("img.mpi4dl-figure")
    before = memory.get_attribute("alt")
    page.locator(".mpi4dl-slicer .mpi4dl-stage canvas").focus()
    for _ in range(2):
        page.keyboard.press("t")
    expect(memory).not_to_have_attribute("alt", before)
    expect(page.locator(".mpi4dl-slicer .mpi4dl-words p").first).to_contain_text("Tile 2 (rank 2)")
    opened.check()


def test_the_memory_of_a_workbench_is_shown_whole_below_two_panes(pages, open_page):
    page = open_page(pages["Workbench"]).page
    for width in (1040, 1280):
        page.set_viewport_size({"width": width, "height": 900})
        slicer, timeline, memory = page.evaluate(
            """() => ["slicer", "timeline", "figure-room"].map((name) => {
                const pane = document.querySelector(`.mpi4dl-${name}`);
                const { left, right, top, bottom } = pane.getBoundingClientRect();
                return { left, right, top, bottom, hidden_px: pane.scrollWidth - pane.clientWidth };
            })"""
        )
        assert timeline["left"] >= slicer["right"]
        assert memory["top"] >= max(slicer["bottom"], timeline["bottom"])
        assert memory["hidden_px"] == 0


@pytest.mark.nightly
def test_figures_and_widgets_stand_on_one_page(folder, slicer, open_page):
    figure = show_slicing(TISSUE, PLAN, make_model())
    opened = open_page(save_page([figure, slicer, slicer], folder / "several.html"))
    assert opened.page.locator("img").first.get_attribute("alt") == figure.alt
    assert opened.page.locator(".mpi4dl-slicer").count() == 2
    opened.check()


@pytest.mark.nightly
def test_a_damaged_part_says_so(pages, folder, slicer, open_page):
    text = save_page([slicer, slicer], folder / "two.html").read_text(encoding="utf-8")
    packed = PACKED.search(text)[2]
    middle = len(packed) // 2
    damaged = packed[:middle] + ("A" if packed[middle] != "A" else "B") + packed[middle + 1 :]
    path = folder / "damaged.html"
    path.write_text(text.replace(packed, damaged, 1), encoding="utf-8")
    opened = open_page(path)
    expect(opened.page.get_by_role("alert").first).to_contain_text("This part of the page is damaged")
    assert opened.page.locator(".mpi4dl-slicer").count() == 1


def test_without_scripts_the_still_picture_is_shown(pages, open_page):
    opened = open_page(pages["Slicer"], java_script_enabled=False)
    assert opened.page.locator("img").is_visible()


def test_a_page_leaves_out_what_no_file_may_contain(folder, open_page):
    hidden = Slicer(folder / NAME, PLAN, make_model(), save_picture=False)
    path = hidden.save_page(folder / "nameless.html")
    assert NAME not in repr(unpack_parts(path)) + path.read_text(encoding="utf-8")
    (part,) = unpack_parts(path)
    assert part["views"][0]["answers"] == {}
    assert part["views"][0]["values"]["preview"] == b""
    opened = open_page(path)
    expect(opened.page.locator(".mpi4dl-saved-remark").last).to_contain_text("The picture is not saved in files")
    opened.check()


@pytest.mark.nightly
def test_a_page_by_the_command_line(folder, open_page, capsys):
    flags = ["--image", str(folder / NAME), "--slice-method", "1x2", "--split-size", "1", "--title", "Mine"]
    with pytest.raises(SystemExit) as ended:
        main(["page", *flags, "--show", "slicer,stepper,timeline", "--to", str(folder / "mine.html")])
    assert ended.value.code == 0
    assert re.search(r"mine\.html: [\d.]+ [KM]B, slicer, stepper, timeline", capsys.readouterr().out)
    opened = open_page(folder / "mine.html")
    assert opened.page.locator(".mpi4dl-slicer, .mpi4dl-stepper, .mpi4dl-timeline").count() == 3
    opened.check()
    for wrong, said in (
        (["--show", "film"], "--show 'film' is unknown"),
        (["--image-size", "4000", "--show", "stepper"], "more than"),
        (["--image-size", "8x16x16", "--show", "stepper"], "is that of a volume"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["page", *flags, *wrong, "--to", str(folder / "wrong.html")])
        assert ended.value.code == 2
        assert said in capsys.readouterr().err
    assert not (folder / "wrong.html").exists()


@pytest.mark.parametrize(("width", "columns"), [(1240, 2), (800, 1)])
def test_the_panes_of_a_workbench_stand_in_two_columns_where_both_have_room(pages, open_page, width: int, columns: int):
    opened = open_page(pages["Workbench"], width=width)
    panes = [opened.page.locator(f".mpi4dl-{name}").first.bounding_box() for name in ("slicer", "timeline", "drawing")]
    assert len({round(pane["x"]) for pane in panes}) == columns
    assert all(pane["height"] <= 900 for pane in panes)
    assert panes[2]["y"] >= panes[1]["y"] + panes[1]["height"]
    opened.check()


@pytest.mark.parametrize("name", ["Slicer", "Stepper", "Tuner"])
def test_a_saved_view_has_the_height_of_controls_that_are_not_there(pages, open_page, name: str):
    opened = open_page(pages[name])
    limit = opened.page.locator(".mpi4dl-page").first.evaluate("(view) => parseFloat(getComputedStyle(view).maxHeight)")
    assert limit == 900 - AROUND_PX


def test_what_has_no_page_is_refused_and_no_file_is_written(folder, slicer):
    path = folder / "refused.html"
    with Cluster(1, backend="loopback") as cluster:
        training = Training(make_model(), Plan(split_size=1, spatial_size=0), cluster, (1, 3, 32, 32))
        batch = torch.rand(1, 3, 32, 32), torch.tensor([1])
        stepper = Stepper(training, *batch)
        with pytest.raises(
            PlanError, match=r"The step has 0 of \d+ instructions done on each rank, .* Finish it first"
        ):
            stepper.save_page(path)
        stepper.close()
        with pytest.raises(PlanError, match="This Stepper is closed"):
            stepper.save_page(path)
        hidden = Stepper(training, *batch, save_picture=False)
        with pytest.raises(PlanError, match="which no file may contain"):
            hidden.save_page(path)
        hidden.close()
        with pytest.raises(PlanError, match="type Training cannot be part of a page"):
            save_page(training, path)
    with pytest.raises(PlanError, match="at least one widget or figure"):
        save_page([], path)
    with pytest.raises(PlanError, match="type int cannot be part of a page"):
        save_page([slicer, 3], path)
    with pytest.raises(PlanError, match=r"cannot be written to .*no_folder.* \(No such file or directory\)"):
        save_page(slicer, folder / "no_folder" / "page.html")
    assert not path.exists()
