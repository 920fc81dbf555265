"""Every figure by its name, from the folder of a run: through the command line, as a user would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from streamed_world import STREAMED_FILE, lay_out

from shiftmend.cli import main
from shiftmend.errors import DataError, ShiftmendError
from shiftmend.research.bench.run import run
from shiftmend.research.bench.suite import find
from shiftmend.research.datasets.streamed import ImageFiles
from shiftmend.research.figures import gallery
from shiftmend.research.figures.gallery import FIGURES, SHEET_COLUMNS, Request, rerun
from shiftmend.research.figures.images import GAP_PIXELS, draw_sheet

TINY = f"{Path(__file__).parents[2] / 'helpers' / 'tiny.py'}:TINY"
LOOK_INSIDE = ("activations", "embedding", "affected", "moved", "patches")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    torch.set_num_threads(1)
    methods = ["source-only", "adabn", "fr"]
    run(TINY, folder, methods=methods, root=folder, device="cpu", workers=1, progress=False)
    return folder


def drawn(name: str, home: Path, **changes: Any) -> Any:
    options: dict[str, Any] = {"root": home, "device": "cpu", "methods": ["source-only", "adabn", "fr"]}
    if name in (*LOOK_INSIDE, "curves"):
        options |= {"methods": ["fr"], "shifts": ["noisy"]}
    return gallery.draw(name, Request(TINY, home, **(options | changes)))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FIGURES if name != "shots"])
def test_every_figure_can_be_drawn_from_a_run(name: str, home: Path) -> None:
    figure = drawn(name, home)
    artists = [
        artist for axis in figure.axes for artist in (*axis.lines, *axis.patches, *axis.collections, *axis.images)
    ]
    assert artists


@pytest.mark.slow
def test_the_reliability_diagram_is_of_the_stored_bins(home: Path) -> None:
    request = Request(TINY, home, root=home, methods=["fr"])
    results = [result for result in request.results() if result.cell.method == "fr"]
    text = " ".join(item.get_text() for axis in drawn("reliability", home, methods=["fr"]).axes for item in axis.texts)
    pooled = [sum(result.manifest["reliability"][i]["count"] for result in results) for i in range(10)]
    gaps = [
        sum(
            part["count"] * (part["accuracy"] - part["confidence"])
            for result in results
            if (part := result.manifest["reliability"][i])["count"]
        )
        for i in range(10)
    ]
    assert f"ECE {100 * sum(map(abs, gaps)) / sum(pooled):.1f} %" in text


@pytest.mark.slow
def test_the_sheet_shows_the_same_images_clean_and_shifted(home: Path) -> None:
    figure = drawn("sheet", home, shifts=["noisy"])
    shown = [axis.images[0].get_array() for axis in figure.axes]
    assert [axis.get_ylabel() for axis in figure.axes] == ["clean", "noisy"]
    target = find(TINY).load_target("noisy", home)
    side = target.score.images.shape[-1] + 2 * GAP_PIXELS
    places = torch.linspace(0, len(target.score) - 1, SHEET_COLUMNS).long()
    for row, images in zip(shown, (target.clean, target.score), strict=True):
        assert row.shape == (side, SHEET_COLUMNS * side, 3)
        for column, place in enumerate(places):
            cell = row[GAP_PIXELS:-GAP_PIXELS, column * side + GAP_PIXELS : (column + 1) * side - GAP_PIXELS]
            picture = images.images[place].expand(3, -1, -1).permute(1, 2, 0)
            assert (cell == picture.numpy()).all()
    with pytest.raises(DataError, match="rows of images"):
        draw_sheet({})


@pytest.mark.slow
def test_a_rerun_gives_the_weights_of_the_run(home: Path) -> None:
    cell = rerun(TINY, home, "noisy", ["fr"], root=home, device="cpu")
    request = Request(TINY, home, root=home, methods=["fr"], seed=cell.seed)
    (result,) = [r for r in request.results() if r.cell.shift == "noisy" and r.cell.method == "fr"]
    assert cell.adapted["fr"].manifest["adapted_weights"] == result.manifest["adapted_weights"]


@pytest.fixture(scope="module")
def streamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("streamed")
    torch.set_num_threads(1)
    lay_out(root)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOK_INSIDE)
def test_figures_that_look_inside_take_image_files(name: str, streamed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that do not fit into memory are decoded one by one, as those of CAMELYON17 and VisDA-C."""
    monkeypatch.setattr("shiftmend.research.bench.resources.MAX_DECODED_BYTES", 0)
    request = Request(f"{STREAMED_FILE}:STREAMED", streamed, methods=["fr"], root=streamed, device="cpu")
    assert isinstance(request.rerun().target.adapt, ImageFiles)
    assert gallery.draw(name, request).axes


@pytest.mark.slow
def test_a_few_shot_protocol_adapts_to_few_and_scores_on_all(streamed: Path) -> None:
    name = f"{STREAMED_FILE}:STREAMED"
    few = rerun(name, streamed, "dark", ["fr"], root=streamed, device="cpu", protocol="few-shot-4")
    assert (len(few.target.adapt), len(few.target.score)) == (12, 36)
    assert few.adapted["fr"].manifest["target"]["samples"] == 12
    assert len(rerun(name, streamed, "dark", root=streamed, device="cpu").target.adapt) == 36
    bound = rerun(name, streamed, "dark", ["target-supervised"], root=streamed, device="cpu")
    assert bound.adapted["target-supervised"].manifest["target"]["samples"] == 28
    with pytest.raises(DataError, match="online"):
        rerun(TINY, streamed, "dark", ["fr"], root=streamed, device="cpu", protocol="online")


@pytest.mark.slow
def test_reliability_of_the_clean_model(home: Path) -> None:
    for methods in (["clean", "fr"], ["clean"]):
        figure = drawn("reliability", home, methods=methods)
        assert [axis.get_title("left") for axis in figure.axes][: len(methods)] == methods
    with pytest.raises(DataError, match="fry"):
        drawn("reliability", home, methods=["clean", "fry"])


@pytest.mark.slow
def test_activations_of_several_methods_have_rows_of_their_own(home: Path) -> None:
    labels = [axis.get_ylabel() for axis in drawn("activations", home, methods=["adabn", "fr"]).axes]
    rows = [label.partition("\n")[0] for label in labels if label]
    assert rows == ["adabn: features", "adabn: logits", "fr: features", "fr: logits"]


@pytest.mark.slow
def test_curves_of_several_shifts_are_lines(home: Path) -> None:
    figure = drawn("curves", home, shifts=["noisy", "dark"])
    assert [line.get_label() for line in figure.axes[0].lines] == ["dark", "noisy"]
    assert "fr on dark, noisy, seed 1" in str(figure.get_suptitle())
    both = drawn("curves", home, shifts=["noisy", "dark"], methods=["adabn", "fr"])
    assert {"adabn, dark", "fr, noisy"} <= {line.get_label() for axis in both.axes for line in axis.lines}
    with pytest.raises(DataError, match="sideways"):
        drawn("curves", home, shifts=["sideways"])


@pytest.mark.slow
def test_who_moves_is_measured_at_one_constant_rate(streamed: Path) -> None:
    request = Request(f"{STREAMED_FILE}:STREAMED", streamed, root=streamed, device="cpu")
    cell = request.rerun()
    results = cell.adapt_at_one_rate(["adabn", "fr", "bufr"])
    rates = {name: {stage["learning_rate"] for stage in each.manifest["stages"]} for name, each in results.items()}
    assert rates["fr"] == rates["bufr"] == {0.02}  # the setting of FR has 0.02, that of BUFR 0.1 and a decay
    assert len(results["bufr"].manifest["stages"]) > 1
    assert "learning rate 0.02" in str(gallery.draw("moved", request).get_supxlabel())


@pytest.mark.slow
def test_what_cannot_be_drawn_is_one_sentence(home: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="pie"):
        drawn("pie", home)
    with pytest.raises(DataError, match="sideways"):
        drawn("dots", home, shifts=["sideways"])
    with pytest.raises(DataError, match="bufr"):
        drawn("activations", home, methods=["bufr"])
    with pytest.raises(DataError, match="bufr"):
        drawn("patches", home, methods=["bufr"])
    with pytest.raises(DataError, match="source model"):
        drawn("moved", home, methods=["shot"])
    with pytest.raises(DataError, match="Expected a store"):
        gallery.draw("dots", Request(TINY, tmp_path, root=tmp_path))
    with pytest.raises(DataError, match="sideways"):
        drawn("shots", home, shifts=["sideways"])
    with pytest.raises(DataError, match="fry"):
        drawn("shots", home, methods=["fry"])
    with pytest.raises(DataError, match="no seed"):
        drawn("shots", home, seed=77)
    with pytest.raises(DataError, match="no finished result"):
        drawn("reliability", home, methods=None, seed=77)
    with pytest.raises(DataError, match="no finished result"):
        drawn("curves", home, methods=["shot"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["curves", "moved", "affected", "activations"])
def test_without_the_usual_methods_a_benchmarks_own_are_drawn(name: str, home: Path) -> None:
    """Draw other methods: there is no BUFR in this benchmark."""
    assert drawn(name, home, methods=None).axes


@pytest.mark.slow
def test_what_came_from_an_export_has_no_curves(home: Path, tmp_path: Path) -> None:
    file, merged = str(tmp_path / "tiny.json"), tmp_path / "merged"
    for command in (
        ["export", "--folder", str(home), "--format", "compact", "--out", file],
        ["merge", file, "--folder", str(merged)],
    ):
        with pytest.raises(SystemExit, match="0"):
            main(["bench", *command])
    with pytest.raises(DataError, match="history"):
        drawn("curves", merged, root=home)
    run(TINY, merged, methods=["fr"], seeds=[3], root=home, device="cpu", workers=1, progress=False)
    assert "seed 3" in str(drawn("curves", merged, root=home).get_suptitle())


@pytest.mark.slow
def test_the_command_writes_what_it_says(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shared = ["--folder", str(home), "--data-root", str(home), "--methods", "adabn,fr"]
    for target, start in (("a.svg", b"<?xml"), ("b.png", b"\x89PNG")):
        with pytest.raises(SystemExit) as ended:
            main(["figure", "dots", TINY, *shared, "--out", target])
        assert ended.value.code == 0
        assert f"written to {target}" in capsys.readouterr().out
        assert (tmp_path / target).read_bytes().startswith(start)
    for wrong, said in (
        (["pie", TINY], "unknown figure"),
        (["dots", TINY, "--out", "c.pdf"], ".png or .svg"),
        (["dots", TINY, "--folder", "nowhere"], "Expected a store"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["figure", *wrong[:2], *shared, *wrong[2:]])
        assert ended.value.code == 2
        assert said in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit):
        main(["figure", "list"])
    listed = capsys.readouterr().out
    assert all(name in listed for name in FIGURES)


def test_figures_of_results_only_read_their_folder(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert drawn("dots", home).axes
    with pytest.raises(ShiftmendError, match="written"):
        drawn("moved", home)


@pytest.mark.slow
def test_figures_of_results_can_be_drawn_from_an_export(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "export", "--folder", str(home), "--format", "compact", "--out", str(file)])
    for name in ("dots", "restoration"):
        there, here = drawn(name, home), drawn(name, file)
        for one, other in zip(there.axes, here.axes, strict=True):
            points = [[artist.get_offsets().tolist() for artist in axis.collections] for axis in (one, other)]
            lines = [[artist.get_xydata().tolist() for artist in axis.lines] for axis in (one, other)]
            assert sum(map(len, (*points[0], *lines[0])))
            for of_store, of_file in (points, lines):
                for expected, found in zip(of_store, of_file, strict=True):
                    assert found == [pytest.approx(point, rel=1e-4, nan_ok=True) for point in expected]
    for name in (*LOOK_INSIDE, "curves", "reliability"):
        with pytest.raises(DataError, match="folder"):
            drawn(name, file)
