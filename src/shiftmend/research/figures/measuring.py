"""What several figures measure: activations at the taps of a profile, and which layers of a model can be tapped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shiftmend.errors import DataError, ProfileError, TapError
from shiftmend.inputs.feed import Feed, Preprocess
from shiftmend.introspection.model_state import on_device
from shiftmend.introspection.modes import force_eager, preserve_modes
from shiftmend.introspection.taps import Recorder, Tap, attach_taps
from shiftmend.introspection.trace import trace
from shiftmend.introspection.validate import check_model, unwrap
from shiftmend.profiles.profile import Profile
from shiftmend.utils.devices import resolve_device

_KERNELS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


_NORMALISATION = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm)


@contextmanager
def watched(model: nn.Module, device: torch.device, taps: dict[str, Tap]) -> Iterator[tuple[nn.Module, Recorder]]:
    """The model in eval mode, on a device, with taps on it; all of that is undone at the end."""
    plain = unwrap(model)
    with on_device(plain, device), preserve_modes(plain), torch.no_grad(), attach_taps(plain, taps) as recorder:
        plain.eval()
        yield plain, recorder


def shares(
    model: nn.Module,
    data: Any,
    profile: Profile,
    taps: Iterable[str],
    *,
    batch_size: int | None = None,
    preprocess: Preprocess | None = None,
    device: str | torch.device = "auto",
) -> dict[str, Tensor]:
    """Normalised counts `[units, bins]` of a model on some data, in the profile's own bins, by tap."""
    plain = unwrap(model)
    names = tuple(taps)
    missing = [name for name in names if name not in profile.taps]
    if missing:
        raise ProfileError(f"the profile has no tap {missing[0]!r}, only {', '.join(map(repr, profile.taps))}")
    profile.check_architecture(plain)
    place = resolve_device(device, plain)
    feed = Feed(data, batch_size=batch_size, device=place, preprocess=preprocess, what="target data")
    homes = {name: profile.taps[name].to(place) for name in names}
    counters = {name: home.new_tracker() for name, home in homes.items()}
    with on_device(plain, place):
        check_model(plain, [feed.first(2)])
    with watched(plain, place, {name: profile.specs[name] for name in names}) as (running, recorder):
        for batch in feed.batches():
            running(batch)
            for name, values in recorder.read().items():
                counters[name].update(values)
    result = {name: (counter.counts / counter.samples).float().cpu() for name, counter in counters.items()}
    for name, table in result.items():
        if not bool(table[profile.taps[name].usable].isfinite().all()):
            raise DataError(f"the model gives NaN at tap {name!r} on the target data, so there is nothing to draw")
    return result


def per_unit(profile: Profile, tap: str, target: Tensor) -> Tensor:
    """PSI of each unit between the profile and normalised counts of a target; NaN where the source was constant."""
    home = profile.taps[tap]
    return torch.where(home.usable, home.divergence_per_unit(target), torch.nan)


def layer_taps(
    model: nn.Module, sample: Tensor, *, head: str | None = None, normalised: bool = False
) -> dict[str, Tap]:
    """Taps on every convolution and linear layer below the head, for `shiftmend.profile(..., taps=...)`.

    Left out are layers that run more than once in a forward pass, and the one whose output is the features already.
    Taps are on what a layer writes, as in the paper; with `normalised`, on what the normalisation right behind it makes
    of that, if there is one: level and scale in front of it mean little, since nothing but the normalisation sees them.
    """
    plain = unwrap(model)
    found = trace(plain, sample, head=head)
    modules = dict(plain.named_modules())
    times = _runs(plain, sample, found.extractor)
    features = found.taps["features"]
    own = features.module if features.side == "output" else None
    taps = {}
    for name, behind in zip(found.extractor, (*found.extractor[1:], None), strict=True):
        if name == own or not isinstance(modules[name], (nn.Linear, *_KERNELS)):
            continue
        follows = normalised and behind is not None and isinstance(modules[behind], _NORMALISATION)
        watched_module = behind if follows and behind is not None else name
        if times[watched_module] == 1:
            axis = -1 if isinstance(modules[watched_module], nn.Linear) else 1
            taps[name] = Tap(name, watched_module, channel_axis=axis)
    if not taps:
        raise TapError("no convolution or linear layer runs below the features, so there is nothing further to tap")
    return taps


def running_order(model: nn.Module, sample: Tensor, taps: dict[str, Tap]) -> list[str]:
    """The names of the taps in the order in which they give something in a forward pass."""
    plain = unwrap(model)
    modules = dict(plain.named_modules())
    seen: list[str] = []
    with ExitStack() as stack:
        for context in (torch.no_grad(), preserve_modes(plain), force_eager(plain)):
            stack.enter_context(context)
        plain.eval()
        for name, tap in taps.items():
            module = modules[tap.module]
            note = _note(seen, name)
            hook = module.register_forward_pre_hook if tap.side == "input" else module.register_forward_hook
            stack.callback(hook(note).remove)
        plain(sample)
    return list(dict.fromkeys(seen))


def _runs(model: nn.Module, sample: Tensor, names: Iterable[str]) -> dict[str, int]:
    modules = dict(model.named_modules())
    seen: list[str] = []
    with ExitStack() as stack:
        for context in (torch.no_grad(), preserve_modes(model), force_eager(model)):
            stack.enter_context(context)
        model.eval()
        for name in names:
            stack.callback(modules[name].register_forward_hook(_note(seen, name)).remove)
        model(sample)
    return {name: seen.count(name) for name in names}


def _note(seen: list[str], name: str) -> Callable[..., None]:
    return lambda *_: seen.append(name)
