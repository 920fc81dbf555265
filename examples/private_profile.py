"""Private and signed profiles
============================

A profile leaves home. An ordinary one holds exact numbers, such as the highest value of each feature, which is that of
one single person. A private one holds noisy counts instead, within a budget. A signature tells who made it.
"""

import importlib.util
import os
import tempfile
from pathlib import Path

import torch
from torch import nn

import shiftmend
from shiftmend.utils.signing import new_key

SHORT = "SHIFTMEND_SHORT" in os.environ  # a quicker run, for tests

# %%
# A model and its data
# --------------------
# Noise is the same however many samples there are, so a private profile needs many.

torch.manual_seed(0)
home = torch.randn(20_000, 8)
labels = (home[:, 0] * home[:, 1] > 0).long()
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), 0.01)
for _ in range(1 if SHORT else 5):
    for rows in torch.randperm(len(home)).split(256):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(home[rows]), labels[rows]).backward()
        optimizer.step()
model.eval()

# %%
# What an ordinary profile gives away
# -----------------------------------
# Somebody who has the model and a recording finds its values among the stored extremes.

exact = shiftmend.profile(model, home, progress=False)
with torch.no_grad():
    features = model[:3](home)
found = (features == exact.taps["features"].high).any(1)
print(f"{int(found.sum())} people hold a highest value of one of {features.shape[1]} features")

# %%
# A private profile
# -----------------
# `pip install 'shiftmend[private]'` brings OpenDP, which draws the noise and keeps the account. One person is one
# sample. Ranges that are known anyway, such as those of pixels, cost nothing.

if importlib.util.find_spec("opendp"):
    budget = shiftmend.Privacy(epsilon=1.0, delta=1e-6, ranges={"inputs": (-4.0, 4.0)})
    profile = shiftmend.profile(model, home, private=budget, progress=False)
    found = (features == profile.taps["features"].high).any(1)
    print(f"{int(found.sum())} people hold a stored highest value")
else:
    print("OpenDP is not installed; going on with the ordinary profile")
    profile = exact
print(profile)

# %%
# Mend with it
# ------------
# The site needs no extra package.

site = 0.4 * torch.randn(2000, 8) + 1.5
truth = ((site[:, 0] - 1.5) * (site[:, 1] - 1.5) > 0).long()
mended = shiftmend.adapt(model, site, profile, "fr", seed=0, progress=False)
for name, net in (("before", model), ("after", mended.model)):
    print(f"accuracy {name}: {shiftmend.evaluate(net, (site, truth), progress=False).accuracy:.1%}")

# %%
# Sign it
# -------
# Home keeps the private key. A site that trusts the public one refuses everything else.

if importlib.util.find_spec("cryptography"):
    with tempfile.TemporaryDirectory() as folder:
        key, file = Path(folder, "home.key"), Path(folder, "home.profile")
        new_key(key)
        profile.save(file, sign=key)
        print(shiftmend.Profile.load(file, trust=f"{key}.pub").samples, "samples, signed by home")
        profile.save(file)
        try:
            shiftmend.Profile.load(file, trust=f"{key}.pub")
        except shiftmend.ProfileError as error:
            print("without a signature:", str(error).partition(": ")[2])
