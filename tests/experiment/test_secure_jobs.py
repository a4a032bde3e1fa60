"""Jobs with secure sums: settings, identities, one noise multiplier, the reserve of delta, and the statement."""

from __future__ import annotations

import math

import pytest
from conftest import SMALL

from dpcfl_net.core.errors import ConfigError, Refused
from dpcfl_net.core.frozen import canonical, digest
from dpcfl_net.experiment import config
from dpcfl_net.experiment.build import make_job
from dpcfl_net.experiment.calibration import calibrated
from dpcfl_net.experiment.job_files import Job
from dpcfl_net.experiment.statement import privacy_statement, replace_one_epsilon
from dpcfl_net.federation.claim import verify_claim
from dpcfl_net.federation.secure_claim import epsilon_of_reserve, secure_divergence, secure_sum_problem
from dpcfl_net.privacy.accounting.accountant import epsilon
from dpcfl_net.privacy.events.sampled_gaussian import SampledGaussian
from dpcfl_net.results.privacy_statement import statement
from dpcfl_net.transport.identities import make_identities, read_identities
from dpcfl_net.transport.keys import make_keys

SECURE = {"epsilon": 4, "delta": 1e-3, "unit": "client", "trust": "secure-aggregation"}
CLIENTS = 8
WITH_DEADLINE = {**SMALL["local"], "deadline_s": 0.5}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    make_keys(folder, CLIENTS)
    make_identities(folder, range(CLIENTS))
    return folder


def document(options=None, privacy=None, **changes):
    base = {**SMALL, "model": {"name": "linear"}, "output": {}, "privacy": {**SECURE, **(privacy or {})}}
    return {**base, "algorithm": {"name": "secure_algorithm:SecureMean", **(options or {})}, **changes}


def job_of(keys, *args, **more):
    return make_job(config.resolve(document(*args, **more)), keys)


def forged(job, **update):
    return Job(job.protocol.model_copy(update=update), job.experiment)


def test_terms_have_defaults_and_only_this_trust_has_terms():
    plain = config.resolve({**SMALL, "privacy": {"epsilon": 5, "delta": 1e-4}})
    assert "secure_aggregation" not in plain.model_dump()["privacy"]
    terms = config.resolve(document()).privacy.secure_aggregation
    assert (terms.threshold, terms.colluders, terms.neighbours) == (2 / 3, 0, None)
    again = config.resolve(config.resolve(document(privacy={"secure_aggregation": {"colluders": 1}})).model_dump(mode="json"))
    assert again.privacy.secure_aggregation.colluders == 1


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"privacy": {"adjacency": "replace-one"}}, "privacy.adjacency must be 'zero-out', got 'replace-one'"),
        ({"runtime": {"aggregators": 2}}, "runtime.aggregators must be 0, got 2"),
        ({"communication": {"up": "int8"}}, "communication.up must be float32, got 'int8'"),
        ({"ledger": {"scope": "dataset", "root": "/tmp/book"}}, "ledger.scope must be 'run', got 'dataset'"),
        ({"local": {"pace": "constant"}}, "local.pace must be 'free', got 'constant'"),
        ({"privacy": {"unit": "sample"}, "audit": {"canaries": 3}}, "audit.client must be the number of one client, got 'all'"),
        ({"algorithm": {"name": "r-dpcfl", "clusters": 4}}, "r-dpcfl works with unit sample and trust untrusted-server"),
        ({"privacy": {"trust": "trusted-server", "secure_aggregation": {}}}, "belongs to privacy.trust secure-aggregation"),
        ({"privacy": {"secure_aggregation": {"threshold": 0.5}}}, "threshold"),
        ({"privacy": {"secure_aggregation": {"colluders": 6}}}, "colluders is 6: of 8 clients 6 must answer"),
        ({"privacy": {"secure_aggregation": {"neighbours": 65}}}, "neighbours"),
        ({"privacy": {"secure_aggregation": {"colluders": -1}}}, "colluders"),
        ({"privacy": {"trust": "nobody"}}, "secure-aggregation"),
    ],
)
def test_settings_that_cannot_be_combined_are_sentences(changes, said):
    with pytest.raises(ConfigError) as caught:
        config.resolve(document(**changes))
    assert any(said in problem for problem in caught.value.problems)


def test_a_pace_that_secure_sums_cannot_have_is_named_once():
    algorithm, privacy = {"name": "r-dpcfl", "clusters": 2}, {"epsilon": 5, "delta": 1e-4, "trust": "secure-aggregation"}
    with pytest.raises(ConfigError) as caught:
        config.resolve({**SMALL, "algorithm": algorithm, "privacy": privacy, "local": {**SMALL["local"], "pace": "constant"}})
    assert ["local.pace" in problem for problem in caught.value.problems] == [True]


def test_an_audit_of_whole_clients_names_the_reason_that_holds():
    changes = {
        "audit": {"canaries": 3},
        "output": {"transcript": "full"},
        "algorithm": {"name": "dp-fedper", "sampling_rate": 0.5},
    }
    with pytest.raises(ConfigError, match="dp-fedper with these options keeps a state in its clients, and the audit knows"):
        config.resolve(document(**changes))


@pytest.mark.parametrize(("name", "trust"), [("SecureMean", "secure-aggregation"), ("TrustedMean", "trusted-server")])
def test_whole_clients_are_audited_only_in_sums_whose_layout_is_known(keys, name, trust):
    """A trusted server's sums that were clipped to another norm than local.clip were taken for sums with too little noise."""
    with pytest.raises(ConfigError, match=f"secure_algorithm:{name} is not derived from"):
        job_of(
            keys, {"name": f"secure_algorithm:{name}"}, {"trust": trust}, audit={"canaries": 3}, output={"transcript": "full"}
        )


def test_true_clusters_that_can_form_no_secure_sum_are_refused():
    def oracle(colluders):
        privacy = {"epsilon": 4, "delta": 1e-3, "trust": "secure-aggregation", "secure_aggregation": {"colluders": colluders}}
        data = {**SMALL["data"], "clients": [3, 5], "train_per_client": 100, "test_per_client": 20}
        return config.resolve({**SMALL, "data": data, "algorithm": {"name": "oracle"}, "privacy": privacy})

    oracle(2)
    with pytest.raises(ConfigError, match="colluders is 3: of 3 clients 3 must answer"):
        oracle(3)


def test_the_job_names_each_client_s_identity_and_other_jobs_have_none(keys):
    job = job_of(keys)
    assert [entry.identity for entry in job.protocol.roster] == read_identities(keys, CLIENTS)
    other = make_job(config.resolve({**SMALL, "privacy": {"epsilon": 5, "delta": 1e-4}}), keys)
    assert b"identity" not in canonical(other.protocol)
    assert b"secure" not in canonical(other.protocol)
    roster = [entry.model_copy(update={"identity": "ab" * 32}) for entry in job.protocol.roster]
    assert digest(forged(job, roster=roster).protocol) != digest(job.protocol)


@pytest.mark.parametrize("remove", ["identity", "terms", "trust"])
def test_a_protocol_that_does_not_fit_its_trust_is_invalid(keys, remove):
    job = job_of(keys)
    fields = job.protocol.model_dump()
    if remove == "identity":
        fields["roster"] = [e.model_copy(update={"identity": e.identity if e.id != 3 else None}) for e in fields["roster"]]
    elif remove == "terms":
        del fields["privacy"]["secure_aggregation"]
    else:
        fields["privacy"]["trust"] = "untrusted-server"
    with pytest.raises(ValueError, match="secure-aggregation"):
        type(job.protocol).model_validate(fields)


def test_a_part_of_delta_is_reserved_and_the_rest_is_accounted(keys):
    protocol = job_of(keys).protocol
    assert protocol.secure_delta == 1e-3 * protocol.privacy.delta
    assert protocol.accounted_delta == protocol.privacy.delta - protocol.secure_delta
    z = protocol.roster[0].noise_multiplier
    assert 3.99 < epsilon([SampledGaussian(z, 1.0, protocol.rounds)], protocol.accounted_delta) <= 4


def test_all_clients_get_the_largest_noise_multiplier_and_workers_accept_it(keys, tmp_path):
    alone, mixed = job_of(keys), job_of(keys, {"more_for": 2})
    (small,) = {entry.noise_multiplier for entry in alone.protocol.roster}
    (large,) = {entry.noise_multiplier for entry in mixed.protocol.roster}
    assert 1.3 * small < large < 1.5 * small
    spent = {client: verify_claim(mixed.algorithm, client, tmp_path) for client in (1, 2)}
    assert spent[1] < 3.2 < 3.99 < spent[2] <= 4


def test_workers_refuse_different_noise_multipliers(keys, tmp_path):
    job = job_of(keys)
    first, *others = job.protocol.roster
    louder = first.model_copy(update={"noise_multiplier": 2 * first.noise_multiplier})
    bad = forged(job, roster=[louder, *others])
    with pytest.raises(Refused, match="need one noise multiplier"):
        verify_claim(bad.algorithm, 0, tmp_path)


def test_workers_refuse_too_many_colluders(keys, tmp_path):
    job = job_of(keys)
    terms = job.protocol.privacy.secure_aggregation.model_copy(update={"colluders": 6})
    bad = forged(job, privacy=job.protocol.privacy.model_copy(update={"secure_aggregation": terms}))
    with pytest.raises(Refused, match="colluders is 6"):
        verify_claim(bad.algorithm, 0, tmp_path)


def test_the_reserve_covers_the_distance_of_the_noise(keys):
    algorithm = job_of(keys).algorithm
    code = algorithm.secure_code(CLIENTS)
    eta = secure_divergence(algorithm)
    assert eta == code.divergence(algorithm.protocol.rounds) > 0
    covered = epsilon_of_reserve(algorithm)
    assert (1 + math.exp(covered)) * eta == pytest.approx(algorithm.protocol.secure_delta)
    assert covered > 4
    assert secure_sum_problem(algorithm) is None
    lone = job_of(keys, {"groups": 1}).algorithm  # one honest participant adds the whole noise
    assert secure_divergence(lone) == 0
    assert epsilon_of_reserve(lone) == math.inf


@pytest.mark.parametrize(
    ("options", "unit", "said"),
    [
        ({"largest": 3e7}, "sample", r"within .* of a Gaussian's in total variation, which needs more than the reserved 1e-06 of delta"),
        ({"largest": 1e9}, "sample", "does not fit into 32 bits"),
        ({"groups": 99}, "client", "a group of 8 clients or fewer cannot form a secure sum"),
        ({"more_honest": 1}, "client", "has participants 8 and honest 7: must be 8, and at most 6, the answers that a sum needs"),
        ({"noise_share": 0.999}, "client", r"has noise_multiplier .*: must be at least .*, that of the roster"),
        ({"clip_share": 0.25}, "sample", "has clip 0.25: must be at least 1, local.clip, to which gradients are clipped"),
        ({"rate": 0.5}, "client", "local.deadline_s is null: must be set for secret coins of clients"),
        ({"exchanged": True}, "client", "has rounded True: must be False with privacy.unit 'client'"),
        ({"exchanged": True}, "sample", "has rounded False: must be True with privacy.unit 'sample'"),
    ],
)  # fmt: skip
def test_sums_whose_noise_is_not_what_epsilon_counts_are_refused_by_operator_and_worker(keys, tmp_path, options, unit, said):
    with pytest.raises(ConfigError, match=said):
        job_of(keys, options, {"unit": unit})
    job = job_of(keys, None, {"unit": unit})
    bad = forged(job, options={**job.protocol.options, **options})
    with pytest.raises(Refused, match=said):
        verify_claim(bad.algorithm, 0, tmp_path)
    with pytest.raises(ConfigError, match=said):
        calibrated(bad.protocol)


@pytest.mark.parametrize(("rate", "participation"), [(0.5, "secret"), (1.0, "visible")])
def test_the_statement_says_under_which_conditions_epsilon_holds(keys, rate, participation):
    terms = {"secure_aggregation": {"colluders": 1, "threshold": 0.8}}
    protocol = job_of(keys, {"rate": rate}, terms, local=WITH_DEADLINE).protocol
    section = privacy_statement(protocol, replace_one_epsilon(protocol))
    assert section["secure_sums"] == {
        "participants": {"min": 8, "max": 8},
        "answers": {"min": 7, "max": 7},
        "colluders": 1,
        "participation": "secret coins" if participation == "secret" else "visible",
        "single_releases": False,
    }
    assert "sums of at least 7 of them" in section["covered"][0]
    said = " ".join(section["not_covered"])
    for words in ("more than 1 participants", "computationally secure", "malicious client can change it"):
        assert words in said
    assert ("secret coin" in said) == (participation == "secret")
    for words in ("durations of tasks in files of the observer", "acknowledges messages milliseconds later"):
        assert (words in said) == (participation == "secret")
    page = statement(section)
    facts = dict(page.facts)
    assert "sums of masked vectors" in facts["Trust"]
    # The server that the claim is about names each client of the roster, which sends in any case.
    assert facts["Adjacency"].startswith("zero-out: all vectors of a client replaced by zeros")
    assert facts["Secure sums"] == "8 participants, of whom 7 must answer"
    assert facts["Colluders"] == "at most 1 participants of a sum work with the server"
    assert facts["Participation"].startswith(participation)
    assert section["epsilon_replace_one"] > 4


def test_without_colluders_the_statement_excepts_a_participant_that_only_reads_the_models(keys):
    """It subtracts its own share of the noise from the sum, by which the model moves."""
    protocol = job_of(keys, {"rate": 0.5}, local=WITH_DEADLINE).protocol
    section = privacy_statement(protocol, None)
    needed, z = section["secure_sums"]["answers"]["min"], section["noise_multiplier"]["min"]

    def against_a_participant(answers: int) -> float:
        noise = z * ((answers - 1) / needed) ** 0.5
        return epsilon([SampledGaussian(noise, 0.5, protocol.rounds)], protocol.accounted_delta)

    assert against_a_participant(needed) > 1.05 * section["epsilon"]
    assert against_a_participant(needed + 1) <= section["epsilon"]
    (said,) = [line for line in section["not_covered"] if line.startswith("the participants of a sum:")]
    assert "only if more answer than must" in said
    assert "colluders: 1" in said
    terms = {"secure_aggregation": {"colluders": 1}}
    one = privacy_statement(job_of(keys, {"rate": 0.5}, terms, local=WITH_DEADLINE).protocol, None)
    assert not any(line.startswith("the participants of a sum:") for line in one["not_covered"])


def test_a_fix_is_named_only_where_it_is_allowed(keys):
    records = {"privacy": {"epsilon": 4, "delta": 1e-3}, "algorithm": {"name": "global"}, "local": {"epochs": 1}}
    said = {}
    for trust in ("untrusted-server", "secure-aggregation"):
        changed = {**records, "privacy": {**records["privacy"], "trust": trust}}
        lines = privacy_statement(make_job(config.resolve({**SMALL, **changed}), keys).protocol, None)["not_covered"]
        (said[trust],) = [line for line in lines if line.startswith("duration of tasks")]
    assert said["untrusted-server"] == f"{said['secure-aggregation']} (fix: local.pace: constant)"


def test_the_time_of_a_secret_batch_is_named_whatever_the_algorithm_says_of_its_steps(keys):
    """`SecureMean` declares plain SGD, and its sums of records are over Poisson batches."""
    for rate in (0.5, 1.0):
        lines = privacy_statement(job_of(keys, {"rate": rate}, {"unit": "sample"}).protocol, None)["not_covered"]
        assert any(line.startswith("duration of tasks: the time of a step depends") for line in lines) == (rate < 1)


def test_other_statements_are_unchanged(keys):
    job = make_job(config.resolve({**SMALL, "privacy": {"epsilon": 5, "delta": 1e-4}}), keys)
    section = privacy_statement(job.protocol, None)
    assert "secure_sums" not in section
    assert "Secure sums" not in dict(statement(section).facts)
