"""A transformer with dict inputs
==============================

A transformer reads measurements whose number differs: a dict of values, times and a mask. The dict goes through
profiling, adapting and scoring as it is, without a wrapper. So do the ``input_ids`` and ``attention_mask`` of a text
model. The measurements are synthetic.
"""

import math
import os

import torch
from matplotlib import pyplot as plt
from torch import nn

import shiftmend

SHORT = "SHIFTMEND_SHORT" in os.environ  # a quicker run, for tests

# %%
# Measurements at irregular times
# -------------------------------
# Each sample has 12 to 24 measurements of a wave at random times. The class is the shape of the wave. All tensors have
# one row a sample, so shorter samples are padded, and a mask says which entries count.

torch.manual_seed(0)
CLASSES = ("sine", "square", "saw")


def measure(samples, longest=24):
    """Return a dict of `values`, `times` and `mask`, each `[samples, longest]`, and class numbers `[samples]`."""
    labels = torch.randint(3, (samples,))
    times = torch.rand(samples, longest).sort(dim=1).values
    phase = (2 * times + torch.rand(samples, 1)) % 1
    sine = (2 * math.pi * phase).sin()
    waves = torch.stack([sine, sine.sign(), 2 * phase - 1])
    values = waves[labels, torch.arange(samples)] + 0.1 * torch.randn(samples, longest)
    mask = torch.arange(longest) < torch.randint(12, longest + 1, (samples, 1))
    return {"values": values * mask, "times": times * mask, "mask": mask}, labels


def new_probe(events):
    """Return the same events, measured with another gain and an offset."""
    return {**events, "values": (1.7 * events["values"] + 0.5) * events["mask"]}


(home, home_labels), (recorded, truth) = measure(1000), measure(400)
site = new_probe(recorded)

# %%
# The model
# ---------
# ``forward`` names its inputs as the dict does. It returns a dict, too: an entry called ``logits`` is found.


class Reader(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(2, width), nn.GELU(), nn.Linear(width, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, 3)

    def forward(self, values, times, mask):
        hidden = self.embed(torch.stack([values, times], dim=-1))
        for layer in self.layers:
            hidden = layer(hidden, src_key_padding_mask=~mask)
        pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return {"hidden": hidden, "logits": self.head(pooled)}


model = Reader()
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
for _ in range(12 if SHORT else 25):
    for rows in torch.randperm(len(home_labels)).split(50):
        batch = {name: values[rows] for name, values in home.items()}
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(**batch)["logits"], home_labels[rows]).backward()
        optimizer.step()
model.eval()

# %%
# At home, then at the site
# -------------------------
# BUFR's blocks are the embedding and each layer. To rehearse with several inputs, a battery of your own functions is
# needed. Without a rehearsal there is a verdict about the features, and no estimate.

profile = shiftmend.profile(model, home, progress=False)
result = shiftmend.adapt(
    model, site, profile, method="bufr", batch_size=100, epochs_per_block=3 if SHORT else 20, progress=False
)
print([block for block in dict.fromkeys(row.block for row in result.history) if block])
print(result)

# %%
# ``evaluate`` takes the dict with its labels.

before = shiftmend.evaluate(model, (site, truth)).accuracy
after = shiftmend.evaluate(result.model, (site, truth)).accuracy
print(f"true accuracy: {before:.1%} before, {after:.1%} after")

figure, axes = plt.subplots(1, 3, figsize=(8, 2.4), sharey=True, layout="constrained")
for number, axis in enumerate(axes):
    row = int((truth == number).nonzero()[0])
    kept = recorded["mask"][row]
    for name, events in (("home's probe", recorded), ("site's probe", site)):
        axis.plot(events["times"][row][kept], events["values"][row][kept], ".", label=name)
    axis.set(title=CLASSES[number], xlabel="time", xlim=(0, 1), xticks=(0, 0.5, 1))
axes[0].set_ylabel("value")
axes[2].legend(loc="lower right", fontsize="small")
plt.show()
