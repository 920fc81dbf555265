"""One adaptation of a cell, watched: which epochs are scored, and what a choice without labels keeps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor, nn

import shiftmend
from shiftmend.adaptations import Adaptation, Epoch
from shiftmend.bench.base import Images, Setting, Target
from shiftmend.bench.cells import Outcome
from shiftmend.bench.protocols import Protocol
from shiftmend.bench.workshop import Workshop, inputs_of, labelled
from shiftmend.evaluation import Scorer
from shiftmend.feeds import Feed
from shiftmend.methods import METHODS
from shiftmend.profiles import Profile
from shiftmend.scores import Scores
from shiftmend.selection import Choice
from shiftmend.states import put_back, tensors_of

SCORED_AT_ONCE = 2048
Tick = Callable[[int, int], None]
"""Called with the epochs (online: batches) done, and how many there will be; 0 if that is not known."""


@dataclass(frozen=True)
class Given:
    """What a cell starts from."""

    workshop: Workshop
    setting: Setting
    protocol: Protocol
    model: nn.Module
    profile: Profile
    target: Target
    seed: int

    def feed(self, images: Images, batch_size: int) -> Feed:
        return Feed(
            inputs_of(images),
            batch_size=batch_size,
            device=self.workshop.device,
            preprocess=self.workshop.benchmark.preprocess,
            what="target data",
        )


class Run:
    """One adaptation, and what is seen of it on the way: some epochs' scores, and what a choice without labels keeps.

    The choice looks at all epochs, scored or not, as `adapt(keep="selected")` does.
    """

    adaptation: Adaptation

    def __init__(self, given: Given, scored: Images, options: dict[str, Any]) -> None:
        self.given, self.scored, self.options = given, scored, options
        self.choice = Choice(entropy_may_decide=not METHODS[given.setting.method].minimises_entropy)
        self.outcomes: dict[int, Outcome] = {}
        self.reliability: dict[int, list[dict[str, Any]]] = {}
        self._unscored: dict[str, Tensor] = {}
        self._scorer: Scorer | None = None

    def go(self, data: Images, tick: Tick) -> None:
        given = self.given
        # BUFR has so many epochs a block, and how many blocks there are is not known here
        epochs = int(self.options.get("epochs", self.options.get("passes", 0)))

        def look(model: nn.Module, row: Epoch) -> None:
            if row.epoch % given.protocol.score_every == 0:
                self._scorer = self._scorer or self._scorer_of(model, capture=True)
                self._score(self._scorer, row.epoch)
            if self.choice.consider(row):
                self._unscored = {} if row.epoch in self.outcomes else tensors_of(model)
            tick(row.epoch, epochs)

        self.adaptation = shiftmend.adapt(
            given.model,
            inputs_of(data),
            given.profile,
            given.setting.method,
            batch_size=given.protocol.batch_size,
            seed=given.seed,
            preprocess=given.workshop.benchmark.preprocess,
            device=given.workshop.device,
            autocast=given.protocol.in_bfloat16(given.workshop.device),
            compile=given.workshop.compile,
            on_epoch=look,
            progress=False,
            **self.options,
        )
        self._scorer = None  # with its graph, which knows the model only as it was while it was adapted
        if self.adaptation.interrupted or self.adaptation.after is None:  # Ctrl-C; the second while it was judged
            raise KeyboardInterrupt
        if self.adaptation.history[-1].epoch not in self.outcomes:
            self._score(self._scorer_of(self.adaptation.model), self.adaptation.history[-1].epoch)
        if self.kept.epoch not in self.outcomes:
            model = copy.deepcopy(self.adaptation.model)
            put_back(model, self._unscored)
            self._score(self._scorer_of(model), self.kept.epoch)
        self._unscored = {}

    def _scorer_of(self, model: nn.Module, capture: bool = False) -> Scorer:
        feed = Feed(
            labelled(self.scored),
            batch_size=SCORED_AT_ONCE,
            device=self.given.workshop.device,
            preprocess=self.given.workshop.benchmark.preprocess,
            what="data to evaluate on",
        )
        return Scorer(model, feed, capture=capture)

    def _score(self, scorer: Scorer, epoch: int) -> None:
        scores = scorer()
        assert isinstance(scores, Scores)
        self.outcomes[epoch] = outcome_of(epoch, scores)
        self.reliability[epoch] = reliability_of(scores)

    @property
    def kept(self) -> Epoch:
        """The epoch that is chosen without labels."""
        assert self.choice.kept is not None, "epoch 0 is a candidate already"
        return self.choice.kept

    @property
    def last(self) -> Outcome:
        return self.outcomes[self.adaptation.history[-1].epoch]

    @property
    def best(self) -> Outcome:
        """The highest accuracy of those scored, and of equals the first."""
        return max((self.outcomes[epoch] for epoch in sorted(self.outcomes)), key=lambda outcome: outcome.accuracy)

    def facts(self) -> dict[str, Any]:
        """What the choice between several runs saw, and where this one ended."""
        judged = {name: getattr(self.kept, name) for name in ("epoch", "verification", "entropy")}
        return judged | {"last": asdict(self.last)}

    def history(self) -> tuple[dict[str, Any], ...]:
        return tuple(
            asdict(row) | ({"accuracy": at.accuracy, "ece": at.ece} if (at := self.outcomes.get(row.epoch)) else {})
            for row in self.adaptation.history
        )


def outcome_of(epoch: int, scores: Scores) -> Outcome:
    return Outcome(epoch, scores.accuracy, scores.ece, scores.mce, scores.nll, scores.brier)


def reliability_of(scores: Scores) -> list[dict[str, Any]]:
    """The bins of a reliability diagram, for a manifest."""
    return [asdict(part) for part in scores.reliability]
