"""Spectra: a regression
=====================

A model reads a concentration from a spectrum. A second spectrometer has another gain and a sloped baseline. This script
mends the model without reference values, then judges it with thirty of them. The spectra are synthetic.
"""

import os

import torch
from matplotlib import pyplot as plt
from torch import nn

import shiftmend

SHORT = "SHIFTMEND_SHORT" in os.environ  # a quicker run, for tests

# %%
# Two spectrometers
# -----------------
# A spectrum has three bands. The height of the second band is the concentration. The others vary from sample to sample.

torch.manual_seed(0)
channels = torch.linspace(0, 1, 100)


def band(centre, width):
    return torch.exp(-((channels - centre) ** 2) / (2 * width**2))


def measure(samples):
    """Return spectra `[samples, 100]` and concentrations `[samples]`."""
    concentration = 1 + 4 * torch.rand(samples)
    others = 0.5 + torch.rand(samples, 2)
    spectra = others[:, :1] * band(0.25, 0.08) + 0.4 * concentration[:, None] * band(0.5, 0.05)
    spectra = spectra + others[:, 1:] * band(0.7, 0.12) + 0.02 * torch.randn(samples, 100)
    return spectra, concentration


def second_spectrometer(spectra):
    return 0.8 * spectra + 0.5 + 0.4 * channels


(home, home_values), (held_out, held_out_values) = measure(800), measure(800)
recorded, site_values = measure(800)
site = second_spectrometer(recorded)

figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
axis.plot(channels, home[:5].T, color="#0072b2", lw=1)
axis.plot(channels, site[:5].T, color="#d55e00", lw=1)
axis.set(xlabel="wavelength", ylabel="absorbance", title="five samples at home (blue) and at the site (orange)")
plt.show()

# %%
# The model
# ---------
# Spectra are tables ``[N, D]``: each wavelength is a column. Labels of a regression are floating-point numbers.

model = nn.Sequential(nn.Linear(100, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
for _ in range(30 if SHORT else 80):
    for rows in torch.randperm(len(home)).split(64):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(home[rows]), home_values[rows]).backward()
        optimizer.step()
model.eval()

# %%
# At home
# -------
# Simulated devices for tables change gain, offset, baseline, noise and more. The score of a regression is the root mean
# square error.

profile = shiftmend.profile(model, home, progress=False)
profile = shiftmend.rehearse(
    model,
    (held_out, held_out_values),
    profile,
    candidates=["match-mean", "match-moments"],
    shifts=9 if SHORT else 12,
    site_size=800,
    progress=False,
)

# %%
# At the site
# -----------

result = shiftmend.adapt(model, site, profile, progress=False)
print(result)

# %%
# The interval would be too wide, so no number is given. Thirty reference values help.

print(shiftmend.evaluate(result.model, (site[:30], site_values[:30])))

# %%
# This script has all reference values, so it can check.

before = shiftmend.evaluate(model, (site, site_values)).root_mean_square_error
after = shiftmend.evaluate(result.model, (site, site_values)).root_mean_square_error
print(f"true RMSE: {before:.2f} before, {after:.2f} after")

figure, axes = plt.subplots(1, 2, figsize=(7, 3.2), layout="constrained", sharex=True, sharey=True)
for axis, which, title in zip(axes, (model, result.model), ("before", "after"), strict=True):
    with torch.no_grad():
        axis.scatter(site_values, which(site), s=4, color="#0072b2")
    axis.plot([1, 5], [1, 5], color="black", lw=1)
    axis.set(xlabel="true concentration", title=title)
axes[0].set_ylabel("predicted")
plt.show()
