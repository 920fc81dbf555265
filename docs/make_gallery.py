"""Draw the gallery of docs/figures.md from a run of the benchmark `digits`.

shiftmend bench run digits --folder bench
shiftmend bench run digits --folder bench --protocol few-shot-20
python docs/make_gallery.py bench
"""

from __future__ import annotations

import sys
from pathlib import Path

from shiftmend.research.figures.gallery import FIGURES, Request, draw
from shiftmend.research.figures.style import save

HERE = Path(__file__).parent
INTRODUCTION = """# Figures

Every figure is drawn from the folder of a benchmark's run: `shiftmend figure NAME BENCHMARK --folder bench`, as PNG or
SVG; `shiftmend figure list` names them ([shifts](shifts.md) shows all shifts there are). Those that look into models
adapt again, since a store holds numbers, not models. In Python each is one function `draw_NAME(...)` in
`shiftmend.research.figures`, from results or from a model, a profile and data of your own: `results` has those of
results, `curves` those of a history, `activations`, `embedding`, `images` and `weights` those that look into models.
They need matplotlib and scikit-learn: `pip install 'shiftmend[research]'`.

These are of `shiftmend bench run digits` (897 small digits, two seeds; those of one shift show *stripe*, the patches
*oranges*, seed 123) and were made by `python docs/make_gallery.py bench`.
"""
ONE_SHIFT = dict.fromkeys(("curves", "activations", "embedding", "affected", "moved"), "stripe") | {
    "patches": "oranges"
}


def main(folder: Path) -> None:
    lines = [INTRODUCTION]
    for name, (_, text) in FIGURES.items():
        shifts = [ONE_SHIFT[name]] if name in ONE_SHIFT else None
        file = HERE / "images" / "figures" / f"{name}.png"
        save(draw(name, Request("digits", folder, shifts=shifts, device="cpu", unit=1)), file)
        lines += [f"## {name}", "", f"{text[0].upper()}{text[1:]}.", "", f"![{name}](images/figures/{name}.png)", ""]
    (HERE / "figures.md").write_text("\n".join(lines).rstrip() + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "bench"))
