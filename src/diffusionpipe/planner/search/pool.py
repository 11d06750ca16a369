"""The pool of candidates that a search has judged so far."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from diffusionpipe.costs.tied import tied_problems
from diffusionpipe.planner.pricing.arrangement import Arrangement
from diffusionpipe.planner.pricing.encoders import host_sets
from diffusionpipe.planner.search.candidates import Candidate, Estimate
from diffusionpipe.planner.search.constants import CHAIN, HEAVY
from diffusionpipe.planner.search.judge import Judge
from diffusionpipe.units import Bytes, Seconds

Cut = tuple[Arrangement, int, tuple[int, ...], tuple[int, ...]]
"""(arrangement, micro-batches, first layers, replicas): how a candidate cuts the batch and the layers."""


def cut_of(candidate: Candidate) -> Cut:
    """(arrangement, micro-batches, first layers, replicas) of a candidate: how it cuts the batch and the layers."""
    return candidate.arrangement, candidate.microbatches, candidate.starts, candidate.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A candidate with its estimate and its score."""

    candidate: Candidate
    estimate: Estimate
    score: Seconds
    """The estimated time by which candidates are compared, in seconds; see `Pool.score_of`."""

    @property
    def fits(self) -> bool:
        """Whether the candidate fits in memory by its estimate."""
        return self.estimate.overflow <= 0


@dataclass(slots=True, kw_only=True)
class Pool:
    """The candidates that a search has judged so far, and the scores of the best ones."""

    judge: Judge
    is_filled: bool
    """Whether frozen work runs in the bubbles."""
    judged: dict[Candidate, Judged] = field(default_factory=dict)
    less: Mapping[Cut, Bytes] = field(default_factory=dict)
    """Cut -> bytes that are added to its candidates' memory, because one of them held more than was estimated."""
    slower: Mapping[Cut, float] = field(default_factory=dict)
    """Cut -> factor of its candidates' scores, because one of them was slower than estimated by it."""
    score: Seconds = float("inf")
    """The score of the best candidate that fits, in seconds."""
    chain_score: Seconds = float("inf")
    """The score of the best 1F1B candidate that fits, in seconds."""
    is_tight: bool = False
    """Whether candidates that need less memory are looked for, because no others fit."""
    refused: str = ""
    """The reason why a candidate was left out that puts layers with a common parameter on several workers; "" for none.
    """

    def judged_of(self, candidate: Candidate, *, limit: Seconds = float("inf")) -> Judged:
        """The candidate with its estimate and score; it is not added to the pool.

        A score at or above `limit` may be too low, as the estimate ends early then. If not all units have memory for
        heavy encoders, some units may hold them for all (`with_hosts`).
        """
        candidate, estimates = self.with_hosts(candidate), self.judge.estimates
        estimate = estimates.estimate(
            candidate, is_filled=self.is_filled, is_hopeless=lambda least: self.score_of(least) >= limit
        )
        cut = cut_of(candidate)
        if less := self.less.get(cut, 0):
            estimate = replace(estimate, overflow=estimate.overflow + less)
        score = self.score_of(estimate) * self.slower.get(cut, 1)
        return Judged(candidate=candidate, estimate=estimate, score=score)

    def sets_of_hosts(self, arrangement: Arrangement) -> tuple[tuple[int, ...], ...]:
        """The sets of units that may encode for all units; () without fills, or if the encoders are light."""
        memories = self.judge.tables.ground(arrangement).memories
        is_heavy = self.judge.footprint.frozen_bytes >= HEAVY * max(memories)
        return host_sets(memories) if self.is_filled and is_heavy else ()

    def with_hosts(self, candidate: Candidate) -> Candidate:
        """The candidate with heavy encoders only on the units that have room; itself if it fits, or never does.

        The filler finds such units by itself, so an estimate without them would refuse plans that fit.
        """
        if candidate.hosts is not None or candidate.backbones or not self.sets_of_hosts(candidate.arrangement):
            return candidate
        footprint, memories = self.judge.footprint, self.judge.tables.ground(candidate.arrangement).memories
        held = footprint.held(candidate)
        hosts = tuple(unit for unit, memory in enumerate(memories) if held[unit] <= memory)
        if not 0 < len(hosts) < len(memories):
            return candidate
        lighter = replace(candidate, hosts=hosts)
        return lighter if footprint.fits(lighter) else candidate

    def score_of(self, estimate: Estimate) -> Seconds:
        """The seconds by which candidates are ranked: the estimated iteration with the frozen work.

        It is rounded to ten digits, so that times that differ by rounding alone are equal.
        """
        return float(f"{estimate.iteration:.10g}")

    def add(self, one: Judged) -> None:
        """Add a judged candidate to the pool, unless layers with a common parameter are on several workers.

        Then the reason is noted in `refused`.
        """
        if refused := self._split_ties(one.candidate):
            self.refused = refused
            return
        self.judged[one.candidate] = one
        if one.fits:
            self.score = min(self.score, one.score)
            if one.candidate.schedule == CHAIN:
                self.chain_score = min(self.chain_score, one.score)

    def _split_ties(self, candidate: Candidate) -> str:
        setting = self.judge.setting
        if not self.judge.has_ties:
            return ""
        layers = setting.graph.backbone_layers
        cuts = zip(candidate.starts, (*candidate.starts[1:], len(layers)), strict=True)
        blocks = [layers[start:stop] for start, stop in cuts]
        return "\n".join(tied_problems(setting.graph, candidate.layout(setting).generated().placement, blocks))

    def ranked(self) -> list[Judged]:
        """The candidates that fit, best first; equal ones in the order in which they were found."""
        return sorted((one for one in self.judged.values() if one.fits), key=lambda one: one.score)

    def diverse(self) -> list[Judged]:
        """The best candidate that fits of each arrangement, micro-batches, replicas, schedule and hosts, best first."""
        seen: dict[object, Judged] = {}
        for one in self.ranked():
            seen.setdefault(_kind(one), one)
        return list(seen.values())

    def siblings(self, candidate: Candidate) -> list[Judged]:
        """The candidates that fit and differ from this one in cuts or buckets alone, best first."""
        own, kind = self.judged[candidate], _kind(self.judged[candidate])
        return [one for one in self.ranked() if _kind(one) == kind and one is not own]

    def twin(self, candidate: Candidate) -> Judged:
        """The candidate with the longest pipeline among this one and its siblings with the same score.

        It has the least frozen work after the pipeline. Estimates of filling cannot tell which is better.
        """
        one = self.judged[candidate]
        alike = [one, *(other for other in self.siblings(candidate) if other.score == one.score)]
        return max(alike, key=lambda other: other.estimate.pipeline)


def _kind(one: Judged) -> object:
    c = one.candidate
    return c.arrangement, c.microbatches, c.replicas, c.schedule, c.hosts
