"""Argument `me` of a central step: sample of clients, their raw releases, and the mechanisms that ran."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dpcfl_net.core.types import Release
from dpcfl_net.federation.base import Arrays, Federation, Results
from dpcfl_net.federation.clipped_sums import ClippedSums
from dpcfl_net.federation.gate import Charge
from dpcfl_net.federation.in_order import Take
from dpcfl_net.privacy.client_level import rounding_factor
from dpcfl_net.privacy.events.base import Event
from dpcfl_net.privacy.mechanisms import check_bound, gaussian_on_grid, lowest_by_exponential_mechanism, randomised_response
from dpcfl_net.privacy.normal_stream import NormalStream
from dpcfl_net.privacy.randomness import derive, stream
from dpcfl_net.privacy.slots import CentralSlot, LabelledCentralSlot, LabelSlot, ParticipationSlot, UnprotectedSlot, slot_of

STEP = "central step"
MECHANISMS = SAMPLE, LABELS = "sample", "labels"  # purposes of the streams that mechanisms draw from


@dataclass
class CentralContext:
    """Argument `me` of a central step: it samples clients, collects their raw releases, and applies mechanisms.

    Attributes:
        buffer: Raw releases that arrived before the charge, by client.
    """

    _fed: Federation
    _charge: Charge
    _shown: dict[str, Any]
    buffer: Mapping[int, Arrays] = field(default_factory=dict)
    _sampled: dict[str, list[int]] = field(default_factory=dict)
    _noised: list[tuple[str, str, float]] = field(default_factory=list)
    _unprotected: list[str] = field(default_factory=list)
    _named: list[tuple[str, str]] = field(default_factory=list)
    _totals: list[tuple[float, np.ndarray]] = field(default_factory=list)  # clip norm and noisy sums

    def sample(self, slot: str) -> list[int]:
        """Sample the clients of the round.

        Args:
            slot: Name of the slot.

        Returns:
            Client ids: in client order for Poisson sampling, in random order for a sample of fixed size.
        """
        spec, clients = self._slot(slot), self._fed.clients
        rng = self._stream(slot, SAMPLE)
        if spec.sampling == "fixed":
            chosen = rng.permutation(len(clients))[: int(spec.sample_size)]
        else:
            chosen = np.flatnonzero(rng.random(len(clients)) < spec.sample_size / spec.population)
        self._sampled[slot] = [clients[k] for k in chosen]
        return [*self._sampled[slot]]  # the step may change its list, not the sample

    def call(self, method: Any, each: Mapping[int, Arrays]) -> Results:
        """Call a client step and collect the raw releases, which may leave the central step only through its mechanisms.

        Args:
            method: The client step.
            each: Client to its tensors.

        Returns:
            The raw releases in client order.
        """
        return self._fed.call(method, each=each)

    def stream(self, method: Any, take: Take, each: Mapping[int, Arrays]) -> list[int]:
        """Call a client step and pass the raw releases on in client order without keeping them; see `Federation.stream`.

        Args:
            method: The client step.
            take: Receives client and raw release.
            each: Client to its tensors.

        Returns:
            The clients that answered, in client order.
        """
        return self._fed.stream(method, take, each=each)

    def rng(self, slot: str, purpose: str) -> np.random.Generator:
        """Make a generator for one purpose of this round.

        Args:
            slot: Name of the slot.
            purpose: Name of the purpose.

        Raises:
            ValueError: If a mechanism draws from this stream: its numbers would tell the sample, or how labels were randomised.
        """
        if purpose in MECHANISMS:
            raise ValueError(
                f"purpose is {purpose!r}: must not be {' or '.join(map(repr, MECHANISMS))}, whose draws are secret"
            )
        return self._stream(slot, purpose)

    def noisy_labels(
        self, slot: str, part: str, labels: Iterable[int | None], blocks: int, length: float, sensitivity: float
    ) -> np.ndarray:
        """Encode labels as one-hot rows and add noise.

        Args:
            slot: Name of the slot, with samples of fixed size.
            part: Name of the part of the slot.
            labels: Label of each sampled client, 0 to blocks - 1; None (no answer) and other values give a row of zeros.
            blocks: Number of labels.
            length: Norm of a one-hot row.
            sensitivity: L2 sensitivity that the noise covers: at least sqrt(2) * length, by which a replaced row moves, unless the
                step also charges a slot without a guarantee.

        Returns:
            Noisy rows, (m, blocks) float64.

        Raises:
            ValueError: If there is not one label for each sampled client, or the noise does not cover a replaced row, or a number is
                out of range, or the sample is not of fixed size: the number of labels of a Poisson sample reveals whether a client
                took part.
        """
        check_bound("length", length)
        check_bound("sensitivity", sensitivity)
        rows = list(labels)
        self._one_for_each("sampled client", rows, self._sampled.get(slot, []))
        if (sampling := self._slot(slot).sampling) != "fixed":
            raise ValueError(f"slot {slot!r} has sampling {sampling!r}: must be 'fixed' for labels of a sample")
        least = math.sqrt(2) * length
        without = any(isinstance(spec, UnprotectedSlot) for spec in self._charge.slots.values())
        if sensitivity < least * (1 - 1e-12) and not without:
            raise ValueError(f"sensitivity must be at least sqrt(2) * length, {least:g}, got {sensitivity:g}")
        one_hot = np.zeros((len(rows), blocks))
        for k, label in enumerate(rows):
            if label is not None and 0 <= label < blocks:
                one_hot[k, label] = length * (1 - 1e-9)  # as `mechanisms.shortened`: the sensitivity is rounded
        return self._noisy(slot, part, one_hot, sensitivity)

    def randomised_labels(self, slot: str, labels: Sequence[int | None]) -> np.ndarray:
        """Release a label of every client by randomised response.

        Args:
            slot: Name of a `LabelSlot`.
            labels: Label of each client; None (no answer) gives one at random.

        Returns:
            Labels, (n,) int64.

        Raises:
            ValueError: If there is not one label for each client, which the slot pays for.
        """
        self._one_for_each("client", labels, self._fed.clients)
        spec = self._labels_slot(slot, "randomised-response")
        return randomised_response(labels, spec.epsilon, spec.categories, self._stream(slot, LABELS))

    def sampled_labels(self, slot: str, labels: Sequence[int | None]) -> np.ndarray:
        """Release a label of every sampled client by randomised response, before the sums of the same sample.

        Args:
            slot: Name of a `LabelledCentralSlot`, whose clients were sampled.
            labels: Label of each client in the order of the sample; None (no answer) gives one at random.

        Returns:
            Labels in the same order, (m,) int64.

        Raises:
            ValueError: If there is not one label for each sampled client.
        """
        spec = self._charge.slot(slot, LabelledCentralSlot, step=STEP)
        self._one_for_each("sampled client", labels, self._sampled.get(slot, []))
        self._named.append((slot, "randomised-response"))
        return randomised_response(labels, spec.label_epsilon, spec.categories, self._stream(slot, LABELS))

    def chosen_labels(self, slot: str, losses: Sequence[np.ndarray | None], span: float) -> np.ndarray:
        """Release a cluster of small loss for every client by the exponential mechanism.

        Args:
            slot: Name of a `LabelSlot`.
            losses: Loss of each client in each cluster, (k,); None (no answer) gives a cluster at random.
            span: Loss above a client's smallest one at which scores are clipped.

        Returns:
            Labels, (n,) int64.

        Raises:
            ValueError: As `randomised_labels`.
        """
        self._one_for_each("client", losses, self._fed.clients)
        spec, rng = self._labels_slot(slot, "exponential"), self._stream(slot, LABELS)
        chosen = [lowest_by_exponential_mechanism(own, spec.epsilon, spec.categories, span, rng) for own in losses]
        return np.array(chosen, np.int64)

    def noisy_total(self, slot: str, part: str, sums: ClippedSums) -> tuple[np.ndarray, np.ndarray | None]:
        """Add noise to sums of clipped updates.

        Args:
            slot: Name of the slot.
            part: Name of the part of the slot.
            sums: Sums over the clients that answered.

        Returns:
            Noisy sums, (blocks, p) float32, and noisy counts, (blocks,) float64; None for sums without counts.

        Raises:
            ValueError: If the sums hold a client that was not sampled.
        """
        if outside := sorted(sums.clients.difference(self._sampled.get(slot, []))):
            raise ValueError(
                f"client {outside[0]} is not in the sample of slot {slot!r}: epsilon counts on the sample being secret and random"
            )
        sensitivity = self._unit(sums) * (2 if self._slot(slot).sampling == "fixed" else 1)
        noisy, counts = sums.split(self._noisy(slot, part, sums.total, sensitivity))
        self._totals.append((sums.clip, noisy))
        return noisy, counts

    def noisy_buffer(self, slot: str, sums: ClippedSums) -> np.ndarray:
        """Add noise to sums of clipped updates of a buffer.

        Args:
            slot: Name of the participation in the central plan.
            sums: Sums over clients whose participation was charged.

        Returns:
            Noisy sums, (blocks, p) float32.

        Raises:
            ValueError: If the sums hold a client whose participation was not charged.
        """
        if uncharged := sorted(client for client in sums.clients if slot_of(slot, client) not in self._charge.slots):
            raise ValueError(f"the participation of client {uncharged[0]} was not charged")
        z = self._charge.z
        self._noised += [(name, "sums", z) for name in self._charge.slots if name.startswith(slot_of(slot, ""))]
        return sums.split(gaussian_on_grid(sums.total, z * self._unit(sums), NormalStream(self._key(slot), "noise sums")))[0]

    def audit_problem(self, release: Release) -> str:
        """Say why an audit cannot read a release: it scores noisy sums of updates that were clipped to `local.clip`.

        Args:
            release: What the step returned.

        Returns:
            A sentence; empty if an audit can read it.
        """
        clip = self._fed.protocol.local.clip
        for used, noisy in self._totals:
            if not math.isclose(used, clip, rel_tol=1e-6):
                return (
                    f"its sums have the clip norm {used:g}: must be local.clip, {clip:g}, where releases are kept for an audit"
                )
            if not any(np.array_equal(np.atleast_2d(array), noisy) for array in release.tensors.values()):
                return "it changes the noisy sums before it releases them: must release them unchanged where they are kept for an audit"
        return ""

    def without_guarantee(self, slot: str) -> None:
        """Declare a release without a guarantee.

        Args:
            slot: Name of its slot in the plan.
        """
        self._unprotected.append(slot)

    def show_observer(self, **facts: Any) -> None:
        """Give the observer facts that are not in the release.

        Args:
            facts: `clients`, the ids of the drawn clients, and `labels`, a mapping of names to the cluster of each of them
                (None: not known). The first name is that of the labels as clients sent them.
        """
        if "clients" in facts:
            facts["clients"] = [int(client) for client in facts["clients"]]
        if "labels" in facts:
            facts["labels"] = {
                kind: [None if label is None else int(label) for label in labels] for kind, labels in facts["labels"].items()
            }
        self._shown.update(facts)

    def ran(self) -> list[Event]:
        """List the events of the slots whose parts all ran once with the planned noise and sampling."""
        events: list[Event] = []
        for name, spec in self._charge.slots.items():
            if isinstance(spec, UnprotectedSlot):
                events += [spec.event(None)] * self._unprotected.count(name)
                continue
            if isinstance(spec, LabelSlot):
                events += [spec.event(None, self._charge.adjacency)] * self._named.count((name, spec.mechanism))
                continue
            z = self._charge.z
            if isinstance(spec, ParticipationSlot):
                events += [spec.event(z, self._charge.adjacency)] * self._noised.count((name, "sums", z))
                continue
            assert isinstance(spec, CentralSlot)
            planned = sorted((name, part, spec.part_noise(z, part)) for part, _ in spec.parts)
            named = [(name, "randomised-response")] * isinstance(spec, LabelledCentralSlot)
            labelled = [entry for entry in self._named if entry[0] == name] == named
            if name in self._sampled and labelled and sorted(e for e in self._noised if e[0] == name) == planned:
                events.append(spec.event(z, self._charge.adjacency))
        return events

    def _unit(self, sums: ClippedSums) -> float:
        """Largest L2 norm by which one client moves sums; the number of all clients bounds their rounding, since it is public."""
        return sums.unit * rounding_factor(len(self._fed.clients))

    def _noisy(self, slot: str, part: str, values: np.ndarray, sensitivity: float) -> np.ndarray:
        z = self._slot(slot).part_noise(self._charge.z, part)
        self._noised.append((slot, part, z))
        return gaussian_on_grid(values, z * sensitivity, NormalStream(self._key(slot), f"noise {part}"))

    @staticmethod
    def _one_for_each(what: str, labels: Sequence[object], clients: Sequence[int]) -> None:
        """ValueError unless there are as many labels as clients: a slot pays for one label of each."""
        if len(labels) != len(clients):
            raise ValueError(f"labels must be one for each {what}, {len(clients)}, got {len(labels)}")

    def _labels_slot(self, slot: str, mechanism: str) -> LabelSlot:
        spec = self._charge.slot(slot, LabelSlot, step=STEP)
        if spec.mechanism != mechanism:
            raise ValueError(f"slot {slot!r} pays for {spec.mechanism} labels, not for {mechanism}")
        self._named.append((slot, mechanism))
        return spec

    def _slot(self, slot: str) -> CentralSlot:
        return self._charge.slot(slot, CentralSlot, step=STEP)

    def _stream(self, slot: str, purpose: str) -> np.random.Generator:
        return stream(self._key(slot), purpose)

    def _key(self, slot: str) -> bytes:
        return derive(self._charge.key, "curator", slot)
