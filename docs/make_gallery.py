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

`shiftmend figure NAME BENCHMARK --folder bench` draws a figure from the folder of a benchmark's run, as PNG or SVG;
`shiftmend figure list` names all figures. ([Shifts](shifts.md) shows all shifts.) A store holds numbers and not models,
so figures that look into models adapt again. Figures need matplotlib and scikit-learn:
`pip install 'shiftmend[research]'`.

In Python each figure is one function `draw_NAME(...)` in `shiftmend.research.figures`. Those in `results` draw results,
those in `curves` a history, and those in `activations`, `embedding`, `images` and `weights` your own models and data.

The figures below are of `shiftmend bench run digits` (897 small digits, two seeds). Figures of one shift show *stripe*,
the patches *oranges*, with seed 123. `python docs/make_gallery.py bench` draws them again.
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
