"""Algorithms whose rounds are secure sums, or sums of a trusted server; for jobs only, their rounds are not written."""

from __future__ import annotations

from dpcfl_net.algorithms import base
from dpcfl_net.federation.capabilities import Capabilities
from dpcfl_net.federation.secure.stages import MASKED, MASKING
from dpcfl_net.federation.secure.terms import settings_of, survivors_needed
from dpcfl_net.privacy.secure_sum import SumCode
from dpcfl_net.privacy.slots import CentralSlot, RawSlot, SecureSlot, StageSlot


class SecureMean(base.Algorithm):
    class Options(base.Options):
        rate: float = 1.0
        largest: float = 1.0  # of the code for unit sample
        more_honest: int = 0  # shares that the code counts beyond those that the job leaves
        noise_share: float = 1.0  # of the roster's noise multiplier
        clip_share: float = 1.0  # of local.clip
        exchanged: bool = False  # a code for the other unit
        groups: int = 0  # only sums of so many participants; 0: of all clients
        more_for: int = -1  # client with twice as many sums

    @classmethod
    def capabilities_for(cls, options, setting):
        trusts = [(unit, "secure-aggregation") for unit in ("client", "sample")]
        return Capabilities(
            setting.rounds * float(setting.clients),
            protects=(*trusts, ("client", "trusted-server")),
            plain_sgd=True,
            sides={"masked": lambda model: model.parameters},
        )

    def plan(self, client):
        sums = [StageSlot("secure_keys"), SecureSlot("masked_update", self.options.rate), StageSlot("secure_unmask")]
        return sums * self.protocol.rounds * (2 if client.id == self.options.more_for else 1)

    def start(self, fed):
        raise AssertionError("its jobs are checked and not run")

    def round(self, state, t, fed):
        raise AssertionError("its jobs are checked and not run")

    @base.on_client(charges=["masked_update"], takes={**MASKING, "model": base.MODEL}, gives={"masked": MASKED})
    def masked_update(self, me, model):
        raise AssertionError("its jobs are checked and not run")

    @base.on_client(charges=["masked_update"], takes={**MASKING, "model": base.MODEL}, gives={"masked": MASKED})
    def masked_again(self, me, model):
        raise AssertionError("its jobs are checked and not run")

    def secure_code(self, participants):
        if participants != (self.options.groups or len(self.clients)):
            return None
        settings = settings_of(self.protocol.privacy)
        honest = survivors_needed(participants, settings) - settings.colluders
        z, options = self.protocol.roster[0].noise_multiplier, self.options
        rounded = (self.protocol.privacy.unit == "sample") != options.exchanged
        return SumCode(
            self.protocol.model.parameters, participants, honest + options.more_honest, z * options.noise_share,
            self.protocol.local.clip * options.clip_share, options.largest if rounded else 1.0, rounded,
        )  # fmt: skip


class TrustedMean(SecureMean):
    """The same by a trusted server, which may clip to any norm."""

    def plan(self, client):
        return [RawSlot("raw")] * self.protocol.rounds

    def central_plan(self):
        n = len(self.clients)
        return [CentralSlot("round", "poisson", n / 2, n)] * self.protocol.rounds

    @base.on_client(charges=["raw"], takes={"model": base.MODEL}, gives={"update": base.RAW_UPDATE})
    def train(self, me, model):
        raise AssertionError("its jobs are checked and not run")

    @base.on_central_server(charges=["round"])
    def noisy_sum(self, me, model):
        raise AssertionError("its jobs are checked and not run")
