"""Adaptation methods by name. To add one, write its file, a line here, a test, and a row in `docs/methods.md`.

Example:
    >>> from shiftmend.methods import METHODS, method
    >>> "bufr" in METHODS
    True
    >>> method("adabn").name
    'adabn'
"""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from shiftmend.engine.method import Method, Network, Objective, Stage
from shiftmend.errors import AdaptationError
from shiftmend.methods.adabn import AdaBN
from shiftmend.methods.bnm import BNM, BNMIM
from shiftmend.methods.bufr import BUFR
from shiftmend.methods.bufr_im import BUFRIM
from shiftmend.methods.coral import CORAL, NEO
from shiftmend.methods.fr import FR
from shiftmend.methods.fr_shares import FRShares
from shiftmend.methods.full_gauss import FullGauss
from shiftmend.methods.match import MatchHistogram, MatchMean, MatchMoments
from shiftmend.methods.match_fr import MatchFR
from shiftmend.methods.pl import PL
from shiftmend.methods.shot import SHOT
from shiftmend.methods.shot_im import SHOTIM
from shiftmend.methods.source_only import SourceOnly
from shiftmend.methods.target_supervised import TargetSupervised
from shiftmend.methods.tent import TENT
from shiftmend.utils.checks import check_known

METHODS: dict[str, type[Method]] = {
    method.name: method
    for method in (
        SourceOnly,
        MatchMean,
        MatchMoments,
        MatchHistogram,
        NEO,
        CORAL,
        AdaBN,
        PL,
        SHOTIM,
        SHOT,
        TENT,
        BNM,
        BNMIM,
        FullGauss,
        FR,
        FRShares,
        MatchFR,
        BUFR,
        BUFRIM,
        TargetSupervised,
    )
}


def kind_of(name: str | type[Method]) -> type[Method]:
    """Return the class of a method by its name. Users may add their own classes to `METHODS`."""
    if not isinstance(name, type) or not issubclass(name, Method):
        check_known(name, METHODS, "method", AdaptationError)
    return METHODS[name] if isinstance(name, str) else name


def method(name: str | Method | type[Method], **options: Any) -> Method:
    """Make a method from its name or class and its options.

    Args:
        name: Name or class of a method, or an instance, which is returned unchanged.
        **options: Hyper-parameters.

    Returns:
        The method, to be passed to `adapt` or `stream`.

    Raises:
        AdaptationError: If the method or an option is unknown, or an option is missing.

    Example:
        >>> from shiftmend.methods import method
        >>> method("fr", epochs=5).epochs
        5
    """
    if isinstance(name, Method):
        if options:
            raise AdaptationError(
                f"Expected options inside {name.name}(...), got them beside a finished method. Pass the class, or make "
                "the method with them."
            )
        return name
    kind = kind_of(name)
    name = name if isinstance(name, str) else getattr(kind, "name", kind.__name__)
    known = [field.name for field in fields(kind)]
    unknown = [option for option in options if option not in known]
    if unknown:
        expected = f"options of {name!r} among {', '.join(known)}" if known else f"no options for {name!r}"
        raise AdaptationError(f"Expected {expected}, got {unknown[0]!r}.")
    missing = [field.name for field in fields(kind) if field.default is MISSING and field.name not in options]
    if missing:
        raise AdaptationError(
            f"Expected {missing[0]!r}, which the method {name!r} needs, got none. Pass it: adapt(..., "
            f"{missing[0]}={missing[0]})."
        )
    return kind(**options)


__all__ = [
    "BNM",
    "BNMIM",
    "BUFR",
    "BUFRIM",
    "CORAL",
    "FR",
    "METHODS",
    "NEO",
    "PL",
    "SHOT",
    "SHOTIM",
    "TENT",
    "AdaBN",
    "FullGauss",
    "MatchFR",
    "MatchHistogram",
    "MatchMean",
    "MatchMoments",
    "Method",
    "Network",
    "Objective",
    "SourceOnly",
    "Stage",
    "TargetSupervised",
    "method",
]
