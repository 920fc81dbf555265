"""Several GPUs: a script
======================

Under ``torchrun``, the processes of a group share the work of ``profile`` and ``adapt``. This script starts two
processes on the CPU, so that it runs anywhere; on a machine with GPUs each process takes the GPU of its number. See
:doc:`/several-gpus` for which methods can share.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file

import shiftmend

SHORT = "SHIFTMEND_SHORT" in os.environ  # a quicker run, for tests

# %%
# The script of every process
# ---------------------------
# Every process has the same model and all of the data. ``batch_size`` is that of all processes together. Import
# shiftmend before the process group begins.

SCRIPT = """
import torch
import torch.distributed as dist
from torch import nn

import shiftmend


def make():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU()),
        nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16), nn.ReLU()),
        nn.Linear(16, 3),
    )
    home = torch.randn(SAMPLES, 8)
    for _ in range(100):  # BatchNorm learns its statistics
        model(home)
    return model.eval(), home, 1.5 * torch.randn(SAMPLES, 8) + 0.5


def mend():
    model, home, site = make()
    profile = shiftmend.profile(model, home, progress=False)
    return shiftmend.adapt(model, site, profile, method="fr", epochs=EPOCHS, batch_size=200, progress=False)


if __name__ == "__main__":
    dist.init_process_group("gloo")  # leave out "gloo" where there are GPUs
    result = mend()
    if dist.get_rank() == 0:
        print("processes:", result.manifest["environment"]["world_size"])
        result.save("mended")
    dist.destroy_process_group()
"""
folder = Path(tempfile.mkdtemp())
samples, epochs = (400, 1) if SHORT else (2000, 5)
(folder / "mend.py").write_text(SCRIPT.replace("SAMPLES", str(samples)).replace("EPOCHS", str(epochs)))

# %%
# Start it
# --------
# In a shell this is ``torchrun --nproc-per-node=2 mend.py``.

installed = str(Path(shiftmend.__file__).parents[1])
done = subprocess.run(
    [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "mend.py"],
    cwd=folder,
    env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": installed},
    capture_output=True,
    text=True,
    check=True,
)
print(done.stdout)

# %%
# The same result as by one process
# ---------------------------------
# BatchNorm and histograms see the whole batch, so weights differ by rounding alone.

names = {"__name__": "mend"}
exec((folder / "mend.py").read_text(), names)
alone = names["mend"]().model.state_dict()
shared = load_file(folder / "mended" / "model.safetensors")
difference = max(float((alone[name].float() - shared[name].float()).abs().max()) for name in alone)
print(f"largest difference of a weight: {difference:.1e}")
assert difference < 1e-4

# %%
# On the command line
# -------------------
#
# .. code-block:: bash
#
#     torchrun --nproc-per-node=2 --no-python shiftmend adapt net.py:make --weights net.safetensors \
#         --data site/ --profile net.profile --out mended/
