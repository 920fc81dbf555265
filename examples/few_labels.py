"""A few labels
============

Twenty to a hundred labelled samples from the site narrow an estimate, or replace one that does not hold. Labels are
used to judge a model, never to adapt it.
"""

import os

import torch
from matplotlib import pyplot as plt
from torch import nn

import shiftmend
from shiftmend.inputs.digits import load_digits

SHORT = "SHIFTMEND_SHORT" in os.environ  # a quicker run, for tests

# %%
# A rehearsed profile
# -------------------

torch.manual_seed(0)
images, labels = load_digits()
order = torch.randperm(len(images))
images, labels = images[order], labels[order]
home, held_out, recorded, truth = images[:600], images[600:1200], images[1200:], labels[1200:]
site = 0.5 + 0.12 * recorded + 0.03 * torch.randn_like(recorded)  # hardly any contrast is left

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
    candidates=["match-moments", "adabn"],
    shifts=9 if SHORT else 12,
    site_size=600,
    progress=False,
)
result = shiftmend.adapt(model, site, profile, progress=False)

# %%
# Without labels, and with 20, 50 and 100
# ---------------------------------------
# ``labelled`` takes inputs and labels. Choose them at random: easy samples would flatter the model.

found = {"no labels": result.estimate.after}
for count in (20, 50, 100):
    few = (site[:count], truth[:count])
    found[f"{count} labels"] = shiftmend.verify(
        result.model, site, profile, adaptation=result, labelled=few, progress=False
    ).estimate
for name, estimate in found.items():
    print(f"{name:<11} {estimate}")

# %%
# The line is the true accuracy, which a site does not know.

before = shiftmend.evaluate(model, (site, truth)).accuracy
after = shiftmend.evaluate(result.model, (site, truth)).accuracy
figure, axis = plt.subplots(figsize=(6, 2.4), layout="constrained")
for row, estimate in enumerate(found.values()):
    if estimate.low is None:
        axis.text(1, row, "unknown", va="center")
        continue
    axis.plot([100 * estimate.low, 100 * estimate.high], [row, row], color="#0072b2", lw=3)
    if estimate.value is not None:
        axis.plot(100 * estimate.value, row, "o", color="#0072b2")
axis.axvline(100 * after, color="black", lw=1)
axis.set(yticks=range(len(found)), yticklabels=found, xlabel="accuracy, percent", xlim=(0, 100))
axis.margins(y=0.2)
plt.show()
