"""Gas sensors: a second board
===========================

A board of eight metal-oxide sensors tells four gases apart. A second board is built alike, but no two such sensors have
the same baseline and sensitivity. There are 160 measurements of each board. The measurements are synthetic.
"""

import os

import torch
from matplotlib import pyplot as plt
from torch import nn

import shiftmend

SHORT = "SHIFTMEND_SHORT" in os.environ  # a quicker run, for tests

# %%
# Two boards
# ----------
# The response of a sensor rises with the concentration by a power law; each gas excites each sensor differently. Two
# features describe a sensor: its baseline and how far it rises.

torch.manual_seed(0)
GASES = ("CO", "ethanol", "ethylene", "methane")
response = 0.5 + torch.rand(4, 8)


class Board:
    """Eight sensors, with a baseline and a sensitivity each."""

    def __init__(self):
        self.baseline, self.sensitivity = 5 + 2 * torch.randn(8), torch.exp(0.6 * torch.randn(8))

    def measure(self, samples):
        """Return features `[samples, 16]` and numbers of the gases `[samples]`."""
        gases = torch.arange(samples) % 4
        strength = (10 * (1 + torch.randint(10, (samples, 1)))) ** 0.5 / 10
        rise = self.sensitivity * response[gases] * strength * (1 + 0.05 * torch.randn(samples, 8))
        return torch.cat((self.baseline + 0.1 * torch.randn(samples, 8), rise), dim=1), gases


home_board, site_board = Board(), Board()
(home, home_gases), (held_out, held_out_gases) = home_board.measure(160), home_board.measure(160)
site, site_gases = site_board.measure(160)

# %%
# The model
# ---------
# Features are standardised as usual. What was computed at home is used at the site, too.

centre, deviation = home.mean(0), home.std(0)
home, held_out, site = ((features - centre) / deviation for features in (home, held_out, site))
model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-3)
for _ in range(40 if SHORT else 100):
    for rows in torch.randperm(len(home)).split(16):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(home[rows]), home_gases[rows]).backward()
        optimizer.step()
model.eval()

# %%
# At home, then at the site
# -------------------------
# Features are a table ``[N, D]``. The candidates here undo a gain and an offset in each column of the inputs, or in
# each unit inside the network, and train nothing.

profile = shiftmend.profile(model, home, progress=False)
profile = shiftmend.rehearse(
    model,
    (held_out, held_out_gases),
    profile,
    candidates=["match-mean", "match-moments", "adabn"],
    shifts=9 if SHORT else 12,
    site_size=160,
    progress=False,
)
result = shiftmend.adapt(model, site, profile, progress=False)
print(result)

# %%
# A site has no labels. This script has them, so it can check.

before = shiftmend.evaluate(model, (site, site_gases)).accuracy
after = shiftmend.evaluate(result.model, (site, site_gases)).accuracy
print(f"true accuracy: {before:.1%} before, {after:.1%} after")

# %%
# Both assume that the site has met the gases about as often, and as concentrated, as home. If it has met one gas
# alone, they move that gas into the others: read about label shift first.

figure, axis = plt.subplots(figsize=(6, 3), layout="constrained")
for features, colour, where in ((home, "#0072b2", "home"), (site, "#d55e00", "site")):
    axis.errorbar(range(16), features.mean(0), features.std(0), fmt="o", ms=3, color=colour, label=where)
axis.set(xlabel="feature", ylabel="in deviations at home", title="baseline (0 to 7) and rise (8 to 15) of each sensor")
axis.legend()
plt.show()
