"""A stream
========

Batches arrive one after another, each is predicted at once, and the device drifts. :func:`shiftmend.stream` predicts a
batch, then learns from it.
"""

import os

import torch
from matplotlib import pyplot as plt
from torch import nn

import shiftmend
from shiftmend.inputs.digits import load_digits

SHORT = "SHIFTMEND_SHORT" in os.environ  # a quicker run, for tests

# %%
# A model and its profile
# -----------------------
# Softer bins, with a temperature of 0.05, forgive more on a stream.

torch.manual_seed(0)
images, labels = load_digits()
order = torch.randperm(len(images))
images, labels = images[order], labels[order]
home, home_labels, seen, truth = images[:800], labels[:800], images[800:], labels[800:]

model = nn.Sequential(
    nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    nn.Sequential(nn.Linear(256, 64), nn.BatchNorm1d(64), nn.ReLU()),
    nn.Linear(64, 10),
)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(8 if SHORT else 20):
    for rows in torch.randperm(len(home)).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(home[rows]), home_labels[rows]).backward()
        optimizer.step()
model.eval()
profile = shiftmend.profile(model, home, bins=shiftmend.Bins(temperature=0.05), progress=False)

# %%
# A drifting device
# -----------------
# The contrast fades from 100 % to 30 %, and the ground becomes brighter.

batches = 30 if SHORT else 120
generator = torch.Generator().manual_seed(1)


def read_batch(step):
    rows = torch.randint(len(seen), (64,), generator=generator)
    fading = step / batches
    return (1 - 0.7 * fading) * seen[rows] + 0.5 * fading, truth[rows]


# %%
# Predict, then learn
# -------------------
# ``method="source-only"`` changes nothing. Its ``verification`` tells whether there is anything to mend.

online = shiftmend.stream(model, profile, method="fr", learning_rate=0.01)
still = shiftmend.stream(model, profile, method="source-only")
right = {"learning": [], "not learning": []}
for step in range(batches):
    inputs, answers = read_batch(step)
    for name, one in (("learning", online), ("not learning", still)):
        right[name].append(float((one.step(inputs).argmax(1) == answers).float().mean()))

print("not learning:", still.verification)
print("learning:    ", online.verification)

figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
for name, values in right.items():
    smooth = torch.tensor(values).unfold(0, 10, 1).mean(1)
    axis.plot(range(9, batches), smooth, label=name)
axis.set(xlabel="batch", ylabel="true accuracy, mean of 10", ylim=(0, 1))
axis.xaxis.get_major_locator().set_params(integer=True)
axis.legend()
plt.show()

# %%
# ``snapshot`` returns the model of this moment, a plain ``nn.Module``. A stream has no estimate: verify a snapshot on
# data of some size.

before, after = (sum(values[-10:]) / 10 for values in (right["not learning"], right["learning"]))
print(f"last ten batches: {before:.1%} not learning, {after:.1%} learning")
mended = online.snapshot()
