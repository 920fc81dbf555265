"""Lightning: a callback that makes the profile when training ends."""

from __future__ import annotations

import os
from typing import Any

from shiftmend.errors import ShiftmendError
from shiftmend.profiles.collect import profile
from shiftmend.utils.files import as_path


def profile_at_end(path: str | os.PathLike[str], data: Any = None, *, module: str | None = None, **options: Any) -> Any:
    """Make a Lightning callback that profiles the trained model and writes the profile to a file.

    Args:
        path: Path of the file to write.
        data: Source data, as for `shiftmend.profile`. By default, the training data of the trainer; pass data without
            augmentation if the loader augments.
        module: Name of the submodule to profile, e.g. `"net"`. By default, the LightningModule itself, called with the
            inputs of a batch.
        options: Further arguments of `shiftmend.profile`.

    Returns:
        A `Callback`; its attribute `profile` holds the profile after training.

    Raises:
        ShiftmendError: When training begins in several processes, whose loaders differ.

    Example:
        >>> keep = profile_at_end("model.profile")  # doctest: +SKIP
        >>> lightning.Trainer(callbacks=[keep]).fit(model, loader)  # doctest: +SKIP
    """
    from lightning.pytorch import Callback

    place = as_path(path, "the file of the profile")

    class ProfileAtEnd(Callback):  # type: ignore[misc]
        """Callback that profiles the model when training ends."""

        def __init__(self) -> None:
            self.profile: Any = None

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            if trainer.world_size > 1:
                raise ShiftmendError(
                    f"Expected one process to profile in, got {trainer.world_size}. Call shiftmend.profile afterwards."
                )

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            model = pl_module if module is None else pl_module.get_submodule(module)
            source = trainer.train_dataloader if data is None else data
            self.profile = profile(model, source, **{"progress": False, **options})
            self.profile.save(place)

    return ProfileAtEnd()
