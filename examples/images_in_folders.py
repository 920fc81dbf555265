"""Images in folders
=================

This script mends an image classifier from two folders: labelled images at home, unlabelled images at the site.
It also shows the same steps on the command line.
"""

import os
import tempfile
from pathlib import Path

import torch
from matplotlib import pyplot as plt
from PIL import Image
from torch import nn

import shiftmend
from shiftmend.inputs.digits import load_digits

SHORT = "SHIFTMEND_SHORT" in os.environ  # a quicker run, for tests

# %%
# Write the folders
# -----------------
# At home there is one folder per class. The site has a flat folder without labels. Its scanner is brighter and has less
# contrast.

torch.manual_seed(0)
folder = Path(tempfile.mkdtemp())
images, labels = load_digits()  # 1,797 handwritten digits, [N, 1, 8, 8] in 0 to 1
order = torch.randperm(len(images))[: 900 if SHORT else 1797]
images, labels = images[order], labels[order]
third = len(images) // 3
parts = {"home": slice(0, third), "held-out": slice(third, 2 * third), "site": slice(2 * third, None)}
for name, part in parts.items():
    for number, (image, label) in enumerate(zip(images[part], labels[part], strict=True)):
        path = folder / name if name == "site" else folder / name / str(int(label))
        path.mkdir(parents=True, exist_ok=True)
        seen = 0.45 + 0.25 * image if name == "site" else image
        pixels = (255 * seen[0]).round().to(torch.uint8).numpy()
        Image.fromarray(pixels).save(path / f"{number:04}.png")

# %%
# Read them
# ---------
# :func:`shiftmend.image_folder` returns 8-bit images and, if there is one folder per class, labels. A function scales
# the pixels as in training. Pass the same function as ``preprocess`` everywhere.

home = shiftmend.image_folder(folder / "home")
held_out = shiftmend.image_folder(folder / "held-out")
site = shiftmend.image_folder(folder / "site")
print(home.images.shape, home.images.dtype, home.classes)


def preprocess(pixels):
    return pixels.float() / 255


# %%
# Train a small classifier
# ------------------------

model = nn.Sequential(
    nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    nn.Sequential(nn.Linear(256, 64), nn.ReLU()),
    nn.Linear(64, 10),
)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(8 if SHORT else 20):
    for rows in torch.randperm(len(home.images)).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(preprocess(home.images[rows])), home.labels[rows]).backward()
        optimizer.step()
model.eval()

# %%
# At home: profile and rehearse
# -----------------------------
# Only two quick candidates are rehearsed here. Leave out ``candidates`` to rehearse all of them, which takes minutes.

profile = shiftmend.profile(model, home.images, preprocess=preprocess, progress=False)
profile = shiftmend.rehearse(
    model,
    (held_out.images, held_out.labels),
    profile,
    preprocess=preprocess,
    candidates=["match-moments", "adabn"],
    shifts=9 if SHORT else 12,
    site_size=len(site.images),
    progress=False,
)
profile.save(folder / "digits.profile")

# %%
# At the site: mend
# -----------------

result = shiftmend.adapt(model, site.images, folder / "digits.profile", preprocess=preprocess, progress=False)
print(result)

# %%
# A site has no labels. This script has them, so it can check.

truth = labels[parts["site"]]
before = shiftmend.evaluate(model, (site.images, truth), preprocess=preprocess).accuracy
after = shiftmend.evaluate(result.model, (site.images, truth), preprocess=preprocess).accuracy
print(f"true accuracy: {before:.1%} before, {after:.1%} after")

figure, rows = plt.subplots(2, 8, figsize=(8, 2.4), layout="constrained")
for title, row, shown in (("home", rows[0], home.images), ("site", rows[1], site.images)):
    for axis, image in zip(row, shown[:: len(shown) // 8], strict=False):
        axis.imshow(image[0], cmap="gray", vmin=0, vmax=255)
        axis.set(xticks=[], yticks=[])
    row[0].set_ylabel(title)
plt.show()

# %%
# On the command line
# -------------------
# ``net.py`` has a function ``make`` that returns the model. ``--mean 0 --std 1`` keeps pixels in 0 to 1.
#
# .. code-block:: bash
#
#     shiftmend profile net.py:make --weights net.safetensors --mean 0 --std 1 --data home/ --out net.profile
#     shiftmend rehearse net.py:make --weights net.safetensors --mean 0 --std 1 --data held-out/ \
#         --profile net.profile --out rehearsed.profile
#     shiftmend adapt net.py:make --weights net.safetensors --mean 0 --std 1 --data site/ \
#         --profile rehearsed.profile --out mended/
#     shiftmend report net.py:make --weights net.safetensors --mean 0 --std 1 --data site/ \
#         --profile rehearsed.profile --adapted mended/ --out report.html
