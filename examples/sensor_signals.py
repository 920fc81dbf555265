"""Sensor signals
==============

A model recognises movements in signals of two accelerometer axes. A new sensor has another gain, an offset and more
noise. The signals are synthetic.
"""

import math
import os

import torch
from matplotlib import pyplot as plt
from torch import nn

import shiftmend

SHORT = "SHIFTMEND_SHORT" in os.environ  # a quicker run, for tests

# %%
# Signals
# -------
# Signals have the shape ``[N, channels, length]``. The four classes differ in frequency and in the phase between axes.

torch.manual_seed(0)
CLASSES = ("walk", "run", "turn", "shake")


def record(samples):
    """Return signals `[samples, 2, 64]` and class numbers `[samples]`."""
    labels = torch.randint(4, (samples,))
    time = torch.arange(64) / 64
    frequency = torch.tensor([2.0, 4.0, 2.0, 4.0])[labels] * (0.9 + 0.2 * torch.rand(samples))
    lag = torch.tensor([0.0, 0.0, 0.5, 0.5])[labels] * math.pi
    phase = 2 * math.pi * (frequency[:, None] * time + torch.rand(samples, 1))
    signals = torch.stack([phase.sin(), (phase + lag[:, None]).sin()], dim=1)
    return signals + 0.4 * torch.randn(samples, 2, 64), labels


def new_sensor(signals):
    gain, offset = torch.tensor([[2.2], [0.5]]), torch.tensor([[-0.8], [1.2]])
    return gain * signals + offset + 0.2 * torch.randn_like(signals)


(home, home_labels), (held_out, held_out_labels), (recorded, truth) = record(800), record(500), record(500)
site = new_sensor(recorded)

# %%
# The model
# ---------

model = nn.Sequential(
    nn.Sequential(nn.Conv1d(2, 16, 7, padding=3), nn.BatchNorm1d(16), nn.ReLU(), nn.MaxPool1d(4)),
    nn.Sequential(
        nn.Conv1d(16, 32, 5, padding=2), nn.BatchNorm1d(32), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten()
    ),
    nn.Linear(32, 4),
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
for _ in range(6 if SHORT else 20):
    for rows in torch.randperm(len(home)).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(home[rows]), home_labels[rows]).backward()
        optimizer.step()
model.eval()

# %%
# At home, then at the site
# -------------------------
# Simulated devices for signals change gain, offset, drift, noise, clock and more.

profile = shiftmend.profile(model, home, progress=False)
profile = shiftmend.rehearse(
    model,
    (held_out, held_out_labels),
    profile,
    candidates=["match-moments", "adabn"],
    shifts=9 if SHORT else 12,
    site_size=500,
    progress=False,
)
result = shiftmend.adapt(model, site, profile, progress=False)
print(result)

# %%
# A site has no labels. This script has them, so it can check.

before = shiftmend.evaluate(model, (site, truth)).accuracy
after = shiftmend.evaluate(result.model, (site, truth)).accuracy
print(f"true accuracy: {before:.1%} before, {after:.1%} after")

figure, axes = plt.subplots(2, 4, figsize=(9, 3.4), layout="constrained", sharex=True, sharey=True)
for column, name in enumerate(CLASSES):
    for row, (signals, labels, where) in enumerate(((home, home_labels, "home"), (site, truth, "site"))):
        axes[row, column].plot(signals[labels == column][0].T, lw=1)
        axes[row, 0].set_ylabel(where)
    axes[0, column].set_title(name)
plt.show()
