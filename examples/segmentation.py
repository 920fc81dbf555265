"""Segmentation
============

A model of classes for each pixel returns logits ``[N, classes, H, W]``. Profiling, rehearsing and adapting are called
as for whole images. Scores count every pixel. The images are synthetic.
"""

import os

import torch
from matplotlib import pyplot as plt
from torch import nn

import shiftmend

SHORT = "SHIFTMEND_SHORT" in os.environ  # a quicker run, for tests

# %%
# Images and masks
# ----------------
# Each image has a disc and a square on a noisy ground. The site's camera has less contrast.

torch.manual_seed(0)
SIDE = 16
rows, columns = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")


def photograph(samples):
    """Return images `[samples, 1, 16, 16]` in 0 to 1 and masks `[samples, 16, 16]`: 0 ground, 1 disc, 2 square."""
    centres = torch.randint(4, SIDE - 4, (samples, 2, 2, 1, 1))
    disc = (rows - centres[:, 0, 0]) ** 2 + (columns - centres[:, 0, 1]) ** 2 < 14
    square = (rows - centres[:, 1, 0]).abs().maximum((columns - centres[:, 1, 1]).abs()) < 3
    masks = torch.where(square, 2, disc.long())
    images = torch.tensor([0.2, 0.5, 0.8])[masks] + 0.06 * torch.randn(samples, SIDE, SIDE)
    return images.clamp(0, 1)[:, None], masks


def other_camera(images):
    return 0.35 + 0.45 * images


count = 100 if SHORT else 120
(home, home_masks), (held_out, held_out_masks), (recorded, truth) = (
    photograph(count),
    photograph(count),
    photograph(count),
)
site = other_camera(recorded)

# %%
# The model
# ---------

model = nn.Sequential(
    nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
    nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
    nn.Conv2d(16, 3, 1),
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(8 if SHORT else 20):
    for chosen in torch.randperm(count).split(20):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(home[chosen]), home_masks[chosen]).backward()
        optimizer.step()
model.eval()

# %%
# At home, then at the site
# -------------------------
# A shifted model often gives most pixels to one class with confidence. ``auto`` takes that for other class shares: it
# would return the model as it came, without an estimate. So this script names a method.

profile = shiftmend.profile(model, home, progress=False)
profile = shiftmend.rehearse(
    model,
    (held_out, held_out_masks),
    profile,
    candidates=["adabn"],
    shifts=9,
    site_size=count,
    progress=False,
)
result = shiftmend.adapt(model, site, profile, method="adabn", progress=False)
print(result)

# %%
# Every pixel is a sample, and scores have the mean intersection over union. Pass ``ignore_label=255`` to leave pixels
# without a class out of every score.

before = shiftmend.evaluate(model, (site, truth))
after = shiftmend.evaluate(result.model, (site, truth))
print(f"before: {before.accuracy:.1%} of the pixels, mean IoU {before.mean_iou:.2f}")
print(f"after:  {after.accuracy:.1%} of the pixels, mean IoU {after.mean_iou:.2f}")

with torch.no_grad():
    shown = [site[0, 0], truth[0], model(site[:1])[0].argmax(0), result.model(site[:1])[0].argmax(0)]
figure, axes = plt.subplots(1, 4, figsize=(8, 2.3), layout="constrained")
for axis, picture, title in zip(axes, shown, ("site", "true mask", "before", "after"), strict=True):
    axis.imshow(picture, vmin=0, vmax=1 if title == "site" else 2, cmap="gray" if title == "site" else "viridis")
    axis.set(xticks=[], yticks=[], title=title)
plt.show()
