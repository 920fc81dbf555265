"""Your own method
===============

A method is a class that says what is trained, and a loss of the activations of a batch. :func:`shiftmend.adapt` and
:func:`shiftmend.stream` take the class. Its fields are options.
"""

import os
from dataclasses import dataclass
from typing import ClassVar

import torch
from matplotlib import pyplot as plt
from torch import nn

import shiftmend
from shiftmend.inputs.digits import load_digits
from shiftmend.methods import Method, Stage

SHORT = "SHIFTMEND_SHORT" in os.environ  # a quicker run, for tests

# %%
# The class
# ---------
# This method moves the mean of each feature back to its mean at home. The profile stores these means.


@dataclass(frozen=True, kw_only=True)
class Centred(Method):
    name: ClassVar[str] = "centred"
    needs_profile: ClassVar[bool] = True
    epochs: int = 5
    learning_rate: float = 0.01

    def taps(self, profile):
        return ("features",)  # the activations that the loss reads

    def stages(self, network, profile):
        return [Stage("all blocks", self.epochs, self.learning_rate, network.below_features)]

    def objective(self, profile, device):
        home = profile.gaussian.mean.to(device)

        def losses(activations):  # named terms; their sum is minimised
            return {"features": (activations["features"].mean(0) - home).pow(2).mean()}

        return losses


# %%
# A model and a site
# ------------------

torch.manual_seed(0)
images, labels = load_digits()
order = torch.randperm(len(images))
images, labels = images[order], labels[order]
home, home_labels, truth = images[:900], labels[:900], labels[900:]
site = 0.5 + 0.25 * images[900:] + 0.03 * torch.randn(897, 1, 8, 8)

model = nn.Sequential(
    nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
    nn.Sequential(nn.Linear(256, 64), nn.ReLU()),
    nn.Linear(64, 10),
)
optimizer = torch.optim.Adam(model.parameters())
for _ in range(8 if SHORT else 20):
    for rows in torch.randperm(len(home)).split(64):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(home[rows]), home_labels[rows]).backward()
        optimizer.step()
model.eval()
profile = shiftmend.profile(model, home, progress=False)

# %%
# Use it
# ------
# Options are the fields of the class. From a list of learning rates, the run with the lowest verification slices is
# kept; no label is looked at.

epochs = 2 if SHORT else 10
result = shiftmend.adapt(
    model, site, profile, method=Centred, epochs=epochs, learning_rate=[0.003, 0.03], progress=False
)
print(result.manifest["method"])

# %%
# Compare it with the methods of the package.

scores = {"untouched": shiftmend.evaluate(model, (site, truth)).accuracy}
scores["centred"] = shiftmend.evaluate(result.model, (site, truth)).accuracy
for name, options in {"adabn": {}, "fr": {"epochs": epochs}}.items():
    other = shiftmend.adapt(model, site, profile, method=name, progress=False, **options)
    scores[name] = shiftmend.evaluate(other.model, (site, truth)).accuracy

figure, axis = plt.subplots(figsize=(6, 2.2), layout="constrained")
axis.barh(list(scores)[::-1], [100 * value for value in scores.values()][::-1], color="#0072b2")
axis.set(xlabel="true accuracy, percent", xlim=(0, 100))
plt.show()
before, after = scores["untouched"], scores["centred"]

# %%
# On the command line it is ``shiftmend adapt ... --method centred.py:Centred --option epochs=3``.
# :class:`shiftmend.methods.Method` documents everything that a class can override: several stages, targets for each
# sample, another optimiser.
