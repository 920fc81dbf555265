"""Your own battery
================

A rehearsal simulates devices on held-out home data. If you know what the devices to come do, simulate that: an estimate
holds for devices that resemble the rehearsed ones.
"""

import os

import torch
from matplotlib import pyplot as plt
from torch import nn

import shiftmend
from shiftmend.inputs.digits import load_digits

SHORT = "SHIFTMEND_SHORT" in os.environ  # a quicker run, for tests

torch.manual_seed(0)
images, labels = load_digits()
order = torch.randperm(len(images))
images, labels = images[order], labels[order]
home, held_out, recorded, truth = images[:600], images[600:1200], images[1200:], labels[1200:]

# %%
# Devices as functions
# --------------------
# Each function takes inputs and returns inputs of the same shape and dtype. Functions whose names begin with the same
# words before a slash are one family. Errors are measured with whole families left out, so give similar devices one
# family. Intervals need nine families. Let some devices do great harm: a battery that never fails teaches nothing about
# failure.

row = torch.arange(8).view(8, 1)
grain = 0.35 * torch.randn(1, 1, 8, 8)
battery = {
    "lamp/dim": lambda x: 0.4 * x,
    "lamp/bright": lambda x: (1.8 * x).clamp(max=1),
    "haze/thin": lambda x: 0.2 + 0.7 * x,
    "haze/thick": lambda x: 0.45 + 0.3 * x,
    "gamma": lambda x: x**2,
    "vignette": lambda x: x * (1 - 0.1 * row),
    "dead rows": lambda x: x * (row % 4 > 0),
    "stain": lambda x: (x + grain).clamp(0, 1),
    "noise": lambda x: x + 0.3 * torch.randn(x.shape, generator=torch.Generator().manual_seed(0)),
    "focus": lambda x: nn.functional.avg_pool2d(x, 3, 1, 1),
    "lifted by a row": lambda x: x.roll(-1, 2),
    "inverted": lambda x: 1 - x,
}

figure, axes = plt.subplots(2, 6, figsize=(8, 3), layout="constrained")
for axis, (name, device) in zip(axes.flat, battery.items(), strict=True):
    axis.imshow(device(home[:1])[0, 0], cmap="gray", vmin=0, vmax=1)
    axis.set(xticks=[], yticks=[], title=name)
plt.show()

# %%
# Rehearse
# --------

model = nn.Sequential(
    nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    nn.Sequential(nn.Linear(256, 64), nn.ReLU()),
    nn.Linear(64, 10),
)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(8 if SHORT else 20):
    for rows in torch.randperm(600).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(home[rows]), labels[rows]).backward()
        optimizer.step()
model.eval()

profile = shiftmend.profile(model, home, progress=False)
profile = shiftmend.rehearse(
    model,
    (held_out, labels[600:1200]),
    profile,
    battery=battery,
    candidates=["match-moments", "adabn"],
    site_size=600,
    progress=False,
)
print(profile.rehearsal)

# %%
# At the site
# -----------
# A device that is in no list: haze with a darker bottom.

site = (0.45 + 0.35 * recorded) * (1 - 0.02 * row)
result = shiftmend.adapt(model, site, profile, progress=False)
print(result)

# %%
# A site has no labels. This script has them, so it can check.

before = shiftmend.evaluate(model, (site, truth)).accuracy
after = shiftmend.evaluate(result.model, (site, truth)).accuracy
print(f"true accuracy: {before:.1%} before, {after:.1%} after")

# %%
# On the command line it is ``shiftmend rehearse ... --battery devices.py:battery``.
