"""Other class shares
==================

At a site, classes may be more or less frequent than at home. Then features are rightly distributed otherwise, and
aligning them does harm. This script shows the harm, what ``auto`` does, and how to mix a profile for known shares.
"""

import os

import torch
from matplotlib import pyplot as plt
from torch import nn

import shiftmend
from shiftmend.inputs.digits import load_digits

SHORT = "SHIFTMEND_SHORT" in os.environ  # a quicker run, for tests

# %%
# Home and site
# -------------
# The device is the same. At the site, nine in ten digits are zeros or ones.

torch.manual_seed(0)
images, labels = load_digits()
order = torch.randperm(len(images))
images, labels = images[order], labels[order]
home, home_labels = images[:900], labels[:900]
frequent = (labels[900:] < 2).nonzero()[:, 0]
rare = (labels[900:] >= 2).nonzero()[: len(frequent) // 9, 0]
site, truth = images[900:][torch.cat([frequent, rare])], labels[900:][torch.cat([frequent, rare])]

model = nn.Sequential(
    nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    nn.Sequential(nn.Linear(256, 32), nn.BatchNorm1d(32), nn.ReLU()),
    nn.Linear(32, 10),
)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(8 if SHORT else 20):
    for rows in torch.randperm(len(home)).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(home[rows]), home_labels[rows]).backward()
        optimizer.step()
model.eval()


def score(which):
    return shiftmend.evaluate(which, (site, truth)).accuracy


# %%
# One method, and auto
# --------------------
# ``bufr`` takes the other shares for a shift of the device. ``auto`` sees that the model is as certain as at home but
# answers with other classes, and returns the model as it came.

whole = shiftmend.profile(model, home, progress=False)
forced = shiftmend.adapt(model, site, whole, method="bufr", progress=False)
result = shiftmend.adapt(model, site, whole, progress=False)
print(result.reason)

# %%
# If you know the shares
# ----------------------
# Store one profile per class at home. Mix them for the site.

parts = [shiftmend.profile(model, home[home_labels == digit], like=whole, progress=False) for digit in range(10)]
shares = truth.bincount(minlength=10).double() / len(truth)  # what a site would have to know
mixed = shiftmend.Profile.mixture(parts, shares=shares.tolist())
informed = shiftmend.adapt(model, site, mixed, method="bufr", progress=False)

rows = {
    "untouched": model,
    "bufr, profile of home": forced.model,
    "auto, profile of home": result.model,
    "bufr, mixed profile": informed.model,
}
scores = {name: score(which) for name, which in rows.items()}
for name, value in scores.items():
    print(f"{name:<22} {value:.1%}")

figure, axis = plt.subplots(figsize=(6, 2.2), layout="constrained")
axis.barh(list(scores)[::-1], [100 * value for value in scores.values()][::-1], color="#0072b2")
axis.set(xlabel="true accuracy, percent", xlim=(0, 100))
plt.show()
before, after = scores["bufr, profile of home"], scores["bufr, mixed profile"]
